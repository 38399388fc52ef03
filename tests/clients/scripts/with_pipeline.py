"""A pipeline of Transformers does not compile; its model's forward pass, compiled, runs on ark's kernels."""

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, pipeline

torch.manual_seed(0)
with open("vocab.txt", "w") as file:
    file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film"]))
tokenizer = BertTokenizer("vocab.txt")
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
model = BertForSequenceClassification(BertConfig(vocab_size=9, **sizes)).eval()
classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
expected = classify("a good film")[0]["score"]
model.forward = torch.compile(model.forward, backend="ark", options={"choose": "ark"})
classify("a good film")
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    got = classify("a good film")[0]["score"]
assert abs(got - expected) < 1e-5
assert any(event.key.startswith("ark::") for event in profile.key_averages()), "not ark's kernels"
