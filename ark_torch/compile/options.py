"""The contents of torch.compile(model, backend="ark", mode=..., options={...}): one table, and the check against it.

Two keys never arrive: PyTorch removes `guard_filter_fn` and `use_aoti` from the dictionary before a backend sees it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ark_torch import _suggest
from ark_torch.errors import InvalidOption


@dataclass(frozen=True)
class Option:
    """One key: its default, its allowed values (a tuple, or a type), and its effect."""

    name: str
    default: Any
    allowed: tuple[Any, ...] | type
    doc: str

    def shown(self) -> str:
        if isinstance(self.allowed, tuple):
            return ", ".join(repr(value) for value in self.allowed)
        return "a whole number above 0, or None" if self.allowed is int else self.allowed.__name__

    def accepts(self, value: Any) -> bool:
        if isinstance(self.allowed, tuple):
            return isinstance(value, str) and value in self.allowed
        if self.allowed is int:
            return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
        return isinstance(value, self.allowed)


MODES = ("default",)
# With more workers per core than this, they mostly wait for each other's time slices.
THREADS_A_CORE = 4


def _option(name: str, default: Any, allowed: tuple[Any, ...] | type, doc: str) -> Any:
    return field(default=default, metadata={"option": Option(name, default, allowed, doc)})


@dataclass(frozen=True)
class Options:
    """The values in force, one field per key."""

    choose: str = _option(
        "choose",
        "measure",
        ("ark", "inductor", "measure"),
        "Who runs a graph. ark: its regions, with Inductor for what ark does not run. inductor: Inductor, as without "
        "ark. measure: these and eager PyTorch are timed, and the fastest is taken and remembered in the cache folder, "
        "so that later runs of the program take the same.",
    )
    wait: bool = _option(
        "wait",
        False,
        bool,
        'With choose="measure". False: Inductor serves while ark\'s regions are compiled in the background, and some '
        "of the program's next calls are the ones that are timed. True: the first call compiles and times all.",
    )
    fallback: bool = _option(
        "fallback",
        True,
        bool,
        "False: what ark does not support is an error that names operator, module and source line, instead of going "
        "to Inductor.",
    )
    threads: int | None = _option(
        "threads",
        None,
        int,
        "Worker threads of the kernel, up to four a core. None: torch.get_num_threads() when it is compiled.",
    )
    nan: str = _option(
        "nan",
        "skip",
        ("skip", "exact"),
        "skip: attention passes over blocks of positions that its mask (or is_causal) leaves out, so NaN or infinity "
        "there may not reach the result, and eager PyTorch has NaN; at positions in use they always do. exact: "
        "such attention is left to PyTorch's own kernels, and what is written as products, a mask and a softmax "
        "remains products.",
    )
    differentiate_twice: bool = _option(
        "differentiate_twice",
        False,
        bool,
        "True: graphs that train run eagerly, so that their gradients have gradients (create_graph=True), which "
        "torch.compile has on no backend. torch.func.grad of torch.func.grad needs no option.",
    )
    cache: str = _option(
        "cache",
        "auto",
        ("auto", "none", "all-first", "all-last"),
        "What caches are told of each load and store; results are the same. auto: what the compiler chooses from when "
        "a value is read again and what the machine was measured to gain. none: plain loads and stores. all-first "
        "(all-last): everything makes way first (last), for comparisons.",
    )
    minimum: int = _option(
        "minimum",
        2,
        int,
        "A region with fewer operators than this (views and constants do not count) is not worth a call of its own "
        "and goes to Inductor with the rest.",
    )


OPTIONS: tuple[Option, ...] = tuple(one.metadata["option"] for one in fields(Options))


def parse(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Checks the user's mode and options. InvalidOption names the known ones."""
    if mode is not None and mode not in MODES:
        raise InvalidOption(
            f'torch.compile(backend="ark", mode={mode!r}): known modes are '
            f"{', '.join(map(repr, MODES))}{_suggest.did_you_mean(mode, MODES)}; everything else is set by "
            f"options={{...}}, which take {', '.join(sorted(option.name for option in OPTIONS))}."
        )
    known = {option.name: option for option in OPTIONS}
    values: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if name not in known:
            raise InvalidOption(
                f'options[{name!r}] is not known to backend "ark"{_suggest.did_you_mean(str(name), known)}; '
                f"it knows {', '.join(sorted(known))}."
            )
        if not known[name].accepts(value):
            allowed = known[name].allowed
            given_name = isinstance(value, str) and isinstance(allowed, tuple)
            meant = _suggest.did_you_mean(value, allowed) if given_name else ""  # type: ignore[arg-type]
            raise InvalidOption(f"options[{name!r}] is {value!r}{meant}; it takes {known[name].shown()}.")
        values[name] = value
    cores = os.cpu_count() or 1
    if (values.get("threads") or 0) > cores * THREADS_A_CORE:
        raise InvalidOption(
            f"options['threads'] is {values['threads']}; this machine has {cores} cores, so it takes at most "
            f"{cores * THREADS_A_CORE} ({THREADS_A_CORE} a core)."
        )
    if values.get("minimum", 1) is None:
        values["minimum"] = known["minimum"].default
    return Options(**values)


def table() -> str:
    """The options as the Markdown table in docs/compile.md."""
    lines = ["| option | allowed | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{o.name}` | {o.shown()} | {o.default!r} | {o.doc} |" for o in OPTIONS]
    return "\n".join(lines) + "\n"
