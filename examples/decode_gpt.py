"""Writes text with the model that examples/train_gpt.py has trained, token by token, in four ways that it compares.

    python examples/decode_gpt.py --folder demo-output      # train_gpt.py does this at its end

The same step runs eagerly, compiled by Inductor, compiled by ark, and in ark's resident mode, where all steps are one
launch. All use the same noise. Results: decode.json, sample.txt and schedule.svg, a drawing of each worker's tasks in
one compiled step. Exit code: 0, or 1 if resident mode and single launches have written different texts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt.decoding import Writer, compare
from gpt.model import GPT, VOCABULARY, ModelConfig

PROMPT = b'def main(argv):\n    """'
TEMPERATURE = 0.7


def trained(folder: Path) -> GPT:
    about = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    model = GPT(ModelConfig(**about["config"]["model"]))
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model.to(about["device"]).eval().requires_grad_(False)


@torch.no_grad()
def traced_steps(gpt: GPT) -> None:
    """Runs some steps for the timeline that ARK_TRACE names."""
    Writer("ark", gpt, PROMPT, torch.zeros(40, 1, VOCABULARY), TEMPERATURE).write()


def draw_schedule(arguments: argparse.Namespace) -> None:
    """Traces in a separate process, so that tracing does not slow down anything that is timed."""
    from ark_torch.tools import trace

    timeline = arguments.folder / "trace.json"
    command = [sys.executable, __file__, "--trace", "--folder", str(arguments.folder), "--threads"]
    subprocess.run([*command, str(arguments.threads)], env={**os.environ, "ARK_TRACE": str(timeline)}, check=True)
    with contextlib.redirect_stdout(None):  # hides its summary, which `ark trace` prints
        code = trace.main([str(timeline), "--picture", str(arguments.folder / "schedule.svg")])
    if code != 0:
        raise RuntimeError(f"{timeline} holds no step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo-output"), help="what train_gpt.py has written")
    parser.add_argument("--tokens", type=int, default=400, help="to write (default: 400)")
    parser.add_argument("--threads", type=int, default=2, help="of each way, and workers of ark's kernel (default: 2)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tokens < 2:
        parser.error("--tokens takes 2 or more")
    if not (arguments.folder / "model.pt").is_file():
        parser.error(f"{arguments.folder} has no model.pt: run examples/train_gpt.py first")
    torch.set_num_threads(arguments.threads)
    gpt = trained(arguments.folder)
    if arguments.trace:
        traced_steps(gpt)
        return 0
    found = compare(gpt, PROMPT, arguments.tokens, TEMPERATURE, arguments.seed)
    alike = found["ark"].text == found["ark, resident"].text
    about = {"threads": arguments.threads, "tokens": arguments.tokens, "resident_as_single_launches": alike}
    ways = {name: asdict(one) for name, one in found.items()}
    (arguments.folder / "decode.json").write_text(json.dumps(about | {"ways": ways}, indent=1) + "\n")
    (arguments.folder / "sample.txt").write_text((PROMPT + bytes(found["ark, resident"].text)).decode(errors="replace"))
    draw_schedule(arguments)
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
