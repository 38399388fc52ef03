"""Builds the extension ark_torch._C against the installed PyTorch.

pyproject.toml has everything static. This file adds what depends on the machine: the extension (csrc/**/*.cpp, no CUDA
library, no -march=native: one wheel serves every x86-64 machine), the requirement on the minor version of PyTorch that
it was built against, and ark_torch/_build_info.py, which records that version for the check at import. Source
distributions are built without PyTorch.
"""

import glob
import itertools
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Importing torch must not load installed backends, especially not an older ark_torch.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
# Uses the Ninja next to this Python even if its environment is not activated, because another version would rebuild
# all.
if os.path.exists(os.path.join(os.path.dirname(sys.executable), "ninja")):
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
THIRD_PARTY = ROOT / "third_party"
os.chdir(ROOT)
SUPPORT = runpy.run_path(str(ROOT / "ark_torch" / "_support.py"))

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    torch = None
    WHY_NOT = SUPPORT["no_torch"](sys.executable, str(error))


class NeedsTorch(build_ext):
    """Replaces the build if there is no PyTorch: an sdist still works, anything else reports what to install."""

    def run(self) -> None:
        raise SystemExit(WHY_NOT)


def make_build_command() -> type:
    class Build(cpp_extension.BuildExtension):
        """Adds a persistent object folder, ccache, and the record of the PyTorch built against."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # One object folder for all kinds of builds (wheel, editable, in place), so that a change of one file
            # compiles only that file. Its name has the exact PyTorch and Python, whose headers differ.
            tag = f"torch{torch.__version__}-{sys.implementation.cache_tag}"
            self.build_temp = str(ROOT / "build" / f"objects-{tag}")

        def build_extensions(self) -> None:
            use_ccache(Path(self.build_temp))
            os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))  # per part
            super().build_extensions()
            text = f'"""Written by setup.py."""\n\nTORCH_VERSION = "{torch.__version__}"\n'
            self.build_info = Path(self.get_ext_fullpath("ark_torch._C")).parent / "_build_info.py"
            self.build_info.write_text(text)

        def build_extension(self, extension: Extension) -> None:
            compile_sources = self.compiler.compile

            def compile_in_parts(sources: list, output_dir: str, extra_postargs: list, **rest: object) -> list:
                """Compiles files that do not use torch while PyTorch's headers are precompiled, then the rest with
                those.
                """

                def compile_part(part: list, name: str, *flags: str) -> list:
                    folder = os.path.join(output_dir, name)  # Ninja keeps one record per folder
                    return compile_sources(
                        in_units(part, Path(folder)),
                        output_dir=folder,
                        extra_postargs=[*extra_postargs, *flags],
                        **rest,
                    )

                folders = [*rest.get("include_dirs", ()), *self.compiler.include_dirs]
                flags = [*self.compiler.compiler_so[1:], *(f"-I{folder}" for folder in folders), *extra_postargs]
                torch_headers = PrecompiledHeaders(Path(output_dir) / "torch-headers.hpp", TORCH_HEADERS, flags)
                # Not for what knows torch, whose headers bring a {fmt} of another version.
                third_party = f"-I{THIRD_PARTY}"
                standard = Path(output_dir) / "standard-headers.hpp"
                headers = PrecompiledHeaders(standard, STANDARD_HEADERS, [*flags, third_party])
                group = [source for source in sources if source.startswith(KNOW_TORCH)]
                planner = [source for source in sources if source.startswith(PLANNER) and source not in group]
                core = [source for source in sources if source not in {*group, *planner, *BINDINGS}]

                def compile_core() -> list:
                    on_headers = [third_party, *headers.wait()]
                    objects = compile_part(core, "core", *on_headers)
                    objects += compile_part(planner, "planner", "-O1", *on_headers)
                    keep_archive(objects, Path(output_dir) / "libark_core.a")
                    return objects

                with ThreadPoolExecutor() as beside:
                    core_objects = beside.submit(compile_core)
                    on_headers = torch_headers.wait()
                    # Linked last: of inline functions in several units, the linker keeps the others' copies.
                    bindings = beside.submit(compile_part, BINDINGS, "bindings", "-Og", *on_headers)
                    objects = compile_part(group, "process_group", *on_headers)
                    return core_objects.result() + objects + bindings.result()

            self.compiler.compile = compile_in_parts
            super().build_extension(extension)

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            inplace = Path(self.get_finalized_command("build_py").get_package_dir("ark_torch"))
            shutil.copy(Path(self.build_lib) / "ark_torch" / "_build_info.py", inplace / "_build_info.py")

        def get_outputs(self) -> list:
            return [*super().get_outputs(), os.path.join(self.build_lib, "ark_torch", "_build_info.py")]

    return Build


# Not on the path of any collective: -O1 takes two thirds of the compile time, and -Og less for the bindings.
BINDINGS = ["csrc/bindings.cpp", "csrc/bindings_plan.cpp"]
KNOW_TORCH = ("csrc/process_group/", "csrc/compiler/region/", "csrc/ops/")
PLANNER = ("csrc/compiler/", "csrc/jit/")

# Each translation unit compiles shared templates again: PyTorch's take 4 s, plus the C++ library's.
LINES_A_UNIT = 1600


def in_units(sources: list, folder: Path) -> list:
    """Combines files of one folder into units: half the total time, and a unit still compiles in seconds.

    CMake compiles every file separately, so that none depends on another's includes.
    """
    units: list = []
    for _, together in itertools.groupby(sorted(sources, key=os.path.dirname), os.path.dirname):
        texts = {source: Path(source).read_text() for source in together}
        alone = [source for source, text in texts.items() if "#define ARK_REDUCE_ISA" in text]  # by instruction set
        units.extend([source] for source in alone)
        lengths = {source: text.count("\n") for source, text in texts.items() if source not in alone}
        all_lines = sum(lengths.values())
        count = -(-all_lines // LINES_A_UNIT)
        begun: list = [[] for _ in range(count)]  # of about equal length
        before = 0
        for source, length in lengths.items():
            begun[(before + length // 2) * count // all_lines].append(source)
            before += length
        units.extend(unit for unit in begun if unit)
    return [unit_of(files, folder) if len(files) > 1 else files[0] for files in units]


def keep_archive(objects: list, archive: Path) -> None:
    """Archives what does not use torch for the C++ tests, which link the extension's own code (ARK_CORE_ARCHIVE)."""
    archive.unlink(missing_ok=True)
    subprocess.run([*shlex.split(os.environ.get("AR", "ar")), "crs", str(archive), *objects], check=True)


