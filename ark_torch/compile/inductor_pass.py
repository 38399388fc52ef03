"""products.py, embeddings.py and experts.py as an Inductor pass over graphs that it compiles whole: training graphs,
forward and backward, those with symbolic sizes, and those with nothing left for a loop kernel. Those of training that
change both passes at once come before, as a pass over joint graphs."""

from __future__ import annotations

import uuid
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from ark_torch.compile import (
    choices,
    combining,
    embeddings,
    embeddings_training,
    expert_rows,
    experts,
    experts_training,
    graph_edits,
    networks,
    products,
    trials,
)
from ark_torch.compile.report import GraphReport, log


def fuse(graph: Graph, device: str = "cuda") -> list[str]:
    # experts.py would look for counts of rows in the split sizes of pooled embeddings.
    return [one for pass_ in (embeddings, experts, products) for one in pass_.fuse(graph, device)]


def fuse_joint(graph: Graph, device: str = "cuda") -> list[str]:
    """Of a training graph before it is split, where the backward pass must follow the forward pass."""
    if not any(node.op == "placeholder" and "tangents" in str(node.target) for node in graph.nodes):
        return []
    return [one for pass_ in (embeddings_training, experts_training) for one in pass_.fuse(graph, device)]


def foretold(graph: Graph, target: str) -> list[str]:
    """What would be fused on a GPU in a graph of CPU tensors."""
    from ark_torch.compile import inductor_fallback

    owner: Any = graph.owning_module
    return [f"on {target}: {line}" for line in fuse(inductor_fallback.copy_of(owner).graph, "cpu")]


class FuseCollectives(CustomGraphPass):  # type: ignore[misc]
    """`report`: also told what became of collectives."""

    def __init__(self, report: GraphReport | None = None) -> None:
        self._report = report

    def __call__(self, graph: Graph) -> None:
        if self._report is not None and self._report.target:
            self._report.products += foretold(graph, self._report.target)
        lines = fuse(graph)
        for line in lines:
            log.info("Inductor's graph: %s", line)
        if self._report is not None:
            # A graph that goes to Inductor whole was looked at before.
            self._report.products += [line for line in lines if line not in self._report.products]

    def uuid(self) -> Any:
        if self._report is not None:
            return uuid.uuid4().bytes  # a graph of Inductor's cache would tell nothing
        return _hash()


class FuseJoint(CustomGraphPass):  # type: ignore[misc]
    def __call__(self, graph: Graph) -> None:
        for line in fuse_joint(graph):
            log.info("Inductor's joint graph: %s", line)

    def uuid(self) -> Any:
        return _hash()


def _hash() -> Any:
    modules = (choices, combining, embeddings, embeddings_training, expert_rows, experts, experts_training)
    others = (graph_edits, networks, products, trials)
    return get_hash_for_files((__file__, *(str(one.__file__) for one in (*modules, *others))))
