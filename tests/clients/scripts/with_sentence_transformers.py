"""SentenceTransformer: the forward pass of its Transformers model, compiled, runs on ark's kernels."""

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizer

torch.manual_seed(0)
with open("vocab.txt", "w") as file:
    file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film"]))
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
BertModel(BertConfig(vocab_size=9, **sizes)).save_pretrained("bert")
BertTokenizer("vocab.txt").save_pretrained("bert")
words = Transformer("bert")
model = SentenceTransformer(modules=[words, Pooling(64)], device="cpu")
sentences = ["a good film", "a bad film"]
expected = model.encode(sentences)
inner = words.auto_model
inner.forward = torch.compile(inner.forward, backend="ark", options={"choose": "ark"})
model.encode(sentences)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    got = model.encode(sentences)
assert abs(got - expected).max() < 1e-5
assert any(event.key.startswith("ark::") for event in profile.key_averages()), "not ark's kernels"
