"""PEP 517 backend: setuptools' own, plus the PyTorch of the environment that the package is built for.

An isolated build sees only its build requirements, and the extension must be compiled against the very PyTorch
that will load it, so PyTorch cannot be a build requirement (pip would fetch another one). pip runs the hooks with
the target environment's interpreter: its site-packages are put at the *end* of the path, so that setuptools and
ninja still come from the isolated environment. uv runs them with an interpreter of its own: --no-build-isolation.
"""

import importlib.util
import runpy
import sys
import sysconfig
from pathlib import Path
from typing import Any

import ark_aot

for _name in ("purelib", "platlib"):
    _path = sysconfig.get_path(_name)
    if _path and _path not in sys.path:
        sys.path.append(_path)

import setuptools  # noqa: E402

if int(setuptools.__version__.split(".")[0]) < 77:  # without isolation nothing else looks at build-system.requires
    raise SystemExit(
        f"ark_torch's build needs setuptools 77 or newer, and this environment has {setuptools.__version__}: "
        "python -m pip install 'setuptools>=77' 'ninja>=1.11'"
    )

from setuptools import build_meta  # noqa: E402
from setuptools.build_meta import *  # noqa: E402, F403


def _need_torch() -> None:
    """Asked first of all: pip would otherwise fetch the gigabytes of a PyTorch before the build finds none."""
    if importlib.util.find_spec("torch") is None:
        support = runpy.run_path("ark_torch/_support.py")
        raise SystemExit(support["no_torch"](sys.executable))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    _need_torch()
    return []  # setuptools would run setup.py to find none


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    _need_torch()
    return []


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """setuptools' wheel; with ARK_AOT=1 the kernels in it too."""
    with_kernels = ark_aot.requested()
    name = str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))
    if with_kernels:
        ark_aot.add_to_wheel(Path(wheel_directory, name))
    return name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """setuptools' link to this folder, into which the kernels go with ARK_AOT=1."""
    with_kernels = ark_aot.requested()
    name = str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))
    if with_kernels:
        ark_aot.fill(Path.cwd())
    return name
