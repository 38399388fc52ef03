"""torch.compile(backend="ark") on one GPU: operators against float64, models against eager."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_support import DEVICE, compiled, on_one_kernel
from torch import Tensor
from torch._inductor import config as inductor_config

from ark_torch.compile import background

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "compile"))

import models  # noqa: E402
import recommender  # noqa: E402

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_compiler")]
PARTS = max(2, len(os.sched_getaffinity(0)) - 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_operators_are_exact(dtype: str) -> None:
    """In separate processes, several at once: each operator is a kernel, and compiling takes most of the time."""

    def part(index: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(HERE / "compile_operators.py"), dtype, str(index), str(PARTS)]
        return subprocess.run(command, capture_output=True, text=True, timeout=280)

    with ThreadPoolExecutor(PARTS) as pool:
        for done in pool.map(part, range(PARTS)):
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("dtype, close", [(torch.float32, 2e-5), (torch.bfloat16, 6e-2), (torch.float16, 2e-2)])
def test_decode_at_every_position(dtype: torch.dtype, close: float) -> None:
    model = models.Llama(models.Config(dim=256, heads=8, kv_heads=2, ffn=512, max_len=48), 1, dtype).eval().to(DEVICE)
    eager = copy.deepcopy(model)
    call, report = compiled(model, fallback=False)
    for position in range(48):
        ids, pos = torch.randint(0, 100, (1, 1), device=DEVICE), torch.tensor([position], device=DEVICE)
        got, wanted = call(ids, pos), eager(ids, pos)
        assert (got - wanted).abs().max() < close, position
        for cache, right in zip(model.caches(), eager.caches(), strict=True):
            assert (cache - right).abs().max() < close, position
    on_one_kernel(report)


@pytest.mark.parametrize("dtype, close", [(torch.bfloat16, 6e-2), (torch.float16, 2e-2)])
def test_decode_over_blocks_of_positions(dtype: torch.dtype, close: float) -> None:
    """Attention's tasks add the new position themselves, only in the block that contains it."""
    config = models.Config(dim=512, heads=8, kv_heads=2, ffn=512, max_len=600)
    model = models.Llama(config, 1, dtype).eval().to(DEVICE)
    for cache in model.caches():
        cache.normal_()
    eager = copy.deepcopy(model)
    call, report = compiled(model, fallback=False)
    for position in (0, 1, 15, 255, 256, 257, 511, 512, 599, 300):
        ids, pos = torch.randint(0, 100, (1, 1), device=DEVICE), torch.tensor([position], device=DEVICE)
        got, wanted = call(ids, pos), eager(ids, pos)
        assert (got - wanted).abs().max() < close, position
        for cache, right in zip(model.caches(), eager.caches(), strict=True):
            assert (cache - right).abs().max() < close, position
        assert all(torch.equal(call(ids, pos), got) for _ in range(20)), position
    on_one_kernel(report)
    assert '"index_copy_"' not in report.graphs[0].pieces[0].region.json(), report


