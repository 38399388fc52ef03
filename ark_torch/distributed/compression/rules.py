"""How each layer travels: bits and bucket of each parameter's gradient, by name or pattern.

A rule that matches a layer overrides the defaults: one-dimensional layers (norms, biases) and small ones are exact,
since they are few bytes and each element counts; all others use the state's bits and bucket.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

FORMATS = ("uniform", "fp8")
ROUNDINGS = ("nearest", "stochastic")
PLACES = ("everywhere", "between")


@dataclass(frozen=True)
class Rule:
    """How a layer's gradient travels.

    Args:
        bits: 1 to 8 bits per element; 0: exact.
        bucket: number of elements that share a scale, a multiple of 32 from 128 to 4096; None: the state's.
    """

    bits: int
    bucket: int | None = None


EXACT = Rule(0)
Rules = Mapping[str, "int | str | Rule"]


def check_bits(what: str, bits: Any, format: str = "uniform") -> int:
    """Returns valid `bits`; `what` is the argument's name. Raises TypeError or ValueError."""
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"ark: {what} is {bits!r}: it is a whole number from 1 to 8.")
    if not 1 <= bits <= 8:
        raise ValueError(f"ark: {what} is {bits}: it is a whole number from 1 to 8.")
    if format == "fp8" and bits != 8:
        raise ValueError(f"ark: {what} is {bits}: format='fp8' has 8 bits. Pass {what}=8, or format='uniform'.")
    return bits


def check_bucket(what: str, bucket: Any) -> int:
    """Returns a valid `bucket`. Raises TypeError or ValueError."""
    if isinstance(bucket, bool) or not isinstance(bucket, int):
        raise TypeError(f"ark: {what} is {bucket!r}: it is a multiple of 32 from 128 to 4096.")
    if bucket % 32 or not 128 <= bucket <= 4096:
        raise ValueError(f"ark: {what} is {bucket}: it is a multiple of 32 from 128 to 4096.")
    return bucket


def check_choice(what: str, value: Any, choices: Sequence[str]) -> str:
    """Returns `value` if it is one of `choices`. Raises ValueError."""
    if value not in choices:
        raise ValueError(f"ark: {what} is {value!r}: it is {' or '.join(map(repr, choices))}.")
    return str(value)


def parse(rules: Rules | None, format: str) -> dict[str, Rule]:
    """Parses and checks the user's rules ({"head.*": 8, "embedding.weight": "exact", "*.up.*": Rule(2, 256)})."""
    if rules is None:
        return {}
    if not isinstance(rules, Mapping):
        raise TypeError(f"ark: rules is a {type(rules).__name__}: it maps names or patterns to bits, 'exact' or Rule.")
    parsed = {}
    for pattern, given in rules.items():
        what = f"rules[{pattern!r}]"
        rule = EXACT if given == "exact" else given if isinstance(given, Rule) else None
        if rule is None:
            if isinstance(given, str) or not isinstance(given, int):
                raise TypeError(f"ark: {what} is {given!r}: it is bits from 1 to 8, 'exact' or a Rule.")
            rule = Rule(given)
        if rule.bits != 0 or given == 0:
            check_bits(what, rule.bits, format)
        if rule.bucket is not None:
            check_bucket(f"{what}.bucket", rule.bucket)
        parsed[pattern] = rule
    return parsed


def check_patterns(rules: Mapping[str, Rule], names: Sequence[str]) -> None:
    """Requires that each rule matches a parameter. Raises ValueError with the closest names."""
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, 3, 0.3) or names[:3]
            raise ValueError(f"ark: rules[{pattern!r}] matches no parameter: there is {', '.join(near)}.")


def rule_for(name: str, dims: int, numel: int, rules: Mapping[str, Rule], exact_below: int) -> Rule | None:
    """The first rule that matches the layer; EXACT for layers exact by default; None: the state's settings."""
    for pattern, rule in rules.items():
        if fnmatchcase(name, pattern):
            return rule
    return EXACT if dims <= 1 or numel < exact_below else None
