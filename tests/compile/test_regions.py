"""How graphs are cut: checks random graphs of two kinds of operators, with mutations, against invariants."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, fx

from ark_torch.compile import analysis, in_place, regions

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def traced(build: object, inputs: int, size: int = 4) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(build, tracing_mode="fake")(*(torch.zeros(size, size) for _ in range(inputs)))  # type: ignore[arg-type]


def random_graph(seed: int) -> fx.GraphModule:
    """Pointwise operators, cumsum (not on ark), views, and writes into inputs and views of inputs."""
    chance = random.Random(seed)

    def build(*inputs: Tensor) -> list[Tensor]:
        values = list(inputs)
        for _ in range(chance.randint(5, 30)):
            a, b = chance.choice(values), chance.choice(values)
            kind = chance.random()
            if kind < 0.45:
                values.append(a * 2 + b)
            elif kind < 0.65:
                values.append(torch.cumsum(a, 0))
            elif kind < 0.8:
                values.append(a.t())
            else:
                target = chance.choice(inputs)
                (target if kind < 0.9 else target.t()).copy_(b * 3)
        return values[-3:]

    return traced(build, 3)


def supported(node: fx.Node) -> bool:
    return node.target is not aten.cumsum.default


@pytest.mark.parametrize("seed", range(60))
def test_cuts_of_random_graphs(seed: int) -> None:
    graph = random_graph(seed)
    needed = analysis.dependencies(graph)
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    pieces, given = regions.cut(needed, supported, 2)
    where = {node: number for number, piece in enumerate(pieces) for node in piece.nodes}
    assert where.keys() == needed.keys() and sum(len(piece.nodes) for piece in pieces) == len(needed)
    for piece in pieces:
        assert [position[n] for n in piece.nodes] == sorted(position[n] for n in piece.nodes)
        assert not piece.ark or (len(piece.nodes) >= 2 and all(map(supported, piece.nodes)))
    for node, before in needed.items():
        assert all(where[b] <= where[node] for b in before)
    # Independent of `dependencies`: runs piece by piece, in order, and compares with the program's order.
    inputs = [torch.randn(4, 4) for _ in range(3)]
    order = [node for piece in pieces for node in piece.nodes]
    assert all(torch.equal(a, b) for a, b in zip(run(graph, None, inputs), run(graph, order, inputs), strict=True))
    assert {node for node in given} <= {node for piece in pieces if not piece.ark for node in piece.nodes}


def run(graph: fx.GraphModule, order: list[fx.Node] | None, inputs: list[Tensor]) -> list[Tensor]:
    """Returns results and inputs after a run in `order`. Views are created when needed."""
    given = [t.clone() for t in inputs]
    values: dict[fx.Node, Tensor] = {}
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    values.update(zip(placeholders, given, strict=True))

    def value(node: fx.Node) -> Tensor:
        if node not in values:
            assert analysis.is_free(node) or order is None, f"{node} is read before it is computed"
            compute(node)
        return values[node]

    def compute(node: fx.Node) -> None:
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), value)
        values[node] = node.target(*arguments, **keywords)  # type: ignore[operator]

    computing = [n for n in graph.graph.nodes if not analysis.is_free(n)]
    for node in computing if order is None else order:
        compute(node)
    output = next(n for n in graph.graph.nodes if n.op == "output")
    return [value(n).clone() for n in output.args[0]] + given


def test_pieces_are_few() -> None:
    """Two chains that meet: the operators of one kind form one piece on each side of the other kind's."""

    def build(a: Tensor, b: Tensor) -> list[Tensor]:
        c = [(a * 2).sin(), (b * 3).cos()]
        d = [torch.cumsum(x, 0) for x in c]
        e = (a + 5).exp()  # needed only after the cumsums
        return [(d[0] + d[1]) * e + c[0]]

    needed = analysis.dependencies(traced(build, 2))
    pieces, given = regions.cut(needed, supported, 2)
    assert [(piece.ark, len(piece.nodes)) for piece in pieces] == [(True, 6), (False, 2), (True, 3)]
    assert not given


def test_small_pieces_are_given_away() -> None:
    needed = analysis.dependencies(traced(lambda a: [torch.cumsum(torch.cumsum(a, 0) * 2, 0)], 1))
    pieces, given = regions.cut(needed, supported, 2)
    assert [(piece.ark, len(piece.nodes)) for piece in pieces] == [(False, 3)] and len(given) == 1


def test_view_operators() -> None:
    assert all(
        analysis.is_view_operator(op)
        for op in (aten.view.default, aten.permute.default, aten.split.Tensor, aten.expand.default, aten.alias.default)
    )
    assert not any(
        analysis.is_view_operator(op)
        for op in (aten.add.Tensor, aten.add_.Tensor, aten.clone.default, aten.copy_.default)
    )
    assert analysis.written_arguments(aten.index_put_.default) == (0,)


def test_update_is_restored_only_where_nobody_sees() -> None:
    def unseen(cache: Tensor, x: Tensor) -> list[Tensor]:
        new = aten.slice_scatter(cache, x[:1], 0, 1, 2)
        out = new * 2
        cache.copy_(new)
        return [out]

    def seen(cache: Tensor, x: Tensor) -> list[Tensor]:
        new = aten.slice_scatter(cache, x[:1], 0, 1, 2)
        out = cache.t() * 2 + new
        cache.copy_(new)
        return [out]

    def from_itself(cache: Tensor, x: Tensor) -> list[Tensor]:
        new = aten.slice_scatter(cache, cache[:3], 0, 1, 4)
        cache.copy_(new)
        return [new * 2]

    for build, restored in ((unseen, 1), (seen, 0), (from_itself, 0)):
        graph = traced(build, 2)
        inputs = [torch.randn(4, 4), torch.randn(4, 4)]
        wanted = run(graph, None, inputs)
        assert in_place.restore(graph) == restored
        assert all(torch.equal(a, b) for a, b in zip(run(graph, None, inputs), wanted, strict=True))
