"""`python compile_real_sizes.py CASE [--device cpu]`: runs a model at its real size as one loop kernel.

A problem is an AssertionError. Otherwise the last line is a JSON object of figures. With --device cpu everything is
small and runs there, to test this script.

Errors are against the model in float64 on the same device, over all results of a run, and may be 1.5 times
torch.compile's. GPT-2 XL, where Inductor is slow, and the 1,000 tokens are compared with eager instead.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "compile"))

import exactness
import real_sizes
import torch
from compile_support import compiled
from torch import Tensor

from ark_torch.compile.report import Report

Figures = dict[str, Any]
RUNS = 200  # they must give the same bits


def one_kernel(report: Report) -> Figures:
    (graph,) = report.graphs
    (piece,) = graph.pieces
    assert piece.runs_on == "ark", report
    return dict(piece.region.resources)


def held(case: real_sizes.Case, by_inductor: bool = True) -> Figures:
    """Compares a model with float64 and its rival, and the bits of many runs."""
    dtype = next(case.model.parameters()).dtype
    rival = torch.compile(copy.deepcopy(case.model), dynamic=False) if by_inductor else copy.deepcopy(case.model)
    wanted = exactness.exact(case.model, case.run)
    begin = time.perf_counter()
    call, report = compiled(case.model, fallback=False)
    got = case.run(call, dtype)
    seconds = time.perf_counter() - begin
    ark, other = exactness.error(got, wanted), exactness.error(case.run(rival, dtype), wanted)
    assert ark <= exactness.FACTOR * other, f"error {ark:.3g}, the rival's {other:.3g}"
    assert other < (1e-4 if dtype == torch.float32 else 0.1)  # otherwise the reference is wrong
    assert all(torch.equal(a, b) for a, b in zip(case.run(call, dtype), got, strict=True))
    first = listed(call(*case.inputs))
    for _ in range(RUNS):
        assert all(torch.equal(a, b) for a, b in zip(listed(call(*case.inputs)), first, strict=True))
    by = "inductor" if by_inductor else "eager"
    return {"error": ark, "rival": other, "by": by, "s": seconds} | one_kernel(report)


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


# Text.


def continued(call: Any, steps: int, device: torch.device, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns tokens and logits of all steps. Each token comes from the previous step, or from `given`."""
    real_sizes.fill(call, 0)
    ids, pos = torch.ones(1, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    tokens, logits = [], []
    for step in range(steps):
        logits.append(call(ids, pos))
        tokens.append(logits[-1].argmax(-1, keepdim=True))
        ids, pos = tokens[-1] if given is None else given[step : step + 1], pos + 1
    return torch.cat(tokens), torch.cat(logits)


def exactly(model: Any, tokens: Tensor, device: torch.device) -> Tensor:
    """Returns the float64 model's logits along a text."""

    def run(call: Any, _: torch.dtype) -> list[Tensor]:
        return [continued(call, len(tokens), device, tokens)[1]]

    return exactness.exact(model, run)[0]


def text_in_float32(device: torch.device, small: bool) -> Figures:
    """200 greedy tokens must equal eager's."""
    case = real_sizes.llama(torch.float32, device, small, layers=4)
    eager, _ = continued(copy.deepcopy(case.model), 200, device)
    call, report = compiled(case.model, fallback=False)
    tokens, _ = continued(call, 200, device)
    assert torch.equal(tokens, eager), f"from token {int((tokens != eager).flatten().nonzero()[0])} on"
    assert tokens.unique().numel() > 3
    return {"distinct tokens": tokens.unique().numel()} | one_kernel(report)


def text_of_a_thousand(device: torch.device, small: bool) -> Figures:
    """1,000 greedy tokens by one kernel, with logit errors at every position; the first 200 must equal eager's.

    Ties may differ: two logits that differ by less than four times eager's error there.
    """
    steps, compared = (40, 20) if small else (1000, 200)
    model = real_sizes.llama(torch.bfloat16, device, small).model
    eager = copy.deepcopy(model)
    call, report = compiled(model, fallback=False)
    tokens, logits = continued(call, steps, device)
    resources = one_kernel(report)
    exact = exactly(eager, tokens, device)
    _, theirs = continued(eager, steps, device, tokens)
    errors = [(found.double() - exact).norm(dim=1) for found in (logits, theirs)]
    ark, rival = (float(e.norm() / exact.norm()) for e in errors)
    assert ark <= exactness.FACTOR * rival, f"error {ark:.3g}, eager's {rival:.3g}"
    worst = [float((e / exact.norm(dim=1)).max()) for e in errors]
    assert worst[0] <= exactness.FACTOR * worst[1], f"error at the worst position {worst}"
    own, _ = continued(eager, compared, device)
    tie: list[float] = []
    differ = (own != tokens[:compared]).flatten().nonzero().flatten().tolist()
    if differ:
        at = differ[0]
        off = float(errors[1][at]) / exact.shape[1] ** 0.5
        apart = abs(float(exact[at, tokens[at]] - exact[at, own[at]]))
        assert apart <= 4 * off, f"token {at} differs, and its logits by {apart}; eager's are off by {off}"
        tie = [at, apart, off]
    assert tokens.unique().numel() > 3
    return {
        "error": ark,
        "rival": rival,
        "by": "eager",
        "worst position": worst,
        "first difference, logits apart, and off": tie,
        "distinct tokens": tokens.unique().numel(),
    } | resources


CASES: dict[str, Callable[[torch.device, bool], Figures]] = {
    "llama-1b": lambda device, small: held(real_sizes.llama(torch.bfloat16, device, small)),
    "llama-float32": lambda device, small: held(real_sizes.llama(torch.float32, device, small, layers=4)),
    "bert-large": lambda device, small: held(real_sizes.bert(torch.float16, device, small)),
    "bert-float32": lambda device, small: held(real_sizes.bert(torch.float32, device, small)),
    "gpt2-xl": lambda device, small: held(real_sizes.gpt2(torch.bfloat16, device, small), by_inductor=False),
    "experts": lambda device, small: held(real_sizes.experts(torch.bfloat16, device, small)),
    "dlrm": lambda device, small: held(real_sizes.dlrm(torch.float32, device, small)),
    "text-float32": text_in_float32,
    "text": text_of_a_thousand,
}


def main() -> int:
    device = torch.device(sys.argv[3] if sys.argv[2:3] == ["--device"] else "cuda")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        figures = CASES[sys.argv[1]](device, device.type == "cpu")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
