"""Transformers' Trainer with captured steps: its own loop, callbacks, logs and schedules, with one launch per step.

    python examples/captured_trainer.py                # starts two ranks by itself
    torchrun --nproc-per-node 2 examples/captured_trainer.py

A Trainer calls training_step() for a batch, then clips, updates and clears gradients. CapturedTrainer overrides this
method: ark_torch.train.capture does everything and leaves no gradients, so that the Trainer's later steps have nothing
to do. Its weights must equal those of an ordinary Trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ark_torch

STEPS, ROWS, LENGTH, WORDS, MAX_NORM = 16, 4, 16, 97, 1.0


class CapturedTrainer(Trainer):
    """A Trainer with captured steps. `max_norm` replaces TrainingArguments.max_grad_norm, which is 0."""

    def __init__(self, *arguments: Any, max_norm: float | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.args.gradient_accumulation_steps != 1 or self.args.max_grad_norm or self.args.fp16:
            raise ValueError(
                "CapturedTrainer: pass gradient_accumulation_steps=1, max_grad_norm=0 (and max_norm to the Trainer), "
                "and bf16 in the place of fp16."
            )
        self.max_norm = max_norm
        self.step: Any = None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        model.train()
        if self.step is None:
            self.step = ark_torch.train.capture(model, self.optimizer, self._loss, max_norm=self.max_norm)
        items = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss: Tensor = self.step({"inputs": dict(inputs), "items": items})
        model.zero_grad()
        return loss

    def _loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, batch["inputs"], num_items_in_batch=batch["items"])
        return loss


def train(kind: type[Trainer], folder: str, cpu: bool, **options: Any) -> tuple[Trainer, nn.Module]:
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes, **dropout))
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randint(0, WORDS, (128, 1), generator=generator) + torch.arange(LENGTH)) % WORDS
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=ROWS, learning_rate=1e-2, lr_scheduler_type="cosine",
        max_grad_norm=0.0 if kind is CapturedTrainer else MAX_NORM, logging_steps=4, save_strategy="no", report_to=[],
        seed=3, use_cpu=cpu, disable_tqdm=True, logging_nan_inf_filter=False,  # this check would wait for each loss
    )  # fmt: skip
    trainer = kind(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows], **options)
    trainer.train()
    return trainer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ark")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # plain python: start two ranks like torchrun
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
        return

    local = int(os.environ["LOCAL_RANK"])
    cpu = torch.cuda.device_count() <= local
    if not cpu:
        torch.cuda.set_device(local)
    dist.init_process_group(arguments.backend)  # before TrainingArguments asks for its device
    rank, world = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        trainer, captured = train(CapturedTrainer, folder, cpu, max_norm=MAX_NORM)
        step = trainer.step
        print(f"rank {rank}: {'one launch a step' if step.captured else f'eager, because {step.reason}'}", flush=True)
        ordinary, expected = train(Trainer, folder, cpu)
    losses, theirs = ([log["loss"] for log in one.state.log_history if "loss" in log] for one in (trainer, ordinary))
    assert len(losses) == STEPS // 4 and losses[-1] < losses[0], losses
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=1e-3, atol=1e-3)
    for (name, ours), (_, other) in zip(captured.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(
            ours, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"rank {rank}, {name}: {text}"
        )
    print(f"rank {rank} of {world}: weights equal those of an ordinary Trainer", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
