"""`python compile_operators.py DTYPE PART OF`: compiles a part of the operators' cases, each as its own loop kernel.

Results (of tests/compile/accuracy_cases.py) are compared with float64 and with eager PyTorch on the same GPU. Prints a
line per problem: FAIL (an exception), FAR (an error more than 1.5 times eager's and more than one additional rounding),
or NOT ARK. The exit status is their number.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "compile"))

import accuracy
import torch

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report

# These create tensors on the CPU, or have a lowering only for CPUs.
ELSEWHERE = ("arange", "iota", "lift_fresh_copy", "convolution")


def verdict(case: Any, given: list[torch.Tensor], right: list[torch.Tensor]) -> str:
    report = Report()
    parsed = options.parse(None, {"choose": "ark", "fallback": False, "minimum": 1})

    def run(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, parsed, report)

    def on_gpu(call: Any) -> list[torch.Tensor]:
        return [tensor.cpu() for tensor in accuracy.tensors(call(*[tensor.cuda() for tensor in given]))]

    def called(*arguments: torch.Tensor) -> Any:
        return case.call(*arguments)

    torch._dynamo.reset()
    got = on_gpu(torch.compile(called, backend=run, dynamic=False))
    eager = on_gpu(case.call)
    if not all(piece.runs_on == "ark" for graph in report.graphs for piece in graph.pieces):
        return "NOT ARK"
    found, other = accuracy.figures(case, got, right), accuracy.figures(case, eager, right)
    if accuracy.nearness(found, other) > 1:
        return f"FAR {found} eager {other}"
    return ""


def main() -> int:
    dtype, part, of = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.backends.cuda.matmul.allow_tf32 = False
    cases, given = accuracy.drawn(dtype)
    cases, given = cases[part::of], given[part::of]
    wrong = 0
    with torch.no_grad():
        wanted = accuracy.exact(cases, given)
        for case, one, right in zip(cases, given, wanted, strict=True):
            if str(case.operator).split(".")[1] in ELSEWHERE:
                continue
            try:
                said = verdict(case, one, right)
            except Exception as error:
                said = f"FAIL {type(error).__name__} {' | '.join(str(error).split(chr(10)))[:300]}"
            if said:
                wrong += 1
                print(f"{sys.argv[1]} {case.name}: {said}", flush=True)
    print(f"{len(cases)} cases, {wrong} wrong")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
