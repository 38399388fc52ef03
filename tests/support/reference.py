"""The exact result of a reduction, computed locally by the project's rules.

Inputs are a pure function of (seed, rank), so that every rank knows all of them without communication. Sums are in rank
order. 8- and 16-bit floats accumulate in float32 and are rounded once, integers wrap, AVG divides the accumulated sum
by the number of ranks, and PREMUL_SUM multiplies in the accumulation type. NumPy computes element by element, so that
nothing is fused or reordered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

BOOL = (torch.bool,)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SCALES = (torch.float8_e8m0fnu,)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
ALL_DTYPES = BOOL + INTS + FLOATS + FLOAT8 + SCALES + COMPLEX

_WIDENED = {torch.float16, torch.bfloat16, *FLOAT8, *SCALES}
_LOGICAL_OR = {"SUM", "MAX", "BOR"}
_LOGICAL_AND = {"PRODUCT", "MIN", "BAND"}


def supported(dtype: torch.dtype, op: str) -> bool:
    """Returns whether the operation is defined for the type."""
    if dtype in BOOL:
        return op not in ("AVG", "PREMUL_SUM")
    if dtype in INTS:
        return op not in ("AVG", "PREMUL_SUM")
    if dtype in SCALES:
        return op in ("PRODUCT", "MIN", "MAX")
    if op in ("BAND", "BOR", "BXOR"):
        return False
    return dtype not in COMPLEX or op in ("SUM", "AVG", "PREMUL_SUM")


def make_input(dtype: torch.dtype, count: int, seed: int, rank: int) -> torch.Tensor:
    """Returns rank `rank`'s input: random bits for integers, widely spread magnitudes for floats."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    random = np.random.default_rng([seed, rank, count])
    if dtype is torch.bool:
        return torch.from_numpy(random.integers(0, 2, count).astype(np.bool_))
    if dtype in INTS:
        size = torch.empty(0, dtype=dtype).element_size()
        return torch.from_numpy(random.integers(0, 256, count * size, dtype=np.uint8)).view(dtype)
    if dtype in SCALES:
        return torch.from_numpy(random.integers(120, 135, count, dtype=np.uint8)).view(dtype)
    if dtype in COMPLEX:
        part = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
        return torch.view_as_complex(make_input(part, 2 * count, seed, rank).view(count, 2))
    values = random.standard_normal(count) * np.exp2(random.integers(-6, 4, count))
    return torch.from_numpy(values).to(dtype)


def _combine(a: np.ndarray, b: np.ndarray, op: str) -> np.ndarray:
    if op in ("SUM", "AVG", "PREMUL_SUM"):
        return a + b
    if op == "PRODUCT":
        return a * b
    if op in ("MIN", "MAX"):  # as in IEEE 754-2019: NaN wins, and -0 is below +0
        picked = np.minimum(a, b) if op == "MIN" else np.maximum(a, b)
        if a.dtype.kind == "f":
            prefer_a = np.signbit(a) if op == "MIN" else ~np.signbit(a)
            picked = np.where(a == b, np.where(prefer_a, a, b), picked)
        return picked
    return {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}[op](a, b)


def reduce(
    inputs: list[torch.Tensor], op: str, factors: list[float] | None = None, nodes: Sequence[int] = ()
) -> torch.Tensor:
    """Returns the exact result of reducing one tensor per rank, in the inputs' dtype and shape.

    `nodes` is the node of every rank. The ranks of a node are reduced first. Empty: all ranks are on one node.
    """
    dtype = inputs[0].dtype
    if inputs[0].numel() == 0:
        return torch.empty_like(inputs[0])
    if dtype in COMPLEX:
        parts = [torch.view_as_real(x.contiguous()) for x in inputs]
        return torch.view_as_complex(reduce(parts, op, factors, nodes))
    if dtype is torch.bool:
        name = "BOR" if op in _LOGICAL_OR else "BAND" if op in _LOGICAL_AND else op
        return reduce([x.to(torch.uint8) for x in inputs], name, None, nodes).to(torch.bool)
    wide = [(x.to(torch.float32) if dtype in _WIDENED else x).contiguous().numpy() for x in inputs]
    if op == "PREMUL_SUM":
        if factors is None:
            raise ValueError("PREMUL_SUM needs a factor a rank")
        wide = [x * x.dtype.type(factor) for x, factor in zip(wide, factors, strict=True)]
    with np.errstate(all="ignore"):
        partials: dict[int, np.ndarray] = {}
        for node, x in zip(nodes or [0] * len(wide), wide, strict=True):
            partials[node] = _combine(partials[node], x, op) if node in partials else x.copy()
        total, *others = partials.values()
        for x in others:
            total = _combine(total, x, op)
        if op == "AVG":
            total = total / total.dtype.type(len(inputs))
    result = torch.from_numpy(np.ascontiguousarray(total))
    if dtype is torch.float8_e4m3fn:
        result = result.clamp(-448.0, 448.0)  # PyTorch 2.13 saturates; 2.11 converts large values to NaN
    return result.to(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements' bytes in order. `contiguous()` alone may keep an odd stride if there is one element."""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.copy_(tensor.reshape(-1))
    return dense.view(torch.uint8)


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """torch.cat for every dtype."""
    return torch.cat([as_bytes(part) for part in parts]).view(parts[0].dtype)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Checks equality to the last bit. The message names the first element that differs."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    a, b = as_bytes(got), as_bytes(expected)
    if torch.equal(a, b):
        return
    size = got.element_size()
    wrong = (a.view(-1, size) != b.view(-1, size)).any(dim=1)
    if got.dtype in FLOATS + FLOAT8:  # any NaN equals any NaN
        wide = torch.float64
        both = got.contiguous().reshape(-1).to(wide).isnan() & expected.contiguous().reshape(-1).to(wide).isnan()
        wrong &= ~both
    if wrong.any():
        at = int(wrong.nonzero()[0])
        one, two = a.view(-1, size)[at].tolist(), b.view(-1, size)[at].tolist()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {at}: "
            f"{got.contiguous().reshape(-1)[at : at + 1].tolist() if got.dtype not in SCALES else one} is not "
            f"{expected.contiguous().reshape(-1)[at : at + 1].tolist() if got.dtype not in SCALES else two} "
            f"(bytes {one}, {two})"
        )
