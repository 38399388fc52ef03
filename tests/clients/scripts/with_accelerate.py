"""Accelerate uses the existing process group."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from data import Samples, network, tell

dist.init_process_group(sys.argv[1])
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(Samples(), batch_size=8)
model = network()
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
assert accelerator.num_processes == 2 and accelerator.gather(loss.reshape(1)).shape == (2,)
tell(model)
dist.destroy_process_group()
