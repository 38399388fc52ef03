"""ark_torch.explain: what backend="ark" makes of a model, operator by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ark_torch.compile import options as table
from ark_torch.compile.report import Report


def explain(
    model: Callable[..., Any],
    /,
    *args: Any,
    ark_options: Mapping[str, Any] | None = None,
    target: str = "",
    **kwargs: Any,
) -> Report:
    """Compiles `model` for these arguments and says what runs where, and why.

    The model is called once under the caller's grad mode, so its caches are written as by any call. A compiled model is
    given as it was before torch.compile; what it was compiled to before stays as it is. With a `target` ("sm_90a")
    every region is planned for it as well, whether it is here or not.
    """
    import torch
    from torch._dynamo.utils import counters

    from ark_torch.compile.backend import compile_graph

    options = table.parse(None, ark_options)
    if target:
        from ark_torch import _C

        if target not in _C.plan.targets():
            raise ValueError(f"target={target!r} is not known; known are {', '.join(_C.plan.targets())}")
    report = Report(target=target)

    def backend(graph_module: Any, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        return compile_graph(graph_module, example_inputs, options, report)

    plain = getattr(model, "_orig_mod", model)
    before = Counter(counters["graph_break"])
    torch.compile(plain, backend=backend)(*args, **kwargs)
    report.graph_breaks = list((Counter(counters["graph_break"]) - before).elements())
    return report
