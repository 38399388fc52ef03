"""Whole models: one region if everything is supported, the same numbers as eager, caches updated in place."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import reference
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.timeout(200)


def decode(model: Any, eager: models.Llama, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, eager.config.vocab, (1, 1))
    pos = torch.tensor([position])
    return model(ids, pos), eager(ids, pos)


def llama(dtype: torch.dtype = torch.float32, **config: int) -> tuple[models.Llama, models.Llama]:
    model = models.Llama(models.Config(**config), 1, dtype).eval()
    return model, copy.deepcopy(model)


@pytest.mark.by_day("cpp-dtype0-1e-05")
@pytest.mark.quick
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_decode_at_every_position(plan: str, compiled: Any, dtype: torch.dtype, close: float) -> None:
    """One compilation serves all positions. Each step writes only its own position of the caches."""
    model, eager = llama(dtype)
    call, report = compiled(model, fallback=False)
    pointers = [cache.data_ptr() for cache in model.caches()]
    for position in range(model.config.max_len):
        before = [cache.clone() for cache in model.caches()]
        got, wanted = decode(call, eager, position)
        assert (got - wanted).abs().max() < close
        for cache, old, right in zip(model.caches(), before, eager.caches(), strict=True):
            assert (cache - right).abs().max() < close
            changed = (cache != old).any(-1).any(1).flatten().nonzero().flatten().tolist()
            assert changed == [position]
    assert pointers == [cache.data_ptr() for cache in model.caches()]
    assert len(report.graphs) == 1 and len(report.regions) == 1
    assert report.graphs[0].in_place == 2 * model.config.layers


def test_fifty_greedy_tokens(compiled: Any) -> None:
    """A prompt, then each token from the previous one. No rounding could change eager's decisions."""
    model, eager = llama(max_len=64)
    call, report = compiled(model, fallback=False)
    lines: list[list[int]] = []
    for decode_with in (call, eager):
        ids, positions, line = torch.tensor([[3, 1, 4, 1, 5, 9, 2]]), torch.arange(7), []
        while len(line) < 50:
            logits = decode_with(ids, positions)
            first, second = logits.topk(2).values.flatten().tolist()
            assert first - second > 1e-3
            ids, positions = logits.argmax(-1, keepdim=True), positions[-1:] + 1
            line.append(int(ids))
        lines.append(line)
    assert lines[0] == lines[1] and len(set(lines[1])) > 10, lines
    assert len(report.graphs) == 2  # the prompt's, and that of all steps


@pytest.mark.quick
def test_decode_reads_and_writes_no_whole_cache(double: Any, compiled: Any) -> None:
    """Only scatter and attention access the caches."""
    model, eager = llama()
    call, _ = compiled(model)
    decode(call, eager, 0)
    graph = double.made[0].graph
    caches = {i for i, buffer in enumerate(graph.buffers) if buffer["mutated"]}
    assert len(caches) == 2 * model.config.layers
    ops = {
        node["op"]
        for node in graph.nodes
        for value in (*node["inputs"], *node["outputs"])
        if graph.values[value]["buffer"] in caches
    }
    assert ops == {"scatter", "attention"}
    # The mask reaches attention as a comparison, not as the numbers that PyTorch makes of it.
    masks = [graph.values[node["inputs"][3]] for node in graph.nodes if node["op"] == "attention"]
    assert [mask["dtype"] for mask in masks] == [torch.bool] * model.config.layers
    # index_copy refuses negative indices, so nothing corrects them.
    assert "where" not in graph.ops()
    weights = sum(buffer["parameter"] for buffer in graph.buffers)
    assert weights == len(list(model.parameters())) + 3  # and cos, sin, positions


def test_prefill_then_decode(plan: str, compiled: Any) -> None:
    model, eager = llama()
    call, report = compiled(model, dynamic=False)
    ids, pos = torch.randint(0, 100, (1, 7)), torch.arange(7)
    torch.testing.assert_close(call(ids, pos), eager(ids, pos), rtol=1e-4, atol=1e-5)
    for position in range(7, 12):
        got, wanted = decode(call, eager, position)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert len(report.graphs) == 2 and len(report.regions) == 2


