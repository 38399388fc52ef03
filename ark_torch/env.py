"""Every environment variable of ark_torch, declared once: name, type, default, allowed values, meaning.

Programs read them through `read()`, which checks all of them at once, so that a bad value is reported before any data
moves. C++ never reads the environment. tools/renew_docs.py generates the table in docs/environment.md from here.
Standard library only.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ark_torch import _suggest

PREFIX = "ARK_"
# Build-time variables, read only by build_backend/ark_aot.py.
BUILD = ("ARK_AOT", "ARK_AOT_ARCHS", "ARK_AOT_RANKS")


@dataclass(frozen=True)
class Variable:
    """One variable. `kind` is bool, choice, command, folder, int, int_or_auto, name, path or prefix."""

    name: str
    kind: str
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int = 0

    @property
    def field(self) -> str:
        return self.name.removeprefix(PREFIX).lower()

    def allowed(self) -> str:
        """The allowed values, for messages and the table."""
        if self.kind == "bool":
            return "0 or 1"
        if self.kind == "choice":
            return ", ".join(self.choices[:-1]) + " or " + self.choices[-1]
        if self.kind == "int":
            return f"a whole number from {self.minimum} to {self.maximum}"
        if self.kind == "int_or_auto":
            return f"auto, or a whole number from {self.minimum} to {self.maximum}"
        if self.kind == "prefix":
            return "a path; its folder must exist"
        if self.kind == "command":
            return "a program, with arguments"
        if self.kind == "names":
            return "names of letters, digits, _ and -, with commas between"
        if self.kind == "folder":
            return "the path of a folder, made when missing"
        return "the path of a readable file"

    def parse(self, text: str) -> Any:
        """Parses a non-empty text. Raises ValueError naming the variable and the allowed values."""
        text = text.strip()
        if self.kind == "bool" and text in ("0", "1"):
            return text == "1"
        if self.kind == "choice" and text.lower() in self.choices:
            return text.lower()
        if self.kind == "int_or_auto" and text.lower() == "auto":
            return "auto"
        if self.kind in ("int", "int_or_auto") and text.isascii() and text.isdigit():
            value = int(text)
            if self.minimum <= value <= self.maximum:
                return value
        if self.kind == "prefix" and os.path.isdir(os.path.dirname(text) or "."):
            return text
        if self.kind == "folder" and _may_be_folder(os.path.abspath(os.path.expanduser(text))):
            return os.path.abspath(os.path.expanduser(text))
        if self.kind == "command" and _words(text):
            return text
        if self.kind == "names" and text.isascii():
            names = [name.strip() for name in text.split(",")]
            if all(name.replace("_", "").replace("-", "").isalnum() for name in names):
                return ",".join(names)
        if self.kind == "path" and os.path.isfile(text) and os.access(text, os.R_OK):
            return text
        raise ValueError(
            f"{self.name}={text!r} is not allowed: it takes {self.allowed()}, and unset means {self.shown_default()}."
        )

    def shown_default(self) -> str:
        if self.kind == "bool":
            return str(int(self.default))
        return "none" if self.default == "" else str(self.default)


def _words(text: str) -> list[str]:
    """Splits `text` like a shell, without calling one; [] if it cannot be split."""
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _may_be_folder(path: str) -> bool:
    """Whether `path` is a folder or could be created as one."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path)


def _variable(*of: Any, **limits: Any) -> Any:
    return field(metadata={"variable": Variable(*of, **limits)})