def unit_of(files: list, folder: Path) -> str:
    unit = folder / "units" / f"{Path(files[0]).stem}_to_{Path(files[-1]).stem}.cpp"
    unit.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f'#include "{os.path.relpath(file, "csrc")}"\n' for file in files)
    if not unit.exists() or unit.read_text() != text:
        unit.write_text(text)
    return os.path.relpath(unit)


# Compiled once, instead of 15 s (PyTorch's) and 2 s (the C++ library's) in each unit.
TORCH_HEADERS = ("torch/csrc/distributed/c10d/Backend.hpp", "torch/csrc/distributed/c10d/Store.hpp")
STANDARD_HEADERS = (
    *("algorithm", "atomic", "chrono", "cstdint", "cstring", "fstream", "functional", "map", "memory", "mutex"),
    *("optional", "set", "span", "sstream", "string", "thread", "utility", "variant", "vector", "fmt/base.h"),
)


class PrecompiledHeaders:
    """Precompiles headers beside other work (GCC only; other compilers read them in each file).

    If flags or version do not match, GCC ignores the result and reads the headers, so this is always safe.
    """

    def __init__(self, header: Path, names: tuple, flags: list) -> None:
        self.header, self.result, self.process = header, Path(f"{header}.gch"), None
        compiler = [*shlex.split(os.environ.get("CXX", "c++"))]
        version = subprocess.run([*compiler, "-v"], capture_output=True, text=True).stderr
        self.works = "gcc version" in version
        if not self.works:
            return
        text = "".join(f"#include <{name}>\n" for name in names)
        # ccache identifies the result by this text instead of its content, which it must be told to do.
        vendored = [path.read_text() for name in names if (path := THIRD_PARTY / name).exists()]
        identity = "\n".join([torch.__version__, version.strip().splitlines()[-1], *flags, text, *vendored])
        identity = identity.replace(str(ROOT), ".")
        self.identity, self.identity_file = identity, Path(f"{self.result}.sum")
        os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")
        os.environ.setdefault("CCACHE_PCH_EXTSUM", "1")
        if self.result.exists() and self.identity_file.exists() and self.identity_file.read_text() == identity:
            return
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
        self.identity_file.unlink(missing_ok=True)
        command = [*compiler, *flags, "-x", "c++-header", str(header), "-o", str(self.result)]
        self.process = subprocess.Popen(command, env={**os.environ, "CCACHE_DISABLE": "1"})

    def wait(self) -> list:
        """Returns the flags that use the headers, or none if they could not be compiled."""
        if self.process is not None:
            self.works = self.process.wait() == 0
            if self.works:
                self.identity_file.write_text(self.identity)
        return ["-include", str(self.header), "-fpch-preprocess"] if self.works else []


