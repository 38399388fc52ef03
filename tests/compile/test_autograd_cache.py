"""Graphs that AOTAutograd's cache keeps: a later compilation takes them and lowers nothing, and the results are the
same; other graphs, options, inputs and damaged entries are compiled."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from coded import Tiles
from support import start
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import ark_torch
from ark_torch.compile import ahead, autograd_cache, build, certain

MISSED = {"autograd_cache_miss": 1}
SAVED = {**MISSED, "autograd_cache_saved": 1}
HIT = {"autograd_cache_hit": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor"


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the regions that are lowered and compiled."""
    made: list[str] = []
    plain = build.make_region

    def make_region(lowering: Any, name: str, *rest: Any, **named: Any) -> Any:
        made.append(name)
        return plain(lowering, name, *rest, **named)

    monkeypatch.setattr(build, "make_region", make_region)
    yield made


def found() -> dict[str, int]:
    """What the cache did since the last call."""
    now = {name: count for name, count in counters["aot_autograd"].items() if "autograd_cache" in name}
    counters.clear()
    return now


def of(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled as by another process."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend="ark", dynamic=False, options={"choose": "ark", **options})


def chain(x: Tensor, y: Tensor) -> Tensor:
    return F.softmax(F.gelu(x * y + 1), -1) @ y.t()


def test_a_step_with_caches(regions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes its caches, is ark's for certain with default options, and runs again with other weights."""
    monkeypatch.setattr(certain, "why", lambda *_: "as the test wants it")

    def model() -> nn.Module:
        return models.Llama(models.Config(64, 2, 4, 2, 128, 96, 32)).eval()

    def tokens(step: Callable[..., Tensor]) -> list[Tensor]:
        return [step(torch.tensor([[7 + i]]), torch.tensor([i])) for i in range(4)]

    for options in ({}, {"choose": "measure"}):
        for number, weights in enumerate((0, 0, 1)):
            torch.manual_seed(weights)
            ours, plain = model(), model()
            plain.load_state_dict(ours.state_dict())
            got = tokens(of(ours, **options))
            torch.testing.assert_close(got, tokens(plain), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()), rtol=1e-4, atol=1e-5)
            assert found() == (SAVED if number == 0 else HIT), options
            assert len(regions) == (1 if number == 0 else 0)
            regions.clear()


def test_tiles_of_int4(regions: list[str]) -> None:
    """Loaded programs unpack PyTorch's int4 tiles, as compiled ones do."""

    x = torch.randn(2, 256).bfloat16()
    for number, seed in enumerate((0, 0, 1)):
        model = Tiles(seed)
        right = model.right(x)
        got = of(model, minimum=1)(x)
        assert float((got.double() - right).abs().max()) <= 2**-7 * float(right.max())
        assert found() == (SAVED if number == 0 else HIT)


# A function, and whether another graph's entry could be mistaken for its own: each is compiled behind the others.
def adds(number: float, constant: list[float]) -> Callable[..., Any]:
    return lambda x, y: (x + number) * torch.tensor(constant) - y.sum(-1, keepdim=True)


GRAPHS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "chain": chain,
    "number 1": adds(1.0, [1.0, 2.0, 3.0, 4.0]),
    "number 2": adds(2.0, [1.0, 2.0, 3.0, 4.0]),
    "constant": adds(1.0, [1.0, 2.0, 3.0, 5.0]),
    "several results": lambda x, y: (x.relu().exp(), (x + y).t(), x.sum(), 3, None),
    "a view of an input": lambda x, y: (x.t(), (x * y).tanh() + x.sigmoid()),
    "an input written": lambda x, y: x.mul_(2).add_(y).exp() + y,
    "an input written and returned": lambda x, y: (x.mul_(2).add_(y), y.exp() * 2 + 1),
}


