"""Compiles whole models with torch.compile(backend="ark") on CPU: errors, regions, fallbacks and compile times.

    python benchmarks/compile_models.py [--models llama bert ...] [--ranks 1 2 4] [--output FOLDER]
    python benchmarks/compile_models.py --device cuda [--only bert-large ...] [--ways ...]    real sizes on one GPU
                                                    (gpu_models.py): a table and compile_models_h200.json

Models have small configurations and random weights. Errors are relative to the model in float64, for ark and for
Inductor on the same inputs (with several ranks, both over the same ark group). Cold: the first call with empty caches,
including Dynamo's tracing. Cached: the same in a new process.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import cpu_tables
import torch
import torch.distributed as dist

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report
from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "tests" / "compile"))

import exactness  # noqa: E402
import gpu_models  # noqa: E402
import models  # noqa: E402
import parallel_llama  # noqa: E402


def huggingface(name: str, ranks: int) -> tuple[Any, Any, Any]:
    """Returns the model, a function that calls it, and its tensor-parallel plan."""
    import transformers as hf

    ids = torch.randint(0, 100, (1, 7), generator=torch.Generator().manual_seed(1))
    if name == "bert":
        bert = hf.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=100
        )
        return hf.BertModel(bert), lambda call, _: [call(input_ids=ids).last_hidden_state], None
    if name == "gpt2":
        gpt = hf.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        return hf.GPT2LMHeadModel(gpt), lambda call, _: [call(input_ids=ids, use_cache=False).logits], None
    llama = parallel_llama.make(2, 64)

    def decode(call: Any, dtype: torch.dtype) -> list[Any]:
        cache = parallel_llama.cache_of(llama.config, dtype, 1 if dtype == torch.float64 else ranks)
        return [call(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(7)]

    return llama, decode, parallel_llama.plan()


def built(name: str, ranks: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    if name == "resnet block":
        x = torch.randn(2, 16, 9, 9)
        return models.ResidualBlock(16), lambda call, dtype: [call(x.to(dtype))], None
    if name == "hand-written llama":
        config = models.Config()

        def decode(call: Any, _: torch.dtype) -> list[Any]:
            return [call(torch.tensor([[i]]), torch.tensor([i])) for i in range(7)]

        return models.Llama(config), decode, None
    return huggingface(name, ranks)


@torch.no_grad()
def row(name: str) -> dict[str, Any]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(2 if ranks == 1 else 1)
    model, run, plan = built(name, ranks)
    model = model.eval()
    wanted = exactness.exact(model, run)
    split = [copy.deepcopy(model) for _ in range(2)]
    if ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        dist.init_process_group("ark")
        mesh = init_device_mesh("cpu", (ranks,))
        split = [parallelize_module(m, mesh, plan) for m in split]
    report, chosen = Report(), options.parse(None, {"choose": "ark"})
    call = torch.compile(split[0], backend=lambda g, x: backend.compile_graph(g, x, chosen, report), dynamic=False)
    begin = time.perf_counter()
    got = run(call, torch.float32)
    seconds = time.perf_counter() - begin
    inductor = run(torch.compile(split[1], dynamic=False), torch.float32)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    fell = Counter(f"{f.operator}: {f.reason}" for f in report.fallbacks)
    return {
        "model": name,
        "ranks": ranks,
        "error": {"ark": exactness.error(got, wanted), "inductor": exactness.error(inductor, wanted)},
        "graphs": len(report.graphs),
        "regions": len(report.regions),
        "fallbacks": dict(fell) | {g.whole: 1 for g in report.graphs if g.whole},
        "seconds": seconds,
    }


def measured(name: str, ranks: int) -> dict[str, Any]:
    """Runs two processes, one after the other, on the same cache folders, which start empty."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as folder:
        environment = {**os.environ, "ARK_CACHE": f"{folder}/ark", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        for turn in range(2):
            out = Path(folder) / f"row{turn}.json"
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            command = [sys.executable, *torchrun, __file__, "--models", name, "--row", str(out)]
            subprocess.run(command, env=environment, check=True)
            rows.append(json.loads(out.read_text(encoding="utf-8")))
    first, second = rows
    return {**first, "cold_seconds": first.pop("seconds"), "cached_seconds": second["seconds"]}


def line(r: dict[str, Any]) -> str:
    fell = "; ".join(f"{n} x {what}" for what, n in r["fallbacks"].items()) or "nothing"
    errors = f"{r['error']['ark']:.1e} | {r['error']['inductor']:.1e}"
    times = f"{r['cold_seconds']:.1f} | {r['cached_seconds']:.1f}"
    return f"| {r['model']} | {r['ranks']} | {errors} | {r['graphs']} / {r['regions']} | {fell} | {times} |"


HEAD = """\
| model | ranks | error: ark | Inductor | graphs / regions | falls back | cold, s | cached, s |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def cpu_table(about: dict[str, Any]) -> str:
    """Formats the table in docs/performance.md."""
    return f"{cpu_tables.origin(about)}.\n\n{HEAD}" + "".join(line(row) + "\n" for row in about["rows"])


ON_A_GPU = [
    ("bert-large", None),
    ("bert-large", torch.bfloat16),
    ("gpt2-xl", None),
    ("eight experts", None),
    ("dlrm", None),
]
ONE = ("hand-written llama", "llama", "bert", "gpt2", "resnet block")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(ONE), choices=ONE)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    parser.add_argument("--row", type=Path, default=None, help=argparse.SUPPRESS)
    gpu_models.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        return gpu_models.main("compile_models", ON_A_GPU, arguments)
    if arguments.row is not None:
        one = row(arguments.models[0])
        if os.environ.get("RANK", "0") == "0":
            arguments.row.write_text(json.dumps(one), encoding="utf-8")
        return 0
    about = bench.surroundings(bench.shown_command("benchmarks/compile_models.py"))
    print(HEAD, end="", flush=True)
    rows = []
    for ranks in arguments.ranks:
        for name in arguments.models if ranks == 1 else ["llama"]:
            rows.append(measured(name, ranks))
            print(line(rows[-1]), flush=True)
            bench.write_json(arguments.output / "compile_models.json", about, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
