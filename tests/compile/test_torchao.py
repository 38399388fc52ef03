"""Weights that torchao has quantised, as its own tensor subclasses: one region for each model, and values.

These are torchao's configurations that run on a CPU, and what it makes of int4 on a GPU, put together by hand.
test_low_bits.py has more forms of decoding, without torchao.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coded import decoded, in_tiles
from torch import Tensor, nn

torchao = pytest.importorskip(
    "torchao.quantization", reason="torchao is not installed (make setup does): its tensor subclasses are not tested"
)

pytestmark = pytest.mark.timeout(200)
DEPTH, INNER, WIDTH = 256, 192, 128


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DEPTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.down(F.silu(self.up(x)))
        return h


def packed() -> Any:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2"):
        pytest.skip("PyTorch packs in another order there")
    return pytest.importorskip("torchao.prototype.quantization.int4").PrototypeInt4WeightOnlyConfig(group_size=64)


PerGroup = torchao.PerGroup
Form = tuple[Callable[[], Any], str]
# What is given to quantize_, and ark's name of the weights.
FORMS: dict[str, Form] = {
    "int8": (torchao.Int8WeightOnlyConfig, "int8 weights, scale a channel"),
    "int8 tensor": (
        lambda: torchao.Int8WeightOnlyConfig(granularity=torchao.PerTensor()),
        "int8 weights, scale a channel",  # torchao repeats the scale
    ),
    "float8": (torchao.Float8WeightOnlyConfig, "float8 weights, scale a channel"),
    "float8 tensor": (
        lambda: torchao.Float8WeightOnlyConfig(granularity=torchao.PerTensor()),
        "float8 weights, scale a tensor",
    ),
    "intx int8": (torchao.IntxWeightOnlyConfig, "int8 weights, scale a channel, and a zero"),
    "intx int4": (
        lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "int8 weights, scale a group of 32, and a zero",
    ),
    "intx int4 zeros": (
        lambda: torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=torchao.MappingType.ASYMMETRIC
        ),
        "int8 weights, scale a group of 32, and a zero",
    ),
    "int4 packed for CPUs": (packed, "int4 weights, scale a group of 64, and a zero"),
}


@pytest.fixture(autouse=True)
def settings_of_inductor() -> Iterator[None]:
    """quantize_ changes them for the whole process."""
    from torch._inductor import config

    before = config.save_config()
    yield
    config.load_config(before)


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).abs().max())


@pytest.mark.by_day("int8-dtype0", "float8-dtype1", "intx int4-dtype0", "int4 packed for CPUs-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMS)
def test_what_quantize_makes(name: str, dtype: torch.dtype, compiled: Any) -> None:
    """For one and for many rows. Errors are at most about those of torchao in eager PyTorch."""
    configuration, told = FORMS[name]
    model = Net().to(dtype).eval()
    torchao.quantize_(model, configuration())
    assert type(model.up.weight).__module__.startswith("torchao."), "quantize_ has left the weight as it was"
    up, down = decoded(model.up.weight), decoded(model.down.weight)
    for rows in (1, 5, 35):
        x = torch.randn(rows, DEPTH).to(dtype)
        torch._dynamo.reset()
        ours, report = compiled(model, dynamic=False, fallback=False, minimum=1)
        got = ours(x)
        right = F.linear(F.silu(F.linear(x.double(), up, model.up.bias.double())), down)
        places = 4 if dtype == torch.float32 else 1  # in float32 the order of a sum matters that much
        place = torch.finfo(dtype).eps * float(right.abs().max())
        assert got.dtype == dtype and torch.equal(got, ours(x))
        assert error(got, right) <= 1.5 * error(model(x), right) + places * place, rows
        assert len(report.regions) == 1 and not report.fallbacks
        assert report.graphs[0].weights == [f"2 times: product of {told}"]


@pytest.mark.parametrize("depth", [1024, 1280])
def test_int4_in_tiles_as_made_on_a_gpu(depth: int, compiled: Any) -> None:
    """What int4_packing_format="tile_packed_to_4d" makes. torchao pads the depth to a multiple of 1024."""
    padded = -(-depth // 1024) * 1024
    codes = torch.randint(0, 16, (WIDTH, padded))
    scales = torch.rand(padded // 128, WIDTH, 2).bfloat16()
    packed = torchao.Int4TilePackedTo4dTensor(in_tiles(codes, 8), scales, [1, 128], torch.Size((WIDTH, depth)))
    layer = nn.Linear(depth, WIDTH, bias=False)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    ours, report = compiled(nn.Sequential(layer, nn.SiLU()), dynamic=False, fallback=False, minimum=1)
    scale, zero = (scales[..., i].double().repeat_interleave(128, 0)[:depth] for i in range(2))
    for rows in (1, 5):
        x = torch.randn(rows, depth).bfloat16()
        right = F.silu(x.double() @ ((codes[:, :depth].t() - 8) * scale + zero))
        assert error(ours(x), right) <= 2**-7 * float(right.abs().max())
    assert report.graphs[0].weights == ["product of int4 weights, scale a group of 128, and a zero"]
    names = [stage["name"] for stage in json.loads(report.regions[0].region.json())["stages"]]
    assert ("fill" in names) == (depth != padded), "padding by nothing takes no copy"
