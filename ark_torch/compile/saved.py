"""Compiled regions as data: for PyTorch's ahead-of-time interface, and for its portable caches.

A saved region is what was told to the planner, the target that it planned for, and the compiled library or cubin.
Loading plans again, which takes milliseconds and must give the text that was compiled, and needs no compiler. It is
refused on another architecture, on a CPU that lacks instructions, and by another version of ark_torch or its kernels.

- aot_compile: AheadOfTime (ahead.py) holds a graph's regions and is pickled by AOTAutograd with its own wrappers.
- torch.compiler.save_cache_artifacts() and load_cache_artifacts(): an artifact of type "ark" for each region that was
  compiled; regions of a later compilation are looked up by what would be told to the planner.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ark_torch import _jit
from ark_torch._version import __version__
from ark_torch.compile.report import log
from ark_torch.errors import CompileError

KIND = "ark"  # of PyTorch's cache artifacts
_CPU_FLAGS = ("avx", "sse", "fma", "f16c", "bmi", "amx", "vaes", "vpclmul", "gfni", "movbe", "popcnt", "asimd", "sve")


class Told:
    """Takes what LoweredGraph.emit() says, and says it again to a graph of the planner."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@dataclass(frozen=True)
class SavedRegion:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    name: str
    options: dict[str, Any]
    kernel: dict[str, Any]  # of _C.plan.Region.saved()
    version: str
    machine: frozenset[str]  # the CPU's instructions; empty: for a GPU
    checksum: (
        str  # of the kernel's binary, which would run with a lost bit; the plan must give the kernel's text anyway
    )
    unpacked: tuple[int, ...]  # positions of arguments that tinygemm.py unpacks

    def check(self) -> None:
        """Raises CompileError if it does not run here."""
        if self.version != version():
            raise CompileError(
                f"{self.name}: saved by ark_torch {self.version}, and this is {version()}: save the program again"
            )
        if hashlib.sha256(self.kernel["binary"]).hexdigest() != self.checksum:
            raise CompileError(f"{self.name}: its saved kernel is damaged: save the program again")
        if lacking := sorted(self.machine - instructions()):
            raise CompileError(
                f"{self.name}: saved on a CPU with {', '.join(lacking)}, which this one lacks: save it on such a one"
            )

    def load(self, name: str = "", kernel: bool = True) -> Any:
        """The region, with a name of its own or another. Without its kernel it is compiled. Raises CompileError, or
        what the planner raises."""
        from ark_torch import _C
        from ark_torch.compile import trace

        if kernel:
            self.check()
        _jit.configure()
        trace.configure()
        graph = _C.plan.Graph()
        for call, args, kwargs in self.calls:
            getattr(graph, call)(*args, **kwargs)
        options = {**self.options, "saved": self.kernel} if kernel else self.options
        return _C.plan.Region(graph, name or self.name, options)


@functools.cache
def version() -> str:
    """This ark_torch, with the kernels that compiled code expects."""
    folder = Path(_jit.__file__).resolve().parent / "kernels"
    text = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.suffix in (".hpp", ".cuh")):
        text.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{__version__} ({text.hexdigest()[:12]}, PyTorch {torch.__version__.partition('+')[0]})"


@functools.cache
def instructions() -> frozenset[str]:
    """The CPU's instruction sets, of those that compilers use for `-march=native`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flag for flag in flags.partition(":")[2].split() if flag.startswith(_CPU_FLAGS))


def of_region(
    told: Told, name: str, options: dict[str, Any], region: Any, unpacked: tuple[int, ...] = ()
) -> SavedRegion:
    kept = {name: value for name, value in options.items() if name not in ("otherwise", "dump_passes", "saved")}
    machine = frozenset() if options["device"] >= 0 else instructions()
    kernel = region.saved()
    checksum = hashlib.sha256(kernel["binary"]).hexdigest()
    return SavedRegion(told.calls, name, kept, kernel, version(), machine, checksum, unpacked)


# ---- PyTorch's portable caches ("mega-cache")

_carried: dict[str, SavedRegion] = {}  # by key


def key_of(told: Told, options: dict[str, Any]) -> str:
    """Of what the planner is told, without names of modules."""
    calls = [(call, args[:4] if call == "node" else args, kwargs) for call, args, kwargs in told.calls]
    chosen = {name: options[name] for name in ("threads", "multi_step", "cache", "caches")}
    device = "cpu" if options["device"] < 0 else torch.cuda.get_device_name(options["device"])
    return hashlib.sha256(repr((version(), device, sorted(chosen.items()), calls)).encode()).hexdigest()


def carried(key: str) -> dict[str, Any] | None:
    """The kernel of a region that load_cache_artifacts() brought, if it runs here."""
    found = _carried.get(key)
    if found is None:
        return None
    try:
        found.check()
    except CompileError as error:
        log.info("a loaded artifact is not used: %s", error)
        return None
    return found.kernel


def record(key: str, saved: SavedRegion) -> None:
    """For a later save_cache_artifacts()."""
    from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

    if KIND not in CacheArtifactFactory._artifact_types:
        return
    try:
        CacheArtifactManager.record_artifact(KIND, key, pickle.dumps(saved))
    except Exception:  # PyTorch's caches are private; a region is compiled all the same
        log.debug("a region is not among PyTorch's cache artifacts", exc_info=True)


def carry(key: str, content: bytes) -> None:
    """Keeps an artifact for regions that this process compiles later. It is unpickled, like all of PyTorch's artifacts:
    load only what you trust."""
    saved = pickle.loads(content)
    if isinstance(saved, SavedRegion):
        _carried[key] = saved
