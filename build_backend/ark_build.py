"""PEP 517 backend: scikit-build-core's, for the PyTorch of the environment that the package is built for.

An isolated build sees only its build requirements, and the extension must be compiled against the very PyTorch
that will load it, so PyTorch cannot be a build requirement (pip would fetch another one). pip runs the hooks with
the target environment's interpreter: its site-packages are put at the *end* of the path, so that scikit-build-core
still comes from the isolated environment. uv runs them with an interpreter of its own: --no-build-isolation.

It also provides the metadata that depend on the machine (dynamic_metadata). A setting of pip is ours:
`-C local-version=torch2.14` (tools/build_wheels.py).
"""

import re
import runpy
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ark_aot
import ark_cmake

for _name in ("purelib", "platlib"):
    _path = sysconfig.get_path(_name)
    if _path and _path not in sys.path:
        sys.path.append(_path)

try:
    from scikit_build_core import build as skbuild
except ImportError:  # without isolation nothing else looks at build-system.requires
    raise SystemExit(
        "ark_torch's build needs scikit-build-core, and this environment has none: python -m pip install "
        "'scikit-build-core>=1.0' ninja (or, for a build in place, python setup.py build_ext --inplace)"
    ) from None

Settings = Mapping[str, Any] | None
_local_version = ""
_state = ""


def _settings(given: Settings, **more: str) -> dict[str, Any]:
    """The given settings and ours for scikit-build-core."""
    global _local_version
    settings = {**(given or {}), **more}
    _local_version = settings.pop("local-version", "")
    settings.update({f"cmake.define.{name}": value for name, value in ark_cmake.defines().items()})
    return settings


def build_state(state: str) -> None:
    """scikit-build-core says what it asks metadata for: an sdist, a wheel, an editable install."""
    global _state
    _state = state


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `dynamic` in pyproject.toml. An sdist serves every PyTorch, a wheel the one it is built against."""
    version = str(runpy.run_path("ark_torch/_version.py")["__version__"])
    support = ark_cmake.SUPPORT
    oldest = f"torch>={support['SUPPORTED_MINORS'][0]}"
    extras = {name: Path("requirements", f"{name}.txt").read_text() for name in ("dev", "bench", "simulate", "docs")}
    return {
        "version": f"{version}+{_local_version}" if _local_version else version,
        "dependencies": [oldest if _state == "sdist" else f"torch=={support['minor_of'](ark_cmake.torch_version())}.*"],
        "optional-dependencies": {
            name: [bare for line in text.splitlines() if (bare := re.sub(r"(^|\s)#.*", "", line).strip())]
            for name, text in extras.items()
        },
    }


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """The fields in which a wheel may differ from the sdist."""
    return {"dependencies": True}


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return []


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """CMake and Ninja where the machine has none. pip would fetch PyTorch's gigabytes before the build finds none."""
    return list(skbuild.get_requires_for_build_wheel(_settings(config_settings)))


get_requires_for_build_editable = get_requires_for_build_wheel


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    return str(skbuild.build_sdist(sdist_directory, dict(config_settings or {})))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return str(skbuild.prepare_metadata_for_build_wheel(metadata_directory, _settings(config_settings)))


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """scikit-build-core's wheel; with ARK_AOT=1 the kernels in it too."""
    with_kernels = ark_aot.requested()
    settings = _settings(config_settings)
    ark_cmake.prepare()
    # It would start anew for each isolated environment.
    (ark_cmake.BUILD / ".skbuild-info.json").unlink(missing_ok=True)
    name = str(skbuild.build_wheel(wheel_directory, settings, metadata_directory))
    ark_cmake.check_libraries()
    if with_kernels:
        ark_aot.add_to_wheel(Path(wheel_directory, name))
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """A path to this folder, in which the extension is built; with ARK_AOT=1 the kernels too.

    Not scikit-build-core's, whose import hook would come before PYTHONPATH and thus before another checkout.
    """
    with_kernels = ark_aot.requested()
    ark_cmake.build_in_place()
    if with_kernels:
        ark_aot.fill(Path.cwd())
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder, prepare_metadata_for_build_editable(folder, config_settings))
        (tag,) = re.findall(r"(?m)^Tag: (\S+)$", (info / "WHEEL").read_text())
        files = {
            f"{info.name}/{path.relative_to(info)}": path.read_bytes() for path in info.rglob("*") if path.is_file()
        }
    files["__editable__.ark_torch.pth"] = f"{Path.cwd()}\n".encode()
    record = f"{info.name}/RECORD"
    lines = [ark_aot.record_line(name, data) for name, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,\n"]).encode()
    wheel = f"{info.name.removesuffix('.dist-info')}-{tag}.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel
