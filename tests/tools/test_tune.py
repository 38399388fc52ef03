"""The autotune writes a table that groups accept and use; bad tables are refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ark_torch.distributed.group import load_dispatch

USE = """
import torch, torch.distributed as dist
dist.init_process_group("ark")
x = torch.arange(300_001, dtype=torch.float32)
dist.all_reduce(x)
assert torch.equal(x, 2 * torch.arange(300_001, dtype=torch.float32))
dist.destroy_process_group()
"""


def test_the_table_covers_every_collective_and_is_used(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, "-m", "ark_torch.tools.tune", "--rounds", "1", "--output", str(table)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    rules = load_dispatch(str(table))
    assert {rule[0] for rule in rules} >= {"all_reduce", "reduce", "all_gather", "broadcast", "all_to_all"}
    script = tmp_path / "use.py"
    script.write_text(USE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(launch, check=True, timeout=120, env={**os.environ, "ARK_DISPATCH": str(table)})


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "[]", '{"rules": [{"collective": "all_reduce"}]}', "{"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "table.json"
    table.write_text(text)
    with pytest.raises(ValueError, match="is no dispatch table"):
        load_dispatch(str(table))


@pytest.mark.quick
def test_a_rule_out_of_range_is_named(tmp_path: Path) -> None:
    from ark_torch import Options

    good = ("all_reduce", "two_shot", "both", 8, 4096, 128)
    options = Options()
    options.dispatch = [good]
    assert options.dispatch == [good]
    with pytest.raises(ValueError, match="rule 1: chunk_bytes 100 is not a multiple of 64"):
        options.dispatch = [good, ("all_reduce", "two_shot", "both", 8, 4096, 100)]
    with pytest.raises(ValueError, match="unknown collective 'all_reduec'"):
        options.dispatch = [("all_reduec", "two_shot", "both", 8, 4096, 128)]
    assert json.dumps(options.dispatch)
