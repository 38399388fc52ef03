"""Accelerate's notebook_launcher forks the ranks."""

import sys

from accelerate import notebook_launcher


def train(backend: str) -> None:
    import torch
    import torch.distributed as dist
    from data import Samples, network, tell
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(backend)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = Samples()[slice(dist.get_rank(), None, 2)]
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    tell(model)
    dist.destroy_process_group()


notebook_launcher(train, args=(sys.argv[1],), num_processes=2)
