"""DeepSpeed's ZeRO-2 uses the existing process group."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from data import Samples, network, tell

dist.init_process_group(sys.argv[1])
engine, *_ = deepspeed.initialize(
    model=(model := network()),
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
samples = Samples()
for step in range(4):
    inputs, targets = samples[slice(16 * step + 8 * dist.get_rank(), 16 * step + 8 * dist.get_rank() + 8)]
    loss = torch.nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
tell(engine.module)
dist.destroy_process_group()
