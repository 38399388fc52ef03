"""products.py, embeddings.py and experts.py as an Inductor pass over graphs that it compiles whole: training graphs,
forward and backward, and those with nothing left for a loop kernel."""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from ark_torch.compile import choices, combining, embeddings, expert_rows, experts, networks, products
from ark_torch.compile.report import log


class FuseCollectives(CustomGraphPass):  # type: ignore[misc]
    def __call__(self, graph: Graph) -> None:
        for line in (*experts.fuse(graph), *products.fuse(graph), *embeddings.fuse(graph)):
            log.info("Inductor's graph: %s", line)

    def uuid(self) -> Any:
        modules = (choices, combining, embeddings, expert_rows, experts, networks, products)
        return get_hash_for_files((__file__, *(str(one.__file__) for one in modules)))
