"""Compiles CUDA kernels without a GPU: `python -m ark_torch.tools.compile_kernels [--arch sm_90a ...] [--out DIR]`.

Each kind of kernel for each architecture, through the same NVRTC that compiles at run time, past the cache. Prints
seconds, bytes, registers and spills. Exit code: 0; 1 when a kernel does not compile; 2 when NVRTC cannot be used.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
# One of each family; the "a" adds the instructions that only that architecture has (wgmma).
DEFAULT = ("sm_80", "sm_90a", "sm_120")


def number_of(arch: str) -> int:
    """90 of sm_90a; ValueError for anything else."""
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if not found:
        raise ValueError(f"{arch!r} is no architecture: say sm_90a, for example")
    return int(found.group(1))


def compile_all(architectures: list[str], pattern: str, out: Path | None) -> int:
    """Compiles what matches, prints a row for each; how many failed."""
    from ark_torch import _C

    failed = 0
    for name, text, oldest in _C._kernel_stubs():
        if not re.search(pattern, name):
            continue
        for arch in architectures:
            if number_of(arch) < oldest:
                continue
            start = time.perf_counter()
            try:
                cubin, kernels = _C._compile_kernel(text, arch)
            except RuntimeError as error:
                failed += 1
                print(f"{name:<32} {arch:<8} FAILED: {error}", flush=True)
                continue
            seconds = time.perf_counter() - start
            used = ", ".join(
                f"{kernel} {registers} registers" + (f", {spilled} bytes SPILLED" if spilled else "")
                for kernel, registers, spilled, _ in kernels
            )
            print(f"{name:<32} {arch:<8} {seconds:6.2f} s {len(cubin):>8} bytes  {used}", flush=True)
            if out is not None:
                (out / f"{name}.{arch}.cubin").write_bytes(cubin)
                (out / f"{name}.cu").write_text(text)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ark_torch.tools.compile_kernels", description=__doc__)
    parser.add_argument("--arch", nargs="+", metavar="SM", help=f"architectures (default: {' '.join(DEFAULT)})")
    parser.add_argument("--all", action="store_true", help=f"all architectures: {' '.join(ARCHITECTURES)}")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels whose name matches")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write stubs and cubins there")
    options = parser.parse_args(arguments)
    architectures = list(ARCHITECTURES if options.all else options.arch or DEFAULT)
    try:
        for arch in architectures:
            number_of(arch)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    from ark_torch import _C, _jit

    try:
        _jit.configure()
        version, path = _C._nvrtc()
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"NVRTC {version} ({path})")
    return 1 if compile_all(architectures, options.only, options.out) else 0


if __name__ == "__main__":
    sys.exit(main())
