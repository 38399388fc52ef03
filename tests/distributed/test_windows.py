"""One-sided windows: PyTorch's interface since 2.14, and ark_torch.distributed's, which serves every version.

Groups of one node (shared memory), of several (a pretended libibverbs), and those that have none (Gloo).
"""

from __future__ import annotations

import ctypes
import gc
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import test_carried as carried
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only, backend_of
from support.launcher import Job, run_ranks
from support.pretended import verbs
from support.rank import Rank

import ark_torch
from ark_torch._support import minor_of

MINOR = tuple(int(part) for part in minor_of(torch.__version__).split("."))
pytestmark = [ark_only]

Env = dict[str, str | None]
Placement = tuple[int, ...] | None  # the node of every rank; None: one node
WAYS = [
    "ark",
    pytest.param("torch", marks=pytest.mark.skipif(MINOR < (2, 14), reason="PyTorch has windows since 2.14")),
]
ONE, TWO, FLAT = None, (0, 0, 1, 1), (0, 1, 2)


@pytest.fixture
def env(pretended_verbs: str, tmp_path: Path) -> Env:
    return {
        "ARK_RDMA_LIBRARY": pretended_verbs,
        "ARK_RDMA_TIMEOUT": "13",
        "ARK_TEST_VERBS_CONTROL": str(verbs.Control(tmp_path / "control").path),
    }


def _join(rank: Rank, placement: Placement, **options: Any) -> Any:
    return rank.init(**options) if placement is None else carried.on_nodes(rank, placement, **options)


def _new(way: str, tensor: torch.Tensor | None = None, group: Any = None) -> Any:
    make: Any = ark_torch.distributed.new_window if way == "ark" else dist._new_window  # type: ignore[attr-defined]
    return make(tensor, group)


def _options(way: str, kind: str, milliseconds: int) -> Any:
    module: Any = torch._C._distributed_c10d if MINOR >= (2, 14) else ark_torch._C
    options = getattr(module, kind)()
    options.timeout = timedelta(milliseconds=milliseconds)
    return options


def _exchange(rank: Rank, placement: Placement, way: str) -> None:
    _join(rank, placement)
    assert ark_torch.distributed.supports_window()
    me, world = rank.rank, rank.world_size
    # Tensors of several sizes and types, one a view into a larger one, windows beside collectives.
    for dtype, count in ((torch.float32, 50_000), (torch.bfloat16, 7), (torch.int64, 1)):
        whole = torch.zeros(world * count + 10, dtype=dtype)
        whole[:10] = 5
        own = whole[10:]
        window = _new(way, own)
        assert window.get_attr(me).access_type.name == "UNIFIED"
        for round in range(3):
            for peer in range(world):
                data = torch.full((2 * count,), float(10 * round + me), dtype=dtype)[::2]  # not contiguous
                work = window.put(data, peer, me * count, True)
                window.signal(peer, False)
                work.wait()
                assert work.is_completed() and work.is_success()
            for peer in range(world):
                work = window.wait_signal(peer, True)
                work.wait()
                assert own[peer * count : (peer + 1) * count].unique().tolist() == [10 * round + peer]
            dist.barrier()
        assert whole[:10].unique().tolist() == [5]
        window.tensor_deregister()
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [world] * 3
        # The same tensor once more, and the window for another one.
        window.tensor_register(own)
        window.put(torch.ones(count, dtype=dtype), (me + 1) % world, 0, False)
        window.signal((me + 1) % world, False)
        window.wait_signal((me - 1) % world, False)
        assert own[:count].unique().tolist() == [1]
        window.tensor_deregister()
    gc.collect()
    own.add_(1)  # the memory outlives its window


@pytest.mark.by_day("ONE-ark", "ONE-torch", "TWO-ark", "FLAT-torch")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "placement", [pytest.param(ONE, id="ONE"), pytest.param(TWO, id="TWO"), pytest.param(FLAT, id="FLAT")]
)
def test_exchange(placement: Placement, way: str, env: Env) -> None:
    run_ranks(_exchange, 3 if placement is None else len(placement), placement, way, env=env)


def _mapped(rank: Rank, way: str) -> None:
    rank.init()
    me = rank.rank
    window = _new(way)
    own = torch.arange(6, dtype=torch.int32).reshape(2, 3) + 100 * me
    kept = own[1]
    window.tensor_register(own)
    assert own.tolist() == [[100 * me + i for i in range(3)], [100 * me + i for i in range(3, 6)]]
    theirs = window.map_remote_tensor(1 - me)
    assert theirs.dtype == torch.int32 and theirs.tolist() == [100 * (1 - me) + i for i in range(6)]
    dist.barrier()
    kept[0] = -1  # a view from before is of the same memory
    dist.barrier()
    assert theirs[3] == -1 and window.map_remote_tensor(me)[3] == -1
    dist.barrier()
    theirs[0] = 7
    dist.barrier()
    assert own[0, 0] == 7
    window.tensor_deregister()
    del window, own
    gc.collect()
    assert theirs[0] == 7 and kept[0] == -1


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
def test_memory_of_a_peer(way: str) -> None:
    run_ranks(_mapped, 2, way)