def test_graphs_are_told_apart(regions: list[str]) -> None:
    torch.manual_seed(0)
    given = torch.randn(3, 4), torch.randn(3, 4)
    wanted: dict[str, Any] = {}
    for again in (False, True):
        for name, function in GRAPHS.items():
            x, y = (one.clone() for one in given)
            got = of(function, minimum=1)(x, y)
            assert found() == (HIT if again else SAVED), name
            mine, other = (one.clone() for one in given)
            torch.testing.assert_close(got, function(mine, other), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close((x, y), (mine, other), rtol=1e-5, atol=1e-6)
            if name == "a view of an input":
                assert got[0]._base is x or got[0].untyped_storage()._cdata == x.untyped_storage()._cdata
            if again:  # the same kernels
                torch.testing.assert_close(got, wanted[name], rtol=0, atol=0)
            wanted[name] = got
        assert len(regions) == len(GRAPHS)


def test_other_inputs_and_options(regions: list[str]) -> None:
    """The same graph for each, but for the last one another program."""
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    square = torch.randn(8, 8)
    cases: list[tuple[tuple[Tensor, Tensor], dict[str, Any]]] = [
        ((x, y), {}),
        ((x, y), {"minimum": 5}),
        ((x, y), {"cache": "none"}),
        ((x, y), {"threads": 1}),
        ((x.bfloat16(), y.bfloat16()), {}),
        ((x[:3], y[:3].clone()), {}),
        ((torch.randn(8, 4).t(), y), {}),
        ((square[:4], y), {}),
    ]
    for again in (False, True):
        regions.clear()
        for number, (inputs, options) in enumerate(cases):
            got = of(chain, **options)(*inputs)
            assert found() == (HIT if again or number == len(cases) - 1 else SAVED), (number, options)
            close = 1e-5 if got.dtype == torch.float32 else 3e-2
            torch.testing.assert_close(got, chain(*inputs), rtol=close, atol=close)
        assert len(regions) == (0 if again else len(cases) - 1)


def test_modes(regions: list[str]) -> None:
    """What a graph computes by PyTorch's modes, and so what is kept for each."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return torch.ones(16) + x @ y

    def attention(x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None]).cos()

    x, y = torch.randn(16, 16), torch.randn(16, 16)
    kernels = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)
    modes: list[tuple[Callable[..., Any], Callable[[], Any]]] = [
        (product, contextlib.nullcontext),
        (product, lambda: torch.autocast("cpu", torch.bfloat16)),
        (product, lambda: torch.autocast("cpu", torch.float16)),
        (product, lambda: default_dtype(torch.bfloat16)),
        *((attention, functools.partial(sdpa_kernel, kernel)) for kernel in kernels),
    ]
    for again in (False, True):
        for number, (function, mode) in enumerate(modes):
            with mode():
                got, wanted = of(function, minimum=1)(x, y), function(x, y)
                assert got.dtype == wanted.dtype, number
                assert found() == (HIT if again else SAVED), number
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=5e-2)
    assert len(regions) == len(modes)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("strict", [False, True])
def test_who_is_not_kept(strict: bool, regions: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A graph with a part of Inductor's; inputs that share memory; a report, which shows what was lowered."""
    x, y = torch.randn(16, 32), torch.randn(16, 32)

    def mixed(x: Tensor, y: Tensor) -> Tensor:
        return chain(torch.fft.fft(chain(x, y).cos()).real.contiguous(), torch.ones(16, 16)) * 2 + 1

    with torch._functorch.config.patch(strict_autograd_cache=strict):
        for _ in range(2):
            torch.testing.assert_close(of(mixed, minimum=1)(x, y), mixed(x, y), rtol=1e-4, atol=1e-4)
            mine = {name: count for name, count in found().items() if "bypass" not in name}
            assert mine == MISSED and len(regions) == 2
            regions.clear()
    assert not [line for line in caplog.messages if "unable to serialize" in line]
    both = torch.randn(32, 32)
    for _ in range(2):
        torch.testing.assert_close(of(chain)(both[:16], both[16:]), chain(both[:16], both[16:]))
        assert found() == {} and len(regions) == 1
        regions.clear()
    of(chain)(x, y)
    torch._dynamo.reset()
    assert len(ark_torch.explain(chain, x, y, ark_options={"choose": "ark"}).regions) == 1 and len(regions) == 2


def test_passes_are_dumped(regions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    of(chain)(x, y)
    monkeypatch.setenv("ARK_DUMP_PASSES", str(tmp_path / "passes"))
    of(chain)(x, y)
    assert len(regions) == 2 and list((tmp_path / "passes").rglob("*"))


def test_a_program_loaded_meanwhile(regions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread loads while a graph is looked up is not taken for it."""
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    entry: list[ahead.AheadOfTime] = []
    plain = build.Builder.ahead_of_time

    def compiled_ahead(self: Any) -> Any:
        if entry:  # another thread's, in the midst of this compilation
            one = copy.copy(entry[0])
            one.run = None
            thread = threading.Thread(target=one.post_compile, args=([], None, None))
            thread.start()
            thread.join()
            assert one.run is not None
        entry.append(plain(self))
        return entry[-1]

    monkeypatch.setattr(build.Builder, "ahead_of_time", compiled_ahead)
    for function in (chain, lambda x, y: chain(y, x).sin()):
        torch.testing.assert_close(of(function)(x, y), function(x, y))
        assert found() == SAVED
    assert len(regions) == 2


def test_inference_mode(regions: list[str]) -> None:
    """An entry of one mode serves in the other, or is compiled anew; what is written and its versions are right."""

    def writes(cache: Tensor, x: Tensor) -> Tensor:
        cache.mul_(2).add_(x)
        return chain(cache, x)

    for modes in ((torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)) * 2:
        for mode in modes:
            with mode():
                cache, x = torch.ones(16, 32), torch.randn(16, 32)
                mine = cache.clone()
                call, before = of(writes), 0 if cache.is_inference() else cache._version
                for _ in range(2):
                    torch.testing.assert_close(call(cache, x), writes(mine, x), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(cache, mine)
                assert cache.is_inference() or cache._version > before
    assert len(regions) <= 2


@pytest.mark.parametrize("damage", ["cut", "other bytes", "kernel"])
def test_a_damaged_entry_is_compiled_anew(
    damage: str,
    folder: Path,
    regions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    if damage == "kernel":  # a bit is lost in the binary alone
        plain = ahead.AheadOfTime.prepare_for_serialization

        def damaged(self: Any) -> None:
            plain(self)
            binary = bytearray(self.regions[0].kernel["binary"])
            binary[len(binary) // 2] ^= 1
            self.regions[0].kernel["binary"] = bytes(binary)

        monkeypatch.setattr(ahead.AheadOfTime, "prepare_for_serialization", damaged)
    of(chain)(x, y)
    assert found() == SAVED
    entries = [path for path in folder.rglob("*") if path.is_file() and "aotautograd" in str(path)]
    assert entries
    for path in entries if damage != "kernel" else []:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else os.urandom(len(content)))
    for expected in [HIT, HIT] if damage == "kernel" else [SAVED, HIT]:
        torch.testing.assert_close(of(chain)(x, y), chain(x, y))
        assert found() == expected
    assert ("compiled anew" in caplog.text) == (damage == "kernel")


def test_another_pytorch(regions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch's interface differs, graphs are traced and lowered."""

    def differs(compiler: Any) -> Any:
        raise ImportError("no such name")

    monkeypatch.setattr(autograd_cache, "serializable", differs)
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    for count in (1, 2):
        torch.testing.assert_close(of(chain)(x, y), chain(x, y))
        assert found() == {} and len(regions) == count


PROGRAM = """
import sys, torch, models
from torch._dynamo.utils import counters
from ark_torch.compile import build
made, plain = [], build.make_region
build.make_region = lambda *given, **named: made.append(1) or plain(*given, **named)
torch.manual_seed(int(sys.argv[1]))
model = models.Llama(models.Config(64, 2, 4, 2, 128, 96, 32)).eval()
step = torch.compile(model, backend="ark", options={"choose": "ark"})
with torch.no_grad():
    got = [step(torch.tensor([[i]]), torch.tensor([i])) for i in range(3)]
    assert sys.argv[1] == "0" or "torch._inductor.codegen.triton" not in sys.modules
    for cache in model.caches():
        cache.zero_()
    wanted = [model(torch.tensor([[i]]), torch.tensor([i])) for i in range(3)]
torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
content, info = torch.compiler.save_cache_artifacts()
print(dict(counters["aot_autograd"]), len(made), sorted(info.artifacts))
"""


def test_processes(tmp_path: Path) -> None:
    """The second process takes the first one's, without Inductor's code generators. Its save_cache_artifacts() has the
    region all the same."""
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, seed],
            env=start.base_environment(
                TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "shared"),
                ARK_CACHE=str(tmp_path / "ark"),
                ARK_COSTS="assumed",
                PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            ),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        told = done.stdout.splitlines()[-1]
        assert ("'autograd_cache_saved': 1" if seed == "0" else "'autograd_cache_hit': 1") in told, told
        assert ("} 1 [" if seed == "0" else "} 0 [") in told and "'ark'" in told, told
