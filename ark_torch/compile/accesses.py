"""The cache policy of each load and store of a plan (csrc/compiler/passes/cache_policy.hpp), for reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True)
class Access:
    """What one stage reads or writes of a value. `operand`: weight, state, table, stream, packets or activation.
    `prefetch`: usual, or what the plan has the kernel do instead (csrc/compiler/graph/stage.hpp).
    `until_read`: bytes that the step touches before the value is read again; None: never."""

    stage: int
    operator: str
    origin: str
    operand: str
    write: bool
    cache: str
    prefetch: str
    bytes: int
    until_read: float | None


def accesses_of(plan: dict[str, Any]) -> list[Access]:
    """All accesses of a plan (its parsed JSON), in stage order."""
    found = []
    for stage in plan["stages"]:
        for one in stage["accesses"]:
            value = plan["values"][one["value"]]
            if "shape" not in value:  # a literal
                continue
            size = _BYTES.get(value["type"], 4)
            for length, stride in zip(value["shape"], value["strides"], strict=True):
                size *= length if stride else 1
            until = one["bytes_until_read"]
            found.append(
                Access(
                    stage["stage"],
                    stage["name"],
                    stage["origin"],
                    one["operand"],
                    one["write"],
                    one["cache"],
                    one.get("prefetch", "usual"),
                    size,
                    None if until < 0 else until,
                )
            )
    return found


def line(plan: dict[str, Any]) -> str:
    """One line: the number of accesses of each kind per policy."""
    alike: Counter[tuple[str, str, bool]] = Counter()
    size: Counter[tuple[str, str, bool]] = Counter()
    for one in accesses_of(plan):
        key = (one.cache, one.operand, one.write)
        alike[key] += 1
        size[key] += one.bytes
    told = [
        f"{cache} {count} {'write' if write else 'read'}{'s' if count > 1 else ''} of {operand} "
        f"({size[cache, operand, write] / 1e6:.2f} MB)"
        for (cache, operand, write), count in sorted(alike.items(), key=lambda item: -size[item[0]])
        if cache != "normal"
    ]
    others = sum(count for (cache, _, _), count in alike.items() if cache == "normal")
    asked = Counter(one.prefetch for one in accesses_of(plan) if one.prefetch != "usual")
    prefetches = [f"prefetch {how} {count}" for how, count in sorted(asked.items())]
    return f"caches ({plan['target']['cache']}): {', '.join([*told, f'normal {others}', *prefetches])}"


def rows(plan: dict[str, Any]) -> list[tuple[str, ...]]:
    """Equal accesses in one row: operator, operand, read or write, policy, count, MB, MB until read again."""
    alike: dict[tuple[str, str, str, str], list[Access]] = {}
    for one in accesses_of(plan):
        cache = one.cache if one.prefetch == "usual" else f"{one.cache}, prefetch {one.prefetch}"
        key = (one.operator, one.operand, "write" if one.write else "read", cache)
        alike.setdefault(key, []).append(one)
    told: list[tuple[str, ...]] = []
    for key, some in alike.items():
        again = [one.until_read for one in some if one.until_read is not None]
        until = f"{min(again) / 1e6:.2f}" if again else "never"
        told.append((*key, str(len(some)), f"{sum(one.bytes for one in some) / 1e6:.3f}", until))
    return told