def _refused(rank: Rank, placement: Placement) -> None:
    group = _join(rank, placement)
    me, peer = rank.rank, 1 - rank.rank
    new = ark_torch.distributed.new_window
    bad = {"not contiguous": torch.zeros(4, 4).t()}
    if placement is None:
        bad |= {
            "numpy": torch.from_numpy(torch.zeros(4).numpy().copy()),
            "tensor is on meta": torch.empty(2, device="meta"),
        }
    for words, tensor in bad.items():
        # Of one rank: told to all.
        with pytest.raises((ValueError, TypeError), match=rf"rank {me}\].*{words}"):
            new(tensor if me == 0 else torch.zeros(4))
    window = new()
    for call in (lambda: window.put(torch.zeros(1), peer, 0, False), lambda: window.wait_signal(peer, False)):
        with pytest.raises(ValueError, match="no tensor is registered with this window"):
            call()
    own = torch.zeros(12 + me)
    window.tensor_register(own)
    with pytest.raises(ValueError, match="this window has a tensor"):
        window.tensor_register(own)
    with pytest.raises(ValueError, match=rf"14 elements from target_offset_nelems {me} on .* which has {12 + peer}"):
        window.put(torch.ones(14), peer, me, False)
    with pytest.raises(TypeError, match=r"tensor is torch\.int32, and the window of rank \d is torch\.float32"):
        window.put(torch.ones(1, dtype=torch.int32), peer, 0, False)
    with pytest.raises(ValueError, match="dst_rank"):
        window.put(torch.ones(1), 2, 0, False)
    with pytest.raises(ValueError, match="peer_rank"):
        window.signal(-1, False)
    if placement is not None:
        with pytest.raises(ValueError, match=rf"rank {peer} is of another node.*put"):
            window.map_remote_tensor(peer)
    dist.barrier()
    assert own.abs().sum() == 0
    window.tensor_deregister()
    kept = new(torch.zeros(3))
    dist.barrier()
    dist.destroy_process_group()
    del group
    with pytest.raises((RuntimeError, ValueError), match="shut down"):
        kept.signal(peer, False)


@pytest.mark.parametrize("placement", [pytest.param(ONE, id="ONE"), pytest.param((0, 1), id="FLAT")])
def test_what_is_refused(placement: Placement, env: Env) -> None:
    run_ranks(_refused, 2, placement, env=env)


def _alone(rank: Rank, placement: Placement, way: str, how: str) -> tuple[float, str]:
    _join(rank, placement)
    window = _new(way, torch.zeros(8))
    window.signal(1 - rank.rank, False)
    window.wait_signal(1 - rank.rank, False)
    rank.report("running")
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0, ""
    began = time.monotonic()
    work = window.wait_signal(1, True)
    if how == "timeout":
        with pytest.raises(RuntimeError, match="gave up after 10 ms; the operation goes on"):
            work.wait(timedelta(milliseconds=10))
    with pytest.raises(RuntimeError, match=r"rank 0.*rank 1") as raised:
        if how == "timeout":
            window.wait_signal(1, False, _options(way, "WaitSignalOptions", 300))
        else:
            work.wait()
    took = time.monotonic() - began
    with pytest.raises(RuntimeError):
        dist.barrier()
    with pytest.raises(RuntimeError):
        window.signal(1, False)
    rank.report("ended")
    return took, str(raised.value)


