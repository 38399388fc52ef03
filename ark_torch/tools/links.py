"""`ark doctor --links`: the connection between every pair of ranks, its speed, and whether values arrive intact.

Ranks are processes of this machine, one per GPU, or those of a launcher (torchrun) that started the command, so it also
measures between machines. Each pair is measured by send and recv of an ark group while the others wait: latency of 8
bytes (half a round trip), then GB/s of large tensors there, back, and in both directions at once (per direction).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Found = dict[str, Any]
COLLIDES = 0.6  # less than this share of the one-way rate, both ways at once, means a shared resource


def measured(ranks: int | None, device: str) -> Found | None:
    """Rank 0's results; None on a launcher's other ranks."""
    from ark_torch.tools import _links_rank

    with tempfile.TemporaryDirectory(prefix="ark-links-") as folder:
        results = os.path.join(folder, "links.json")
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            _links_rank.main(device, results)
            if os.environ["RANK"] != "0":
                return None
        else:
            _spawn(ranks or (_gpus() if device == "cuda" else 2), device, results)
        found: Found = json.loads(Path(results).read_text(encoding="utf-8"))
    links = nvidia_links() if device == "cuda" else {}
    for row in found["pairs"]:
        row["path"] = path_of(found, row, links)
    found["verdict"], found["well"] = verdict_of(found)
    return found


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _spawn(ranks: int, device: str, results: str) -> None:
    import torch.distributed as dist

    from ark_torch.tools.bench.launch import end, wait_for

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "ark_torch.tools._links_rank", device, results]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts the store
        "WORLD_SIZE": str(ranks),
    }
    processes = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}) for rank in range(ranks)]
    try:
        wait_for(processes)
    finally:
        end(processes)


def nvidia_links(text: str | None = None) -> dict[tuple[int, int], str]:
    """nvidia-smi's connection between two GPUs: "NV18" (number of NVLinks), "PIX", "NODE", "SYS" ..."""
    if text is None:
        try:
            done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        text = done.stdout
    links = {}
    for line in text.splitlines():
        words = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]) or words[1:2] == ["GPU1"]:
            continue
        for other, word in enumerate(words[1:]):
            if not re.fullmatch(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS", word):
                break
            links[int(words[0][3:]), other] = word
    return links


def path_of(found: Found, row: dict[str, Any], links: dict[tuple[int, int], str]) -> str:
    one, two = (found["places"][row[end]] for end in ("from", "to"))
    if one["host"] != two["host"]:
        return f"network ({found['carrier']})"
    if found["kind"] == "cpu":
        return "shared memory" if found["carrier"] == "ark" else f"{found['carrier']}, one machine"
    link = links.get((int(one["device"].partition(":")[2]), int(two["device"].partition(":")[2])), "")
    name = f"{link[2:]} NVLinks" if link.startswith("NV") else f"PCIe ({link})" if link else "unknown"
    return name if row.get("peer_access") else f"{name}, no peer access"


def verdict_of(found: Found) -> tuple[str, bool]:
    """One sentence, and whether everything works."""
    wrong = [f"{row['from']}->{row['to']}" for row in found["pairs"] if not row["right"]]
    wrong += [f"{row['to']}->{row['from']}" for row in found["pairs"] if not row["right_back"]]
    if wrong and found["kind"] == "cuda":
        return (
            f"peer access lies: values do not arrive between ranks {', '.join(wrong)}. Use ARK_DISABLE_P2P=1, and "
            "NCCL_P2P_DISABLE=1 for NCCL.",
            False,
        )
    if wrong:
        return (
            f"values do not arrive between ranks {', '.join(wrong)}: this machine's memory is not to be trusted.",
            False,
        )
    if found.get("on_host"):
        text = (
            f"ark goes through memory of the host, {found['shared_bytes'] >> 20} MB of it pinned for each rank: "
            f"{found['on_host']}."
        )
        return text, "claims to work" not in found["on_host"]
    if found["carrier"] != "ark":
        whose = "GPU tensors" if found["kind"] == "cuda" else "tensors"
        return f"use ark or {found['carrier']}: {found['carrier']} carries this group's {whose} for ark.", True
    return "use ark: it carries this group itself.", True


def as_table(found: Found) -> str:
    heads = ("ranks", "path", "NUMA", "8 B, us", "GB/s there", "back", "both ways, each", "")
    rows = [heads]
    for row in found["pairs"]:
        one, two = (found["places"][row[end]] for end in ("from", "to"))
        numa = "/".join("-" if node is None else str(node) for node in (one["numa"], two["numa"]))
        slower = min(row["gb_per_s"], row["gb_per_s_back"])
        note = "wrong values" if not (row["right"] and row["right_back"]) else ""
        if not note and row["gb_per_s_both"] < COLLIDES * slower:
            note = "the two ways collide"
        figures = [f"{row[key]:.2f}" for key in ("latency_us", "gb_per_s", "gb_per_s_back", "gb_per_s_both")]
        rows.append((f"{row['from']} - {row['to']}", row["path"], numa, *figures, note))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    places = [f"rank {p['rank']}: {p['device']} ({p['name']}) on {p['host']}" for p in found["places"]]
    return "\n".join([*places, "", *lines, "", found["verdict"]])


def draw(found: Found, path: str) -> None:
    """Plots the GB/s of all pairs (matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    count = len(found["places"])
    rates = [[float("nan")] * count for _ in range(count)]
    for row in found["pairs"]:
        rates[row["from"]][row["to"]] = row["gb_per_s"]
        rates[row["to"]][row["from"]] = row["gb_per_s_back"]
    figure, axes = plt.subplots(figsize=(2 + count * 0.8, 1.5 + count * 0.7))
    image = axes.imshow(rates, cmap="viridis", vmin=0)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_xticks(range(count))
    axes.set_yticks(range(count))
    for one, line in enumerate(rates):
        for two, rate in enumerate(line):
            axes.text(two, one, "" if one == two else f"{rate:.1f}", ha="center", va="center", color="white")
    figure.colorbar(image, label="GB/s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(ranks: int | None, device: str | None, as_json: bool, picture: str | None) -> int:
    """Measures and prints; returns the exit code: 0 if all values arrive, else 1."""
    if device is None:
        device = "cuda" if _gpus() > 1 else "cpu"
    found = measured(ranks, device)
    if found is None:
        return 0
    print(json.dumps(found, indent=2) if as_json else as_table(found))
    if picture:
        draw(found, picture)
    return 0 if found["well"] else 1