@dataclass(frozen=True)
class Settings:
    """The values in force, one field per variable (ARK_SPIN_US -> spin_us)."""

    disable: bool = _variable(
        "ARK_DISABLE",
        "bool",
        False,
        'Hand every new "ark" group to PyTorch\'s own Gloo (CPU) or NCCL (CUDA): the first thing to try in trouble.',
    )
    debug: bool = _variable(
        "ARK_DEBUG",
        "bool",
        False,
        "Compare operation, sizes, dtype, reduce operation and root between the ranks before every collective "
        "(TORCH_DISTRIBUTED_DEBUG=DETAIL does so too).",
    )
    shared_memory: str = _variable(
        "ARK_SHARED_MEMORY",
        "choice",
        "auto",
        "auto: found out for each group. off: as if no rank shared memory with another, so Gloo carries the group. "
        "on: ranks that share no memory are an error.",
        choices=("auto", "on", "off"),
    )
    flight_record: int = _variable(
        "ARK_FLIGHT_RECORD",
        "int",
        2048,
        "How many of the last operations the flight record keeps; 0: none.",
        minimum=0,
        maximum=1 << 20,
    )
    flight_dump: str = _variable(
        "ARK_FLIGHT_DUMP",
        "prefix",
        "",
        "Where a failure writes the flight record: this text, then the rank and .json. Unset: nothing is written.",
    )
    timing: bool = _variable(
        "ARK_TIMING",
        "bool",
        False,
        "Operations on CUDA tensors take the device's times: their durations are in the flight record and in works. "
        "Costs about a microsecond each.",
    )
    node: int | str = _variable(
        "ARK_NODE",
        "int_or_auto",
        "auto",
        "As of which machine this rank counts: ranks with other numbers share no memory with it, as if they ran on "
        "another. For trying out on one machine what groups over several do; auto: where the rank runs.",
        minimum=0,
        maximum=1_000_000,
    )
    net: str = _variable(
        "ARK_NET",
        "choice",
        "auto",
        "What carries groups between nodes. auto: RDMA where every rank has a device for it, else PyTorch's Gloo; the "
        "log says which and why. rdma: where it cannot be, that is an error; collectives on CUDA tensors use it, too, "
        "in place of NCCL. gloo: no RDMA. All ranks alike.",
        choices=("auto", "rdma", "gloo"),
    )
    rdma_device: str = _variable(
        "ARK_RDMA_DEVICE",
        "names",
        "",
        "The RDMA device (`rdma link`, `ibv_devices` list them). Several, or all: large messages go along all of them, "
        "small ones by the first. Unset: the nearest to the rank's GPU by PCI, else the first with an active port.",
    )
    rdma_port: int | str = _variable(
        "ARK_RDMA_PORT",
        "int_or_auto",
        "auto",
        "The device's port, from 1; auto: the first that is active.",
        minimum=1,
        maximum=255,
    )
    rdma_gid_index: int | str = _variable(
        "ARK_RDMA_GID_INDEX",
        "int_or_auto",
        "auto",
        "Which of the port's GIDs (`ibv_devinfo -v`) is this rank's address; auto: RoCE v2 with an IPv4 address, else "
        "what comes nearest.",
        minimum=0,
        maximum=255,
    )
    rdma_mtu: str = _variable(
        "ARK_RDMA_MTU",
        "choice",
        "auto",
        "Bytes of an RDMA packet; auto: the least that any rank's port has.",
        choices=("auto", "256", "512", "1024", "2048", "4096"),
    )
    rdma_traffic_class: int = _variable(
        "ARK_RDMA_TRAFFIC_CLASS",
        "int",
        0,
        "The traffic class of RoCE's packets: four times the DSCP that the network's lossless class has.",
        minimum=0,
        maximum=255,
    )
    rdma_service_level: int = _variable(
        "ARK_RDMA_SERVICE_LEVEL",
        "int",
        0,
        "InfiniBand's service level; of RoCE the priority.",
        minimum=0,
        maximum=15,
    )
    rdma_pkey_index: int = _variable(
        "ARK_RDMA_PKEY_INDEX",
        "int",
        0,
        "Which entry of the port's table of partition keys.",
        minimum=0,
        maximum=65535,
    )
    rdma_timeout: int = _variable(
        "ARK_RDMA_TIMEOUT",
        "int",
        18,
        "A packet without an answer is sent again after 4.096 us times 2 to this power (18: 1.1 s), or up to four "
        "times that; 0: never.",
        minimum=0,
        maximum=31,
    )
    rdma_retry_count: int = _variable(
        "ARK_RDMA_RETRY_COUNT",
        "int",
        6,
        "How often, before the peer counts as lost and the group fails (soft-RoCE takes 7 for ever).",
        minimum=0,
        maximum=7,
    )
    rdma_rnr_retry: int = _variable(
        "ARK_RDMA_RNR_RETRY",
        "int",
        7,
        "How often a message is sent again to a receiver that is not ready, which credits leave no cause for; 7: for "
        "ever.",
        minimum=0,
        maximum=7,
    )
    rdma_cache_mb: int = _variable(
        "ARK_RDMA_CACHE_MB",
        "int",
        0,
        "How many MiB of tensors' memory may stay registered with the NIC while no message uses it. Only for programs "
        "that give no memory back to the system (docs/rdma.md); 0: none.",
        minimum=0,
        maximum=1 << 20,
    )
    rdma_library: str = _variable(
        "ARK_RDMA_LIBRARY",
        "path",
        "",
        "The libibverbs that is opened. Unset: the system's libibverbs.so.1.",
    )
    spin_us: int | str = _variable(
        "ARK_SPIN_US",
        "int_or_auto",
        "auto",
        "How many microseconds a waiting thread polls before it sleeps; auto: 50, or none when there are more ranks "
        "than cores.",
        minimum=0,
        maximum=1_000_000,
    )
    dispatch: str = _variable(
        "ARK_DISPATCH",
        "path",
        "",
        "A dispatch table (JSON, written by the autotune) in place of the built-in one.",
    )
    tune: bool = _variable(
        "ARK_TUNE",
        "bool",
        True,
        "On GPU models that the built-in dispatch was not measured on, and for more than four ranks, a group measures "
        "one in about 3 s when it first uses CUDA tensors, all ranks together, and keeps it in the cache folder for "
        "later processes. 0: it takes the built-in one. Rank 0's counts; ARK_DISPATCH goes before.",
    )
    buffer_mb: int = _variable(
        "ARK_BUFFER_MB",
        "int",
        512,
        "How many MiB of GPU memory a group may share for what copy engines carry, made by the first call of such a "
        "size (also of one that they carry in captured training steps alone); with less they go in smaller pieces, "
        "with 0 not by copy engines.",
        minimum=0,
        maximum=1 << 20,
    )
    reduction: str = _variable(
        "ARK_REDUCTION",
        "choice",
        "exact",
        "exact: sums are added in rank order and rounded once, the same bits whatever carries them. fast: sums of CUDA "
        "tensors go the fastest way that was measured, NCCL's included, which adds in other orders.",
        choices=("exact", "fast"),
    )
    order: str = _variable(
        "ARK_ORDER",
        "choice",
        "node",
        "node: sums over several nodes are taken within each node, then between nodes, which sends the fewest bytes. "
        "flat: in the order of all ranks, the same bits as on one node whatever the placement, for more bytes.",
        choices=("node", "flat"),
    )
    partials: str = _variable(
        "ARK_PARTIALS",
        "choice",
        "float32",
        "What nodes send each other of sums of 8- and 16-bit floats. float32: a node's sum as it was added, which is "
        "rounded once, in the end. input: rounded to the tensor's type, for half the bytes (of float8 a quarter).",
        choices=("float32", "input"),
    )
    share_gpu: bool = _variable(
        "ARK_SHARE_GPU",
        "bool",
        False,
        "Ranks may have the same GPU: a program for several GPUs can be tried on one. It gives each process a slice of "
        "time in turn, which is slow; under NVIDIA's MPS (`nvidia-cuda-mps-control -d`) they run at once: "
        "collectives by few blocks, loop kernels on their part of the multiprocessors each. Groups with options of "
        "their own follow it, too. Without it such ranks are an error.",
    )
    disable_p2p: str = _variable(
        "ARK_DISABLE_P2P",
        "choice",
        "auto",
        "Whether GPUs use each other's memory. auto: where values arrive there, for which every pair of devices is "
        "tested when a group first uses CUDA tensors; where a pair has no peer access, or has it and it lies, the "
        "whole group goes through pinned memory of the host (at most 64 MB a group), with PyTorch's NCCL for what that "
        "is faster with. 0: where the driver says so, untested; else PyTorch's NCCL carries the group. 1: never; "
        "memory of the host carries all. Rank 0's counts. docs/collectives.md says what is faster.",
        choices=("auto", "0", "1"),
    )
    cache: str = _variable(
        "ARK_CACHE",
        "folder",
        "",
        "Where compiled kernels are kept, and what was chosen. It must be yours and not writable by others, or nothing "
        "is kept. Unset: ark_torch/kernels in XDG_CACHE_HOME or ~/.cache.",
    )
    costs: str = _variable(
        "ARK_COSTS",
        "choice",
        "measured",
        "What torch.compile's plans reckon with. measured: what work costs on this machine, kept in the cache folder; "
        "a CPU is measured at the first compilation, a GPU by `ark tune --costs`, and until then it counts as an H200. "
        "assumed: the same figures everywhere, so that plans, and a cache that was filled elsewhere, do not depend on "
        "the machine.",
        choices=("measured", "assumed"),
    )
    trace: str = _variable(
        "ARK_TRACE",
        "prefix",
        "",
        "A file for the timeline of compiled regions: each task and each wait of every worker, for Perfetto. Where "
        "there are several ranks, each writes a file with its rank in the name. Unset: nothing is measured.",
    )
    trace_mb: int = _variable(
        "ARK_TRACE_MB",
        "int",
        64,
        "How many MiB the timeline's file may take; steps after that are not in it.",
        minimum=1,
        maximum=1 << 14,
    )
    dump_passes: str = _variable(
        "ARK_DUMP_PASSES",
        "folder",
        "",
        "Where the compiler writes what each of its passes leaves of each region, and checks it: for whoever works on "
        "a pass. Unset: neither.",
    )
    nvrtc: str = _variable(
        "ARK_NVRTC",
        "path",
        "",
        "The NVRTC library (libnvrtc.so.12 or .13) that compiles CUDA kernels. Unset: the one of PyTorch's wheels, "
        "then CUDA_HOME's, then the system's.",
    )
    optimise: int = _variable(
        "ARK_OPTIMISE",
        "int",
        3,
        "How far the host's compiler (CXX, or the first of c++, g++ and clang++) optimises what torch.compile makes "
        "for the CPU (its -O): 1 compiles in half the time and runs slower.",
        minimum=0,
        maximum=3,
    )
    cxx: str = _variable(
        "CXX",
        "command",
        "",
        "The C++ compiler (C++20) of torch.compile's CPU kernels, as build tools take it: `ccache g++` too. Unset: "
        "c++, g++ or clang++ in PATH.",
    )


