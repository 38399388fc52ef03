"""The project's speed goals, as ratios to Gloo in the same run (float32, called from Python)."""

from __future__ import annotations

KB, MB = 1 << 10, 1 << 20
OVERHEAD_US = 8.0  # a 4-byte all_reduce of two ranks, from Python
FIVE_TIMES = {
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
}


def goal(operation: str, ranks: int, size: int) -> float | None:
    """The required speedup over Gloo; None if there is no goal."""
    if operation in FIVE_TIMES:
        return 5.0
    if operation != "all_reduce":
        return None
    if ranks == 4:
        return 5.0
    if ranks == 2:
        if size <= 64 * KB:
            return 10.0
        if 1 * MB <= size <= 16 * MB:
            return 8.0
        if size == 64 * MB:
            return 7.0
    return None


def verdict(operation: str, ranks: int, size: int, ratio: float | None) -> str:
    """'met >=10' or 'MISSED >=10'; "" without a goal or a rival."""
    wanted = goal(operation, ranks, size)
    if wanted is None or ratio is None:
        return ""
    return f"{'met' if ratio >= wanted else 'MISSED'} >={wanted:g}"
