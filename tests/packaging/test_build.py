"""Building: an sdist without PyTorch, an isolated build of it against the environment's PyTorch, and their content.

Each environment is a new venv with links to this one's packages, except for ark_torch and what an isolated build must
install itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from ark_torch._support import minor_of
from ark_torch._version import __version__

pytestmark = pytest.mark.changed("CMakeLists.txt", "setup.py", "pyproject.toml", "requirements/*", "build_backend/*")

REPO = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
BUILD_TOOLS = ("scikit_build_core", "pathspec", "packaging", "ninja", "pip")
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", "_build_info.py", ".*_cache")


def make_environment(folder: Path, leave_out: tuple[str, ...]) -> Path:
    """Creates a venv with links to this environment's packages except those left out (then with a fresh pip).

    Returns its python.
    """
    venv.create(folder, with_pip="scikit_build_core" in leave_out, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for entry in SITE.iterdir():
        ours = "ark_torch" in entry.name or entry.name.startswith("__")
        if not ours and not entry.name.startswith(leave_out) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(a) for a in arguments], cwd=cwd, capture_output=True, text=True, timeout=540)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "ark_torch"
    shutil.copytree(REPO, folder, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    return folder


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the python of an environment with scikit-build-core and ninja but without PyTorch."""
    return make_environment(tmp_path_factory.mktemp("bare"), ("torch", "pip"))


HOOK = "import sys; sys.path.insert(0, 'build_backend'); import ark_build; print(ark_build.{}('{}'))"


@pytest.fixture(scope="module")
def sdist(source: Path, without_torch: Path) -> Path:
    done = run(without_torch, "-c", HOOK.format("build_sdist", source.parent), cwd=source)
    assert done.returncode == 0, done.stderr
    return source.parent / done.stdout.strip().splitlines()[-1]


# Whole folders with sources in more than one language.
BOTH = [
    (folder, pattern)
    for folder in ("ark_torch/kernels", "benchmarks", "tests")
    for pattern in ("*.py", "*.[ch]pp", "*.cuh")
]
VENDORED = [("third_party", pattern) for pattern in ("*.h", "*.hpp", "*.cc", "LICENSE*")]


def test_sdist_without_pytorch_holds_all_sources(source: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {
        str(path.relative_to(source))
        for folder, pattern in (
            ("csrc", "*.[ch]pp"),
            ("ark_torch", "*.py"),
            ("build_backend", "*.py"),
            *VENDORED,
            *BOTH,
        )
        for path in (source / folder).rglob(pattern)
    }
    assert len(wanted) > 40
    assert wanted | {"LICENSE", "README.md", "setup.py", "CMakeLists.txt", "ark_torch/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable", "build_wheel"])
def test_build_without_pytorch_says_what_to_install(
    source: Path, without_torch: Path, tmp_path: Path, hook: str
) -> None:
    argument = str(tmp_path) if hook == "build_wheel" else ""
    done = run(without_torch, "-c", HOOK.format(hook, argument), cwd=source)
    assert done.returncode != 0
    sentence = done.stderr.strip().splitlines()[-1]
    assert "python -m pip install 'torch==" in sentence and "--no-build-isolation" in sentence
    assert "Traceback" not in done.stderr


def test_build_against_an_older_pytorch_is_refused(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build"))
    support = copy / "ark_torch" / "_support.py"
    support.write_text(
        re.sub(r"(?m)^SUPPORTED_MINORS = .*$", 'SUPPORTED_MINORS = ("98.1", "98.2")', support.read_text())
    )
    done = run(sys.executable, "-c", HOOK.format("build_wheel", tmp_path), cwd=copy)
    assert done.returncode != 0
    assert "supports PyTorch 98.1 and newer" in done.stderr.strip().splitlines()[-1]


CHECK = """
import torch, torch.distributed as dist
dist.init_process_group("ark", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
import ark_torch
print(ark_torch.__version__, ark_torch.__file__)
"""


@pytest.mark.timeout(600)
def test_isolated_install_of_the_sdist(sdist: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment", BUILD_TOOLS)
    done = run(python, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", tmp_path, sdist, cwd=tmp_path)
    output = done.stdout + done.stderr
    if re.search(r"Could not find a version that satisfies the requirement (scikit-build-core|ninja)", output):
        pytest.skip("no network here: an isolated build cannot fetch scikit-build-core")
    assert done.returncode == 0, output
    wheel = next(tmp_path.glob("ark_torch-*.whl"))
    check_wheel(wheel, tmp_path)

    done = run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(python, "-c", CHECK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version, where = done.stdout.split()
    assert version == __version__ and Path(where).is_relative_to(tmp_path / "environment")


def test_a_second_build_compiles_nothing(tmp_path: Path) -> None:
    """A wheel reuses the objects of this tree, built in place."""
    command = ("-m", "pip", "-v", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", tmp_path, REPO)
    done = run(sys.executable, *command, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert output.count("ninja: no work to do") == 1, output
    assert list(tmp_path.glob("ark_torch-*.whl"))


def check_wheel(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"ark_torch-{__version__}.dist-info/METADATA").decode()
        extension = next(name for name in names if name.startswith("ark_torch/_C."))
        archive.extract(extension, folder)
        record = archive.read("ark_torch/_build_info.py").decode()
    headers = {str(path.relative_to(REPO)) for path in REPO.glob("ark_torch/kernels/**/*.hpp")}
    assert headers and headers <= set(names)
    assert {"ark_torch/py.typed", "ark_torch/_C.pyi"} <= set(names)
    assert not [name for name in names if name.startswith(("csrc", "tests", "build_backend"))]
    assert f"Requires-Dist: torch=={minor_of(torch.__version__)}.*" in metadata
    assert repr(torch.__version__).replace("'", '"') in record
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", folder / extension, cwd=folder).stdout)
    assert any(name.startswith("libtorch_cpu") for name in needed)
    assert "libstdc++.so.6" in needed, "a second, static libstdc++ breaks streams and exceptions"
    assert not [name for name in needed if re.search("cuda|nvrtc|cudart|nccl", name)], needed
