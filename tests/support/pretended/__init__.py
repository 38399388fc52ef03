"""A pretended CUDA device, driver and NVRTC, to run the host side of CUDA tensors without a GPU.

`build()` compiles them. A rank's body calls `enter()` before it creates a group. No kernel runs: the effects of ark's
own kernels are missing, but a carrier (PyTorch's NCCL, here a Recorder) really works, in host memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
driver: Any = None  # the pretended libcuda, with its pretend_... functions
device: Any = None  # the module pretended_device


def build(folder: Path) -> dict[str, str | None]:
    """Compiles everything into the folder, once for all callers. Returns the environment of ranks."""
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            _compile(folder)
            (folder / "built").touch()
    return {
        "ARK_TEST_PRETENDED": str(folder),
        "ARK_NVRTC": str(folder / "libnvrtc.so.13"),
        "ARK_CACHE": str(folder / "cache"),
    }


def _compile(folder: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include = [f"-isystem{path}" for path in (torch_folder / "include", sysconfig.get_path("include"))]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    own = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'csrc'}", f"-I{ROOT / 'ark_torch' / 'kernels'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    memory = ROOT / "tests" / "csrc" / "support" / "pretended_memory.cpp"
    driver_files = [HERE / "driver.cpp", HERE / "driver_rest.cpp", memory]
    make_library(folder / "libcuda.so.1", driver_files, ["-O0", *own], ["-Wl,-soname,libcuda.so.1"])
    make_library(folder / "libnvrtc.so.13", [HERE / "nvrtc.cpp"], ["-O0"])
    make_library(folder / "pretended_device.so", [HERE / "device.cpp"], ["-O0", abi, *include], libraries)


def make_library(library: Path, sources: list[Path], options: list[str], linked: Sequence[str] = ()) -> None:
    """Compiles a shared library, through ccache if there is one: PyTorch's headers take 20 s."""
    ccache = shutil.which("ccache")
    settings = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}  # as in CMakeLists.txt
    environment = {**os.environ, **settings} if ccache else None
    compiler = [*([ccache] if ccache else []), "g++", "-std=c++20", "-w", "-fPIC", *options, "-c"]
    objects = []
    for source in sources:
        objects.append(str(library.with_name(f"{source.stem}.o")))
        subprocess.run([*compiler, str(source), "-o", objects[-1]], check=True, timeout=280, env=environment)
    subprocess.run(["g++", "-shared", *objects, "-pthread", *linked, "-o", str(library)], check=True, timeout=200)


def enter(with_driver: bool = True) -> None:
    """Called in a rank before its first group. Afterwards this process seems to have a GPU."""
    global driver, device
    folder = Path(os.environ["ARK_TEST_PRETENDED"])
    if with_driver:
        driver = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # later found by its name
        for name in ("pretend_capture", "pretend_graph_end"):
            getattr(driver, name).argtypes = [ctypes.c_uint64]
        driver.pretend_loop_added.restype = ctypes.c_uint64
    spec = importlib.util.spec_from_file_location("pretended_device", folder / "pretended_device.so")
    assert spec is not None and spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # torch.distributed asks for it because of float8


def on(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of "cuda:rank" over the host tensor's memory."""
    made = device.tensor(tensor, rank)
    assert isinstance(made, torch.Tensor)
    return made


class Carriers:
    """Creates and keeps stand-ins for NCCL. `inner` are groups that carry for them, created ahead because all ranks
    must join.
    """

    def __init__(self, inner: list[dist.ProcessGroup], fails: bool = False, name: str = "nccl") -> None:
        self._inner, self._fails, self._name = inner, fails, name
        self.made: list[Any] = []
        self.timeouts: list[Any] = []

    def __call__(self, store: Any, rank: int, size: int, timeout: Any) -> Any:
        backend = self._inner[len(self.made)]._get_backend(torch.device("cpu"))
        self.timeouts.append(timeout)
        self.made.append(device.Recorder(rank, size, backend, self._fails, self._name))
        return self.made[-1]
