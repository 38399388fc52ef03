"""Transformers' Trainer uses the existing process group."""

import sys

import torch
import torch.distributed as dist
from data import tell
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=16, **sizes))
generator = torch.Generator().manual_seed(1)
samples = [{"input_ids": ids, "labels": ids.sum() % 2} for ids in torch.randint(0, 100, (32, 8), generator=generator)]
arguments = TrainingArguments(
    sys.argv[2], use_cpu=True, max_steps=4, per_device_train_batch_size=4, report_to=[], save_strategy="no", seed=3
)
Trainer(model, arguments, train_dataset=samples).train()
tell(model)
dist.destroy_process_group()
