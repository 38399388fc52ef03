"""Compares pipeline schedules with one process. Every stage sends before its neighbour receives."""

from __future__ import annotations

import common
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Sequential(nn.Linear(24, 24), nn.Tanh()).to(common.DEVICE) for _ in range(count)]


def main() -> None:
    rank, world = common.start()
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(2)).to(common.DEVICE)
    y = torch.randn(16, 24, generator=torch.Generator().manual_seed(3)).to(common.DEVICE)
    loss = nn.functional.mse_loss
    for schedule_class, per_rank in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
        count = world * per_rank
        alone = layers(count)
        losses = []
        for part_x, part_y in zip(x.chunk(8), y.chunk(8), strict=True):
            losses.append(loss(nn.Sequential(*alone)(part_x), part_y))
        torch.stack(losses).sum().div(8).backward()
        own = layers(count)
        stages = [PipelineStage(own[rank + world * i], rank + world * i, count, common.DEVICE) for i in range(per_rank)]
        schedule = schedule_class(stages if per_rank > 1 else stages[0], n_microbatches=8, loss_fn=loss)
        last = count - 1 in [stage.stage_index for stage in stages]
        for _ in range(3):
            for stage in stages:
                stage.submod.zero_grad()
            seen: list[torch.Tensor] = []
            arguments = (x,) if rank == 0 else ()
            out = schedule.step(*arguments, **({"target": y, "losses": seen} if last else {}))
            if last:
                torch.testing.assert_close(out, nn.Sequential(*alone)(x))
                torch.testing.assert_close(torch.stack(seen), torch.stack(losses))
        for stage in stages:
            for one, two in zip(stage.submod.parameters(), alone[stage.stage_index].parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad)
    common.finish()


if __name__ == "__main__":
    main()
