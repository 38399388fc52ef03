"""The doctor's probes. Each yields rows; any may raise (doctor.run_probe turns that into a row).

They import only the standard library and files of ark_torch that do not import torch: the doctor must run where PyTorch
is missing, of another version, or crashes at import.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ark_torch import _cost_files, _dispatch_files, _support, env
from ark_torch._version import __version__

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
_NEVER = 2**64 - 1  # CudaDispatch::kNever
OK, INFO, WARN, FAIL = "ok", "info", "warn", "FAIL"


@dataclass
class Row:
    """One finding. FAIL: collectives on CPU tensors cannot work; WARN: something less important does not work."""

    probe: str
    state: str
    found: str
    advice: str = ""


Probe = Callable[[], Iterable[Row]]


def child(*arguments: str, seconds: float = 60.0) -> tuple[bool, str]:
    """Runs this Python in a child process. Returns (it succeeded, its output or the error)."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {seconds:.0f} s"
    if done.returncode < 0:
        return False, f"killed by signal {-done.returncode}"
    if done.returncode:
        return False, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return True, done.stdout.strip()


def versions() -> Iterator[Row]:
    yield Row("ark_torch", OK, f"{__version__} in {HERE.parent}")
    right = sys.platform == "linux" and platform.machine() == "x86_64"
    yield Row("system", OK if right else FAIL, platform.platform(), "" if right else "ark_torch needs Linux on x86-64")
    new = sys.version_info >= (3, 10)
    text = f"{platform.python_version()} at {sys.executable}"
    yield Row("python", OK if new else FAIL, text, "" if new else "ark_torch needs Python 3.10 or newer")


def pytorch() -> Iterator[Row]:
    script = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.__file__]))"
    good, text = child("-c", script, seconds=120)
    if not good:
        advice = f"install a supported PyTorch: {_support.supported_text()}; then `{_support.rebuild_command()}`"
        yield Row("pytorch", FAIL, text, advice)
        return
    version, cuda, where = json.loads(text.splitlines()[-1])
    yield Row("pytorch", OK, f"{version} (CUDA {cuda or 'none'}) at {os.path.dirname(where)}")
    built = _support.built_for()
    why = _support.problem(version, built)
    if why is not None:
        found = f"built for PyTorch {built or 'none'}"
        if built is not None and _support.minor_of(built) != _support.minor_of(version):
            found += f", now {version}: an installation since has replaced it"
            asking = _support.requirers()
            found += f"\npackages that ask for a torch: {', '.join(asking)}" if asking else ""
        yield Row("extension", FAIL, found, why)
        return
    news = _support.untested(version)
    if news is not None:
        yield Row("pytorch", WARN, news)
    good, text = child("-c", "import ark_torch, ark_torch._C as c; print(c.__file__)")
    advice = "" if good else f"build it anew: {_support.rebuild_command()}"
    yield Row("extension", OK if good else FAIL, f"built for PyTorch {built}: {text}", advice)


def entry_points() -> Iterator[Row]:
    found = [
        group
        for group in ("torch.backends", "torch.distributed.backends", "torch_dynamo_backends")
        if any(entry.name == "ark" for entry in importlib.metadata.entry_points(group=group))
    ]
    whole = "torch.backends" in found
    advice = "" if whole else "the installation has no metadata: install with pip, or `import ark_torch` in the script"
    yield Row("entry points", OK if whole else WARN, ", ".join(found) or "none", advice)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        advice = "the script has to `import ark_torch` itself"
        yield Row("entry points", WARN, "TORCH_DEVICE_BACKEND_AUTOLOAD is off", advice)


def environment() -> Iterator[Row]:
    values = {name: text for name, text in sorted(os.environ.items()) if name.startswith(env.PREFIX)}
    shown = ", ".join(f"{name}={text}" for name, text in values.items()) or "no ARK_ variable is set"
    try:
        env.read()
        yield Row("environment", OK, shown)
    except ValueError as error:
        yield Row("environment", FAIL, shown, str(error))
    for name, meant in env.unknown().items():
        yield Row("environment", WARN, f"{name} is not a variable of ark_torch", meant)


