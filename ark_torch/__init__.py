"""ark_torch: PyTorch's collectives over shared memory, `torch.distributed.init_process_group("ark")`.

Importing this package is not needed (PyTorch finds the backend by its entry points) and does no more than check that
PyTorch and the extension belong together, and register the backend; the extension is loaded with the first group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ark_torch import _autoload
from ark_torch._version import __version__

if TYPE_CHECKING:
    from ark_torch._C import Options
    from ark_torch.compile.report import Report
    from ark_torch.compile.resident import Resident

_autoload.on_import()

__all__ = ["Options", "__version__", "explain", "flight_record", "resident"]


def flight_record() -> dict[str, Any]:
    """What this process's groups did last: the flight record, as a dictionary (`ark flight` reads its files)."""
    from ark_torch.distributed import flight

    return flight.record()


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """What torch.compile(model, backend="ark") makes of this call: regions, what falls back, and why.

    print() it, or `.save("report.html")`; `.regions`, `.fallbacks` and `.graphs` hold the same as data. Inference is
    explained unless `training=True`, and the model is left as it was. `ark_options={...}` are those of
    torch.compile(options=...). With `target="sm_90a"` regions are also planned for that GPU, which need not be here.
    """
    from ark_torch.compile.explain import explain as implementation

    return implementation(model, *args, **kwargs)


def resident(
    step: Callable[..., Any],
    /,
    *,
    keep: Sequence[int] = (0,),
    stop: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Resident:
    """Many steps of a function of tensors in one launch: `loop = ark_torch.resident(step)`, then
    `loop(token, position, steps=50)`.

    `step(*state)` returns as many tensors as it takes, of the same shapes and types: what the next step is given.
    See ark_torch.compile.resident.Resident for sampling with noise, for `keep` and for `stop`, the early end.
    """
    from ark_torch.compile.resident import Resident

    return Resident(step, keep=keep, stop=stop, options=options)


def __getattr__(name: str) -> Any:
    """`ark_torch.Options`, for init_process_group(pg_options=...), loads the extension when it is asked for.

    So do `ark_torch.memory`, `ark_torch.distributed`, `ark_torch.nn`, `ark_torch.ops` and `ark_torch.train`, which need
    not be imported by their own names.
    """
    if name == "Options":
        from ark_torch._C import Options

        return Options
    if name in ("compile", "distributed", "memory", "nn", "ops", "train"):
        return importlib.import_module(f"ark_torch.{name}")
    raise AttributeError(f"module 'ark_torch' has no attribute {name!r}")