@pytest.mark.by_day("ONE-ark-killed", "ONE-torch-timeout", "FLAT-ark-timeout", "FLAT-torch-killed")
@pytest.mark.parametrize("how", ["timeout", "killed"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("placement", [pytest.param(ONE, id="ONE"), pytest.param((0, 1), id="FLAT")])
def test_what_ends_a_wait(placement: Placement, way: str, how: str, env: Env) -> None:
    with Job(_alone, 2, placement, way, how, destroy=False, env=env) as job:
        job.wait_all("running")
        if how == "killed":
            job.kill(1)
        job.wait_event(0, "ended", timeout=20)
        if how == "timeout":
            job.go(1, "go")
        value = job.finish(30, [0])[0].value
    assert value is not None
    took, text = value
    assert took < 15
    words = "rank 1 sent no signal within 300 ms" if how == "timeout" else "rank 1 is gone|RDMA with rank 1 "
    assert any(part in text for part in words.split("|")), text


def _on_gpus(rank: Rank, way: str, dma_buf: int) -> None:
    pretended.enter()
    carried.on_nodes(rank, (0, 1))
    me, peer = rank.rank, 1 - rank.rank
    memory, source = torch.zeros(300_000), torch.full((100_000,), float(me))

    def on_gpu(host: torch.Tensor) -> torch.Tensor:
        pretended.driver.pretend_memory(ctypes.c_void_p(host.data_ptr()), ctypes.c_ulong(host.nbytes))
        return pretended.on(me, host)

    pretended.driver.pretend_dma_buf(dma_buf, 100)
    own, data = on_gpu(memory), on_gpu(source)
    if not dma_buf:
        with pytest.raises(ValueError, match="NIC does not reach its memory: the CUDA driver exports no dma-buf"):
            _new(way, own)
        return
    window = _new(way, own)
    dist.barrier()  # memory is the host's here, so that nobody's check comes before
    for round in range(3):
        source.fill_(10.0 * round + me)
        window.put(data, peer, 100_000, False)
        window.signal(peer, False)
        window.wait_signal(peer, False)
        assert memory[100_000:200_000].unique().tolist() == [10 * round + peer]
        dist.barrier()
    window.put(torch.full((5,), 7.0), peer, 0, False)  # from the host's memory to a GPU's
    window.signal(peer, False)
    window.wait_signal(peer, False)
    assert memory[:6].tolist() == [7.0] * 5 + [0.0]
    window.put(data, me, 200_000, False)  # to oneself by a copy engine
    assert memory[200_000:].unique().tolist() == [20.0 + me]
    assert window.map_remote_tensor(me).data_ptr() == own.data_ptr()
    pretended.driver.pretend_capture(5)
    with pytest.raises(ValueError, match="a graph is being captured"):
        window.put(data, peer, 0, False)
    pretended.driver.pretend_capture(0)
    window.tensor_deregister()


@pytest.mark.by_day("1-ark", "0-ark")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dma_buf", [1, 0])
def test_gpu_memory(pretended_gpu: Any, env: Env, dma_buf: int, way: str) -> None:
    run_ranks(_on_gpus, 2, way, dma_buf, env=env | pretended_gpu)


def _in_the_pool(rank: Rank, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of ark_torch.memory.pool() on the pretended GPU, and the host tensor over the same memory."""
    library = ctypes.CDLL(ark_torch._C.__file__)
    library.ark_pool_alloc.restype = ctypes.c_void_p
    library.ark_pool_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    # Not at the beginning of what is mapped.
    at = library.ark_pool_alloc(4 * count + 256, rank.rank, None) + 256
    host = torch.frombuffer((ctypes.c_char * (4 * count)).from_address(at), dtype=torch.float32)
    return pretended.on(rank.rank, host), host


def _gpus_of_one_node(rank: Rank, way: str) -> None:
    pretended.enter()
    rank.init()
    me, size = rank.rank, rank.world_size
    with pytest.raises(ValueError, match=r"not of ark_torch.memory.pool\(\), so other ranks of this"):
        _new(way, pretended.on(me, torch.zeros(4)))
    own, memory = _in_the_pool(rank, 1000 * size)
    data, source = _in_the_pool(rank, 1000)
    with pytest.raises(ValueError, match="that of rank 0 on the CPU, that of rank 1 on a GPU"):
        _new(way, torch.zeros(1000) if me == 0 else own)
    window = _new(way, own)
    for round in range(3):
        source.fill_(10.0 * round + me)
        for peer in range(size):
            window.put(data, peer, 1000 * me, False)
            window.signal(peer, False)
        for peer in range(size):
            window.wait_signal(peer, False)
        assert memory.view(size, 1000).tolist() == [[10.0 * round + peer] * 1000 for peer in range(size)]
        dist.barrier()
    mapped = window.map_remote_tensor(1 - min(me, 1))
    assert mapped.device == own.device and mapped.numel() == 1000 * size
    with pytest.raises(ValueError, match="beyond the window of rank 0"):
        window.put(data, 0, 1000 * size - 999, False)
    dist.barrier()
    window.tensor_deregister()
    dist.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_gpus_of_one_node(pretended_gpu: Any, way: str) -> None:
    run_ranks(_gpus_of_one_node, 3, way, env=pretended_gpu)


def _gloo(rank: Rank) -> None:
    carried.on_nodes(rank, (0, 1))
    assert not ark_torch.distributed.supports_window()
    assert not backend_of(dist.group.WORLD).supports_window
    with pytest.raises(RuntimeError, match=r"no one-sided writes \(no RDMA: rank 0 has ARK_NET=gloo\).*send and recv"):
        ark_torch.distributed.new_window(torch.zeros(3))
    dist.barrier()


@pytest.mark.quick
def test_gloo_has_none_and_says_why() -> None:
    run_ranks(_gloo, 2, env={"ARK_NET": "gloo"})
