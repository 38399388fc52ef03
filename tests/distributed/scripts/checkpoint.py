"""Distributed checkpoint of an FSDP2 model: save, load into another model, async_save with its own group."""

from __future__ import annotations

import shutil
import tempfile

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def trained(steps: int, rank: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = common.make_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = (common.mine(t, rank, world) for t in common.batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def main() -> None:
    rank, world = common.start()
    folder: list[str | None] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    own_group = dist.new_group(list(range(world)))
    model, optimizer = trained(3, rank, world)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    wanted = {name: value.full_tensor().clone() for name, value in model_state.items()}
    state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(3)}
    dcp.save(state, checkpoint_id=f"{folder[0]}/sync")
    pending = dcp.async_save(state, checkpoint_id=f"{folder[0]}/async", process_group=own_group)
    for _ in range(50):  # the world group works while another thread writes the checkpoint
        tensor = torch.ones(1000, device=common.DEVICE)
        dist.all_reduce(tensor)
        assert tensor[0].item() == world
    pending.result()
    dist.barrier()
    for kind in ("sync", "async"):
        other, other_optimizer = trained(1, rank, world)
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        loaded = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(0)}
        dcp.load(loaded, checkpoint_id=f"{folder[0]}/{kind}")
        set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        assert int(loaded["step"]) == 3
        for name, value in other.state_dict().items():
            assert torch.equal(value.full_tensor(), wanted[name]), f"{kind}: {name}"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(str(folder[0]))
    common.finish()


if __name__ == "__main__":
    main()