def shared_memory() -> Iterator[Row]:
    descriptor = os.memfd_create("ark-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, MIB)
        os.pwrite(descriptor, b"ark", 0)
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with left, right:
            socket.send_fds(left, [b"x"], [descriptor])
            _, received, _, _ = socket.recv_fds(right, 1, 1)
        works = len(received) == 1 and os.pread(received[0], 3, 0) == b"ark"
        for copy in received:
            os.close(copy)
    finally:
        os.close(descriptor)
    advice = "" if works else "descriptors do not pass over Unix sockets here: look at the container's seccomp profile"
    yield Row("memfd", OK if works else FAIL, "created, written, passed over a Unix socket and read back", advice)
    try:
        room = shutil.disk_usage("/dev/shm")
        text = f"{room.free // MIB} MiB free of {room.total // MIB} MiB (not needed: memory has no name here)"
        yield Row("/dev/shm", INFO, text)
    except OSError as error:
        yield Row("/dev/shm", INFO, f"{error} (not needed: memory has no name here)")
    for name, limit, enough in (
        ("memlock", resource.RLIMIT_MEMLOCK, 64 * MIB),
        ("nofile", resource.RLIMIT_NOFILE, 1024),
    ):
        soft, hard = resource.getrlimit(limit)
        text = " of ".join("unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard))
        low = soft != resource.RLIM_INFINITY and soft < enough
        if name == "memlock":
            yield Row("limit memlock", INFO, text, "RDMA and pinned memory will want more: ulimit -l" if low else "")
        else:
            yield Row("limit nofile", WARN if low else OK, text, "many groups need more: ulimit -n" if low else "")


def memory() -> Iterator[Row]:
    table = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(table[key].split()[0]) // 1024 for key in ("MemAvailable", "MemTotal"))
    low = free < 512
    yield Row("memory", WARN if low else OK, f"{free} MiB available of {total} MiB", "little room" if low else "")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if os.path.exists(path) else ""
        if text.isdigit() and int(text) // MIB < total:
            yield Row("memory", INFO, f"control group's limit {int(text) // MIB} MiB; shared memory counts towards it")


def processor() -> Iterator[Row]:
    allowed = sorted(os.sched_getaffinity(0))
    text = f"{os.cpu_count()} in all, {len(allowed)} for this process"
    quota = Path("/sys/fs/cgroup/cpu.max")
    words = quota.read_text().split() if quota.exists() else []
    if len(words) == 2 and words[0].isdigit():
        text += f", control group's quota {int(words[0]) / int(words[1]):.1f}"
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    yield Row("cores", OK, f"{text}; {max(nodes, 1)} memory node(s)")
    info = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in info if line.startswith("flags")), "").split()
    model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")
    best = "avx512" if {"avx512f", "avx512bw", "avx512vl"} <= set(flags) else "avx2" if "avx2" in flags else "baseline"
    yield Row("vectors", INFO, f"{best} ({model})")


