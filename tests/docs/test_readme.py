"""The three examples of README.md run unchanged, under torchrun and with plain python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import processes, start

README = start.TESTS.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
# The code is unchanged; compilation is set for a busy machine: no measured costs, no pool of compilers.
ENVIRONMENT = {"ARK_COSTS": "assumed", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(number: int, folder: Path, *launcher: str) -> str:
    script = folder / "train.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *launcher, str(script)],
        cwd=folder, env=start.base_environment(**ENVIRONMENT), stdout=pipe, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        processes.end_tree([process.pid, *processes.descendants(process.pid)])
    assert process.returncode == 0, output
    return output


@pytest.mark.quick
def test_there_are_three_and_the_page_is_short() -> None:
    assert len(BLOCKS) == 3
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 180


@pytest.mark.changed("README.md", "ark_torch/distributed/*")
def test_training(tmp_path: Path, leaves_nothing: None) -> None:
    norms = dict(re.findall(r"rank (\d): ([\d.]+)", run(0, tmp_path, *TORCHRUN)))
    assert set(norms) == {"0", "1"} and float(norms["0"]) > 0
    assert norms["0"] == norms["1"], "the gradients are not the mean over the ranks"


@pytest.mark.changed("README.md")
def test_compiling(tmp_path: Path) -> None:
    output = run(1, tmp_path)
    found = re.search(r"largest difference: (\S+)", output)
    assert found and float(found.group(1)) < 1e-5, output
    assert "piece 0 runs on ark: " in output and "fall back" not in output, output


@pytest.mark.changed("README.md", "ark_torch/compile/*resident*")
def test_resident(tmp_path: Path) -> None:
    output = run(2, tmp_path)
    found = re.search(r"tokens: \[(.*)\]", output)
    assert found and len(found.group(1).split(",")) == 50, output
    assert "launches: one\n" in output, output
