"""Hugging Face models in small configurations with random weights: Llama with a static cache, BERT, GPT-2.

They have their own forms: masks made of ranges and lookups, keys and values repeated for every head, rotary embeddings
computed by slices in the step, and a position that the cache counts itself.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import exactness
import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (make setup does): models of Hugging Face are not tested"
)

pytestmark = pytest.mark.timeout(300)

MAX_LEN, PROMPT, BLOCK = 128, 7, 64  # attention goes over its keys in blocks of BLOCK


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    sizes: dict[str, Any] = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=MAX_LEN,
    )
    config = transformers.LlamaConfig(**{**sizes, **changes})
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def cache_of(model: Any, dtype: torch.dtype = torch.float32, batch: int = 1, max_len: int = MAX_LEN) -> Any:
    """The cache's tensors exist from the start. Otherwise the first call would create them in its graph."""
    config = model.config
    cache = transformers.StaticCache(config=config, max_cache_len=max_len)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, dtype, "cpu")
    return cache


def tensors_of(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def prompt(batch: int = 1, length: int = PROMPT) -> Tensor:
    return torch.randint(0, 100, (batch, length), generator=torch.Generator().manual_seed(1))


def greedy(model: Any, cache: Any, tokens: int) -> tuple[list[int], Tensor]:
    """Returns the tokens, and the logits that each was taken from."""
    step, chosen, seen = prompt(), [], []
    for _ in range(tokens):
        logits = model(input_ids=step, past_key_values=cache).logits[:, -1]
        seen.append(logits)
        step = logits.argmax(-1, keepdim=True)
        chosen.append(int(step))
    return chosen, torch.cat(seen)


def test_llama_at_every_position(compiled: Any) -> None:
    """Gives eager's tokens until the cache is full, with one kernel for the prompt and one for all steps.

    The cache is written in place. Beyond the blocks in use it is not even read (it holds NaN there).
    """
    model = llama()
    wanted, logits = greedy(model, cache_of(model), MAX_LEN - PROMPT + 1)
    assert len(wanted) > 50
    call, report = compiled(model, dynamic=False, fallback=False)
    cache = cache_of(model)
    places = [tensor.data_ptr() for tensor in tensors_of(cache)]
    for tensor in tensors_of(cache):
        tensor[:, :, BLOCK:] = math.nan
    got, first = greedy(call, cache, BLOCK - PROMPT + 1)
    assert got == wanted[: len(got)] and len(got) > 50
    torch.testing.assert_close(first, logits[: len(first)], rtol=1e-4, atol=1e-5)
    assert all(bool(tensor[:, :, BLOCK:].isnan().all()) for tensor in tensors_of(cache))
    assert places == [tensor.data_ptr() for tensor in tensors_of(cache)]
    # The same kernels over the rest, from the beginning.
    cache = cache_of(model)
    got, second = greedy(call, cache, len(wanted))
    assert got == wanted and torch.equal(first, second[: len(first)])
    assert len(report.graphs) == 2 and len(report.regions) == 2, report
    assert [graph.in_place for graph in report.graphs] == [4, 4] and not report.fallbacks


@pytest.mark.quick
def test_llama_touches_no_whole_cache(double: Any, compiled: Any) -> None:
    """A step scatters into each cache and attends to it. Nothing copies it or repeats it for every head."""
    model = llama()
    call, _ = compiled(model, dynamic=False, fallback=False)
    call(input_ids=prompt(1, 1), past_key_values=cache_of(model))
    (region,) = double.made
    graph = region.graph
    whole = min(b["bytes"] for b in graph.buffers if b["mutated"] and b["bytes"] > 1000)
    caches = {i for i, b in enumerate(graph.buffers) if b["mutated"] and b["bytes"] == whole}
    assert len(caches) == 4
    for node in graph.nodes:
        touched = [v for v in (*node["inputs"], *node["outputs"]) if graph.values[v]["buffer"] in caches]
        assert not touched or node["op"] in ("scatter", "attention"), node
        written = graph.buffers[graph.values[node["outputs"][0]]["buffer"]]
        assert written["kind"] != "temporary" or written["bytes"] < whole, node
    masks = [graph.values[node["inputs"][3]] for node in graph.nodes if node["op"] == "attention"]
    assert [mask["dtype"] for mask in masks] == [torch.bool] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("dtype, layers", [(torch.float32, 2), (torch.bfloat16, 1)])
def test_llama_error(compiled: Any, dtype: torch.dtype, layers: int) -> None:
    """The prompt (in float32 only, to save time) and three steps."""
    model = llama(dtype, num_hidden_layers=layers)

    def run(model_: Any, dtype_: torch.dtype) -> list[Tensor]:
        cache = cache_of(model, dtype_)
        steps = [torch.tensor([[token]]) for token in (3, 14, 15)]
        if dtype == torch.float32:
            steps.insert(0, prompt())
        logits = [model_(input_ids=step, past_key_values=cache).logits for step in steps]
        return [*logits, *tensors_of(cache)]

    report = exactness.check(model, run, compiled, fallback=False)
    assert len(report.regions) == (2 if dtype == torch.float32 else 1)


def padded(model: Any, prototype: Any) -> list[Tensor]:
    """A batch whose first text is shorter, then two steps. The mask grows in a tensor of fixed size."""
    cache, ids = cache_of(prototype, batch=2, max_len=32), prompt(2)
    present = torch.zeros(2, 32, dtype=torch.int64)
    present[:, :PROMPT] = 1
    present[0, :3] = 0
    logits = [model(input_ids=ids, attention_mask=present, past_key_values=cache).logits]
    for step in range(2):
        present[:, PROMPT + step] = 1
        logits.append(model(input_ids=ids[:, step : step + 1], attention_mask=present, past_key_values=cache).logits)
    return logits


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.nightly)])
def test_llama_padded(compiled: Any, attention: str) -> None:
    model = llama(attn_implementation=attention)
    wanted = padded(model, model)
    call, report = compiled(model, dynamic=False, fallback=False)
    for got, right in zip(padded(call, model), wanted, strict=True):
        torch.testing.assert_close(got[:, -1], right[:, -1], rtol=1e-4, atol=1e-5)
    assert len(report.graphs) == 2 and len(report.regions) == 2


