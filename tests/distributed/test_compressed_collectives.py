"""Compressed collectives on CPU ranks, compared bit for bit with an oracle in plain torch (support/quantizer.py).

They run over shared memory and over Gloo. Results and residuals of all ranks are compared. Further tests: refused
input, the errors of ranks that disagree, and a peer that dies.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import quantizer
from support.failures import check_message
from support.grid import CARRIERS, each_world, run
from support.groups import ark_only, total
from support.launcher import Job, run_ranks
from support.quantizer import Segment, Settings
from support.rank import Rank
from torch import Tensor

from ark_torch.distributed import compressed_all_reduce

pytestmark = [ark_only]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Odd sizes, empty segments, one-element buckets, a single bucket, exact segments, all widths.
LAYOUTS: dict[str, list[Segment]] = {
    "one bucket": [Segment(512)],
    "one element": [Segment(1, 3, 128)],
    "nothing": [Segment(0)],
    "no segment": [],
    "odd": [Segment(1003, 5, 160), Segment(0, 2, 128), Segment(129, 1, 128), Segment(7, 8, 4096)],
    "exact": [Segment(300, 0, 128), Segment(2049, 4, 512), Segment(1, 0, 128), Segment(33, 7, 128)],
    "all widths": [Segment(257 + bits, bits, 128) for bits in range(1, 9)],
    "fp8": [Segment(700, 8, 256), Segment(65, 0, 128), Segment(513, 8, 512)],
}


def _arguments(segments: list[Segment], settings: Settings) -> tuple[Any, ...]:
    return (
        [s.numel for s in segments],
        [s.bits for s in segments],
        [s.bucket for s in segments],
        settings.format,
        settings.rounding,
        settings.seed,
    )


def _drawn(count: int, dtype: torch.dtype, seed: int, world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, generator=generator) * 3).to(dtype) for _ in range(world)]


def _same(got: Tensor, expected: Tensor, what: str) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


# Rounding, op, whether with a residual. Every pair occurs once, two combinations per layout. At night all.
SPREAD = (
    ("nearest", "sum", False),
    ("stochastic", "avg", True),
    ("stochastic", "sum", True),
    ("nearest", "avg", False),
)
ALL = tuple(product(("nearest", "stochastic"), ("sum", "avg"), (False, True)))


def _check_all(me: int, world: int, group: str, cases: Any, dtypes: Any) -> None:
    operators = torch.ops.ark
    number = 0
    for seed, (name, segments) in enumerate(LAYOUTS.items()):
        count = sum(s.numel for s in segments)
        for rounding, op, fed in cases[seed % 2 :: 2] if cases == SPREAD else cases:
            dtype, number = dtypes[number % len(dtypes)], number + 1
            settings = Settings("fp8" if name == "fp8" else "uniform", rounding, (11 << 32) + seed)
            what = f"{name}, {dtype}, {settings}, {op}, {'fed' if fed else 'not fed'}"
            arguments = _arguments(segments, settings)

            def fed_with(elements: int, seed: int = seed, fed: bool = fed) -> tuple[Any, Any]:
                owed = [x / 7 for x in _drawn(elements, torch.float32, seed + 100, world)] if fed else None
                return owed, owed[me].clone() if owed else None

            inputs = _drawn(count, dtype, seed, world)
            (owed, residual), kept = fed_with(count), inputs[me].clone()
            got = operators.compressed_all_reduce(inputs[me], residual, *arguments, op, group)
            _same(inputs[me], kept, f"{what}: the input")
            of = quantizer.owners(segments, dtype.itemsize, world)
            _same(got, quantizer.all_reduce(inputs, owed, segments, settings, op, of), what)
            if owed:
                _same(residual, owed[me], f"{what}: residual")

            inputs = _drawn(count * world, dtype, seed, world)
            owed, residual = fed_with(count * world)
            got = operators.compressed_reduce_scatter(inputs[me], residual, *arguments, op, group)
            expected = quantizer.reduce_scatter(inputs, owed, segments, settings, op)
            _same(got, expected[me * count : (me + 1) * count], f"reduce_scatter, {what}")
            if owed:
                _same(residual, owed[me], f"reduce_scatter, {what}: residual")

            inputs = _drawn(count, dtype, seed, world)
            got = operators.compressed_all_gather(inputs[me], *arguments, group)
            _same(got, quantizer.all_gather(inputs, segments, settings), f"all_gather, {what}")


def _values(rank: Rank, cases: Any, dtypes: Any) -> None:
    torch.set_num_threads(1)
    group = rank.init()
    _check_all(rank.rank, rank.world_size, group.group_name, cases, dtypes)


@pytest.mark.by_day("3", "2-carried")
@each_world
def test_values(world: int, carrier: str) -> None:
    run(_values, world, carrier, SPREAD, DTYPES)


@pytest.mark.nightly
@each_world
def test_values_of_every_dtype(world: int, carrier: str) -> None:
    for dtype in DTYPES:
        run(_values, world, carrier, ALL, (dtype,))


def _threads(rank: Rank) -> None:
    """Many buckets, which threads share. The number of threads must not change the bits."""
    group = rank.init()
    inputs = _drawn(300_001, torch.bfloat16, 5, rank.world_size)
    arguments = _arguments([Segment(300_001, 4, 128)], Settings("uniform", "stochastic", 3))
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        residual = torch.zeros(300_001)
        results.append(
            torch.ops.ark.compressed_all_reduce(inputs[rank.rank], residual, *arguments, "sum", group.group_name)
        )
        results.append(residual)
    _same(results[0], results[2], "threads")
    _same(results[1], results[3], "threads: residual")


def test_threads_change_no_bit() -> None:
    run_ranks(_threads, 2)


def _subgroups(rank: Rank) -> None:
    torch.set_num_threads(1)
    rank.init()
    me = rank.rank
    pair, rest = dist.new_group([0, 2]), dist.new_group([1])
    mine, members = (pair, [0, 2]) if me in (0, 2) else (rest, [1])
    inputs = _drawn(1000, torch.float32, 9, 3)
    segments, settings = [Segment(1000, 3, 160)], Settings("uniform", "stochastic", 2)
    got = torch.ops.ark.compressed_all_reduce(inputs[me], None, *_arguments(segments, settings), "sum", mine.group_name)
    of = quantizer.owners(segments, 4, len(members))
    _same(got, quantizer.all_reduce([inputs[r] for r in members], None, segments, settings, "sum", of), "subgroup")
    assert total(None, float(me)) == 3.0


def test_subgroups() -> None:
    run_ranks(_subgroups, 3)


def _functional(rank: Rank) -> None:
    torch.set_num_threads(1)
    group = rank.init()
    me, world = rank.rank, rank.world_size
    for shape, bits, format, op in (
        ((3, 5, 70), 8, "uniform", dist.ReduceOp.SUM),
        ((1000,), 4, "uniform", dist.ReduceOp.AVG),
        ((), 8, "uniform", dist.ReduceOp.SUM),
        ((0, 4), 8, "uniform", dist.ReduceOp.SUM),
        ((40, 33), 8, "fp8", dist.ReduceOp.SUM),
    ):
        inputs = [x.view(shape) for x in _drawn(torch.Size(shape).numel(), torch.bfloat16, 3, world)]
        given = inputs[me].mT.contiguous().mT if len(shape) > 1 else inputs[me]  # other strides, same elements
        got = compressed_all_reduce(given, bits=bits, bucket=256, format=format, op=op)
        segments = [Segment(given.numel(), bits, 256)]
        flat = [x.flatten() for x in inputs]
        of = quantizer.owners(segments, 2, world)
        name = "avg" if op == dist.ReduceOp.AVG else "sum"
        expected = quantizer.all_reduce(flat, None, segments, Settings(format), name, of)
        assert got.is_contiguous() and (got.data_ptr() != given.data_ptr() or not got.numel())
        _same(got, expected.view(shape), f"{shape} {bits} {format}")
        _same(compressed_all_reduce(given, bits=bits, bucket=256, format=format, op=op, group=group), got, "the group")
    # A plain all_reduce of the same group stays exact.
    exact = [x.float() for x in _drawn(5000, torch.float32, 8, world)]
    mine = exact[me].clone()
    dist.all_reduce(mine)
    summed = exact[0].clone()
    for other in exact[1:]:
        summed += other
    _same(mine, summed, "all_reduce")


@pytest.mark.by_day("3", "2-carried")
@each_world
def test_functional(world: int, carrier: str) -> None:
    run(_functional, world, carrier)


def _compiled(rank: Rank, backend: str) -> None:
    torch.set_num_threads(1)
    rank.init()

    def step(x: Tensor, w: Tensor) -> Tensor:
        total = compressed_all_reduce(x @ w, bits=4).relu() + 1
        return compressed_all_reduce(total, op=dist.ReduceOp.AVG)

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(rank.rank)
    with torch.no_grad():
        for rows in (3, 8):
            x, w = torch.randn(rows, 16, generator=generator), torch.randn(16, 20, generator=generator)
            _same(compiled(x, w), step(x, w), f"{rows} rows")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled(backend: str) -> None:
    run_ranks(_compiled, 2, backend)


def _fakes(rank: Rank) -> None:
    """Fake tensors predict the correct shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_num_threads(1)
    group = rank.init().group_name
    for numel, bits, bucket in ((0, 4, 128), (1, 3, 128), (129, 5, 128), (1000, 8, 160), (512, 1, 512)):
        x = torch.randn(numel)
        codes = torch.ops.ark.quantize(x, bits, bucket, "uniform", "nearest", 0)
        back = torch.ops.ark.dequantize(codes, numel, torch.float16, bits, bucket, "uniform")
        arguments = _arguments([Segment(numel, bits, bucket)], Settings())
        scattered = torch.ops.ark.compressed_reduce_scatter(
            torch.cat([x] * rank.world_size), None, *arguments, "sum", group
        )
        gathered = torch.ops.ark.compressed_all_gather(x, *arguments, group)
        with FakeTensorMode() as mode:
            y = mode.from_tensor(x)
            fake = torch.ops.ark.quantize(y, bits, bucket, "uniform", "nearest", 0)
            assert (fake.shape, fake.dtype) == (codes.shape, codes.dtype)
            fake = torch.ops.ark.dequantize(fake, numel, torch.float16, bits, bucket, "uniform")
            assert (fake.shape, fake.dtype) == (back.shape, back.dtype)
            fake = torch.ops.ark.compressed_reduce_scatter(
                torch.cat([y] * rank.world_size), None, *arguments, "sum", group
            )
            assert fake.shape == scattered.shape
            assert torch.ops.ark.compressed_all_gather(y, *arguments, group).shape == gathered.shape


