"""ark_torch.explain: what backend="ark" does with a model, operator by operator."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ark_torch import _suggest
from ark_torch.compile import options as table
from ark_torch.compile.report import Report

IN_TRAINING_MODE = (
    "the model is in training mode (model.training), and is explained as after model.eval(): explain(training=True) "
    "explains its training"
)
WRITTEN = "code outside of compiled graphs wrote {} parameters, which stay written"


def explain(
    model: Callable[..., Any],
    /,
    *args: Any,
    ark_options: Mapping[str, Any] | None = None,
    target: str = "",
    training: bool = False,
    **kwargs: Any,
) -> Report:
    """Compiles `model` for these arguments and reports what runs where, and why.

    Explains inference, as under torch.no_grad() and after model.eval(), whatever the caller's mode; training=True
    explains a call with gradients instead. The model is called once, and everything is restored: buffers, parameters,
    attributes, the arguments' contents, random number generators, and what torch._dynamo has compiled. If the model has
    collectives, all ranks must call explain. A compiled model is explained as it was before torch.compile.

    ark_options: as in torch.compile(backend="ark", options=...); InvalidOption names the known ones.
    target:      every region is also planned for this target ("sm_90a"), present or not. ValueError names the known
    ones.
    """
    import torch
    from torch._dynamo.utils import counters

    from ark_torch.compile import forward_alone
    from ark_torch.compile.backend import compile_graph
    from ark_torch.compile.unchanged import Unchanged, compiling_apart

    options = dataclasses.replace(table.parse(None, ark_options), wait=True)
    if target:
        from ark_torch import _C

        known = _C.plan.targets()
        if target not in known:
            meant = _suggest.did_you_mean(target, known)
            raise ValueError(f"target={target!r} is not known{meant}; known are {', '.join(known)}")
    plain = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))
    report = Report(target=target)
    unchanged = Unchanged([plain, args, kwargs])

    def backend(graph_module: Any, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        alone = None
        if options.choose != "inductor" and forward_alone.trains(example_inputs):
            alone = forward_alone.measuring(graph_module, example_inputs, options)  # first: Inductor changes the graph
        compiled = compile_graph(graph_module, example_inputs, options, report)
        graph = report.graphs[-1]

        def run(*inputs: Any) -> Any:
            unchanged.save_written(graph_module, inputs)
            if alone is not None and graph.whole and not graph.forward:
                graph.forward = alone([x.clone() if isinstance(x, torch.Tensor) else x for x in inputs])
            return compiled(*inputs)

        return run

    with compiling_apart(backend) as compile_apart, unchanged, torch.set_grad_enabled(training):
        if not training and any(module.training for module in unchanged.modules):
            report.notes.append(IN_TRAINING_MODE)
        for module in unchanged.modules:
            module.training = module.training and training
            module._compiled_call_impl = None  # set by module.compile(): explain the model as it was before
        before = Counter(counters["graph_break"])
        compile_apart(plain)(*args, **kwargs)
        report.graph_breaks = list((Counter(counters["graph_break"]) - before).elements())
        if written := unchanged.changed_parameters():
            report.notes.append(WRITTEN.format(written))
    return report