VARIABLES: tuple[Variable, ...] = tuple(one.metadata["variable"] for one in fields(Settings))


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads and checks every variable; an empty one counts as unset. Raises ValueError naming the first bad one."""
    environ = os.environ if environ is None else environ
    values = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        values[variable.field] = variable.parse(text) if text.strip() else variable.default
    return Settings(**values)


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that resemble ours but are not, each with a suggestion, since a misspelled name would silently do
    nothing. These are all that start with ARK_ (except the tests' own), and all that differ from ours only in case or
    separators."""
    environ = os.environ if environ is None else environ
    ours = [name for name in (*names(), *BUILD) if name.startswith(PREFIX)]
    folded = {name.replace("_", "") for name in ours}
    found = {}
    for name in sorted(set(environ) - set(ours)):
        prefixed = name.startswith(PREFIX) and not name.startswith("ARK_TEST_")
        if prefixed or name.upper().replace("-", "").replace("_", "") in folded:
            meant = _suggest.closest(name, ours)
            found[name] = f"did you mean {meant}?" if meant else f"known are {', '.join(ours)}."
    return found


@functools.cache
def warn_of_unknown() -> None:
    """Logs them once per process."""
    for name, meant in unknown().items():
        logging.getLogger("ark_torch").warning("%s is set, but is no variable of ark_torch: %s", name, meant)


def names() -> list[str]:
    """All variables, sorted."""
    return sorted(variable.name for variable in VARIABLES)


def table() -> str:
    """The Markdown table of variables in docs/environment.md."""
    lines = ["| variable | allowed | default | meaning |", "| --- | --- | --- | --- |"]
    for variable in VARIABLES:
        doc = variable.doc.replace("|", "\\|")
        lines.append(f"| `{variable.name}` | {variable.allowed()} | {variable.shown_default()} | {doc} |")
    return "\n".join(lines) + "\n"
