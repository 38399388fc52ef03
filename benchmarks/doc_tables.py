"""Names what tools/renew_docs.py can put between the markers of README.md and docs/*.md, and how to produce each text.

Tables come from benchmarks/results/*.json and from the declarations of variables and options. FIGURES are single
numbers for sentences. A name whose file is missing is an error, so that a document shows only figures from files.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cpu_tables
import headline_tables
from headline_tables import KB, MB, Load, best, medians, of_ranks, only

from ark_torch import env
from ark_torch.compile import options


def _scripts(name: str) -> Any:
    """Imports a benchmark's module when its table is needed, because some set environment variables on import."""
    return __import__(name)


def loop_account(load: Load, name: str) -> str:
    data = load(name)
    account = str(_scripts("loop_account").table(data["step"], data["rows"]))
    return f"{data['gpus']}, PyTorch {data['versions']['torch']}; {data['date']}. {account}"


def real_sizes(load: Load, name: str) -> str:
    """Leaves out the output of the `--beside` program, which is long."""
    return str(_scripts("gpu_models").table({**load(name), "beside": {}}))


def overhead(load: Load) -> str:
    data = load("compile_overhead")
    lines = [
        f"{cpu_tables.origin(data)}.",
        "",
        "| threads | what had the caches before | a call, us | torch._dynamo's own share on the host | ark's share |",
        "| --- | --- | --- | --- | --- |",
    ]
    rest = []
    for row in data["rows"]:
        if "microseconds" in row:
            times = row["microseconds"]
            before = "the same step" if row["after"] == "ark" else f"a step of {row['after']}"
            lines.append(
                f"| {row['threads']} | {before} | {times['ark']:.0f} | {times['nothing, host']:.0f} "
                f"| {row['above_dynamo_host_us']:.1f} |"
            )
        else:
            rest.append(
                f"{row['what'].capitalize()}: the first call takes {row['first_call_s']:.1f} s, {row['ark_s']:.2f} s "
                "of them in its backend and AOTAutograd."
            )
    return "\n".join([*lines, "", *rest])