def compilers() -> Iterator[Row]:
    """The host compiler of torch.compile's CPU kernels (csrc/jit/host_compiler.cpp chooses the same)."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(command[0])
        if path is None:
            continue
        shown = " ".join([path, *command[1:]])
        done = subprocess.run([path, *command[1:], "--version"], capture_output=True, text=True, timeout=20)
        version = (done.stdout.splitlines() or ["no version"])[0]
        advice = "" if done.returncode == 0 else "it does not even tell its version"
        yield Row("compiler", WARN if advice else OK, f"{shown}: {version}", advice)
        return
    found = f"CXX={' '.join(given)}: no such program" if given else "none in PATH"
    advice = 'torch.compile(backend="ark") falls back to Inductor: install a C++20 compiler, g++ 11 or newer'
    yield Row("compiler", WARN, found, advice)


def cuda() -> Iterator[Row]:
    # By path, without its folder in sys.path, where tools would shadow modules of the standard library.
    script = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    good, text = child("-c", script, str(HERE / "_probe_cuda.py"))
    if not good:
        yield Row("cuda", WARN, text, "the CUDA driver or NVRTC brought the probe down")
        return
    rows = [Row(**row) for row in json.loads(text)]
    yield from rows
    gpus = [row.found for row in rows if row.probe.startswith("gpu ")]
    yield from costs_of({text.split(",")[0] for text in gpus})
    if len(gpus) > 1:
        missing = any(row.probe == "peer access" and row.state != OK for row in rows)
        yield from between_gpus(len(gpus), missing)
        yield from thresholds([text.split(",")[0] for text in gpus], nccl=not missing)


def costs_of(models: Collection[str]) -> Iterator[Row]:
    """What plans of compiled regions reckon with on GPUs that the built-in figures were not measured on."""
    for model in sorted(models):
        files = _cost_files.kept(model)
        if files:
            yield Row("costs", INFO, f"of compiled regions on {model}: {', '.join(files)}")
        elif not _cost_files.is_built_in(model):
            found = f"of compiled regions on {model}: as on {' and '.join(_dispatch_files.MEASURED)}"
            yield Row("costs", INFO, found, "`ark tune --costs` on the idle machine measures this GPU's")


def between_gpus(gpus: int, missing: bool) -> Iterator[Row]:
    """The transport of a group of all GPUs, and what it requires."""
    try:
        wish = env.read().disable_p2p
    except ValueError:
        return  # another probe reports it
    if wish == "0" and missing:
        yield Row("between GPUs", INFO, "PyTorch's NCCL carries CUDA tensors, as ARK_DISABLE_P2P=0 asks")
        return
    if wish != "1" and not missing:
        how = "untested, as ARK_DISABLE_P2P=0 asks" if wish == "0" else "tested by values when a group first uses it"
        advice = (
            "" if wish == "0" else "where values do not arrive, a group goes through memory of the host and says so"
        )
        yield Row("between GPUs", INFO, f"each other's memory, {how}", advice)
        return
    ranks = min(gpus, 8)
    script = f"from ark_torch import _C; print(*_C._host_use({ranks}, {wish != '1'}))"
    good, text = child("-c", script)
    if not good:
        yield Row("between GPUs", WARN, text, "the extension could not tell how groups would go")
        return
    a_rank, least, most = map(int, text.split()[-3:])
    found = f"memory of the host: {a_rank >> 20} MB of it pinned for each of {ranks} ranks"
    found += f", {a_rank * ranks >> 20} MB a group"
    if least < most < 1 << 40:
        sums = "" if ranks <= 2 or env.read().reduction == "fast" else " (sums are ark's)"
        found += f"; PyTorch's NCCL for {least >> 10} KB to {most >> 20} MB{sums}"
    yield Row("between GPUs", INFO, found, "ARK_DISABLE_P2P=0 leaves all to NCCL" if wish != "1" else "")


def thresholds(models: Sequence[str], nccl: bool = False) -> Iterator[Row]:
    """Whether the built-in dispatch was measured on such GPUs, if no table replaces it. `nccl`: whether NCCL's share
    may be shown, which needs peers' memory."""
    try:
        settings = env.read()
    except ValueError:
        return
    if settings.dispatch:
        return  # dispatch() reports it
    others = sorted({model for model in models if not _dispatch_files.is_built_in(model, 2)})
    found = f"built in, measured on {' and '.join(_dispatch_files.MEASURED)}"
    if not others:
        yield Row("dispatch", INFO, found)
        if nccl and len(set(models)) == 1 and settings.disable_p2p != "1":
            numbers = built_in(models[0], len(models))
            yield from nccl_share(numbers, len(models), settings.reduction == "fast")
            yield from captured_steps(numbers, len(models))
        return
    advice = "`ark tune --cuda` on the idle machine writes a whole one; ARK_DISPATCH names it"
    if files := _dispatch_files.kept(others):
        yield Row("dispatch", INFO, f"measured at first use for {', '.join(others)}: {', '.join(files)}", advice)
        return
    then = "groups measure one in 3 s at first use" if settings.tune else "ARK_TUNE=0 leaves it so"
    yield Row("dispatch", INFO, f"{found}; none was made for {', '.join(others)}: {then}", advice)


def built_in(model: str, gpus: int) -> dict[str, int]:
    """The built-in dispatch of a group of all GPUs; {} if the extension does not load, as its own row says."""
    script = "import json; from ark_torch import _C; print(json.dumps(_C._default_cuda_dispatch({}, {!r})))"
    good, text = child("-c", script.format(gpus, model))
    numbers: dict[str, int] = json.loads(text.splitlines()[-1]) if good else {}
    return numbers


def captured_steps(numbers: dict[str, int], gpus: int) -> Iterator[Row]:
    """What few blocks and copy engines carry in captured training steps alone."""
    engines = numbers["step_copy_engine_from"]
    sizes = {
        name.removeprefix("step_").removesuffix("_from"): least
        for name, least in numbers.items()
        if name.startswith("step_") and name.endswith("_from") and "engine" not in name and least != _NEVER
    }
    parts = []
    if sizes and numbers["step_blocks"]:
        carried = ", ".join(f"{name} from {least / MIB:g} MB on" for name, least in sizes.items())
        fewer = numbers["step_all_reduce_blocks"]
        of_them = f", all_reduce by {fewer} of them" if "all_reduce" in sizes and fewer < numbers["step_blocks"] else ""
        parts.append(f"{numbers['step_blocks']} blocks carry {carried}{of_them}")
    if engines < numbers["copy_engine_from"]:
        parts.append(f"copy engines carry all_reduce from {engines / MIB:g} MB on")
    if gpus > 1 and parts:
        yield Row("dispatch", INFO, f"captured training steps on {gpus} GPUs: {', '.join(parts)}")


