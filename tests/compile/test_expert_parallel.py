"""All-to-all, experts, all-to-all become one operator: which forms are found, which are not, and unchanged bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import expert_forms
from support.expert_forms import DIM, EXPERTS, FORMS, LEFT, WORLD, given
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from support.told import Lines
from torch import Tensor

from ark_torch.ops import moe_layer

pytestmark = [ark_only]


def fused(told: list[str]) -> Any:
    """Returns a backend of torch.compile that only runs the pass on the CPU."""
    from torch._dynamo.backends.common import aot_autograd

    from ark_torch.compile import decompositions, experts

    def compile(graph_module: Any, _: Any) -> Any:
        told.extend(experts.fuse(graph_module.graph, "cpu"))
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module.forward

    return aot_autograd(fw_compiler=compile, decompositions=decompositions.table())


def _run(rank: Rank, names: list[str], tokens: list[int]) -> dict[str, list[str]]:
    rank.init()
    torch.set_num_threads(1)
    expert_forms.make_groups()
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    said = {}
    for name in names:
        form, _, more = (FORMS | LEFT)[name]
        arguments = given(rank.rank, tokens[rank.rank], **more)
        told: list[str] = []
        torch._dynamo.reset()
        with torch.no_grad():
            got = torch.compile(form, backend=fused(told), dynamic=False, fullgraph=True)(*arguments)
            wanted = form(*arguments)
        for one, other in zip(*((y if isinstance(y, tuple) else (y,)) for y in (got, wanted)), strict=True):
            assert torch.equal(one, other), (name, told, one, other)
        said[name] = told
    return said


@pytest.mark.by_day("megatron", "slots_sorted")
@pytest.mark.parametrize("name", FORMS)
def test_what_is_found(name: str) -> None:
    for said in run_ranks(_run, 2, [name], [6, 6]):
        assert len(said[name]) == 1 and said[name][0].endswith(f"ark.{FORMS[name][1]}.default"), said[name]


@pytest.mark.by_day("experts_mixed_up")
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    for said in run_ranks(_run, 2, [name], [6, 6]):
        assert len(said[name]) == 1 and LEFT[name][1] in said[name][0], said[name]


def _symbolic(rank: Rank, name: str) -> list[str]:
    """One graph for several numbers of tokens, none of which it names."""
    rank.init()
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    form, _, more = (FORMS | LEFT)[name]
    told: list[str] = []
    call = torch.compile(form, backend=fused(told), fullgraph=True)
    for tokens in (6, 9, 4):
        arguments = given(rank.rank, tokens, **more)
        torch._dynamo.mark_dynamic(arguments[0], 0)
        with torch.no_grad():
            torch.testing.assert_close(call(*arguments), form(*arguments))
    return told


@pytest.mark.by_day("slots_sorted", "slots_by_one_hot")
@pytest.mark.parametrize("name", [name for name in FORMS if name != "torchtitan_scores_before"])
def test_symbolic_sizes(name: str) -> None:
    for told in run_ranks(_symbolic, 2, name):
        assert len(told) == 1 and told[0].endswith(f"ark.{FORMS[name][1]}.default"), told


def _too_few_slots(rank: Rank) -> list[str]:
    rank.init()
    torch.set_num_threads(1)
    told: list[str] = []
    form, _, more = LEFT["slots_that_may_not_do"]
    x, *rest = given(rank.rank, 2, **more)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        got = torch.compile(form, backend=fused(told), fullgraph=True)(x, *rest)
        torch.testing.assert_close(got, form(x, *rest))
    return told


def test_slots_that_symbolic_sizes_may_exceed() -> None:
    for told in run_ranks(_too_few_slots, 2):
        assert len(told) == 1 and "an expert has 3 slots for each rank" in told[0], told


def _unlike_sizes(rank: Rank) -> list[str]:
    """Slots are as many on all ranks. Ranks that differ all raise, and the next call is well."""
    rank.init()
    torch.set_num_threads(1)
    form, _, more = FORMS["slots_sorted"]
    told: list[str] = []
    call = torch.compile(form, backend=fused(told), fullgraph=True)
    errors = []
    for tokens in (6, 5 + rank.rank, 7):
        arguments = given(rank.rank, tokens, **more)
        torch._dynamo.mark_dynamic(arguments[0], 0)
        with torch.no_grad():
            try:
                torch.testing.assert_close(call(*arguments), form(*arguments))
            except dist.DistBackendError as error:
                errors.append(str(error))
    assert len(told) == 1, told
    return errors


def test_ranks_with_unlike_symbolic_sizes() -> None:
    for errors in run_ranks(_unlike_sizes, 2):
        assert len(errors) == 1 and "moe_layer" in errors[0] and "max_tokens" in errors[0], errors


def _bad_input(rank: Rank) -> None:
    """The operator in a graph of symbolic sizes refuses what it refuses in eager calls, on all ranks."""
    rank.init()
    torch.set_num_threads(1)
    call = torch.compile(moe_layer, fullgraph=True, dynamic=True, backend="aot_eager")
    w1, w2 = torch.ones(2, 8, 8), torch.ones(2, 8, 8)

    def layer(tokens: int, experts: int = 4, **more: Any) -> Tensor:
        ids = torch.arange(2 * tokens).view(tokens, 2) % experts
        return call(torch.ones(tokens, 8), ids, torch.ones(tokens, 2), w1, w2, **more)

    assert layer(3).shape == (3, 8)
    bad = rank.rank == 0
    for error, text, wrong in (
        (IndexError, r"topk_ids\[2\]\[0\] is 4, and there are 4 experts", {"experts": 5}),
        (ValueError, "x has 5 rows, and max_tokens is 4", {"max_tokens": 4}),
        (ValueError, r"get \d+ rows, and max_rows is 1", {"max_rows": 1}),
    ):
        everywhere = "max_rows" in wrong  # which all ranks notice
        alone = not everywhere and not bad
        with pytest.raises(dist.DistBackendError if alone else error, match="rank 0" if alone else text):
            layer(5, **(wrong if bad or everywhere else {key: 5 for key in wrong if key != "experts"}))
        assert layer(4).shape == (4, 8)


def test_bad_input_with_symbolic_sizes() -> None:
    run_ranks(_bad_input, 2)


def _two_layers(*arguments: Any) -> Any:
    x, *weights = arguments
    x = expert_forms.megatron(x, *weights).sign()
    return expert_forms.ids_are_sent(x, weights[0], *(w for w in weights[1].chunk(2, 1)), weights[2])


def _two(rank: Rank) -> list[str]:
    rank.init()
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    arguments = given(rank.rank, 6, torch.float32, "halves")
    told: list[str] = []
    with torch.no_grad():
        got = torch.compile(_two_layers, backend=fused(told), dynamic=False, fullgraph=True)(*arguments)
        assert torch.equal(got, _two_layers(*arguments)), told
    return told


@pytest.mark.nightly
def test_two_layers() -> None:
    for told in run_ranks(_two, 2):
        assert len(told) == 2 and all(one.endswith("ark.moe_feed_forward.default") for one in told), told


def _on_cpus() -> None:
    """Makes the passes of backend="ark" accept CPU tensors."""
    from ark_torch.compile import experts

    plain = experts.fuse
    experts.fuse = lambda graph, *_: plain(graph, "cpu")  # type: ignore[assignment]


def _explained(rank: Rank) -> tuple[str, str, bool]:
    import ark_torch

    rank.init()
    torch.set_num_threads(1)
    _on_cpus()
    torch._dynamo.config.capture_scalar_outputs = True

    def model(*arguments: Any) -> Any:
        return expert_forms.megatron(*arguments) * 2 + 1

    arguments = given(rank.rank, 6, torch.float32, "halves")
    bare = given(rank.rank, 6, torch.float32, None, transposed=True)
    with torch.no_grad():
        found = ark_torch.explain(model, *arguments)
        left = ark_torch.explain(lambda *a: expert_forms.slots_with_biases(*a) * 2 + 1, *bare)
        call = torch.compile(model, backend="ark", options={"choose": "ark"}, dynamic=False)
        same = torch.equal(call(*arguments), model(*arguments))
    return str(found), str(left), same


@pytest.mark.nightly
def test_explained_and_run_by_ark() -> None:
    """A graph with sizes read from tensors becomes static when it is fused, and the rest becomes a region."""
    for found, left, same in run_ranks(_explained, 2):
        assert "ark.moe_feed_forward.default" in found and "symbolic" not in found, found
        assert "not fused with experts: its experts are no feed-forward networks" in left, left
        assert same


def _slots_that_train(x: Any, gate: Any, w1: Any, w3: Any, w2: Any) -> Any:
    """The router's weights train, too."""
    import torch.distributed._functional_collectives as funcol

    def moved(rows: Any) -> Any:
        return funcol.all_to_all_single_autograd(rows, [1] * WORLD, [1] * WORLD, "0")

    local = EXPERTS // WORLD
    weights, ids = torch.topk((x @ gate).float(), 2, dim=-1)
    chosen, order = ids.flatten().sort(stable=True)
    counts = F.one_hot(ids.flatten(), EXPERTS).sum(0)
    place = torch.arange(len(chosen)) - (counts.cumsum(0) - counts)[chosen]
    buffer = x.new_zeros(EXPERTS, len(chosen), DIM)
    buffer[chosen, place] = x[order // 2]
    got = moved(buffer.view(WORLD, -1, DIM)).view(WORLD, local, -1, DIM).transpose(0, 1).reshape(local, -1, DIM)
    y = torch.bmm(F.relu(torch.bmm(got, w1)) * torch.bmm(got, w3), w2)
    back = moved(y.view(local, WORLD, -1, DIM).transpose(0, 1).contiguous())
    rows = back.view(EXPERTS, -1, DIM)[chosen, place] * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add_(0, order // 2, rows)


def _silent(x: Any, gate: Any, w1: Any, w3: Any, w2: Any) -> Any:
    """Same as above, with weights computed from parameters: not fused."""
    return _slots_that_train(x, gate, w1 * 2, w3, w2)


def _trains(rank: Rank) -> dict[str, list[str]]:
    from torch._inductor import config

    from ark_torch.compile import experts_training

    rank.init()
    torch.set_num_threads(1)
    plain = experts_training.fuse
    experts_training.fuse = lambda graph, _: plain(graph, "cpu")  # type: ignore[assignment]
    told = Lines("ark_torch.compile")
    said: dict[str, list[str]] = {}
    for form in (_slots_that_train, _silent):
        told.lines.clear()
        arguments = [one.float().requires_grad_() for one in given(rank.rank, 6, torch.float32, transposed=True)]
        (form(*arguments) ** 2).sum().backward()
        wanted = [one.grad for one in arguments]
        for one in arguments:
            one.grad = None
        with config.patch(compile_threads=1):
            (torch.compile(form, backend="ark", dynamic=False)(*arguments) ** 2).sum().backward()
        for one, other in zip(arguments, wanted, strict=True):
            torch.testing.assert_close(one.grad, other, rtol=1e-5, atol=1e-4)
        said[form.__name__] = [one for one in told.lines if "joint graph" in one]
    return said


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_graphs_that_train() -> None:
    for said in run_ranks(_trains, 2, timeout=300):
        assert len(said["_slots_that_train"]) == 1 and "ark.moe_experts.default" in said["_slots_that_train"][0], said
        assert len(said["_silent"]) == 1 and "its weights are no parameters" in said["_silent"][0], said


def _unlike(rank: Rank) -> list[str]:
    """Other numbers of tokens on each rank and in each call: static graphs meet symbolic ones, which Inductor runs."""
    rank.init()
    torch.set_num_threads(1)
    _on_cpus()
    torch._dynamo.config.capture_scalar_outputs = True
    told = Lines("ark_torch.compile")
    call = torch.compile(expert_forms.megatron, backend="ark")
    for tokens in ((6, 6), (6, 9), (5, 9), (0, 3)):
        arguments = given(rank.rank, tokens[rank.rank], torch.float32, "halves")
        with torch.no_grad():
            assert torch.equal(call(*arguments), expert_forms.megatron(*arguments)), tokens
    return told.lines


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_ranks_with_other_numbers_of_tokens() -> None:
    first, second = run_ranks(_unlike, 2, timeout=300)
    assert any("Inductor's graph: all_to_all_single_1: ark.moe_feed_forward.default" in one for one in second), second
    assert not any("not fused" in one for one in (*first, *second)), (first, second)
