"""NaN and Inf in compressed results: the index that operators note, and how a hook tells the layer once."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
from support.compression import Heard
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor

from ark_torch.distributed.compression import watch
from ark_torch.distributed.compression.layers import Layer

pytestmark = [ark_only]

LAYERS = [Layer("a", [4], None), Layer("nothing", [0, 3], None), Layer("b", [2, 3], None)]
NUMELS = [4, 0, 6]


def _word() -> Tensor:
    return torch.full((1,), watch.NOTHING)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> watch.Watch:
    """Slots in pageable memory, written by the test instead of a kernel."""
    monkeypatch.setattr(watch, "_pinned_word", _word)
    return watch.Watch()


def test_an_element_belongs_to_its_layer_and_is_taken_once() -> None:
    slot = watch.Slot(torch.zeros(1, dtype=torch.int64), LAYERS, NUMELS)
    assert slot.take() is None, "a slot starts empty"
    for index, name in ((0, "a"), (3, "a"), (4, "b"), (9, "b")):
        slot.word[0] = index
        layer = slot.take()
        assert layer is not None and layer.name == name, index
        assert slot.take() is None and slot.word.item() == watch.NOTHING


def test_a_layer_is_told_once(watched: watch.Watch) -> None:
    heard = Heard()
    slot = watched.slot(LAYERS, NUMELS)
    watched.look(3)
    assert not heard.lines
    for index in (7, 4, 9):
        slot.word[0] = index
        watched.look(3)
    assert len(heard.lines) == 1, heard.lines
    assert "[rank 3] NaN or Inf in the gradient of an earlier step of b [2, 3]" in heard.lines[0]
    slot.word[0] = 2
    watched.look(3)
    assert len(heard.of("of a [4]")) == 1 and len(heard.lines) == 2


def test_slots_of_several_buckets(watched: watch.Watch) -> None:
    """A slot stays with its layers as long as these have the same shares; one can be looked at alone."""
    heard = Heard()
    first, second = watched.slot(LAYERS[:1], [4]), watched.slot(LAYERS[2:], [6])
    assert watched.slot(LAYERS[:1], [4]) is first and watched.slot(LAYERS[2:], [3]) is not second
    second = watched.slot(LAYERS[2:], [3])
    first.word[0] = second.word[0] = 0
    watched.look(0, second)
    assert len(heard.lines) == 1 and heard.of("of b [2, 3]")
    watched.look(0)
    assert len(heard.lines) == 2 and heard.of("of a [4]")


BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def _noted(rank: Rank) -> None:
    """In every segment, exact ones included, and wherever ranks' parts are cut."""
    torch.set_num_threads(1)
    group = rank.init().group_name
    numel, bits, bucket = [300, 2049, 33, 1000], [0, 4, 0, 8], [128, 512, 128, 256]
    total = sum(numel)
    for (what, bad), place, name, dtype in product(
        BAD.items(),
        (0, 299, 300, 1500, 2349, total - 1),
        ("compressed_all_reduce", "compressed_reduce_scatter"),
        (torch.float32, torch.float16),
    ):
        rows = rank.world_size if name == "compressed_reduce_scatter" else 1
        x = torch.randn(rows * total, generator=torch.Generator().manual_seed(place)).to(dtype)
        if rank.rank == 1:
            x.view(rows, total)[0, place] = bad  # a reduce_scatter gives row 0 to rank 0
        word = _word()
        arguments = (numel, bits, bucket, "uniform", "nearest", 0, "avg", group)
        result = getattr(torch.ops.ark, name)(x, torch.zeros(rows * total), *arguments, nonfinite=word)
        bad_ones = (~result.isfinite()).nonzero()
        assert (len(bad_ones) > 0) == (rows == 1 or rank.rank == 0), (what, place, name)
        assert word.item() == (bad_ones[0].item() if len(bad_ones) else watch.NOTHING), (what, place, name, dtype)


def _kept(rank: Rank) -> None:
    """Only a smaller index replaces what a slot holds, and finite results leave it alone."""
    torch.set_num_threads(1)
    group = rank.init().group_name

    def call(x: Tensor, word: Tensor, bits: int = 0) -> Tensor:
        arguments = ([x.numel()], [bits], [128], "uniform", "nearest", 0, "sum", group)
        return torch.ops.ark.compressed_all_reduce(x, None, *arguments, nonfinite=word)

    x, word = torch.ones(1000), _word()
    call(x, word, 4)
    assert word.item() == watch.NOTHING
    for place, noted in ((700, 700), (900, 700), (20, 20)):
        x.fill_(1.0)[place] = torch.nan
        call(x, word)
        assert word.item() == noted
    # Finite numbers whose sum float16 does not hold.
    large, word = torch.full((64,), 1.0, dtype=torch.float16), _word()
    large[40] = 60000.0
    assert call(large, word)[40].isinf() and word.item() == 40


def test_operators_note_the_first_nan_or_infinity() -> None:
    run_ranks(_noted, 2)


def test_a_slot_holds_the_smallest_index() -> None:
    run_ranks(_kept, 2)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "dtype": (torch.zeros(1, dtype=torch.int32), TypeError, "nonfinite is torch.int32.*Pass int64"),
    "elements": (torch.zeros(2, dtype=torch.int64), ValueError, "nonfinite has 2 elements, but 1"),
    "dimensions": (torch.zeros((), dtype=torch.int64), ValueError, "nonfinite has 0 dimensions"),
}


def _refused(rank: Rank) -> None:
    group = rank.init().group_name
    for word, kind, text in REFUSED.values():
        with pytest.raises(kind) as caught:
            torch.ops.ark.compressed_all_reduce(
                torch.ones(256), None, [256], [4], [128], "uniform", "nearest", 0, "sum", group, nonfinite=word
            )
        assert re.search(text, str(caught.value)) and "[rank 0] compressed_all_reduce" in str(caught.value)


def test_slots_of_another_kind_are_refused() -> None:
    run_ranks(_refused, 1)


def _schema(rank: Rank) -> None:
    """Operators write what their schema says: residual and slot."""
    group = rank.init().group_name
    x = torch.ones(256)
    x[9] = torch.nan
    for operator in (torch.ops.ark.compressed_all_reduce.default, torch.ops.ark.compressed_reduce_scatter.default):
        arguments = (x, torch.zeros(256), [256], [4], [128], "uniform", "nearest", 0, "sum", group)
        torch.library.opcheck(
            operator, arguments, {"nonfinite": _word()}, test_utils=("test_schema", "test_faketensor")
        )


def test_schema() -> None:
    run_ranks(_schema, 1)
