"""How CMake is called for the extension, by setup.py and by pip's backend (ark_build.py) alike.

The extension is compiled against the very PyTorch that will load it: the one that this Python finds. All kinds of
builds (wheel, editable, in place) share one build folder, so that a change of one file compiles only that file.
Needs CMake and a generator's program (Ninja, or else make); of Python, the standard library only.
"""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "extension"
SUPPORT: dict[str, Any] = runpy.run_path(str(ROOT / "ark_torch" / "_support.py"))


def torch_folder() -> Path:
    """Where PyTorch lies, without the seconds of importing it; SystemExit naming what to install if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(SUPPORT["no_torch"](sys.executable))
    return Path(spec.origin).parent


def torch_version() -> str:
    """'2.13.0+cpu'; SystemExit for a PyTorch that is too old."""
    version = str(runpy.run_path(str(torch_folder() / "version.py"))["__version__"])
    if SUPPORT["too_old"](version):
        raise SystemExit(
            f"ark_torch supports PyTorch {SUPPORT['SUPPORTED_MINORS'][0]} and newer, and {sys.executable} has "
            f"{version}: install a supported one first "
            f"(python -m pip install 'torch=={SUPPORT['SUPPORTED_MINORS'][-1]}.*')."
        )
    if news := SUPPORT["untested"](version):
        print(f"warning: {news}", file=sys.stderr)
    return version


def defines() -> dict[str, str]:
    """What the configuration is told by -D."""
    torch_version()
    return {
        "ARK_EXTENSION": "ON",
        "LIBTORCH_ROOT": str(torch_folder()),
        "Python3_EXECUTABLE": sys.executable,
        "Python3_INCLUDE_DIR": sysconfig.get_path("include"),  # CMake keeps the last Python's
    }


def prepare() -> None:
    """One compilation a core, or MAX_JOBS. The Ninja next to this Python is first: another version rebuilds all.

    scikit-build-core would take the compiler that Python was built with, under another name for ccache.
    """
    cache = BUILD / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
        shutil.rmtree(BUILD)  # a copy from another place, which CMake refuses
    if shutil.which("c++"):
        os.environ.setdefault("CXX", "c++")
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", jobs)
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def check_libraries() -> None:
    """SystemExit if the extension brings its own libstdc++ beside PyTorch's: its errors would crash the process."""
    for built in (BUILD / "ark_torch").glob("_C*.so"):
        if b"libstdc++.so.6" not in built.read_bytes():
            raise SystemExit(
                f"{built} does not use the shared libstdc++ that PyTorch loads: build without -static-libstdc++ "
                "(LDFLAGS, CMAKE_MODULE_LINKER_FLAGS), and with a compiler that finds libstdc++.so.6"
            )


def build_in_place(quiet: bool = False) -> None:
    """Puts ark_torch/_C.*.so and ark_torch/_build_info.py beside the sources."""
    prepare()
    options = [f"-D{name}={value}" for name, value in defines().items()]
    if shutil.which("cmake") is None:
        raise SystemExit(
            "ark_torch is built by CMake 3.22 or newer, which is not here: python -m pip install cmake ninja"
        )
    if "CMAKE_GENERATOR" not in os.environ and shutil.which("ninja"):
        options += ["-G", "Ninja"]
    for command in (["-S", str(ROOT), "-B", str(BUILD), *options], ["--build", str(BUILD), "--target", "_C"]):
        done = subprocess.run(["cmake", *command], stdout=subprocess.PIPE if quiet else None, text=True)
        if done.returncode:
            raise SystemExit((done.stdout or "")[-8000:] + f"cmake {command[0]}: exit code {done.returncode}")
    for name in (f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", "_build_info.py"):
        copy = ROOT / "ark_torch" / f"{name}.new"
        shutil.copy(BUILD / "ark_torch" / name, copy)
        copy.replace(copy.with_suffix(""))  # a process that has the old one loaded keeps it
