"""The sources of loop kernels for GPUs, emitted and compiled without a GPU."""

from __future__ import annotations

import importlib.metadata
import json
import struct
from typing import Any

import pytest
import reference

from ark_torch import _C, _jit
from ark_torch.compile import build

MULTIPROCESSORS = 132  # as an H100 or H200
ALIGNED = "constexpr bool kAligned = true;"
needs_nvrtc = pytest.mark.skipif(
    not any(one.name == "nvidia-cuda-nvrtc" for one in importlib.metadata.distributions()),
    reason="nvidia-cuda-nvrtc is not installed",
)


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Returns the size of each function of a cubin (a 64-bit ELF file), by its mangled name."""
    (table,), (entry, count) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + entry * n) for n in range(count)]
    found: dict[str, int] = {}
    for _, kind, _, _, begin, length, names, _, _, each in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        for at in range(begin, begin + length, each):
            name, info, _, _, _, size = struct.unpack_from("<IBBHQQ", cubin, at)
            if info & 15 == 2:  # STT_FUNC
                first = sections[names][4] + name
                found[cubin[first : cubin.index(b"\0", first)].decode()] = size
    return found


class Sources:
    """Regions that keep the loop kernel's source and compute like the reference (for many steps, like the CPU)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        self.arch = "sm_90a"
        self._plain = build.make_region
        monkeypatch.setattr(build, "make_region", self._make_region)

    def _make_region(
        self,
        lowering: Any,
        name: str,
        threads: int,
        otherwise: Any = None,
        multi_step: bool = False,
        cache: str = "auto",
    ) -> Any:
        self.graph = graph = _C.plan.Graph()
        lowering.graph.emit(graph)
        self.found.append(_C.plan.cuda_source(graph, self.arch, MULTIPROCESSORS, multi_step, cache))
        if multi_step:  # the reference does not support it
            return self._plain(lowering, name, threads, otherwise, multi_step, cache)
        double = reference.Graph()
        lowering.graph.emit(double)
        return reference.Region(double, name, {"threads": threads, "otherwise": otherwise, "multi_step": multi_step})

    def stages(self) -> list[str]:
        """Returns the stages of the last region's plan."""
        text = _C.plan.plan_for(self.graph, self.arch, MULTIPROCESSORS)
        return [stage["name"] for stage in json.loads(text)["stages"]]

    def check(self, misaligned: bool = False) -> None:
        """Each source compiles with the registers that a thread of its block can have; `misaligned`: its functions'
        variants for operands that are not aligned, too."""
        assert self.found
        _jit.configure()
        variants = [source.replace(ALIGNED, ALIGNED.replace("true", "false")) for source in self.found if misaligned]
        assert all(variant not in self.found for variant in variants), "nothing depends on alignment"
        for source in self.found + variants:
            cubin, kernels = _C._compile_kernel(source, self.arch, fuse=True, may_spill=False)
            assert cubin[:4] == b"\x7fELF"
            [kernel] = kernels
            assert kernel["name"] == "loop_kernel" and 0 < kernel["registers"] <= 128
            # The compiler silently drops code that it considers unreachable: then 32 bytes are left. What only calls
            # the task for misaligned operands may be a jump of 64.
            tasks = {name: size for name, size in code_bytes(cubin).items() if "loop7Context" in name}
            assert all(size > (32 if "_misaligned" in name else 64) for name, size in tasks.items()), tasks
            assert not kernel["multiplies_in_order"], "groups of warps wait for each of their multiplications"