@pytest.mark.parametrize(
    "dtype, shared, close", [(torch.float32, 1, 2e-5), (torch.bfloat16, 4, 2e-2), (torch.float16, 2, 3e-3)]
)
def test_few_rows_over_many_positions(dtype: torch.dtype, shared: int, close: float) -> None:
    """Positions are cut into blocks. Data beyond the last one must not matter.

    For float32, PyTorch masks by -inf, and the excluded data may be NaN. Its 16-bit kernel (cuDNN's) masks by a finite
    number: NaN would be NaN in eager as well.
    """
    for heads, queries, positions, columns in ((8, 1, 1088, 64), (4, 2, 704, 128)):
        q = torch.randn(1, heads, queries, columns, device=DEVICE, dtype=dtype)
        k, v = (torch.randn(1, heads // shared, positions, columns, device=DEVICE, dtype=dtype) for _ in range(2))

        def attend(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
            mask = (torch.arange(k.shape[2], device=DEVICE)[None, :] <= last[:, None])[None, None]
            grouped = q.shape[1] != k.shape[1]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

        torch._dynamo.reset()
        call, report = compiled(attend, fallback=False)
        for end in (positions - 1, 0, 255, 256, 600):
            last = torch.tensor([end], device=DEVICE).expand(queries).contiguous()
            wanted = attend(*(x[:, :, : end + 1].double() if x is not q else x.double() for x in (q, k, v)), last)
            got = call(q, k, v, last)
            assert (got - wanted).abs().max() < close, end
            on_one_kernel(report)
            assert '"combine"' in report.graphs[0].pieces[0].region.json(), report
            behind = slice(end + 1, None)
            k[:, :, behind] = v[:, :, behind] = torch.nan if dtype == torch.float32 else 50.0
            assert torch.equal(call(q, k, v, last), got), end
            for cache in (k, v):
                cache[:, :, behind] = torch.randn_like(cache[:, :, behind])


def test_prompt_then_tokens() -> None:
    model = models.Llama(models.Config(max_len=64)).eval().to(DEVICE)
    eager = copy.deepcopy(model)
    call, _ = compiled(model, fallback=False)
    ids = torch.randint(0, 100, (1, 20), device=DEVICE)
    pos = torch.arange(20, device=DEVICE)
    for _ in range(30):
        got, wanted = call(ids, pos), eager(ids, pos)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        ids, pos = wanted.argmax(-1, keepdim=True), pos[-1:] + 1


def test_encoder_and_decoder() -> None:
    encoder, decoder = models.Encoder(256, 4, 2, 100, 64).eval().to(DEVICE), models.Decoder(192, 4).eval().to(DEVICE)
    for layer in (encoder, decoder):
        layer.requires_grad_(False)
    call, report = compiled(encoder)
    ids, present = torch.randint(0, 100, (3, 64), device=DEVICE), torch.rand(3, 64, device=DEVICE) < 0.7
    for got, wanted in zip(call(ids, present), encoder(ids, present), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    call, report = compiled(decoder)
    ids = torch.randint(0, 50, (2, 16), device=DEVICE)
    torch.testing.assert_close(call(ids), decoder(ids), rtol=1e-4, atol=1e-4)
    assert any(piece.runs_on == "ark" for piece in report.graphs[0].pieces), report


@pytest.mark.parametrize("columns", [1000, 1024])
def test_rows_of_a_large_tensor(columns: int) -> None:
    """Several rows per tile, and many elements per thread."""

    def norm(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.layer_norm(x + y, x.shape[1:]), (x * y).amax(-1)

    def pointwise(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x) * torch.sigmoid(y)

    x, y = (torch.randn(700, columns, device=DEVICE) for _ in range(2))
    for function in (norm, pointwise):
        torch._dynamo.reset()
        call, report = compiled(function, fallback=False)
        got = call(x, y)
        torch.testing.assert_close(got, function(x, y), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(call(x, y), got, rtol=0, atol=0)
        on_one_kernel(report)


def test_recommender_and_experts() -> None:
    model = recommender.Dlrm().eval().to(DEVICE)
    dense = torch.randn(10, 13, device=DEVICE)
    indices = [torch.randint(0, 50, (30,), device=DEVICE) for _ in range(8)]
    offsets = [torch.arange(0, 30, 3, device=DEVICE) for _ in range(8)]
    call, _ = compiled(model)
    torch.testing.assert_close(call(dense, indices, offsets), model(dense, indices, offsets), rtol=1e-4, atol=1e-5)
    experts = models.Experts().eval().to(DEVICE)
    call, report = compiled(experts)
    x = torch.randn(12, 48, device=DEVICE)
    torch.testing.assert_close(call(x), experts(x), rtol=1e-4, atol=1e-5)
    assert any(piece.runs_on == "ark" for piece in report.graphs[0].pieces), report


def test_numbers_of_the_program() -> None:
    """Python numbers become CPU tensors in between. Results must be on eager's device."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        x, number = x * 2, torch.tensor(2.5)
        x[0] = 1.5
        return x + number, number, torch.ones_like(x), x.new_full((3,), 2)

    call, report = compiled(program)
    x = torch.randn(4, 5, device=DEVICE)
    torch.testing.assert_close(call(x), program(x))
    on_one_kernel(report)


def test_the_faster_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, as on CPUs: the contest does not modify what a region writes, and the choice is kept."""
    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    monkeypatch.setattr(inductor_config, "compile_threads", 1)  # no processes that outlive the test
    table = torch.randn(4000, 64, device=DEVICE)

    def step(x: Tensor, where: Tensor) -> Tensor:
        table.index_copy_(0, where, x)
        where += 1
        return (table[:200] @ x[0]).softmax(-1)

    chosen = []
    for _ in range(2):
        torch._dynamo.reset()
        call, report = compiled(step, choose="measure")
        for at in range(3):
            x = torch.randn(1, 64, device=DEVICE)
            before, where = table.clone(), torch.tensor([at], device=DEVICE)
            got = call(x, where)
            assert where.item() == at + 1
            before[at] = x[0]
            assert torch.equal(table, before)
            torch.testing.assert_close(got, (table[:200] @ x[0]).softmax(-1), rtol=1e-4, atol=1e-5)
        chosen.append([graph.choice.runs_on for graph in report.graphs if graph.choice is not None])
    assert chosen[0] == chosen[1] and len(chosen[0]) == len(report.graphs)
    assert len(list((tmp_path / "choices").glob("*.json"))) == len(chosen[0])


def test_replays_of_graphs_are_contestants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays choose what a CUDA graph captures. Results must equal eager PyTorch's."""
    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    monkeypatch.setattr(inductor_config, "compile_threads", 1)  # no processes that outlive the test

    def step(x: Tensor) -> Tensor:
        return torch.tanh(x * 2).softmax(-1) + torch.sin(x)

    x = torch.randn(64, 256, device=DEVICE)
    for _ in range(2):  # measured, then remembered
        torch._dynamo.reset()
        call, report = compiled(step, choose="measure")
        call(x)
        choice = report.graphs[0].choice
        assert choice is not None and set(choice.replay_us) == {"ark", "inductor", "eager"} == set(choice.us), report
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(result, step(x))
            torch.testing.assert_close(call(x), step(x))


def test_inductor_serves_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The default: calls and captures are correct before, during and after the contest."""
    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    monkeypatch.setattr(inductor_config, "compile_threads", 1)
    state = torch.zeros(1, device=DEVICE)

    def step(x: Tensor) -> Tensor:
        state.add_(1)
        return torch.tanh(x * state).softmax(-1) + torch.sin(x)

    torch._dynamo.reset()
    call = torch.compile(step, backend="ark")
    x = torch.randn(64, 256, device=DEVICE)
    captured, number = None, 0
    ends = time.monotonic() + 200
    while time.monotonic() < ends:
        number += 1
        got = call(x)
        if number % 50 == 1 or captured is None:
            torch.testing.assert_close(got, torch.tanh(x * number).softmax(-1) + torch.sin(x))
            assert state.item() == number
        if number == 5:  # nothing is decided yet, so the graph keeps Inductor's kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = call(x)
            graph.replay()
            torch.testing.assert_close(captured, torch.tanh(x * (number + 1)).softmax(-1) + torch.sin(x))
            state.fill_(number)
        if background.active():
            time.sleep(0.01)
        elif list((tmp_path / "choices").glob("*.json")):
            break
    else:
        pytest.fail(f"nobody was chosen in {number} calls")
    assert "a CUDA graph captures Inductor's kernels" in caplog.text
    (file,) = (tmp_path / "choices").glob("*.json")
    assert len(json.loads(file.read_text())["replay_us"]) > 1
    at = state.item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(x)
    for number in range(1, 4):  # by who won among the replays
        graph.replay()
        torch.testing.assert_close(captured, torch.tanh(x * (at + number)).softmax(-1) + torch.sin(x))


def test_weights_at_odd_addresses() -> None:
    """The same region with weights that allow 16-byte loads, and with others, which are copied."""
    linear = torch.nn.Linear(1024, 320, dtype=torch.bfloat16, device=DEVICE).requires_grad_(False)
    spare = torch.zeros(320 * 1024 + 1, dtype=torch.bfloat16, device=DEVICE)
    call, report = compiled(lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias).relu())
    odd = spare[1:].view(320, 1024)
    odd.copy_(linear.weight)
    for _ in range(3):
        x = torch.randn(2, 1024, dtype=torch.bfloat16, device=DEVICE)
        wanted = (x.double() @ linear.weight.double().T + linear.bias.double()).relu()
        for weight in (linear.weight, torch.nn.Parameter(odd, requires_grad=False)):
            got = call(x, weight, linear.bias)
            assert (got - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    on_one_kernel(report)


def test_bits_repeat() -> None:
    model = models.Llama(models.Config(dim=512, heads=8, kv_heads=2, ffn=1024), 1, torch.bfloat16).eval().to(DEVICE)
    call, _ = compiled(model, fallback=False)
    ids, pos = torch.randint(0, 100, (1, 8), device=DEVICE), torch.arange(8, device=DEVICE)
    first = call(ids, pos)
    assert all(torch.equal(call(ids, pos), first) for _ in range(200))