def nccl_share(numbers: dict[str, int], gpus: int, fast: bool) -> Iterator[Row]:
    """What PyTorch's NCCL carries by default in a group of all GPUs."""
    shares: list[str] = []
    sums: list[str] = []
    for name, least in numbers.items():
        operation = name.removeprefix("nccl_").removesuffix("_from")
        if name != f"nccl_{operation}_from" or least == _NEVER:
            continue
        most = numbers[f"nccl_{operation}_to"]
        share = f"{operation} from {least / MIB:g} MB" + (" on" if most == _NEVER else f" to {(most + 1) / MIB:g} MB")
        (sums if "reduce" in operation and not fast else shares).append(share)
    if shares or sums:
        found = f"PyTorch's NCCL, measured faster, carries on {gpus} GPUs: {', '.join(shares) or 'nothing'}"
        advice = f"ARK_REDUCTION=fast would also give it {', '.join(sums)}" if sums else ""
        yield Row("dispatch", INFO, found, advice)


def dispatch() -> Iterator[Row]:
    """What the table of ARK_DISPATCH contains for this machine's GPUs."""
    try:
        settings = env.read()
    except ValueError:
        return  # another probe reports it
    path = settings.dispatch
    if not path:
        return
    table = json.loads(Path(path).read_text(encoding="utf-8"))
    sizes = [str(rule["max_ranks"]) for rule in table.get("cuda", [])]
    if sizes:
        yield Row("dispatch", OK, f"{path}: measured for groups of {', '.join(sizes)} GPUs")
    for rule in table.get("fast", []):
        for operation, gains in rule["gains"].items():
            size, gain = max(gains.items(), key=lambda entry: float(entry[1]))
            text = (
                f"{operation} on {rule['ranks']} GPUs: up to {(gain - 1) * 100:.0f}% ({int(size) / MIB:g} MB) to gain"
            )
            advice = "ARK_REDUCTION=fast takes it, where sums need not have the same bits everywhere"
            if settings.reduction == "fast":
                advice = ""
            yield Row("reduction", INFO, f"{text} by adding in any order", advice)


def rdma() -> Iterator[Row]:
    """The NIC that groups over several machines would use, or why there is none."""
    good, text = child("-m", "ark_torch.tools._probe_rdma")
    if not good:
        yield Row("rdma", WARN, text, "the probe failed; ARK_NET=gloo goes around RDMA")
        return
    for row in json.loads(text):
        yield Row(**row)


def network() -> Iterator[Row]:
    good, text = child("-c", "import socket; socket.getaddrinfo(socket.gethostname(), 0)", seconds=10)
    if not good:
        advice = "torchrun's rendezvous resolves it: put the name into /etc/hosts, or pass --master-addr 127.0.0.1"
        yield Row("host name", WARN, f"{socket.gethostname()}: {text}", advice)


def collective() -> Iterator[Row]:
    """The test: two processes, one all_reduce over ark."""
    good, text = child("-m", "ark_torch.tools._probe_collective", seconds=120)
    advice = "" if good else "the rows above may say why; ARK_DISABLE=1 goes around ark"
    yield Row("all_reduce", OK if good else FAIL, text, advice)


def nodes() -> Iterator[Row]:
    """The nodes of a job's ranks, and the transport between nodes; only a job knows them."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        yield Row("nodes", INFO, "not in a job: `torchrun ... -m ark_torch doctor` shows a job's plan")
        return
    good, text = child("-m", "ark_torch.tools._probe_collective", "job", seconds=120)
    advice = "" if good else "see whether the machines reach each other; GLOO_SOCKET_IFNAME names the interface"
    yield Row("nodes", OK if good else FAIL, text, advice)


def libc() -> Iterator[Row]:
    library: Any = ctypes.CDLL(None)
    library.gnu_get_libc_version.restype = ctypes.c_char_p
    yield Row("glibc", INFO, library.gnu_get_libc_version().decode())


PROBES: tuple[tuple[str, Probe, bool], ...] = (
    ("versions", versions, True),
    ("glibc", libc, False),
    ("pytorch", pytorch, True),
    ("entry points", entry_points, False),
    ("environment", environment, True),
    ("shared memory", shared_memory, True),
    ("memory", memory, False),
    ("processor", processor, False),
    ("compiler", compilers, False),
    ("cuda", cuda, False),
    ("dispatch", dispatch, False),
    ("rdma", rdma, False),
    ("network", network, False),
    ("all_reduce", collective, True),
    ("nodes", nodes, False),
)
