"""python setup.py [-q] build_ext --inplace: builds the extension ark_torch._C beside the sources, with CMake alone.

pip reads pyproject.toml instead, whose backend calls CMake in the same way (build_backend/ark_cmake.py) and packs what
CMakeLists.txt installs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "build_backend"))
import ark_cmake

arguments = sys.argv[1:]
if [word for word in arguments if word not in ("-q", "--quiet")] != ["build_ext", "--inplace"]:
    raise SystemExit(f"{__doc__}\nFor anything else: python -m pip --help")
ark_cmake.build_in_place(quiet=arguments[0].startswith("-"))
