"""Transformers' generate() compiles the forward pass of its decoding steps by CompileConfig(backend="ark")."""

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=100, max_position_embeddings=64, **sizes)
config.pad_token_id = config.eos_token_id = 0
model = LlamaForCausalLM(config).eval()
ids = torch.randint(1, 100, (1, 5))
settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "cache_implementation": "static"}
expected = model.generate(ids, **settings, disable_compile=True)
compiling = CompileConfig(backend="ark", fullgraph=False, dynamic=False, mode=None, options={"choose": "ark"})
compiling._compile_all_devices = True  # otherwise generate() compiles only on GPUs
activities = [torch.profiler.ProfilerActivity.CPU]
with torch.profiler.profile(activities=activities) as profile:
    got = model.generate(ids, **settings, compile_config=compiling)
steps = {event.key: event.count for event in profile.key_averages() if event.key.startswith("ark::")}
print(steps)
assert torch.equal(got, expected), (got, expected)
assert sum(steps.values()) >= 19, "the steps are not ark's"