def test_fake_kernels() -> None:
    run_ranks(_fakes, 2)


@pytest.mark.parametrize("format", ["uniform", "fp8"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_quantiser_alone(format: str, rounding: str) -> None:
    settings = Settings(format, rounding, 77)
    for dtype, numel, bits in product(DTYPES, (0, 1, 130, 513), (8,) if format == "fp8" else (1, 3, 4, 8)):
        x = _drawn(numel, dtype, numel, 1)[0]
        segment = Segment(numel, bits, 128)
        codes = torch.ops.ark.quantize(x, bits, 128, format, rounding, 77)
        _same(codes, quantizer.records(x, segment, settings), f"{dtype} {numel} {bits}")
        back = torch.ops.ark.dequantize(codes, numel, dtype, bits, 128, format)
        _same(back, quantizer.coded(x.float(), [segment], settings, 0, 0).to(dtype), f"{dtype} {numel} {bits}")


def test_chance_never_passes_the_last_code() -> None:
    """The quotient exceeds the last code by one unit in the last place.

    With so many draws, the greatest chance, 65535 of 65536, occurs several times.
    """
    high = float.fromhex("0x1.0a7d3ep+0")
    x = torch.zeros(64 * 4096)
    x[1::2] = high
    for seed in range(4):
        codes = torch.ops.ark.quantize(x, 8, 4096, "uniform", "stochastic", seed)
        back = torch.ops.ark.dequantize(codes, x.numel(), torch.float32, 8, 4096, "uniform")
        assert back[1::2].min() > 0.99 * high and back[::2].max() == 0


def _not_finite(rank: Rank) -> None:
    """A NaN or an infinity stays one and leaves no residual in its bucket. Other buckets are not affected."""
    torch.set_num_threads(1)
    group = rank.init().group_name
    for bad, (format, bits), dtype in product(
        (torch.nan, torch.inf, -torch.inf), (("uniform", 4), ("fp8", 8)), (torch.float32, torch.bfloat16)
    ):
        x, residual = torch.ones(1000, dtype=dtype), torch.zeros(1000)
        x[:512] = torch.linspace(-1, 1, 512)
        if rank.rank == 1:
            x[300] = bad
        arguments = _arguments([Segment(1000, bits, 256)], Settings(format, "stochastic", 4))
        got = torch.ops.ark.compressed_all_reduce(x, residual, *arguments, "sum", group)
        assert got[256:512].isnan().all() and got[:256].isfinite().all() and (got[512:] == 2).all()
        assert residual.isfinite().all()
        if rank.rank == 1:
            assert (residual[256:512] == 0).all()
        exact = torch.ops.ark.compressed_all_reduce(
            x, None, [1000], [0], [256], format, "nearest", 0, "sum", group
        )  # same position, same kind
        assert torch.equal(exact[300], torch.tensor(bad + 0.2, dtype=dtype)) or exact[300].isnan()
        assert exact.isfinite().sum() == 999


def test_nan_and_infinity_are_never_clipped() -> None:
    run_ranks(_not_finite, 2)


def _feedback(rank: Rank) -> None:
    """With a residual nothing is lost over time: the sums of sent values and residual equal the input."""
    torch.set_num_threads(1)
    group = rank.init().group_name
    world, count, steps = rank.world_size, 3000, 30
    inputs = [x / 3 for x in _drawn(count, torch.float32, 21, world)]
    for op in ("sum", "avg"):
        residual, sent = torch.zeros(count), torch.zeros(count)
        arguments = _arguments([Segment(count, 2, 128)], Settings("uniform", "stochastic", 0))
        for step in range(steps):
            settings = (*arguments[:5], step)
            sent += torch.ops.ark.compressed_all_reduce(inputs[rank.rank], residual, *settings, op, group)
        owed = residual.clone()
        dist.all_reduce(owed)
        parts = 1 if op == "sum" else world
        exact = sum(inputs) * steps
        torch.testing.assert_close(sent * parts + owed, exact, rtol=1e-4, atol=1e-3)
        assert (sent * parts - exact).abs().max() > 0.05  # 2 bits lose something each time


def test_a_residual_loses_nothing_over_time() -> None:
    run_ranks(_feedback, 3)


def _call(**changed: Any) -> Tensor:
    """Calls compressed_all_reduce of 1000 elements with the changed arguments."""
    of: dict[str, Any] = {
        "input": torch.ones(1000),
        "residual": None,
        "numel": [1000],
        "bits": [4],
        "bucket": [512],
        "format": "uniform",
        "rounding": "nearest",
        "seed": 0,
        "op": "sum",
    } | changed
    name = changed.pop("name", "compressed_all_reduce")
    of.pop("name", None)
    group = dist.group.WORLD
    assert group is not None
    result: Tensor = getattr(torch.ops.ark, name)(*of.values(), group.group_name)
    return result


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "bits": ({"bits": [9]}, ValueError, r"bits is 9.*Pass 1 to 8, or 0"),
    "negative bits": ({"bits": [-1]}, ValueError, r"bits is -1"),
    "one of several": ({"numel": [500, 500], "bits": [4, 12], "bucket": [512] * 2}, ValueError, r"bits\[1\] is 12"),
    "fp8": ({"format": "fp8"}, ValueError, r"bits is 4 and format is 'fp8'"),
    "bucket of 100": ({"bucket": [100]}, ValueError, r"bucket is 100.*multiple of 32 from 128 to 4096"),
    "bucket of 96": ({"bucket": [96]}, ValueError, r"bucket is 96"),
    "bucket of 8192": ({"bucket": [8192]}, ValueError, r"bucket is 8192"),
    "integers": ({"input": torch.ones(1000, dtype=torch.int64)}, TypeError, r"input is torch.int64.*all_reduce"),
    "double": ({"input": torch.ones(1000, dtype=torch.float64)}, TypeError, r"input is torch.float64"),
    "strides": ({"input": torch.ones(2000)[::2]}, ValueError, r"input is not contiguous \(stride 2\)"),
    "dimensions": ({"input": torch.ones(10, 100)}, ValueError, r"input has 2 dimensions instead of one"),
    "sum of numel": ({"numel": [999]}, ValueError, r"numel adds up to 999, and input has 1000 elements"),
    "negative numel": ({"numel": [1001, -1], "bits": [4] * 2, "bucket": [512] * 2}, ValueError, r"numel\[1\] is -1"),
    "lengths": ({"bits": [4, 4]}, ValueError, r"numel has 1 segments, bits 2 and bucket 1"),
    "format": ({"format": "int4"}, ValueError, r"format is 'int4'.*'uniform' or 'fp8'"),
    "rounding": ({"rounding": "up"}, ValueError, r"rounding is 'up'"),
    "op": ({"op": "max"}, ValueError, r"op is 'max'.*'sum' or 'avg'"),
    "residual's length": ({"residual": torch.zeros(999)}, ValueError, r"residual has 999 elements, but 1000"),
    "residual's dtype": ({"residual": torch.zeros(1000).half()}, TypeError, r"residual is torch.float16"),
    "residual's shape": ({"residual": torch.zeros(10, 100)}, ValueError, r"residual has 2 dimensions"),
}


def _bad_input(rank: Rank) -> None:
    """One rank's mistake is an error on all ranks, and the group still works."""
    rank.init(timeout=20)
    culprit = rank.rank == 1
    for what, (changed, kind, text) in BAD.items():
        with pytest.raises(kind if culprit else dist.DistBackendError) as caught:
            _call(**(changed if culprit else _other(what)))
        assert "compressed_all_reduce" in str(caught.value) and f"[rank {rank.rank}]" in str(caught.value)
        assert re.search(text if culprit else "rank 1 refused its arguments", str(caught.value)), caught.value
    assert (_call() == 2).all()
    x = torch.ones(1000)
    with pytest.raises(ValueError, match="residual shares memory with input"):
        _call(input=x, residual=x)
    with pytest.raises(ValueError, match="numel adds up to 1000 for each of 2 ranks, and input has 1000 elements"):
        _call(name="compressed_reduce_scatter")
    assert (_call() == 2).all()


def _other(what: str) -> dict[str, Any]:
    """Valid arguments that no earlier call had, because ranks compare only the first call of a kind."""
    numel = 1000 + 8 * (1 + list(BAD).index(what))
    return {"input": torch.ones(numel), "numel": [numel]}


def test_bad_input() -> None:
    run_ranks(_bad_input, 2)


def _bad_call(rank: Rank) -> None:
    rank.init(timeout=20)
    x = torch.ones(10)
    for changed, kind, text in (
        ({"op": dist.ReduceOp.MAX}, ValueError, "op is .*MAX.*SUM or ReduceOp.AVG"),
        ({"tensor": x.clone().requires_grad_()}, ValueError, "tensor requires grad"),
        ({"tensor": x.long()}, TypeError, "input is torch.int64"),
        ({"bits": 0.5}, (TypeError, RuntimeError), "bits|int"),
        ({"group": dist.new_group(backend="gloo")}, ValueError, "the group's backend is not 'ark'"),
    ):
        with pytest.raises(kind, match=text):
            compressed_all_reduce(**({"tensor": x} | changed))
    assert (compressed_all_reduce(x) == 2).all()


def test_bad_calls_of_the_function() -> None:
    run_ranks(_bad_call, 2)


def test_bad_input_of_the_quantiser() -> None:
    x, operators = torch.ones(300), torch.ops.ark
    codes = operators.quantize(x, 4, 128, "uniform", "nearest", 0)
    for call, kind, text in (
        (lambda: operators.quantize(x, 0, 128, "uniform", "nearest", 0), ValueError, "bits is 0.*Pass 1 to 8"),
        (lambda: operators.quantize(x.int(), 4, 128, "uniform", "nearest", 0), TypeError, "input is torch.int32"),
        (lambda: operators.quantize(x, 4, 64, "uniform", "nearest", 0), ValueError, "bucket is 64"),
        (lambda: operators.dequantize(codes.float(), 300, x.dtype, 4, 128, "uniform"), TypeError, "codes is"),
        (lambda: operators.dequantize(codes, 301, x.dtype, 4, 128, "fp8"), ValueError, "bits is 4 and format is"),
        (lambda: operators.dequantize(codes, 500, x.dtype, 4, 128, "uniform"), ValueError, "codes has .* elements"),
        (lambda: operators.dequantize(codes, -1, x.dtype, 4, 128, "uniform"), ValueError, "numel is -1"),
    ):
        with pytest.raises(kind, match=text):
            call()


def _disagree(rank: Rank) -> None:
    """Ranks with different settings get an error with both values, at the first call that differs."""
    rank.init(timeout=20)
    odd = rank.rank == 1
    several = {"numel": [400, 600], "bucket": [512] * 2}
    for what, changed in {
        "bits .* (8, 4)": {"bits": [8 if odd else 4]},
        "bucket .* (256, 512)": {"bucket": [256 if odd else 512]},
        "largest of bits .* (8, 4)": several | {"bits": [4, 8 if odd else 4]},
        "list of segments": several | {"bits": [4, 8] if odd else [8, 4]},
        "number of segments .* (2, 1)": (several | {"bits": [4, 4]}) if odd else {},
        "number of elements .* (999, 1000)": {"input": torch.ones(999), "numel": [999]} if odd else {},
        "dtype": {"input": torch.ones(1000, dtype=torch.float16 if odd else torch.float32)},
        "format (0: uniform, 1: fp8) .* (1, 0)": {"format": "fp8" if odd else "uniform", "bits": [8]},
        "rounding .* (1, 0)": {"rounding": "stochastic" if odd else "nearest"},
        "op (0: sum, 1: avg) .* (1, 0)": {"op": "avg" if odd else "sum"},
        "operator": {"name": "compressed_all_gather" if odd else "compressed_all_reduce"},
    }.items():
        with pytest.raises(dist.DistBackendError) as caught:
            if changed.get("name") == "compressed_all_gather":
                torch.ops.ark.compressed_all_gather(
                    torch.ones(1000), [1000], [4], [512], "uniform", "nearest", 0, dist.group.WORLD.group_name
                )
            else:
                _call(**changed)
        pattern = re.escape(what).replace(r"\.\*", ".*")
        assert re.search(f"rank 1 has another {pattern}", str(caught.value)), (what, caught.value)
    assert (_call(seed=rank.rank) == 2).all()  # seeds may differ


def test_ranks_that_disagree() -> None:
    run_ranks(_disagree, 2)


def _killed(rank: Rank) -> None:
    rank.init(timeout=60)
    x, residual = torch.ones(200_000), torch.zeros(200_000)
    arguments = _arguments([Segment(200_000)], Settings("uniform", "stochastic"))
    group = dist.group.WORLD.group_name
    torch.ops.ark.compressed_all_reduce(x, residual, *arguments, "sum", group)
    rank.report("running")
    while True:
        torch.ops.ark.compressed_all_reduce(x, residual, *arguments, "sum", group)


@pytest.mark.parametrize("carrier", ["shm", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_a_killed_peer(carrier: str) -> None:
    with Job(_killed, 3, env=CARRIERS[carrier]) as job:
        job.wait_all("running")
        job.kill(2)
        for outcome in job.wait_outcomes([0, 1], timeout=30):
            check_message(outcome, 2 if carrier == "shm" else None, "(all_to_all_single|all_gather\\w*)")
        job.finish(10, [0, 1])
