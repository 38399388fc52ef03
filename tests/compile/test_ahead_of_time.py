"""Ahead-of-time compilation, and PyTorch's portable caches: what one process saves, another runs without a compiler."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from coded import Tiles
from torch import Tensor

import ark_torch
from ark_torch.compile import saved
from ark_torch.errors import CompileError, UnsupportedGraph

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(torch.compiler, "load_compiled_function"), reason="this PyTorch saves no programs"),
]


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 asks for it."""
    monkeypatch.setattr(torch._dynamo.config, "enable_aot_compile", True)


HERE = Path(__file__).resolve().parent


def step(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 + 1


def viewed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Results that are views, an argument, constants and a number; an argument that is written."""
    z = torch.relu(x @ y) + 1
    y.mul_(2)
    return z.t()[1:], z.view(-1), z, torch.zeros(3), x, (x + 1).sum()


def llama() -> models.Llama:
    torch.manual_seed(0)
    return models.Llama(models.Config(64, 2, 4, 2, 128, 50, 16), 1, torch.float32).eval()


def tokens() -> tuple[Tensor, Tensor]:
    return torch.tensor([[7]]), torch.tensor([3])


def ahead(function: object, *inputs: Tensor, **options: object) -> object:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="ark", fullgraph=True, options=options)  # type: ignore[call-overload]
    return compiled.aot_compile((inputs, {}))


# Runs in a process that finds no compiler, and no cache.
ELSEWHERE = """
import os, subprocess, sys
import torch
subprocess.Popen = None  # an error for whatever of Python's starts a program
sys.path.insert(0, {here!r})
import test_ahead_of_time as case
torch.set_grad_enabled(False)
{code}
"""


def elsewhere(code: str, folder: Path) -> str:
    environment = {
        **os.environ,
        "PATH": str(folder / "no-programs"),
        "CXX": str(folder / "no-compiler"),
        "ARK_CACHE": str(folder / "new-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "new-inductor-cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    text = ELSEWHERE.format(here=str(HERE), code=code)
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_saved_programs_start_without_a_compiler(tmp_path: Path) -> None:
    """Bits are those of the process that saved them. The steps of a model share its caches, which are written."""
    x, y = torch.linspace(-2, 2, 12).view(3, 4), torch.linspace(-1, 1, 20).view(4, 5)
    first = ahead(step, x, choose="ark")
    second = ahead(viewed, x, y.clone(), choose="ark")
    first.save_compiled_function(str(tmp_path / "step.pt"))  # type: ignore[attr-defined]
    second.save_compiled_function(str(tmp_path / "viewed.pt"))  # type: ignore[attr-defined]
    model = llama()
    torch._dynamo.reset()
    wanted = [model(*tokens()) for _ in range(2)]
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    compiled = torch.compile(llama(), backend="ark", fullgraph=True, options={"choose": "ark"})
    one = compiled.forward.aot_compile((tokens(), {}))
    one.save_compiled_function(str(tmp_path / "llama.pt"))
    torch.testing.assert_close(one(llama(), *tokens()), wanted[0], rtol=1e-4, atol=1e-5)
    torch.save([first(x), second(x, y.clone()), one(llama(), *tokens())], tmp_path / "results.pt")  # type: ignore[operator]
    elsewhere(
        """
import time
loaded = {}
for name in ("step", "viewed", "llama"):
    with open(name + ".pt", "rb") as file:
        loaded[name] = torch.compiler.load_compiled_function(file)
x, y = torch.linspace(-2, 2, 12).view(3, 4), torch.linspace(-1, 1, 20).view(4, 5)
first, second, third = torch.load("results.pt")
assert torch.equal(loaded["step"](x), first)
written = y.clone()
got = loaded["viewed"](x, written)
assert torch.equal(written, y * 2) and got[4] is x
assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, second, strict=True))
model = case.llama()
assert torch.equal(loaded["llama"](model, *case.tokens()), third)
assert not os.path.exists("new-cache") or not os.listdir("new-cache")
""",
        tmp_path,
    )


def sequential() -> torch.nn.Module:
    """PyTorch's own class, around which torch.compile puts a function that holds the module."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()