def accuracy(load: Load) -> str:
    """Shows per type: the cases, how many have a smaller error than Inductor's, and which are nearest to the limit."""
    data = load("compile_accuracy")
    lines = [
        f"{cpu_tables.origin(data)}.",
        "",
        "| type | cases | operators | ark's error not larger in | ark's by Inductor's, median | nearest to the limit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for dtype in dict.fromkeys(row["type"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["type"] == dtype]
        pairs = [
            (row["ark"][kind], row["inductor"][kind])
            for row in rows
            if (kind := next((kind for kind in ("element", "scale") if kind in row["ark"]), None))  # else: no digits
        ]
        ratios = [ark / other for ark, other in pairs if other > 0]
        worst = max(rows, key=lambda row: row["nearness"])
        smaller = sum(ark <= other for ark, other in pairs)
        lines.append(
            f"| {dtype} | {len(rows)} | {len({row['operator'] for row in rows})} | {smaller / len(pairs):.0%} "
            f"| {statistics.median(ratios):.2f} | `{worst['operator']}`, {worst['nearness']:.0%} of it |"
        )
    return "\n".join(lines)


def compression_accuracy(load: Load, name: str) -> str:
    """Shows held-out loss or test accuracy by bits, beside exact."""
    data = load(name)
    layers, width = data["model"]["layers"], data["model"]["width"]
    if data.get("task") == "digits":
        what, measure, places = (
            f"A vision transformer ({layers} layers of width {width}) on scikit-learn's digits",
            "accuracy",
            1,
        )
        told, scale = "accuracy on the test images in percent", 100
    else:
        what, measure, places = f"The demo's GPT ({layers} layers of width {width})", "loss", 3
        told, scale = "held-out loss in nats a byte", 1
    lines = [
        f"{what} on {data['ranks']} CPU ranks, {data['steps']:,} steps: {told}, mean of the seeds that ran. Difference"
        ": from exact gradients of the same seed, and the least and greatest of it.\n",
        f"| gradients | seeds | {measure} | spread over seeds | difference | bytes sent |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in data["summary"]:
        apart, spread = [scale * value for value in row["from_exact_by_seed"]], row["spread"]
        mean = f"{scale * row['from_exact']:+.{places}f}"
        difference = f"{mean} ({min(apart):+.{places}f} to {max(apart):+.{places}f})"
        lines.append(
            f"| {row['way']} | {row['seeds']} | {scale * row[measure]:.{places}f} | "
            f"{'' if spread is None else f'{scale * spread:.{places}f}'} | "
            f"{'' if row['way'] == 'exact' else difference} | {row['bytes']:.1%} |"
        )
    return "\n".join(lines)


def compression_bytes(load: Load) -> str:
    """Shows the bytes that a rank sends per step, by what learns."""
    data = load("compression_bytes")
    lines = [
        "| what learns | elements that require gradients | bytes a rank and step, exact | sent |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in data["rows"]:
        lines.append(f"| {row['way']} | {row['requires_grad']:,} | {row['exact']:,} | {row['sent']:,} |")
    return "\n".join(lines)


def resident(load: Load) -> str:
    data = load("decode")
    lines = [
        "| ranks x threads | position | launches of one step, ms a token | one launch, ms a token |",
        "| --- | --- | --- | --- |",
    ]
    for row in data["rows"]:
        times = row["loop_microseconds"]
        lines.append(
            f"| {row['ranks']} x {row['threads']} | {row['position']} | {times['launches'] / 1e3:.2f} "
            f"| {times['resident'] / 1e3:.2f} |"
        )
    return "\n".join(lines)


def skeleton(load: Load) -> str:
    """The time of a bare loop over the same bytes on the machine of decode_h200.json."""
    line = next(line for line in load("decode_h200")["beside"]["lines"] if "2 run-ahead, 1 step" in line)
    return f"{float(line.partition('launch: ')[2].partition(' us')[0]) / 1e3:.3f}"


def passes() -> str:
    """The compiler's pipeline as it is in csrc/compiler/passes/pipeline.cpp."""
    from ark_torch import _C

    lines = ["| pass | for | what holds afterwards |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {on} | {leaves} |" for name, on, leaves in _C.plan.passes())])


def low_bits(load: Load) -> str:
    about = load("low_bits_1b_h200")
    return f"{_scripts('on_gpus').origin(about)}\n\n{_scripts('low_bits').table(about['rows'])}"


def low_bits_rows(load: Load) -> str:
    about = load("low_bits_rows_1b_h200")
    return f"{_scripts('on_gpus').origin(about)}\n\n{_scripts('low_bits_rows').table(about['rows'])}"


def low_bits_cpu(load: Load) -> str:
    about = load("low_bits_small_cpu")
    head = f"{about['layers']} layers, activations in {about['dtype']}, position {about['position']}"
    return f"{cpu_tables.origin(about)}; {head}.\n\n{_scripts('low_bits').table(about['rows'])}"


def serving(load: Load, name: str) -> str:
    about = load(name)
    of_gpu = f"{about.get('gpus')}, PyTorch {about['versions']['torch']}, {about['date']}"
    where = of_gpu if "gpus" in about else cpu_tables.origin(about)
    return f"{where}; {about['dtype']}.\n\n{_scripts('serving').table(about['rows'])}"


def many_rows(load: Load) -> str:
    about = load("many_rows_h200")
    head = f"{about['gpus']}, PyTorch {about['versions']['torch']}; {about['date']}."
    return f"{head}\n\n{_scripts('many_rows').table(about['rows'])}"


def once_measured(command: str, table: Callable[[Load], str]) -> Callable[[Load], str]:
    """The table, or a sentence that says how to measure it while its file is not there."""

    def told(load: Load) -> str:
        try:
            return table(load)
        except FileNotFoundError:
            return f"Not measured yet: `{command}`."

    return told


TABLES: dict[str, Callable[[Load], str]] = {
    "environment": lambda load: env.table(),
    "passes": lambda load: passes(),
    "options": lambda load: options.table(),
    "headline-inference": headline_tables.inference,
    "headline-collectives": headline_tables.collectives,
    "headline-training": headline_tables.training,
    "collectives": lambda load: cpu_tables.collectives(load("collectives")),
    "ddp": lambda load: cpu_tables.ddp(load("ddp_step")),
    "cuda": lambda load: _scripts("cuda_collectives").table(load("collectives_2_h200")),
    "interference": lambda load: _scripts("interference").table(load("interference")),
    "interference-bulk": lambda load: _scripts("interference").table(load("interference_bulk")),
    "training": lambda load: _scripts("training_report").table(load("training")),
    "training-in-line": lambda load: _scripts("training_report").table(load("training_in_line")),
    "training-captured": lambda load: _scripts("training_report").table(load("training_captured")),
    "training-busy": lambda load: _scripts("training_report").table(load("training_busy")),
    "training-no-peer-access": lambda load: _scripts("training_report").table(load("training_no_peer_access")),
    "pipeline": lambda load: _scripts("pipeline").table(load("pipeline")),
    "pipeline-small": lambda load: _scripts("pipeline").table(load("pipeline_small")),
    "pipeline-4-h200": lambda load: _scripts("pipeline").table(load("pipeline_4_h200")),
    "low-bits": low_bits,
    "low-bits-rows": low_bits_rows,
    "low-bits-cpu": once_measured("python benchmarks/low_bits.py", low_bits_cpu),
    "many-rows": once_measured("python benchmarks/many_rows.py --device cuda", many_rows),
    "loop-account-bert": once_measured(
        "python benchmarks/loop_account.py --model bert-large",
        lambda load: loop_account(load, "loop_account_bert-large_h100"),
    ),
    "loop-account-prefill": once_measured(
        'python benchmarks/loop_account.py --model "llama-1b prefill 2048"',
        lambda load: loop_account(load, "loop_account_llama-1b-prefill-2048_h100"),
    ),
    "serving-cpu": once_measured("python benchmarks/serving.py", lambda load: serving(load, "serving_cpu")),
    "serving-h200": once_measured(
        "python benchmarks/serving.py --device cuda", lambda load: serving(load, "serving_h200")
    ),
    "dma": lambda load: _scripts("dma").table(load("dma")),
    "fused": lambda load: _scripts("fused").table(load("fused")),
    "fused-ncu": lambda load: _scripts("fused_ncu").table(load("fused_ncu")),
    "fused-products": lambda load: _scripts("fused_products").table(load("fused_products")),
    "fused-moe": lambda load: _scripts("fused_moe").table(load("fused_moe")),
    "grouped-products": lambda load: _scripts("grouped_products").table(load("grouped_products_h200")),
    "dlrm-step": lambda load: _scripts("dlrm_step").table(load("dlrm_step")),
    "compressed-h200": lambda load: _scripts("compressed").table(load("compressed_h200")),
    "no-peer-access": lambda load: _scripts("compressed").table(load("no_peer_access"), alone=False),
    "no-peer-access-4": lambda load: _scripts("compressed").table(load("no_peer_access_4_h200"), alone=False),
    "cache-policy": lambda load: _scripts("cache_policy").table(load("cache_policy")),
    "decode": lambda load: _scripts("decode_report").table(load("decode")),
    "compression.accuracy": lambda load: compression_accuracy(load, "compression_accuracy"),
    "compression.accuracy-2000": lambda load: compression_accuracy(load, "compression_accuracy_2000"),
    "compression.digits": lambda load: compression_accuracy(load, "compression_digits"),
    "compression.bytes": compression_bytes,
    "resident": resident,
    "models": lambda load: _scripts("compile_models").cpu_table(load("compile_models")),
    "contest": lambda load: _scripts("contest").table(load("contest")),
    "convolutions": lambda load: _scripts("convolutions").table(load("convolutions")),
    "nodes": lambda load: _scripts("nodes").table(load("nodes")),
    "decode-h200": lambda load: real_sizes(load, "decode_h200"),
    "decode-compile-times-h200": lambda load: real_sizes(load, "decode_compile_times_h200"),
    "decode-ranks-h200": lambda load: _scripts("decode_ranks").table(load("decode_ranks_h200")),
    "decode-ranks-h100": lambda load: _scripts("decode_ranks").table(load("decode_ranks_autotune_h100")),
    "decode-ranks-8b-h200": lambda load: _scripts("decode_ranks").table(load("decode_ranks_8b_h200")),
    "prefill-ranks-8b-h200": lambda load: _scripts("decode_ranks").table(load("prefill_ranks_8b_h200")),
    "models-h200": lambda load: real_sizes(load, "compile_models_h200"),
    "loop-account-h200": lambda load: loop_account(load, "loop_account_h200"),
    "loop-account-2-h100": lambda load: loop_account(load, "loop_account_2_ranks_h100"),
    "decode-ranks-4-h200": lambda load: _scripts("decode_ranks").table(load("decode_ranks_4_h200")),
    "loop-account-4-h200": lambda load: loop_account(load, "loop_account_4_ranks_h200"),
    "collectives-4-h200": lambda load: _scripts("cuda_collectives").table(load("collectives_4_h200")),
    "collectives-4-two-nodes-h200": lambda load: _scripts("cuda_collectives").table(
        load("collectives_4_two_nodes_h200")
    ),
    "interference-4-h200": lambda load: _scripts("interference").table(load("interference_4_h200")),
    "dispatch-4-h200": lambda load: _scripts("interference").table(load("dispatch_4_h200")),
    "training-4-h200": lambda load: _scripts("training_report").table(load("training_4_h200")),
    "training-captured-4-h200": lambda load: _scripts("training_report").table(load("training_captured_4_h200")),
    "fused-moe-4-h200": lambda load: _scripts("fused_moe").table(load("fused_moe_4_h200")),
    "dlrm-step-4-h200": lambda load: _scripts("dlrm_step").table(load("dlrm_step_4_h200")),
    "fused-4-h200": lambda load: _scripts("fused").table(load("fused_4_h200")),
    "fused-products-4-h200": lambda load: _scripts("fused_products").table(load("fused_products_4_h200")),
    "simulate": lambda load: _scripts("simulate").table(load("simulate")),
    "simulate-rows": lambda load: _scripts("simulate").rows_table(load("simulate")),
    "simulate-steps": lambda load: _scripts("simulate").steps_table(load("simulate")),
    "overhead": overhead,
    "accuracy": accuracy,
}


def _dma(load: Load, what: str, engine: str, size: int) -> float:
    key = "us" if what == "latency" else "gbps"
    return float(only(load("dma"), what=what, engine=engine, bytes=size)[key])


def _during(load: Load, who: str, ranks: int = 2) -> float:
    row = only(load("training"), model="gpt2-xl", mode="graph", ranks=ranks, contender=who)
    return float(row["during_gbps"])


def _captured(load: Load, who: str) -> float:
    of = {"model": "gpt2-xl", "implementation": "plain", "mode": "captured", "ranks": 2}
    return float(only(load("training_captured"), contender=who, **of)["step_ms"])


def _slowdown(load: Load, who: str, size: int) -> float:
    row = only(load("interference"), operation="all_reduce", ranks=2, bytes=size, contender=who)
    return float(row["product_slowdown"]) - 1


def _fused(load: Load) -> list[float]:
    return [1 - 1 / row["faster_than_rival"] for row in load("fused")["rows"]]


def _decoding(load: Load, who: str) -> float:
    return best(medians(only(load("decode_h200"), model="llama-1b")), who)


def _pair(load: Load, who: str) -> float:
    return best(of_ranks(load("decode_ranks_autotune_h100"), 2), who)


FIGURES: dict[str, Callable[[Load], str]] = {
    "fig.latency-8kb": lambda load: f"{_dma(load, 'latency', 'packet', 8 * KB):.2f} us",
    "fig.latency-times-cpu": lambda load: (
        f"{_dma(load, 'latency', 'cpu', 8 * KB) / _dma(load, 'latency', 'packet', 8 * KB):.1f} times"
    ),
    "fig.bulk-8kb": lambda load: f"{_dma(load, 'throughput', 'bulk', 8 * KB):.0f} GB/s",
    "fig.copy-engine-64mb": lambda load: f"{_dma(load, 'throughput', 'copy_engine', 64 * MB):.0f} GB/s",
    "fig.bulk-share": lambda load: (
        f"{_dma(load, 'throughput', 'bulk', 8 * KB) / _dma(load, 'throughput', 'copy_engine', 64 * MB):.0%}"
    ),
    "fig.all-reduce-during": lambda load: f"{_during(load, 'ark'):.0f} against {_during(load, 'nccl'):.0f} GB/s",
    "fig.all-reduce-during-4": lambda load: (
        f"{_during(load, 'ark', 4):.0f} against {_during(load, 'nccl', 4):.0f} GB/s"
    ),
    "fig.captured-ark": lambda load: f"{_captured(load, 'captured_ark'):.1f} ms",
    "fig.captured-ddp": lambda load: f"{_captured(load, 'nccl'):.1f} ms",
    "fig.captured-times": lambda load: f"{_captured(load, 'nccl') / _captured(load, 'captured_ark'):.1f} times",
    "fig.captured-nccl": lambda load: f"{_captured(load, 'captured_nccl'):.1f} ms",
    "fig.captured-free": lambda load: f"{_captured(load, 'free'):.1f} ms",
    "fig.slowdown-ark": lambda load: f"{_slowdown(load, 'ark', 256 * MB):.0%}",
    "fig.slowdown-nccl": lambda load: f"{_slowdown(load, 'nccl', 256 * MB):.0%}",
    "fig.fused-less": lambda load: f"{min(_fused(load)):.0%} to {max(_fused(load)):.0%}",
    "fig.dlrm-step": lambda load: " to ".join(
        f"{of(row['faster_graph'] for row in load('dlrm_step')['rows']):.1f}" for of in (min, max)
    ),
    "fig.fused-of-own": lambda load: f"{1 - statistics.mean(row['of_pool_ark'] for row in load('fused')['rows']):.0%}",
    "fig.decode-ark": lambda load: f"{_decoding(load, 'ark'):.3f} ms",
    "fig.decode-inductor": lambda load: f"{_decoding(load, 'inductor'):.3f} ms",
    "fig.decode-times": lambda load: f"{_decoding(load, 'inductor') / _decoding(load, 'ark'):.2f}",
    "fig.decode-skeleton": lambda load: f"{skeleton(load)} ms",
    "fig.pair-ark": lambda load: f"{_pair(load, 'ark'):.3f} ms",
    "fig.pair-inductor": lambda load: f"{_pair(load, 'inductor'):.3f} ms",
    "fig.pair-times": lambda load: f"{_pair(load, 'inductor') / _pair(load, 'ark'):.2f}",
}


class Parts(Mapping[str, str]):
    """Maps a name to its text, which is produced on access."""

    def __init__(self, results: Path) -> None:
        self._makers = TABLES | FIGURES
        self._results = results
        self._made: dict[str, str] = {}

    def _load(self, name: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self._results / f"{name}.json").read_text(encoding="utf-8"))
        return data

    def __getitem__(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = self._makers[name](self._load)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
