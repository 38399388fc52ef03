"""Decoding of a batch of sequences on a GPU, whose attention may append to the caches itself, compared with float64."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from compile_support import DEVICE, compiled, on_one_kernel
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent / "compile"))

import models

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_compiler")]

# Heads of 64 and 128 columns. With eight key heads 16 sequences have a head for each worker, whose tasks append.
SIZES = {
    "small": models.Config(512, 2, 8, 2, 512, 100, 600),
    "long heads": models.Config(1024, 2, 8, 4, 512, 100, 600),
    "many heads": models.Config(2048, 1, 32, 8, 512, 100, 600),
}


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype, close", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("batch", [2, 4, 16, 32])
@pytest.mark.parametrize("size", SIZES)
def test_decoding(size: str, batch: int, dtype: torch.dtype, close: float) -> None:
    """Every sequence has its own tokens and caches. Only the step's position of a cache changes."""
    model = models.Llama(SIZES[size], batch, dtype).eval().to(DEVICE)
    for cache in model.caches():
        cache.normal_()
    double = copy.deepcopy(model).double()
    call, report = compiled(model, fallback=False)
    for position in (0, 1, 255, 256, 300, 301, 302, 511, 512, 599):
        ids, pos = torch.randint(0, 100, (batch, 1), device=DEVICE), torch.tensor([position], device=DEVICE)
        before = [cache.clone() for cache in model.caches()]
        got, wanted = call(ids, pos).clone(), double(ids, pos)
        for one in range(batch):
            assert distance(got[one], wanted[one]) < close, (position, one)
        for cache, right, old in zip(model.caches(), double.caches(), before, strict=True):
            for one in range(batch):
                assert distance(cache[one, :, position], right[one, :, position]) < close, (position, one)
            old[:, :, position] = cache[:, :, position]
            assert torch.equal(cache, old), position
        assert all(torch.equal(call(ids, pos), got) for _ in range(10)), position
    on_one_kernel(report)
    if size == "many heads" and batch == 16:
        plan = report.graphs[0].pieces[0].region.json()
        assert '"rotary"' not in plan and '"index_copy_"' not in plan, "attention's tasks do not append themselves"


@pytest.mark.parametrize("batch", [2, 20])
def test_decoding_of_padded_sequences(batch: int) -> None:
    """Each sequence has a mask of its own."""
    model = models.Llama(SIZES["small"], batch, torch.bfloat16).eval().to(DEVICE)
    for cache in model.caches():
        cache.normal_()
    double = copy.deepcopy(model).double()
    call, report = compiled(model, fallback=False)
    first = torch.randint(0, 250, (batch,), device=DEVICE)
    for position in (250, 255, 300, 599):
        ids, pos = torch.randint(0, 100, (batch, 1), device=DEVICE), torch.tensor([position], device=DEVICE)
        got, wanted = call(ids, pos, first).clone(), double(ids, pos, first)
        for one in range(batch):
            assert distance(got[one], wanted[one]) < 2e-2, (position, one)
    on_one_kernel(report)
