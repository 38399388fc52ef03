"""While a step is captured, the groups whose ranks all capture it know; no others, and not afterwards."""

from __future__ import annotations

from typing import Any

import fake_graphs
import pytest
import torch
import torch.distributed as dist
from support import training as small
from support.crew import crew_of
from support.groups import ark_only
from support.rank import Rank

from ark_torch.train import capture

pytestmark = [ark_only]


class _Watching(fake_graphs.FakeRecorder):
    """Notes which groups know while it records."""

    def __init__(self, groups: dict[str, Any], error: BaseException | None = None) -> None:
        super().__init__("addmm" if error else "", error)
        self.groups, self.seen = groups, set[str]()

    def know(self) -> set[str]:
        device = torch.device("cpu")
        return {name for name, group in self.groups.items() if group._get_backend(device)._captures_step}

    def warm(self, body: Any) -> Any:
        assert not self.know()
        return super().warm(body)

    def record(self, body: Any) -> Any:
        self.seen = self.know()
        return super().record(body)


def _groups_that_know(rank: Rank, fails: bool) -> None:
    rank.init()
    pair = dist.new_group([0, 1])
    mine = [dist.new_group([member]) for member in range(3)][rank.rank]
    mixed = [dist.new_group([member, 2]) for member in range(2)][rank.rank % 2]
    if rank.rank == 2:
        return
    groups = {"world": dist.group.WORLD, "pair": pair, "alone": mine, "mixed": mixed}
    recorder = _Watching(groups, ValueError("no graph") if fails else None)
    fake_graphs.use(recorder)
    model = small.make("gpt2")
    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), small.loss, group=pair, warmup=2, bucket_mb=1)
    for number in range(4):
        if fails and number == 2:
            with pytest.warns(UserWarning, match="no graph"):
                step(small.batch("gpt2", number, rank.rank))
        else:
            step(small.batch("gpt2", number, rank.rank))
    assert step.captured == (not fails)
    assert recorder.seen == {"pair", "alone"}
    assert not recorder.know()
    step.close()


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "failed"])
def test_groups_that_know(fails: bool) -> None:
    crew_of(3, {}).run(_groups_that_know, fails)
