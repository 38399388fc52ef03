"""ARK_AOT=1: a wheel that contains its kernels, which an installation finds without NVRTC."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_build import BUILD_TOOLS, REPO, make_environment, run

sys.path.insert(0, str(REPO / "build_backend"))
import ark_aot

NVCC = shutil.which("nvcc") or (Path("/usr/local/cuda/bin/nvcc").exists() and "/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(not NVCC, reason="nvcc is not installed: ARK_AOT has nothing to compile with")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For one architecture and groups of two, from this tree, whose objects exist already."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, REPO]
    environment = {**os.environ, "ARK_AOT": "1", "ARK_AOT_ARCHS": "sm_90a", "ARK_AOT_RANKS": "2", "MAX_JOBS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.changed("CMakeLists.txt", "setup.py", "pyproject.toml", "requirements/*", "build_backend/*")
@needs_nvcc
@pytest.mark.timeout(600)
def test_the_wheel_holds_each_kernel_three_times(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = [name for name in archive.namelist() if name.startswith("ark_torch/prebuilt/")]
        index = json.loads(archive.read("ark_torch/prebuilt/index.json"))
        record = archive.read(next(name for name in archive.namelist() if name.endswith("RECORD"))).decode()
    assert index["archs"] == ["sm_90a"] and index["ranks"] == [2] and index["compiler"].startswith("nvcc ")
    stems = {name.split(".")[0] for name in names if not name.endswith("index.json")}
    assert len(stems) > 10 and len(names) == 3 * len(stems) + 1
    assert all(f"\n{name},sha256=" in record for name in names)
    assert record.rstrip("\n").split("\n")[-1].endswith("RECORD,,")


FIND = """
import json
from ark_torch import _C, _jit
_jit.configure()
sizes = {}
for name, text, _ in _C._kernel_stubs([2]):
    sizes[name] = len(_C._compile_kernel(text, "sm_90a", cached=True)[0])
missed = []
for text, arch in ((text, "sm_80"), (_C._kernel_stubs([3])[-1][1], "sm_90a")):
    try:
        _C._compile_kernel(text, arch, cached=True)
    except RuntimeError as error:
        missed.append(str(error))
opened = "libnvrtc" in open("/proc/self/maps").read()
print(json.dumps({"sizes": sizes, "missed": missed, "opened": opened}))
"""


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Iterator[Path]:
    python = make_environment(tmp_path / "environment", BUILD_TOOLS)
    done = run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    yield python


def _find(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {name: text for name, text in os.environ.items() if not name.startswith(("ARK_", "PYTHONPATH"))}
    variables.update(ARK_CACHE=str(folder / "cache"), ARK_NVRTC=__file__)  # not a library
    return subprocess.run([python, "-c", FIND], env=variables, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.changed("CMakeLists.txt", "setup.py", "pyproject.toml", "requirements/*", "build_backend/*")
@needs_nvcc
@pytest.mark.timeout(600)
def test_an_installation_compiles_nothing(installed: Path, tmp_path: Path) -> None:
    done = _find(installed, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["sizes"]) > 10 and all(size > 1000 for size in found["sizes"].values())
    assert len(found["missed"]) == 2 and all("no NVRTC" in text for text in found["missed"]), "what it does not bring"
    assert not found["opened"] and list((tmp_path / "cache").glob("*.cubin")) == []
    done = run(installed, "-m", "ark_torch", "doctor", cwd=tmp_path)
    assert re.search(r"ok +prebuilt kernels +nvcc 1\d\.\d, sm_90a, for groups of 2", done.stdout), done.stdout
    # Altered files are not used.
    cubin = next((tmp_path / "environment").rglob("prebuilt/*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    done = _find(installed, tmp_path)
    assert done.returncode != 0 and "no NVRTC" in done.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    "variables, said",
    [
        ({"ARK_AOT": "yes"}, "ARK_AOT='yes' is not allowed"),
        pytest.param({"ARK_AOT_ARCHS": "sm_75"}, "names 'sm_75': ark's kernels need sm_80", marks=needs_nvcc),
        pytest.param({"ARK_AOT_ARCHS": "hopper"}, "names 'hopper'", marks=needs_nvcc),
        pytest.param({"ARK_AOT_RANKS": "2 9"}, "ARK_AOT_RANKS='2 9' is not allowed", marks=needs_nvcc),
        ({"PATH": "/nowhere", "CUDA_HOME": "", "CUDA_PATH": ""}, "name its folder in CUDA_HOME"),
    ],
)
def test_bad_values_are_told_before_anything_is_compiled(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in ({"ARK_AOT": "1"} | variables).items():
        monkeypatch.setenv(name, text)
    if "PATH" in variables:
        monkeypatch.setattr(ark_aot, "USUAL", "/nowhere/bin")
    with pytest.raises(SystemExit, match=said):
        ark_aot.requested()


@pytest.mark.quick
def test_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "0"):
        monkeypatch.setenv("ARK_AOT", text)
        assert ark_aot.requested() is False
