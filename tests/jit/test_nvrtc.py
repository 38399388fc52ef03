"""The real CUDA compiler on a machine without a GPU: every kernel for every architecture, the cache, errors.

`pip install .[dev]` installs NVRTC. Without it (on processors other than x86-64) there is nothing to test.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from ark_torch import _C, _jit, env
from ark_torch.tools import compile_kernels
from ark_torch.tools.compile_kernels import Result

ARCHITECTURES = list(compile_kernels.ARCHITECTURES)
CORES = len(os.sched_getaffinity(0))


def installed(package: str) -> bool:
    return any(package == distribution.name for distribution in importlib.metadata.distributions())


pytestmark = pytest.mark.skipif(not installed("nvidia-cuda-nvrtc"), reason="nvidia-cuda-nvrtc is not installed")
HOPPER = "sm_90a"

SMALL = """
struct Params { float* values; };
extern "C" __global__ void twice(const __grid_constant__ Params p) { p.values[threadIdx.x] *= 2; }
"""


@pytest.fixture(autouse=True)
def configured(tmp_path: Path) -> None:
    _jit.configure(env.read({"ARK_CACHE": str(tmp_path / "kernels")}))


def check(results: Iterable[Result]) -> None:
    compiled = 0
    for result in results:
        what = f"{result.job.name} for {result.job.arch}"
        assert not result.error, f"{what}: {result.error}"
        assert result.cubin[:4] == b"\x7fELF", f"{what} is no cubin"
        assert result.kernels and all(0 < kernel["registers"] <= 255 for kernel in result.kernels), what
        compiled += 1
    assert compiled > 0


@pytest.mark.changed("ark_torch/kernels/*", "csrc/*stub*")
@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch == HOPPER else pytest.mark.nightly) for arch in ARCHITECTURES]
)
def test_each_kind_of_kernel_compiles(arch: str) -> None:
    """`make test-kernels` compiles each instantiation."""
    check(compile_kernels.compile_all(compile_kernels.jobs_of([arch]), CORES))


@pytest.mark.changed("ark_torch/kernels/*", "csrc/jit/*")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_products_keep_their_sums_in_registers(every: bool) -> None:
    """A thread that multiplies 64 rows holds up to 128 sums, none of which may spill to memory."""
    found = 0
    for job in compile_kernels.jobs_of([HOPPER], "^(matmul|moe_product)_", every):
        result = compile_kernels.compile_one(job)
        [kernel] = result.kernels
        name = next(name for name in ("matmul", "moe_product") if job.name.startswith(name))
        assert (kernel["name"], kernel["spilled"], kernel["stack"]) == (name, 0, 0), job.name
        assert kernel["registers"] > 32, f"{job.name} is compiled for Hopper, and has no instructions"
        found += 1
    assert found == (48 + 72 if every else 5 + 3)


@pytest.mark.changed("ark_torch/kernels/*", "csrc/jit/*")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_rows_of_experts_stay_out_of_memory(every: bool) -> None:
    jobs = compile_kernels.jobs_of([HOPPER], "^moe_(dispatch|rows)_", every)
    assert len(jobs) == (18 if every else 9)
    for job in jobs:
        for kernel in compile_kernels.compile_one(job).kernels:
            assert (kernel["spilled"], kernel["stack"]) == (0, 0), (job.name, kernel["name"])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_codes_stay_in_registers(every: bool) -> None:
    jobs = compile_kernels.jobs_of([HOPPER], "^compressed_", every)
    assert len(jobs) == (300 if every else 4)
    for job in jobs:
        [kernel] = compile_kernels.compile_one(job).kernels
        assert job.name.startswith(kernel["name"].removesuffix("_fed")[:10])
        # Calls of functions that report a lost peer may keep some words on the stack.
        assert kernel["spilled"] <= 64 and kernel["registers"] <= 128, (job.name, kernel)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_rows_are_added_in_registers(every: bool) -> None:
    """Gradients of embedding rows. Division (mode "mean", and single elements) is a function that needs some words."""
    found = 0
    for job in compile_kernels.jobs_of([HOPPER], "^embedding_gradient", every):
        kernels = {kernel["name"]: kernel for kernel in compile_kernels.compile_one(job).kernels}
        assert kernels.keys() == {"send_gradient", "name_rows", "sum_rows", "sum_crowded_rows"}, job.name
        for name, kernel in kernels.items():
            assert kernel["registers"] <= 80, f"{job.name}, {name}: three blocks are to fit a multiprocessor"
            assert kernel["spilled"] <= (72 if re.search("_mean_|_any$", job.name) else 0), f"{job.name}, {name}"
        found += 1
    assert found == (60 if every else 6)


@pytest.mark.by_day("sm_90a")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sample_of_the_others_compiles(arch: str) -> None:
    kinds = {job.text for job in compile_kernels.jobs_of([arch])}
    others = [job for job in compile_kernels.jobs_of([arch], every=True) if job.text not in kinds]
    random = Random(int(os.environ.get("ARK_TEST_SEED", "1")))
    check(compile_kernels.compile_all(random.sample(others, 4), CORES))


@pytest.mark.quick
@pytest.mark.parametrize("sizes", [[], list(compile_kernels.GROUP_SIZES)])
def test_the_lists_name_each_kernel_once(sizes: list[int]) -> None:
    stubs = _C._kernel_stubs(sizes)
    names = [name for name, _, _ in stubs]
    assert "probe" in names and len(names) == len(set(names))
    assert len(stubs) == len({text for _, text, _ in stubs})


@pytest.mark.quick
def test_the_kinds_are_among_all() -> None:
    """A kernel that only one of the two lists names is either never checked or never shipped."""
    every = {(text, oldest) for _, text, oldest in _C._kernel_stubs(list(compile_kernels.GROUP_SIZES))}
    missing = [name for name, text, oldest in _C._kernel_stubs() if (text, oldest) not in every]
    assert missing == [], "every_stub() of csrc/collectives/cuda/stubs.cpp does not have them"


@pytest.mark.quick
def test_resources_are_those_of_the_kernel() -> None:
    spilling = """
    struct Params { float* values; int n; };
    extern "C" __global__ void __launch_bounds__(1024) many(const __grid_constant__ Params p) {
      float kept[200];
      for (int i = 0; i < 200; i++) kept[i] = p.values[i * p.n];
      __syncthreads();
      for (int i = 0; i < 200; i++) p.values[i] = kept[199 - i];
    }"""
    _, [many] = _C._compile_kernel(spilling, "sm_80")
    assert many["name"] == "many" and many["registers"] <= 64, many
    assert many["spilled"] + many["stack"] > 0, "200 floats do not fit 64 registers"
    _, [small] = _C._compile_kernel(SMALL, "sm_80")
    assert (small["name"], small["spilled"], small["stack"]) == ("twice", 0, 0)


@pytest.mark.quick
def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(RuntimeError, match=r"does not compile for sm_80 .*identifier \"nonsense\" is undefined"):
        _C._compile_kernel("__device__ int x = nonsense;", "sm_80")
    with pytest.raises(RuntimeError, match=r"cuda/no_such\.cuh"):
        _C._compile_kernel('#include "cuda/no_such.cuh"', "sm_80")
    for arch in ("sm_35", "sm_999", "90", "", "sm_90; rm -rf"):
        with pytest.raises(RuntimeError, match=r"does not know the architecture|does not compile"):
            _C._compile_kernel(SMALL, arch)
    long = "\n".join(f"int a{i} = nonsense{i};" for i in range(500))
    with pytest.raises(RuntimeError) as caught:
        _C._compile_kernel(long, "sm_80")
    assert len(str(caught.value)) < 4000, "the log is cut"


@pytest.mark.quick
def test_a_library_that_is_none_is_told_with_the_remedy(tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_text("no library")
    _jit.configure(env.read({"ARK_NVRTC": str(broken)}))
    with pytest.raises(RuntimeError, match="no NVRTC") as caught:
        _C._nvrtc()
    assert str(broken) in str(caught.value) and "ARK_NVRTC" in str(caught.value)


IN_A_PROCESS = """
import json, sys
from ark_torch import _C, _jit

