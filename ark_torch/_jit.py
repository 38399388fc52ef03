"""Tells C++ what compiles kernels and where to find kernels, cache, NVRTC and host compiler. C++ reads no environment.

C++ calls `configure()` before the process's first CUDA collective and before the compiler's first region. The settings
then in force hold for the whole process.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import sys
from pathlib import Path

from ark_torch import env
from ark_torch._version import __version__


def configure(settings: env.Settings | None = None) -> None:
    """Passes the environment's settings to C++. Raises ValueError for a variable with an invalid value."""
    from ark_torch import _C

    settings = settings or env.read()
    env.warn_of_unknown()
    jit = _C._JitSettings()
    jit.version = __version__
    jit.kernels_dir = str(Path(__file__).resolve().parent / "kernels")
    jit.cache_dir = settings.cache or default_cache()
    jit.prebuilt_dir = str(prebuilt_folder())
    jit.nvrtc = settings.nvrtc
    jit.library_roots = library_roots()
    jit.toolkit_dirs = [path for name in ("CUDA_HOME", "CUDA_PATH") if (path := os.environ.get(name))]
    jit.cxx, *jit.cxx_words = shlex.split(settings.cxx) or [""]
    jit.cxx_options = [f"-O{settings.optimise}"]
    jit.log = logging.getLogger("ark_torch").info
    _C._configure_jit(jit)


def prebuilt_folder() -> Path:
    """The folder of kernels in the wheel; it exists if the wheel was built with ARK_AOT=1
    (build_backend/ark_aot.py)."""
    return Path(__file__).resolve().parent / "prebuilt"


def default_cache() -> str:
    """ark_torch/kernels in the user's cache folder; "" (compile in memory) for a user without a home."""
    home = os.path.expanduser("~")
    # The XDG specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(home, ".cache")
    return os.path.join(base, "ark_torch", "kernels") if os.path.isabs(base) else ""


def library_roots() -> list[str]:
    """The folders where PyTorch's wheels put NVRTC, PyTorch's own first."""
    spec = importlib.util.find_spec("torch")
    roots = [str(Path(spec.origin).parent.parent)] if spec is not None and spec.origin else []
    roots += [path for path in sys.path if os.path.isdir(os.path.join(path, "nvidia"))]
    return list(dict.fromkeys(os.path.abspath(path) for path in roots))