def test_exported_calls_run_elsewhere(tmp_path: Path) -> None:
    x = torch.linspace(-2, 2, 24).view(3, 8)
    options = {"minimum": 1}
    ark_torch.export(step, (x,), tmp_path / "step.pt", options=options)
    ark_torch.export(sequential(), (x,), str(tmp_path / "sequential.pt"))
    ark_torch.export(llama(), (), tmp_path / "llama.pt", dict(zip(("ids", "pos"), tokens(), strict=True)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.pt", "sequential.pt", "step.pt"]
    here = [
        ark_torch.load(tmp_path / "step.pt")(x),
        ark_torch.load(tmp_path / "sequential.pt", sequential())(x),
        ark_torch.load(tmp_path / "llama.pt", llama())(**dict(zip(("ids", "pos"), tokens(), strict=True))),
    ]
    for found, wanted in zip(here, (step(x), sequential()(x), llama()(*tokens())), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.save(here, tmp_path / "results.pt")
    elsewhere(
        """
import ark_torch
x = torch.linspace(-2, 2, 24).view(3, 8)
first, second, third = torch.load("results.pt")
assert torch.equal(ark_torch.load("step.pt")(x), first)
other = case.sequential()
loaded = ark_torch.load("sequential.pt", other)
assert torch.equal(loaded(x), second)
other[2].bias.add_(1)
torch.testing.assert_close(loaded(x), second + 1)
ids, pos = case.tokens()
assert torch.equal(ark_torch.load("llama.pt", case.llama())(ids=ids, pos=pos), third)
""",
        tmp_path,
    )
    for name in ("sequential", "llama"):
        with pytest.raises(TypeError, match="was made of a module: give one of its kind"):
            ark_torch.load(tmp_path / f"{name}.pt")


def test_tiles_are_unpacked_where_the_program_is_loaded(tmp_path: Path) -> None:
    """PyTorch's int4 weights for GPUs, whose order a region does not read."""
    x = torch.randn(2, 256).bfloat16()
    ark_torch.export(Tiles(0), (x,), tmp_path / "tiles.pt", options={"minimum": 1})
    for seed in (0, 1):
        model = Tiles(seed)
        loaded = ark_torch.load(tmp_path / "tiles.pt", model)
        for factor in (1, 2):
            model.scales.mul_(factor)
            right = model.right(x)
            assert float((loaded(x).double() - right).abs().max()) <= 2**-7 * float(right.max())


def test_bad_exports_are_refused(tmp_path: Path) -> None:
    x = torch.ones(3)
    with pytest.raises(TypeError, match="args is a Tensor, not a tuple"):
        ark_torch.export(step, x, tmp_path / "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a int, not a module or a function"):
        ark_torch.export(3, (x,), tmp_path / "a")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="names a folder that is not there"):
        ark_torch.export(step, (x,), tmp_path / "none" / "a")
    with pytest.raises(IsADirectoryError, match="path is a folder"):
        ark_torch.export(step, (x,), tmp_path)
    with pytest.raises(TypeError, match="kwargs is a list, not a dictionary"):
        ark_torch.export(step, (x,), tmp_path / "a", kwargs=[1])  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        ark_torch.load(tmp_path / "none")
    assert not list(tmp_path.iterdir())


class Coded(Tensor):
    """As torchao's quantized weights: a tensor made of others, with the operators of a linear layer alone."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return "Coded"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> Coded:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            return args[0] @ (args[1].codes.to(args[0].dtype) * args[1].scale).t()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):  # of the same shape
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{function} of Coded")


def test_models_that_pytorch_cannot_save_are_named_with_what_helps(tmp_path: Path) -> None:
    x, plain = torch.randn(2, 32), torch.nn.Linear(32, 16, bias=False)
    codes = Coded(torch.randint(-128, 128, (16, 32), dtype=torch.int8), torch.rand(16, 1))
    coded = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False), torch.nn.ReLU()).requires_grad_(False).eval()
    coded[0].weight = torch.nn.Parameter(codes, requires_grad=False)
    call = torch.compile(coded, backend="ark", options={"choose": "ark", "fallback": False})
    torch.testing.assert_close(call(x), coded(x))
    normed = torch.nn.utils.parametrizations.weight_norm(plain).eval()
    for model, why in ((coded, r"a Coded \(0.weight\): keep codes"), (normed, "parametrized modules")):
        with pytest.raises(CompileError, match=f"export: PyTorch does not save programs of .*{why}"):
            ark_torch.export(model, (x,), tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(UnsupportedGraph, match="sizes are symbolic"):
        ark_torch.export(lambda x: torch.tanh(x)[x > 0] + 1, (torch.ones(3),), tmp_path / "a")
    assert [one.name for one in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"before"


def test_files_that_are_no_programs_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere, with a bit changed anywhere, of other kinds, of other versions. PyTorch reads what is whole."""
    file, bad, x = tmp_path / "program", tmp_path / "bad", torch.linspace(-1, 1, 12)
    ark_torch.export(lambda x: x + 1, (x,), file)  # a single operator
    content = file.read_bytes()
    with file.open("rb") as opened:
        assert torch.equal(torch.compiler.load_compiled_function(opened)(x), x + 1)
    cut = [content[:size] for size in (0, 1, 100, len(content) // 2, len(content) - 300)]
    places = range(0, len(content) - 30, len(content) // 40)
    changed = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
    torch.save({"a": x}, tmp_path / "tensors")
    others = [b"some text", pickle.dumps({"a": 1}), (tmp_path / "tensors").read_bytes()]
    for one in (*cut, *changed, *others):
        bad.write_bytes(one)
        with pytest.raises(CompileError, match=r"load: .*bad is damaged, or was not written by ark_torch\.export"):
            ark_torch.load(bad)
    there = saved.version()
    monkeypatch.setattr(saved, "version", lambda: "0.0.1 (abc, PyTorch 2.99.0)")
    with pytest.raises(CompileError, match=r"this is 0\.0\.1 \(abc, PyTorch 2\.99\.0\): export it again"):
        ark_torch.load(file)
    monkeypatch.setattr(saved, "version", lambda: there)
    assert torch.equal(ark_torch.load(file)(x), x + 1)


def test_other_calls_than_the_exported_one_are_refused_in_a_sentence(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 12)
    ark_torch.export(step, (x,), tmp_path / "step")
    run = ark_torch.load(tmp_path / "step")
    for given, why in ((x[:5], "size mismatch"), (x.double(), "dtype mismatch"), (x.repeat(2)[::2], "stride mismatch")):
        with pytest.raises(RuntimeError, match=rf"load: .*step was exported for other arguments.*{why}[^\n]*this call"):
            run(given)
    with pytest.raises(TypeError, match="model is a Tensor, not a module"):
        ark_torch.load(tmp_path / "step", x)  # type: ignore[arg-type]
    torch.testing.assert_close(run(x), step(x))


def test_portable_caches_bring_regions(tmp_path: Path) -> None:
    """torch.compiler.save_cache_artifacts() and load_cache_artifacts()."""
    torch._dynamo.reset()
    x = torch.linspace(-2, 2, 12)
    compiled = torch.compile(step, backend="ark", options={"choose": "ark", "minimum": 1})
    torch.save(compiled(x), tmp_path / "result.pt")
    made = torch.compiler.save_cache_artifacts()
    assert made is not None and made[1].artifacts["ark"]
    (tmp_path / "artifacts").write_bytes(made[0])
    elsewhere(
        """
info = torch.compiler.load_cache_artifacts(open("artifacts", "rb").read())
assert info.artifacts["ark"], info
x = torch.linspace(-2, 2, 12)
compiled = torch.compile(case.step, backend="ark", options={"choose": "ark", "minimum": 1, "fallback": False})
assert torch.equal(compiled(x), torch.load("result.pt"))
""",
        tmp_path,
    )


def test_default_options_save_ark_where_it_is_all_of_the_graph(tmp_path: Path) -> None:
    function = ahead(step, torch.linspace(-1, 1, 12))
    assert "AheadOfTime" in str(type(function._artifacts.compiled_fn.compiled_fn.serialize().compiled_fw.result))  # type: ignore[attr-defined]


def test_what_is_not_saved_names_the_reason_and_the_option_that_helps() -> None:
    def mixed(x: Tensor) -> Tensor:
        return torch.special.i0(x).sin().cos().tanh() + 1

    with pytest.raises(Exception, match=r'aot_compile.*Inductor would run aten.i0.*options={"choose": "inductor"}'):
        ahead(mixed, torch.linspace(-1, 1, 12), choose="ark", minimum=1)


@pytest.mark.nightly  # Inductor compiles for longer than all else here takes
def test_with_inductor_it_is_saved_and_loaded(tmp_path: Path) -> None:
    program = ahead(step, torch.linspace(-1, 1, 12), choose="inductor")
    x = torch.linspace(-2, 2, 12)
    path = tmp_path / "step.pt"
    program.save_compiled_function(str(path))  # type: ignore[attr-defined]
    with path.open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    torch.testing.assert_close(loaded(x), step(x))


@pytest.fixture(scope="module")
def region() -> saved.SavedRegion:
    with torch.no_grad():
        function = ahead(step, torch.linspace(-1, 1, 12), choose="ark")
    [found] = function._artifacts.compiled_fn.compiled_fn.serialize().compiled_fw.result.regions  # type: ignore[attr-defined]
    assert isinstance(found, saved.SavedRegion)
    return found


def test_a_region_of_another_machine_or_version_is_refused(region: saved.SavedRegion) -> None:
    x = torch.linspace(-2, 2, 12)
    torch.testing.assert_close(region.load()([x])[0], step(x))
    refused = {
        "which this one lacks": {"machine": frozenset({"avx4096"})},
        "save the program again": {"version": "0.0.1"},
        "planned otherwise": {"kernel": {**region.kernel, "source": region.kernel["source"] + " "}},
        "does not run on cpu": {"kernel": {**region.kernel, "target": {**region.kernel["target"], "name": "sm_90a"}}},
        "its saved kernel is damaged": {"kernel": {**region.kernel, "binary": region.kernel["binary"][:-1] + b"x"}},
        "cannot load a compiled plan": {
            "kernel": {**region.kernel, "binary": b"no library"},
            "checksum": hashlib.sha256(b"no library").hexdigest(),
        },
    }
    for reason, changes in refused.items():
        with pytest.raises(CompileError, match=reason):
            dataclasses.replace(region, **changes).load()  # type: ignore[arg-type]