def opened():  # libraries of that name; a CUDA build of PyTorch opens its own
    return {line.split()[-1] for line in open("/proc/self/maps") if "libnvrtc" in line}

before = opened()
_jit.configure()
cubin, _ = _C._compile_kernel(sys.argv[1], "sm_90a", cached=True)
print(json.dumps({"bytes": len(cubin), "opened": opened() != before}))
"""


def in_a_process(stub: str, cache: Path) -> dict[str, object]:
    variables = {name: text for name, text in os.environ.items() if not name.startswith("ARK_")}
    run = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, stub],
        env={**variables, "ARK_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, object] = json.loads(run.stdout)
    return result


@pytest.mark.nightly
def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = in_a_process(SMALL, cache)
    assert first["opened"] is True
    [cubin] = cache.glob("*.cubin")
    assert cubin.stat().st_size == first["bytes"]
    meta = json.loads(cubin.with_suffix("").with_suffix(".meta.json").read_text())
    assert meta["arch"] == "sm_90a" and meta["kernels"][0]["name"] == "twice"
    assert cubin.with_suffix(".cu").read_text() == SMALL
    again = in_a_process(SMALL, cache)
    assert again == {"bytes": first["bytes"], "opened": False}, "NVRTC is not even opened"
    cubin.write_bytes(cubin.read_bytes()[:-1])
    assert in_a_process(SMALL, cache) == first, "a cubin cut short is compiled again"


@pytest.mark.quick
def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert compile_kernels.main(["--arch", "sm_80", "sm_90a", "--only", "^probe$", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["probe.cu", "probe.sm_80.cubin", "probe.sm_90a.cubin"]
    text = capsys.readouterr().out
    assert "NVRTC " in text and "sm_90a" in text and "registers" in text
    monkeypatch.setattr(_C, "_kernel_stubs", lambda sizes: [("bad", "nonsense", 80), ("new", "nonsense", 90)])
    assert compile_kernels.main(["--arch", "sm_80"]) == 1
    text = capsys.readouterr().out
    assert text.count("FAILED") == 1, "a kernel is not compiled for what it does not run on"
    with pytest.raises(SystemExit) as stopped:
        compile_kernels.main(["--arch", "hopper"])
    assert stopped.value.code == 2
    monkeypatch.setenv("ARK_NVRTC", str(out / "probe.cu"))
    assert compile_kernels.main([]) == 2
    assert "no NVRTC" in capsys.readouterr().err