@pytest.mark.nightly
def test_weights_that_change_after_compiling(plan: str, compiled: Any) -> None:
    """param.data swapped, load_state_dict, .to(): correct numbers or a new kernel, never the old weights."""
    model, eager = llama()
    call, report = compiled(model)

    def agree(position: int) -> None:
        got, wanted = decode(call, eager, position)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

    agree(0)
    for m in (model, eager):
        torch.manual_seed(7)
        for parameter in m.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
    agree(1)
    state = {name: torch.randn_like(value) * 0.1 for name, value in model.named_parameters()}
    for m in (model, eager):
        m.load_state_dict(state, strict=False)
    agree(2)
    assert len(report.graphs) == 1
    for m in (model, eager):  # the same numbers, transposed in memory
        m.head.weight.data = m.head.weight.data.t().contiguous().t()
    agree(3)
    for m in (model, eager):
        m.to(torch.bfloat16)
    got, wanted = decode(call, eager, 4)
    assert got.dtype == torch.bfloat16 and (got - wanted).abs().max() < 5e-2


@pytest.mark.quick
def test_encoder(plan: str, compiled: Any) -> None:
    model = models.Encoder().eval()
    call, report = compiled(model, fallback=False)
    ids, present = torch.randint(0, 50, (3, 16)), torch.rand(3, 16) < 0.7
    for got, wanted in zip(call(ids, present), model(ids, present), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert len(report.regions) == 1


def test_decoder(plan: str, compiled: Any) -> None:
    model = models.Decoder().eval()
    call, report = compiled(model, fallback=False)
    ids = torch.randint(0, 50, (2, 16))
    torch.testing.assert_close(call(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert len(report.regions) == 1


@pytest.mark.nightly
def test_transposed_convolutions_fall_back(plan: str, compiled: Any) -> None:
    """The convolutions run on Inductor, the operators between them on ark."""
    model = models.ResidualBlock(transposed=True).eval()
    call, report = compiled(model)
    x = torch.randn(2, 8, 9, 9)
    torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["inductor", "ark", "inductor", "ark"]
    assert {f.operator for f in report.fallbacks} == {"aten.convolution.default"}
    assert all(f.file.endswith("models.py") and f.line > 0 and "c1" in f.module + "c1" for f in report.fallbacks)


@pytest.mark.nightly
def test_training_is_inductors(compiled: Any, caplog: pytest.LogCaptureFixture) -> None:
    """20 training steps give Inductor's numbers. The reason is in the report and logged once."""
    with torch.enable_grad():
        results = []
        for backend in ("inductor", "ark"):
            torch._dynamo.reset()
            torch.manual_seed(3)
            model = models.Decoder()
            if backend == "ark":
                call, report = compiled(model)
            else:
                call = torch.compile(model, backend="inductor")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(20):
                ids = torch.randint(0, 50, (2, 16))
                loss = F.cross_entropy(call(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            results.append((loss.item(), [p.detach().clone() for p in model.parameters()]))
    # Not bit for bit: Inductor's threads add the gradient of the embedding in any order.
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert all("gradients on" in graph.whole for graph in report.graphs)
    said = [record.getMessage() for record in caplog.records if record.name == "ark_torch.compile"]
    assert sum("torch.no_grad()" in text and "Said once" in text for text in said) == 1


def test_grad_on_without_anything_to_train(double: Any, compiled: Any) -> None:
    """If no input requires a gradient, it is inference in any grad mode."""
    model, _ = llama()
    model.requires_grad_(False)
    call, report = compiled(model)
    with torch.enable_grad():
        call(torch.tensor([[1]]), torch.tensor([0]))
    assert len(report.regions) == 1


@pytest.mark.quick
def test_inference_mode(double: Any, compiled: Any) -> None:
    model, eager = llama()
    call, report = compiled(model, fallback=False)
    with torch.inference_mode():
        for position in range(3):
            got, wanted = decode(call, eager, position)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert len(report.graphs) == 1


@pytest.mark.nightly
def test_dynamic_shapes_fall_back_once(plan: str, compiled: Any) -> None:
    """The second length makes sizes symbolic. Inductor's graph then serves all lengths without recompiling."""
    model = models.Decoder().eval()
    call, report = compiled(model)
    for length in (5, 6, 7, 8, 9, 10, 11):
        ids = torch.randint(0, 50, (1, length))
        torch.testing.assert_close(call(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert len(report.graphs) == 2
    assert report.graphs[0].pieces and "symbolic" in report.graphs[1].whole
    assert reference.Region.made == [] or len(reference.Region.made) == 1