def use_ccache(folder: Path) -> None:
    """Compiles through ccache if it is installed. Newer PyTorch does so by itself."""
    # Lets clones and builds of an sdist share compiled objects.
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    ccache = shutil.which("ccache")
    if ccache is None or "CXX" in os.environ or hasattr(cpp_extension, "_wrap_compiler"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "c++"  # called under a compiler's name, ccache finds that compiler in PATH
    if not wrapper.is_symlink():
        wrapper.symlink_to(ccache)
    os.environ["CXX"] = str(wrapper)


def make_extension() -> Extension:
    sources = sorted(glob.glob("csrc/**/*.cpp", recursive=True))
    return cpp_extension.CppExtension(
        "ark_torch._C",
        sources,
        include_dirs=[str(ROOT / "csrc"), str(ROOT / "ark_torch" / "kernels")],
        # -ffp-contract=off: a fused multiply-add would make results depend on the instruction set.
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-Wall",
            "-Wno-maybe-uninitialized",
        ],
        # Some Pythons (those built to run anywhere) pass -static-libstdc++ to the linker. A second copy of the C++
        # library next to PyTorch's crashes at the first stream. With the shared one named first, the linker takes
        # nothing from the static one.
        extra_link_args=["-Wl,--as-needed", "-Wl,-l:libstdc++.so.6"],
    )


def options() -> dict:
    if torch is None:
        return {
            "ext_modules": [Extension("ark_torch._C", [])],  # so that the wheel is never a pure one
            "cmdclass": {"build_ext": NeedsTorch},
            "install_requires": [f"torch>={SUPPORT['SUPPORTED_MINORS'][0]}"],
        }
    minor = SUPPORT["minor_of"](torch.__version__)
    if not {"sdist", "egg_info", "clean"} & set(sys.argv):
        if SUPPORT["too_old"](torch.__version__):
            raise SystemExit(
                f"ark_torch supports PyTorch {SUPPORT['SUPPORTED_MINORS'][0]} and newer, and {sys.executable} has "
                f"{torch.__version__}: install a supported one first "
                f"(python -m pip install 'torch=={SUPPORT['SUPPORTED_MINORS'][-1]}.*')."
            )
        if news := SUPPORT["untested"](torch.__version__):
            print(f"warning: {news}", file=sys.stderr)
    return {
        "ext_modules": [make_extension()],
        "cmdclass": {"build_ext": make_build_command()},
        "install_requires": [f"torch=={minor}.*"],
    }


setup(**options())
