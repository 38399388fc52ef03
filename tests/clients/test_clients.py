"""Libraries that users train and generate with, over ark: Accelerate, Lightning, DeepSpeed, Transformers and others.

They are installed into their own environment, build/clients, which sees the project's. Training is compared with the
same over Gloo. Generation must run on ark's kernels, which the profiler shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support import launcher, processes, start

TOP = start.TESTS.parent
SCRIPTS = Path(__file__).resolve().parent / "scripts"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TRAINERS = {
    "accelerate": TORCHRUN,
    "trainer": TORCHRUN,
    "lightning": [],
    "deepspeed": TORCHRUN,
    "notebook_launcher": [],
}
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python() -> str:
    folder, wanted = TOP / "build" / "clients", TOP / "requirements" / "clients.txt"
    made, found = folder / "bin" / "python", folder / "installed.txt"
    if not found.exists() or found.read_text() != wanted.read_text():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        own = next(folder.glob("lib/python*/site-packages"))
        (own / "project.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        subprocess.run([made, "-m", "pip", "install", "-q", "-r", wanted], check=True, timeout=1500)
        found.write_text(wanted.read_text())
    return str(made)


def run(command: list[str], folder: Path) -> str:
    environment = start.base_environment(PYTHONPATH=os.pathsep.join([str(SCRIPTS), str(TOP)]), DS_ACCELERATOR="cpu")
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        processes.end_tree([process.pid, *processes.descendants(process.pid)])
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("client", TRAINERS)
def test_training_is_as_over_gloo(client: str, python: str, tmp_path: Path) -> None:
    norms: dict[str, dict[str, str]] = {}
    for backend in (launcher.BACKEND, "gloo"):
        script = str(SCRIPTS / f"with_{client}.py")
        output = run([python, *TRAINERS[client], script, backend, str(tmp_path / backend)], tmp_path)
        norms[backend] = dict(re.findall(rf"rank (\d) over {backend}: ([\d.]+)", output))
        assert set(norms[backend]) == {"0", "1"}, output
        assert norms[backend]["0"] == norms[backend]["1"], output
    assert float(norms[launcher.BACKEND]["0"]) == pytest.approx(float(norms["gloo"]["0"]), rel=1e-6)


@pytest.mark.parametrize("client", ["trainer", "accelerate", "lightning"])
def test_captured_steps_train_as_the_client_does(client: str, python: str, tmp_path: Path) -> None:
    script = str(TOP / "examples" / f"captured_{client}.py")
    output = run([python, *TORCHRUN, script, "--backend", launcher.BACKEND], tmp_path)
    assert all(f"rank {rank} of 2: weights equal those of" in output for rank in range(2)), output


@pytest.mark.parametrize("client", ["generate", "pipeline", "sentence_transformers"])
def test_generation_runs_on_arks_kernels(client: str, python: str, tmp_path: Path) -> None:
    run([python, str(SCRIPTS / f"with_{client}.py")], tmp_path)