@pytest.mark.nightly
def test_generate(compiled: Any) -> None:
    """transformers' own loop over its own static cache."""
    model = llama()
    settings: dict[str, Any] = dict(max_new_tokens=50, do_sample=False, pad_token_id=0, eos_token_id=None)
    wanted = model.generate(prompt(), **settings)
    other = copy.deepcopy(model)
    other.forward, report = compiled(other.forward, dynamic=False)
    got = other.generate(prompt(), cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(got, wanted) and got.shape == (1, PROMPT + 50)
    assert len(report.graphs) == 2 and not report.fallbacks and [g.in_place for g in report.graphs][1] == 4, report


@pytest.mark.nightly
def test_llama_with_other_weights(compiled: Any) -> None:
    """After param.data is swapped or load_state_dict: the same kernel, correct numbers. After .to(): another kernel."""
    model = llama()
    eager = copy.deepcopy(model)
    call, report = compiled(model, dynamic=False)
    mine, its = cache_of(model), cache_of(eager)

    def agree(token: int) -> None:
        step = torch.tensor([[token]])
        got, wanted = (m(input_ids=step, past_key_values=c).logits for m, c in ((call, mine), (eager, its)))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

    agree(1)
    for m in (model, eager):
        torch.manual_seed(7)
        for parameter in m.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
    agree(2)
    state = {name: torch.randn_like(value) * 0.1 for name, value in model.named_parameters()}
    for m in (model, eager):
        m.load_state_dict(state, strict=False)
    agree(3)
    assert len(report.graphs) == 1
    for m in (model, eager):
        m.to(torch.bfloat16)
    mine, its = cache_of(model, torch.bfloat16), cache_of(eager, torch.bfloat16)
    got, wanted = (m(input_ids=torch.tensor([[4]]), past_key_values=c).logits for m, c in ((call, mine), (eager, its)))
    assert got.dtype == torch.bfloat16 and (got - wanted).abs().max() < 5e-2 and len(report.regions) == 2


@pytest.mark.nightly
@pytest.mark.quick
def test_bert(compiled: Any) -> None:
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=100,
        max_position_embeddings=32,
    )
    model = transformers.BertModel(config).eval()
    present = torch.ones(2, 16, dtype=torch.int64)
    present[1, 10:] = 0

    def run(model_: Any, _: torch.dtype) -> list[Tensor]:
        result = model_(input_ids=prompt(2, 16), attention_mask=present)
        return [result.last_hidden_state, result.pooler_output]

    report = exactness.check(model, run, compiled, fallback=False)
    assert len(report.regions) == 1
    kinds = [stage["kind"] for stage in json.loads(report.regions[0].plan_json)["stages"]]
    assert kinds.count("attention") == 2


def gpt2(**changes: Any) -> Any:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0, **changes
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.nightly
def test_gpt2(compiled: Any) -> None:
    model = gpt2().eval()
    report = exactness.check(
        model, lambda model_, _: [model_(input_ids=prompt(2, 16), use_cache=False).logits], compiled
    )
    # A cumulative sum counts the texts packed in a sequence. Only that falls back.
    assert {f.operator for f in report.fallbacks} <= {"aten.cumsum.default"}
    assert report.graphs[0].nodes > 80 and sum(piece.nodes for piece in report.regions) >= report.graphs[0].nodes - 1


@pytest.mark.nightly
def test_gpt2_training(compiled: Any) -> None:
    """20 steps through the fallback give eager's numbers within rounding."""
    losses, weights = [], []
    for compile_it in (False, True):
        torch.manual_seed(3)
        model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
        call, report = compiled(model) if compile_it else (model, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(5)
        taken = []
        with torch.enable_grad():
            for _ in range(20):
                ids = torch.randint(0, 100, (2, 16), generator=generator)
                logits = call(input_ids=ids, use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                taken.append(loss.item())
        losses.append(taken)
        weights.append([p.detach() for p in model.parameters()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(set(losses[0])) > 15
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert report is not None and report.graphs and all("gradients on" in graph.whole for graph in report.graphs)
