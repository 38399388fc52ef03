"""Bad input is refused before any byte moves. The message names argument, value, rank and remedy.

The cases call the backend object, because PyTorch's own checks, which come earlier, name neither rank nor remedy and do
not cover users of the object. Both ranks make the same mistake. The group must still work afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank

pytestmark = [pytest.mark.quick, pytest.mark.skipif(BACKEND != "ark", reason="checks what ark's messages say")]

Call = Callable[[Any, int], Any]
REFUSALS = ("ValueError", "TypeError")


def _options(kind: str, **fields: Any) -> Any:
    options = getattr(dist, kind)()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def _csr() -> torch.Tensor:
    return torch.eye(3).to_sparse_csr()


def _coo(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.eye(3, dtype=dtype).to_sparse()


# name -> (call(backend, rank), what the message must contain)
CASES: dict[str, tuple[Call, str]] = {
    "meta device": (lambda b, r: b.allreduce([torch.empty(3, device="meta")]), r"meta"),
    "no tensor": (lambda b, r: b.allreduce([]), r"\b0 tensors"),
    "two tensors": (lambda b, r: b.allreduce([_f(2), _f(2)]), r"\b2 tensors"),
    "sparse CSR": (lambda b, r: b.allreduce([_csr()]), r"(?i)sparse.?csr"),
    "sparse broadcast": (lambda b, r: b.broadcast([_coo()], _options("BroadcastOptions", rootRank=0)), r"(?i)sparse"),
    "sparse MAX": (lambda b, r: b.allreduce([_coo()], dist.ReduceOp.MAX), r"MAX"),
    "SUM of quantised": (
        lambda b, r: b.allreduce([torch.quantize_per_tensor(_f(4), 0.1, 0, torch.qint8)]),
        r"(?i)qint8|quantized",
    ),
    "BAND of floats": (lambda b, r: b.allreduce([_f(2)], dist.ReduceOp.BAND), r"BAND.*float32"),
    "overlapping output": (lambda b, r: b.allreduce([_f(1).expand(5)]), r"(?i)overlap|same memory|one memory"),
    "broadcast root 5": (lambda b, r: b.broadcast([_f(2)], _options("BroadcastOptions", rootRank=5)), r"\b5\b"),
    "broadcast root -1": (lambda b, r: b.broadcast([_f(2)], _options("BroadcastOptions", rootRank=-1)), r"-1"),
    "reduce root 2": (lambda b, r: b.reduce([_f(2)], _options("ReduceOptions", rootRank=2)), r"\b2\b"),
    "all_gather short list": (lambda b, r: b.allgather([[_f(2)]], [_f(2)]), r"\b1 entr.*\b2\b"),
    "all_gather long list": (lambda b, r: b.allgather([[_f(2)] * 3], [_f(2)]), r"\b3 entr"),
    "all_gather dtype": (
        lambda b, r: b.allgather([[_f(2), _f(2, dtype=torch.int64)]], [_f(2)]),
        r"\[1\].*(int64|Long).*(float32|Float)",
    ),
    "all_gather size": (lambda b, r: b.allgather([[_f(2), _f(3)]], [_f(2)]), r"\[1\].*\b3\b.*\b2\b"),
    "all_gather_into_tensor too small": (lambda b, r: b._allgather_base(_f(3), _f(2)), r"\b3\b.*\b4\b"),
    "all_gather_into_tensor dtype": (lambda b, r: b._allgather_base(_f(4), _f(2, dtype=torch.int32)), r"Int|int32"),
    "reduce_scatter list": (lambda b, r: b.reduce_scatter([_f(2)], [[_f(2)]]), r"\b1 entr"),
    "reduce_scatter output": (lambda b, r: b.reduce_scatter([_f(3)], [[_f(2), _f(2)]]), r"\b3\b.*\b2\b"),
    "reduce_scatter_tensor size": (lambda b, r: b._reduce_scatter_base(_f(2), _f(5)), r"\b5\b.*\b4\b"),
    "reduce_scatter_tensor BXOR of floats": (
        lambda b, r: b._reduce_scatter_base(
            _f(2), _f(4), _options("ReduceScatterOptions", reduceOp=dist.ReduceOp.BXOR)
        ),
        r"BXOR",
    ),
    "all_to_all_single odd": (lambda b, r: b.alltoall_base(_f(3), _f(3), [], []), r"\b3\b.*\b2\b"),
    "all_to_all_single split sum": (
        lambda b, r: b.alltoall_base(_f(4), _f(4), [2, 2], [2, 1]),
        r"\b3\b.*\b4\b|\b4\b.*\b3\b",
    ),
    "all_to_all_single negative": (lambda b, r: b.alltoall_base(_f(4), _f(4), [2, 2], [5, -1]), r"-1"),
    "all_to_all_single split count": (lambda b, r: b.alltoall_base(_f(4), _f(4), [4], [2, 2]), r"\b1 entr"),
    "all_to_all_single dtype": (
        lambda b, r: b.alltoall_base(_f(4), _f(4, dtype=torch.int32), [], []),
        r"Int|int32",
    ),
    "all_to_all list": (lambda b, r: b.alltoall([_f(2)], [_f(2), _f(2)]), r"\b1 entr"),
    "all_to_all dtype": (
        lambda b, r: b.alltoall([_f(2), _f(2)], [_f(2), _f(2, dtype=torch.int64)]),
        r"int64|Long",
    ),
    "gather without list": (
        lambda b, r: b.gather([], [_f(2)], _options("GatherOptions", rootRank=r)),
        r"gather_list|output",
    ),
    "gather short list": (
        lambda b, r: b.gather([[_f(2)]], [_f(2)], _options("GatherOptions", rootRank=r)),
        r"\b1 entr",
    ),
    "gather list on others": (
        lambda b, r: b.gather([[_f(2), _f(2)]], [_f(2)], _options("GatherOptions", rootRank=1 - r)),
        r"gather_list.*rank",
    ),
    "gather root": (lambda b, r: b.gather([], [_f(2)], _options("GatherOptions", rootRank=9)), r"\b9\b"),
    "scatter without list": (
        lambda b, r: b.scatter([_f(2)], [], _options("ScatterOptions", rootRank=r)),
        r"scatter_list|input",
    ),
    "scatter size": (
        lambda b, r: b.scatter([_f(2)], [[_f(2), _f(5)]], _options("ScatterOptions", rootRank=r)),
        r"\b5\b",
    ),
    "send to nobody": (lambda b, r: b.send([_f(2)], 7, 0), r"\b7\b"),
    "receive from nobody": (lambda b, r: b.recv([_f(2)], -3, 0), r"-3"),
    "send sparse": (lambda b, r: b.send([_coo()], 1 - r, 0), r"(?i)sparse"),
    "send negative tag": (lambda b, r: b.send([_f(2)], 1 - r, -4), r"-4"),
    "coalesced empty": (lambda b, r: b.allreduce_coalesced([]), r"empty|\b0\b"),
    "coalesced meta": (lambda b, r: b.allreduce_coalesced([_f(2), torch.empty(2, device="meta")]), r"\[1\].*meta"),
    "split without this rank": (lambda b, r: b.shrink([0, 1]), r"(?i)rank"),
}


def _try(backend: Any, rank: int, call: Call) -> dict[str, str]:
    try:
        work = call(backend, rank)
        if work is not None and hasattr(work, "wait"):
            work.wait(timedelta(seconds=5))
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error).splitlines()[0]}
    return {"type": "none", "text": "accepted"}


def _all_cases(rank: Rank) -> dict[str, dict[str, str]]:
    rank.init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    found = {}
    for name, (call, _) in CASES.items():
        found[name] = _try(backend, rank.rank, call)
        for _ in range(3):
            check = torch.full((5,), 1.0)
            dist.all_reduce(check)
            if check.tolist() != [2.0] * 5:
                found[name]["text"] += f" -- and afterwards the group gives {check.tolist()}"
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, str]]]:
    """Runs all cases on one group, one after the other. Each must leave it usable for the next."""
    return run_ranks(_all_cases, 2, timeout=60)


@pytest.mark.parametrize("name", list(CASES))
def test_refused(name: str, found: list[dict[str, dict[str, str]]]) -> None:
    for rank, cases in enumerate(found):
        assert cases[name]["type"] in REFUSALS, cases[name]
        text = cases[name]["text"]
        assert f"[rank {rank}]" in text, f"names no rank: {text}"
        assert re.search(CASES[name][1], text), f"does not name {CASES[name][1]!r}: {text}"
        assert text.startswith("ark: ") and text.rstrip().endswith("."), text
        assert len(re.findall(r"\. [A-Z]", text)) >= 1, f"no remedy: {text}"


def _one_rank_errs(rank: Rank) -> None:
    """Only rank 0 makes a mistake. It gets the error at once and corrects its call, and rank 1 never notices."""
    rank.init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for _ in range(20):
        if rank.rank == 0:
            with pytest.raises(ValueError):
                backend._allgather_base(_f(3), _f(2))
            with pytest.raises(TypeError):
                backend.allreduce([_f(2)], dist.ReduceOp.BAND)
        out = torch.full((4,), float("nan"))
        backend._allgather_base(out, torch.full((2,), float(rank.rank))).wait()
        assert out.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_one_rank_errs_and_mends_it() -> None:
    run_ranks(_one_rank_errs, 2)


def _init_only(rank: Rank) -> None:
    rank.init(timeout=10)


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("ARK_DEBUG", "maybe", r"0 or 1"),
        ("ARK_DISABLE", "2", r"0 or 1"),
        ("ARK_SHARED_MEMORY", "sometimes", r"auto.*on.*off"),
        ("ARK_SPIN_US", "fast", r"auto.*\d"),
        ("ARK_SPIN_US", "-5", r"auto.*\d"),
        ("ARK_FLIGHT_RECORD", "99999999999", r"0 to \d+"),
        ("ARK_FLIGHT_DUMP", "/no/such/folder/record", r"folder"),
        ("ARK_DISPATCH", "/no/such/table.json", r"file"),
    ],
)
def test_bad_environment_value(name: str, value: str, allowed: str) -> None:
    with Job(_init_only, 2, env={name: value}) as job:
        for outcome in job.finish(30):
            assert outcome.kind == "error" and outcome.value["type"] == "ValueError", outcome.describe()
            assert name in outcome.message and value in outcome.message, outcome.message
            assert re.search(allowed, outcome.message), outcome.message


@pytest.mark.parametrize("content", ["{", json.dumps({"version": "what"}), json.dumps([{"algorithm": "magic"}])])
def test_bad_dispatch_table(content: str, tmp_path: Any) -> None:
    table = tmp_path / "table.json"
    table.write_text(content)
    with Job(_init_only, 2, env={"ARK_DISPATCH": str(table)}) as job:
        for outcome in job.finish(30):
            assert outcome.kind == "error" and "ValueError" in outcome.value["bases"], outcome.describe()
            assert str(table) in outcome.message or "ARK_DISPATCH" in outcome.message, outcome.message


def test_unknown_variable_is_told() -> None:
    with Job(_init_only, 2, env={"ARK_SPIN_MICROSECONDS": "5"}) as job:
        assert [o.kind for o in job.finish(30)] == ["result", "result"]
        told = "ARK_SPIN_MICROSECONDS is set, but is no variable of ark_torch: "
        assert any(told in o.log for o in job.outcomes), [o.log for o in job.outcomes]


def _bad_options(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"(?i)options"):
        rank.init(pg_options={"spin_us": 3}, timeout=10)
    if dist.is_initialized():
        dist.destroy_process_group()
    from torch.distributed import ProcessGroupGloo  # options of another backend

    with pytest.raises(TypeError, match=r"(?i)options"):
        rank.init(pg_options=ProcessGroupGloo._Options(), timeout=10)


def test_bad_options() -> None:
    run_ranks(_bad_options, 2)
