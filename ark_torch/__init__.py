"""ark_torch: PyTorch's collectives over shared memory, `torch.distributed.init_process_group("ark")`.

Programs need not import this package, since PyTorch finds the backend by its entry points. The import only checks that
PyTorch and the extension fit each other, and registers the backend; the first group loads the extension.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ark_torch import _autoload
from ark_torch._version import __version__

if TYPE_CHECKING:
    import torch

    from ark_torch._C import Options
    from ark_torch.compile.report import Report
    from ark_torch.compile.resident import Resident

_autoload.on_import()

__all__ = ["Options", "__version__", "explain", "export", "flight_record", "load", "resident"]


def flight_record() -> dict[str, Any]:
    """The flight record of this process as a dictionary: what its groups did last (`ark flight` reads the files)."""
    from ark_torch.distributed import flight

    return flight.record()


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Explains what torch.compile(model, backend="ark") makes of this call: regions, fallbacks and their reasons.

    Print the report or save it with `.save("report.html")`; `.regions`, `.fallbacks` and `.graphs` hold the same data.
    It covers inference unless `training=True`, and leaves the model unchanged. `ark_options={...}` are the options of
    torch.compile(options=...). `target="sm_90a"` also plans the regions for that GPU, which need not be present.
    """
    from ark_torch.compile.explain import explain as implementation

    return implementation(model, *args, **kwargs)


def export(
    model: Callable[..., Any],
    args: Sequence[Any],
    path: str | os.PathLike[str],
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compiles the call model(*args, **kwargs) for inference and saves it; `ark_torch.load(path)` runs it in a process
    that has no compiler, for arguments of the same shapes and dtypes.

    Parameters are not in the file. All of the model must be ark's; with options={"choose": "inductor"} Inductor's code
    is saved instead. `options` are those of torch.compile(options=...).
    """
    from ark_torch.compile.export import export as implementation

    implementation(model, args, path, kwargs, options)


def load(path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> Callable[..., Any]:
    """A function that `ark_torch.export` saved. Of a module: `model` is one of its kind, whose parameters and buffers
    are used. The file is unpickled: load only what you trust."""
    from ark_torch.compile.export import load as implementation

    return implementation(path, model)


def resident(
    step: Callable[..., Any],
    /,
    *,
    keep: Sequence[int] = (0,),
    stop: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Resident:
    """Runs many steps of a function of tensors in one launch: `loop = ark_torch.resident(step)`, then `loop(token,
    position, steps=50)`.

    `step(*state)` takes and returns the same number of tensors, of the same shapes and dtypes: the next step's input.
    See ark_torch.compile.resident.Resident for sampling with noise, for `keep`, and for `stop`, which ends early.
    """
    from ark_torch.compile.resident import Resident

    return Resident(step, keep=keep, stop=stop, options=options)


def __getattr__(name: str) -> Any:
    """Loads the extension on the first use of `ark_torch.Options`, the type of init_process_group(pg_options=...).

    `ark_torch.memory`, `distributed`, `nn`, `ops` and `train` are also imported on first use.
    """
    if name == "Options":
        from ark_torch._C import Options

        return Options
    if name in ("compile", "distributed", "memory", "nn", "ops", "train"):
        return importlib.import_module(f"ark_torch.{name}")
    raise AttributeError(f"module 'ark_torch' has no attribute {name!r}")
