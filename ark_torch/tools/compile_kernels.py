"""Compiles CUDA kernels without a GPU: `python -m ark_torch.tools.compile_kernels [--arch sm_90a ...] [--out DIR]`.

It compiles each kind of kernel (--every: each instantiation for groups of 1 to 8) for each architecture with the run
time's NVRTC, without the cache. Prints seconds, bytes, registers and spills. Exit code: 0; 1 if a kernel does not
compile; 2 if NVRTC is unusable.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ark_torch._C import KernelResources

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
# One per family; the "a" enables architecture-specific instructions (wgmma).
DEFAULT = ("sm_80", "sm_90a", "sm_120")
GROUP_SIZES = range(1, 9)


def number_of(arch: str) -> int:
    """90 for sm_90a; raises ValueError for an invalid name."""
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if not found:
        raise ValueError(f"{arch!r} is no architecture: say sm_90a, for example")
    return int(found.group(1))


@dataclass(frozen=True)
class Job:
    """One kernel for one architecture."""

    name: str
    text: str
    arch: str


@dataclass(frozen=True)
class Result:
    """The job's result: the cubin and its kernels' resources, or an error."""

    job: Job
    seconds: float
    cubin: bytes = b""
    kernels: tuple[KernelResources, ...] = ()
    error: str = ""


def jobs_of(architectures: list[str], pattern: str = "", every: bool = False) -> list[Job]:
    """Each kernel whose name matches, for each architecture that it supports."""
    from ark_torch import _C

    return [
        Job(name, text, arch)
        for name, text, oldest in _C._kernel_stubs(list(GROUP_SIZES) if every else [])
        for arch in architectures
        if re.search(pattern, name) and number_of(arch) >= oldest
    ]


def compile_one(job: Job) -> Result:
    """Compiles in this process."""
    from ark_torch import _C

    start = time.perf_counter()
    try:
        cubin, kernels = _C._compile_kernel(job.text, job.arch)
    except RuntimeError as error:
        return Result(job, time.perf_counter() - start, error=str(error))
    return Result(job, time.perf_counter() - start, cubin, tuple(kernels))


def compile_all(jobs: list[Job], processes: int) -> Iterator[Result]:
    """Yields results in the order of the jobs, using this many processes, which inherit this one's settings."""
    if processes <= 1 or len(jobs) <= 1:
        yield from map(compile_one, jobs)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        yield from pool.map(compile_one, jobs)


def describe(result: Result) -> str:
    """A row of the table."""
    start = f"{result.job.name:<32} {result.job.arch:<8}"
    if result.error:
        return f"{start} FAILED: {result.error}"
    used = ", ".join(
        f"{kernel['name']} {kernel['registers']} registers"
        + (f", {kernel['spilled']} bytes SPILLED" if kernel["spilled"] else "")
        for kernel in result.kernels
    )
    return f"{start} {result.seconds:6.2f} s {len(result.cubin):>8} bytes  {used}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ark_torch.tools.compile_kernels", description=__doc__)
    parser.add_argument("--arch", nargs="+", metavar="SM", help=f"architectures (default: {' '.join(DEFAULT)})")
    parser.add_argument("--all", action="store_true", help=f"all architectures: {' '.join(ARCHITECTURES)}")
    parser.add_argument("--every", action="store_true", help="each instantiation, not one of each kind")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilations at a time (default: one a core)"
    )
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
    failed = 0
    jobs = jobs_of(architectures, options.only, options.every)
    start = time.perf_counter()
    for result in compile_all(jobs, options.jobs):
        print(describe(result), flush=True)
        failed += bool(result.error)
        if options.out is not None and not result.error:
            (options.out / f"{result.job.name}.{result.job.arch}.cubin").write_bytes(result.cubin)
            (options.out / f"{result.job.name}.cu").write_text(result.job.text)
    print(f"{len(jobs)} compiled, {failed} failed, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
