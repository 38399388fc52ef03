"""What fully_shard gathers lies in slots of registered memory: few of them, given again only when nobody holds them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from support import training as small
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor

from ark_torch.distributed.compression.fsdp2 import parameter_groups
from ark_torch.train.gathered import MOST, InPlace, Slots

pytestmark = [ark_only]


class _OnHost(Slots):
    """Without a GPU: ordinary memory stands in for registered memory."""

    every: ClassVar[list[_OnHost]] = []
    refuses = False

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.given = self.ended = 0
        self.every.append(self)

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        taken = super().take(count, dtype, device)
        self.given += taken is not None
        return taken

    def _is_wanted(self, size: int, device: torch.device) -> bool:
        return size >= 1024

    def _stream(self, device: torch.device) -> int:
        return 0

    def _registered(self, size: int, device: torch.device) -> Tensor | None:
        return None if self.refuses else torch.full((size,), 255, dtype=torch.uint8)

    def _deregister(self, made: Tensor) -> None:
        self.ended += 1


@pytest.mark.quick
def test_a_slot_is_given_again_when_nobody_holds_it() -> None:
    slots = _OnHost(None)
    one = slots.take(512, torch.bfloat16, torch.device("cpu"))
    part = one[10:20]  # type: ignore[index]
    other = slots.take(256, torch.float32, torch.device("cpu"))
    assert one is not None and other is not None and other.shape == (256,) and other.dtype == torch.float32
    assert one.data_ptr() != other.data_ptr()
    place = one.data_ptr()
    del one
    third = slots.take(256, torch.float32, torch.device("cpu"))
    assert third is not None and third.data_ptr() not in (place, other.data_ptr()), "a part of it is still used"
    del part
    fourth = slots.take(1024, torch.uint8, torch.device("cpu"))
    assert fourth is not None and fourth.data_ptr() == place
    assert slots.take(100, torch.uint8, torch.device("cpu")) is None, "too small"
    held = [slots.take(1024, torch.uint8, torch.device("cpu")) for _ in range(MOST)]
    assert sum(one is not None for one in held) == MOST - 3
    slots.grows = False
    assert slots.take(2048, torch.uint8, torch.device("cpu")) is None, "a new one needs all ranks"
    del third
    assert slots.take(1024, torch.uint8, torch.device("cpu")) is not None
    slots.close()
    assert slots.ended == MOST and slots.take(1024, torch.uint8, torch.device("cpu")) is None


@pytest.mark.quick
def test_a_group_that_registers_nothing_is_asked_once() -> None:
    slots = _OnHost(None)
    slots.refuses = True
    assert slots.take(1024, torch.uint8, torch.device("cpu")) is None
    slots.refuses = False
    assert slots.take(1024, torch.uint8, torch.device("cpu")) is None


def _sharded(rank: Rank) -> None:
    """The bits of fully_shard's own gathers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank.init()
    mesh = init_device_mesh("cpu", (rank.world_size,))
    results = []
    for in_slots in (False, True):
        model = small.make("gpt2")
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        modules = [one for one in model.modules() if hasattr(one, "set_custom_all_gather")]
        in_place = InPlace(modules, _OnHost) if in_slots else None
        for number in range(5):
            optimizer.zero_grad()
            small.loss(model, small.batch("gpt2", number, rank.rank)).backward()
            optimizer.step()
        if in_place is not None:
            with in_place.as_it_is():
                assert not any(slots.grows for slots in _OnHost.every)
            assert all(slots.grows for slots in _OnHost.every)
        results.append(torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()]))
        if in_place is None:
            continue
        (slots,) = _OnHost.every
        made = sum(map(len, slots._slots.values()))
        assert slots.given >= 5 * len(modules) and made <= 2 * len(slots._slots) + 1, (slots.given, made)
        in_place.close()
        assert slots.ended == made
        given = slots.given
        small.loss(model, small.batch("gpt2", 5, rank.rank)).backward()
        assert slots.given == given and not slots._slots, "fully_shard gathers by itself again"
        names = {type(group._all_gather_comm).__name__ for one in modules for group in parameter_groups(one)}
        assert names == {"DefaultAllGather"}
    assert torch.equal(results[0], results[1])


def test_fully_shard_gathers_into_slots() -> None:
    run_ranks(_sharded, 2)  # DTensor's caches keep meshes, whose groups end with the body
