"""The option `cache`: accepted values, explain's output, generated code, and unchanged bits in results."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import random
import re
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ark_torch
from ark_torch import _C, _jit
from ark_torch.compile import build, options
from ark_torch.errors import InvalidOption

KNOWS_CACHES = platform.machine() == "x86_64"  # glibc tells the sizes of caches there
POLICIES = ("auto", "none", "all-first", "all-last")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).eval()


@pytest.mark.quick
def test_what_it_takes() -> None:
    assert options.parse(None, {}).cache == "auto"
    for policy in POLICIES:
        assert options.parse(None, {"cache": policy}).cache == policy
    with pytest.raises(InvalidOption, match=r"options\['cache'\] is 'all-frst' \(did you mean 'all-first'\?\).*'none'"):
        options.parse(None, {"cache": "all-frst"})
    with pytest.raises(InvalidOption, match=r"options\['cache'\] is True; it takes 'auto'"):
        options.parse(None, {"cache": True})
    with pytest.raises(ValueError, match="cache is 'some'; it takes 'auto', 'none'"):
        _C.plan.plan_for(_C.plan.Graph(), "cpu", cache="some")


def test_explained(tmp_path: Any) -> None:
    """In the text, and access by access in the page."""
    for policy, of_weights in (("auto", "evict_first"), ("none", ""), ("all-last", "evict_last")):
        report = ark_torch.explain(
            small(), torch.randn(2, 64), ark_options={"choose": "ark", "cache": policy}, target="sm_90a"
        )
        assert f"caches ({policy}): " in str(report)
        told = re.search(r"caches \(\S+\): (\S+) \d+ reads of weight \(\d", str(report))
        assert (told[1] if told else "") == of_weights
        report.save(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert '<table class="caches">' in page and "<td>activation</td><td>read</td>" in page
        row = f"<td>linear</td><td>weight</td><td>read</td><td>{of_weights or 'normal'}</td>"
        assert row in page


def test_an_access_says_when_it_is_read_again() -> None:
    report = ark_torch.explain(small(), torch.randn(2, 64), ark_options={"choose": "ark"}, target="sm_90a")
    plan = json.loads(report.regions[0].target_plan)
    stages = plan["stages"]
    weights = [a for stage in stages for a in stage["accesses"] if a["operand"] == "weight"]
    total = sum(stage["bytes"] for stage in stages)
    assert weights and all(0 <= one["bytes_until_read"] < total for one in weights), "until the next step"
    results = [a for a in stages[-1]["accesses"] if a["write"]]
    assert [one["bytes_until_read"] for one in results] == [-1], "never"


def _shapes(seed: int) -> tuple[nn.Module, list[Tensor]]:
    """Rows of random widths and types, whole vectors and tails, contiguous or not."""
    rng = random.Random(seed)
    rows, columns = rng.choice([1, 3, 64, 200]), rng.choice([1, 7, 16, 33, 64, 1000])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    skipped = rng.choice([0, 1, 3, 8])  # elements, which breaks the alignment of the rest
    torch.manual_seed(seed)

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.zeros(rows * columns + skipped, dtype=dtype))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            self.held[skipped:].view(rows, columns).copy_(x * 2 + y)
            mask = x > y
            norm = F.layer_norm(x + y, (columns,))
            return norm, mask, torch.where(mask, x, y).t() + 1, (x.float() * 8).to(torch.int64), norm.sum(-1)

    return Some().eval(), [torch.randn(rows, columns).to(dtype) for _ in range(2)]


@pytest.mark.by_day("0", "3", "5")
@pytest.mark.parametrize("seed", range(6))
def test_bits_are_the_same_under_each(compiled: Any, seed: int) -> None:
    """Also from call to call: data stored past the caches is there when it is read."""
    wanted = None
    for policy in POLICIES:
        model, given = _shapes(seed)
        call, _ = compiled(model, fallback=False, minimum=1, cache=policy, threads=2)
        for _ in range(3):
            found = [one.contiguous().view(torch.uint8) for one in (*call(*given), model.held)]
            wanted = wanted or found
            assert all(map(torch.equal, found, wanted)), policy


def test_a_reader_on_another_thread_sees_what_passed_the_caches(compiled: Any) -> None:
    """Tasks repeatedly read what other workers' tasks stored past the caches."""

    def call(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.softmax(x, -1).roll(1, 0) + x  # rows that another worker wrote
        return x

    x = torch.randn(64, 512)
    run, report = compiled(call, fallback=False, cache="all-first", threads=2)
    wanted = run(x)
    assert "store_past(" in report.regions[0].region.source()
    for _ in range(200):
        assert torch.equal(run(x), wanted)
    torch.testing.assert_close(wanted, call(x))


def test_what_a_cpu_asks_for_ahead_changes_no_bit(compiled: Any) -> None:
    """Products of one row within and beyond the caches, with long columns, and bags of a table beyond them, whose last
    rows are asked for from the first bag on. An index that is out of range is an error still."""

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = nn.Linear(100, 48), nn.Linear(4096, 2500)
            self.table = nn.Parameter(torch.randn(300_000, 24))

        def forward(self, x: Tensor, y: Tensor, index: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
            return self.near(x), self.far(y), F.embedding_bag(index, self.table, offsets, mode="mean")

    torch.manual_seed(0)
    model, offsets = Some().eval(), torch.tensor([0, 0, 7, 50, 99])
    given = torch.randn(1, 100), torch.randn(1, 4096), torch.randint(0, 300_000, (100,)), offsets
    wanted = None
    for policy in ("none", "auto"):
        call, report = compiled(model, fallback=False, cache=policy, threads=2)
        for _ in range(2):
            found = call(*given)
            wanted = wanted or found
            assert all(map(torch.equal, found, wanted)), policy
        if KNOWS_CACHES:
            assert ("Prefetch::ahead" in report.regions[0].region.source()) == (policy == "auto")
    for bad in (300_000, 1 << 60, -1):
        wrong = given[2].clone()
        wrong[80] = bad
        with pytest.raises(IndexError, match=str(bad)):
            call(*given[:2], wrong, offsets)
    small, x = nn.Sequential(nn.Linear(100, 48), nn.Tanh(), nn.Linear(48, 30)).eval(), torch.randn(1, 100)
    near = [compiled(small, fallback=False, cache=policy, threads=2) for policy in ("none", "auto")]
    (plain, _), (call, report) = near
    assert torch.equal(plain(x), call(x))
    assert not KNOWS_CACHES or "Prefetch::none" in report.regions[0].region.source()


def _decoding_source(compiled: Any, monkeypatch: pytest.MonkeyPatch, **caches: Any) -> str:
    """Returns the source of a decoding step with lookups and norms, at the sizes of a billion weights, for an H100."""
    found: list[str] = []
    plain = build.make_region

    def noted(lowering: Any, *given: Any) -> Any:
        graph = _C.plan.Graph()
        lowering.graph.emit(graph)
        found.append(_C.plan.cuda_source(graph, "sm_90a", 132, **caches))
        return plain(lowering, *given)

    monkeypatch.setattr(build, "make_region", noted)
    model = models.Llama(models.Config(2048, 1, 32, 8, 8192, 1024, 1024), 1, torch.bfloat16).eval()
    compiled(model, dynamic=False, fallback=False)[0](torch.randint(0, 1024, (1, 1)), torch.tensor([5]))
    [source] = found
    return source


def _check_compiles(source: str) -> None:
    _jit.configure()
    _, [kernel] = _C._compile_kernel(source, "sm_90a", fuse=True, may_spill=False)
    assert 0 < kernel["registers"] <= 128 and kernel["spilled"] == 0


needs_nvrtc = pytest.mark.skipif(
    not any(one.name == "nvidia-cuda-nvrtc" for one in importlib.metadata.distributions()),
    reason="nvidia-cuda-nvrtc is not installed",
)


@pytest.mark.by_day("all-last")
@pytest.mark.changed("ark_torch/kernels/cuda/*", "csrc/compiler/emit/*")
@needs_nvrtc
@pytest.mark.timeout(400)
@pytest.mark.parametrize("policy", POLICIES)
def test_text_of_a_gpu_compiles_without_spills(compiled: Any, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    source = _decoding_source(compiled, monkeypatch, cache=policy)
    hint = {"auto": "evict_first", "none": "", "all-first": "evict_first", "all-last": "evict_last"}[policy]
    assert set(re.findall(r"Cache::(\w+)", source)) - {"normal"} == ({hint} if hint else set())
    assert ("Hinted<" in source) == policy.startswith("all-")
    assert f"kHintedLoads = {'true' if policy.startswith('all-') else 'false'}" in source
    _check_compiles(source)


@pytest.mark.changed("ark_torch/kernels/cuda/*", "csrc/compiler/emit/*")
@needs_nvrtc
@pytest.mark.timeout(400)
def test_text_of_a_gpu_that_keeps_some_parameters_compiles(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit covers the weights of queries and keys. The values' weights, read by the same function, exceed it."""
    measured = {"kept_bytes": 10 << 20, "reused_last": True, "states_first": True}
    source = _decoding_source(compiled, monkeypatch, caches=measured)
    shapes = re.findall(r"constexpr Product s(\d*)\{.*?b_cache = Cache::(\w+)", source, re.DOTALL)
    assert {cache for _, cache in shapes} == {"evict_first", "evict_last"}
    joined = [text for text in source.split("__noinline__") if "products<" in text]
    assert joined
    for text in joined:  # one kernel reads all of them
        assert len(set(re.findall(r"b_cache = Cache::(\w+)", text.split("products<")[0]))) == 1
    _check_compiles(source)
