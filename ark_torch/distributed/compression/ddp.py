"""The hook for DistributedDataParallel: takes a bucket of gradients, returns the future of their mean.

On the CPU the exchange is complete when the hook returns, so that buckets go in the same order on all ranks; fully
exact buckets use an asynchronous all_reduce. On a CUDA device exchanges run on their own stream, parallel to the
backward pass, and the future holds their event.

This file does not postpone annotations: register_comm_hook compares the hook's annotations with its own types.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch.distributed.compression import exchange, sparse
from ark_torch.distributed.compression.plan import Plan, plan_of, plan_of_bucket
from ark_torch.distributed.compression.state import COMPRESSED_DTYPES, State

_streams: dict[int, Any] = {}


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for DistributedDataParallel that averages gradients with few bits per element.

    Register it before the first backward pass:

        >>> ddp = DistributedDataParallel(model)
        >>> state = compression.State(bits=4, module=ddp)
        >>> ddp.register_comm_hook(state, compression.hook)

    float32, bfloat16 and float16 gradients are compressed, others are exact; sparse ones travel as index and value.
    Frozen layers are in no bucket, and layers whose gradients are zero on all ranks send nothing (State.skip_zeros).
    All ranks get the same bits. A NaN or Inf arrives as NaN or Inf and is logged once, with the layer's name.

    Args:
        state: the State; one per DistributedDataParallel.
        bucket: DDP's bucket.

    Returns:
        The future of the bucket's mean over the ranks of the state's group.

    Raises (out of `backward()`):
        ValueError: the group is not ark's, ranks have different settings (raised on all ranks, with both values), or a
            parameter is not in the state's module.
        torch.distributed.DistBackendError: the error that ended the group.
    """
    tensor = bucket.buffer()
    plan = plan_of_bucket(state, bucket.parameters(), tensor)
    if bucket.index() == 0:
        state.watch.look(state.group.rank())
    if not tensor.is_cuda:
        return _finish(state, bucket, tensor, _reduce(state, tensor, plan))
    device, before = torch.cuda.current_device(), torch.cuda.current_stream(tensor.device)
    stream = _stream_of(tensor.device)
    stream.wait_stream(before)
    # As `with torch.cuda.stream(stream)`, which would look up devices and streams again.
    torch.cuda.set_stream(stream)
    try:
        return _finish(state, bucket, tensor, _reduce(state, tensor, plan))
    finally:
        torch.cuda.set_stream(before)
        if device != tensor.device.index:
            torch.cuda.set_device(device)


def _stream_of(device: torch.device) -> Any:
    if device.index not in _streams:
        _streams[device.index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device.index]


def _finish(state: State, bucket: dist.GradBucket, tensor: Tensor, result: Any) -> torch.futures.Future[torch.Tensor]:
    if bucket.is_last():
        state.end_step(tensor.device)
    if not isinstance(result, Tensor):
        return result  # type: ignore[no-any-return]
    devices: list[int | str | torch.device] | None = [tensor.device] if tensor.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(result)
    return future


def _reduce(state: State, tensor: Tensor, plan: Plan) -> Any:
    """The mean, or the future of it."""
    if state.group.size() == 1:
        return tensor
    if tensor.is_sparse:
        return sparse.mean(state, tensor)
    load = _Load(tensor, plan)
    if not plan.compresses:
        return _exact(state, load)
    if state.zeros.asks(plan.key, tensor.device):
        state.bytes_sent += len(plan.layers)
        travelling = state.zeros.travelling(plan.key, load.pieces(), state.group)
        exchange.count_left_out(state, tensor, plan.layers, travelling)
        if not any(travelling):
            return tensor  # zero on all ranks
        if not all(travelling):
            load = _Part(state, load, travelling)
            plan = load.plan
    state.measure(plan, load.data)
    if plan.exact:
        if tensor.dtype not in COMPRESSED_DTYPES:
            state.say(str(tensor.dtype), f"{tensor.dtype} gradients are sent exact")
        return _exact(state, load)
    if state.when == "always":
        return load.unpack(exchange.all_reduce(state, load.data, plan))
    wins = state.contest.verdict(plan.key)
    if wins is False:
        return _exact(state, load)
    return load.unpack(exchange.all_reduce(state, load.data, plan) if wins else _contested(state, load))


class _Load:
    """The layers of a bucket that travel, in one tensor: here all of them, in the bucket itself."""

    def __init__(self, data: Tensor, plan: Plan) -> None:
        self.data, self.plan = data, plan

    def pieces(self) -> Sequence[Tensor]:
        return self.data.split_with_sizes(self.plan.numels)

    def unpack(self, result: Tensor) -> Tensor:
        """The tensor for DDP, which DDP copies to the gradients."""
        return result


class _Part(_Load):
    """Some of a bucket's layers, in a tensor of their own."""

    def __init__(self, state: State, whole: _Load, travelling: Sequence[bool]) -> None:
        self._bucket = whole.data
        chosen = [i for i, travels in enumerate(travelling) if travels]
        pieces = whole.pieces()
        self._pieces = [pieces[i] for i in chosen]
        data = torch.cat(self._pieces)
        super().__init__(data, plan_of(state, [whole.plan.layers[i] for i in chosen], data))

    def unpack(self, result: Tensor) -> Tensor:
        """The bucket with the result filled in."""
        for piece, mean in zip(self._pieces, result.split_with_sizes(self.plan.numels), strict=True):
            piece.copy_(mean)
        return self._bucket


def _exact(state: State, load: _Load) -> torch.futures.Future[torch.Tensor]:
    """An asynchronous all_reduce, which includes the error that earlier compression left."""
    kept = [layer for layer in load.plan.layers if layer.residual is not None]
    if kept:
        for layer, piece in zip(load.plan.layers, load.pieces(), strict=True):
            if layer.residual is not None:
                piece.add_(layer.residual.reshape(-1))
        state.layers.forget(kept)
    exchange.count_exact(state, load.data)
    load.data.div_(state.group.size())
    work = dist.all_reduce(load.data, group=state.group, async_op=True)
    mean: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: load.unpack(done.value()[0]))
    return mean


def _contested(state: State, load: _Load) -> Tensor:
    """One of the timed calls. After the last one, the first verdict against compression is logged."""
    copy = load.data.clone()

    def compressed() -> Tensor:
        return exchange.all_reduce(state, load.data, load.plan)

    def exact() -> None:
        exchange.count_exact(state, copy)
        dist.all_reduce(copy, group=state.group)

    result, times = state.contest.measure(load.plan.key, compressed, exact, load.data, state.group)
    if times is not None and times[0] >= times[1]:
        size = load.data.numel() * load.data.element_size() / 1e6
        state.say(
            "slower",
            f"a bucket of {size:.2f} MB takes {times[0] * 1e3:.2f} ms compressed and {times[1] * 1e3:.2f} ms exact: it "
            "is sent exact from now on, and so are others where compression loses",
        )
    return result
