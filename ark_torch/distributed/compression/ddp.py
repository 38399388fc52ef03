"""The hook for DistributedDataParallel: takes a bucket of gradients, returns the future of their mean.

On the CPU the exchange is complete when the hook returns, so that buckets go in the same order on all ranks; fully
exact buckets use an asynchronous all_reduce. On a CUDA device exchanges run on their own stream, parallel to the
backward pass, and the future holds their event.

This file does not postpone annotations: register_comm_hook compares the hook's annotations with its own types.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch.distributed.compression import exchange, sparse
from ark_torch.distributed.compression.layers import Layer
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
    layers = [state.layers.of(parameter) for parameter in bucket.parameters()]
    compresses = state.begin(state.group, tensor.device)
    if not tensor.is_cuda:
        return _finish(state, bucket, _reduce(state, tensor, layers, compresses))
    stream = _stream_of(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        return _finish(state, bucket, _reduce(state, tensor, layers, compresses))


def _stream_of(device: torch.device) -> Any:
    if device.index not in _streams:
        _streams[device.index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device.index]


def _finish(state: State, bucket: dist.GradBucket, result: Any) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer()
    if bucket.is_last():
        state.end_step(tensor.device)
    if not isinstance(result, Tensor):
        return result  # type: ignore[no-any-return]
    devices: list[int | str | torch.device] | None = [tensor.device] if tensor.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(result)
    return future


def _reduce(state: State, tensor: Tensor, layers: Sequence[Layer], compresses: bool) -> Any:
    """The mean, or the future of it."""
    if state.group.size() == 1:
        return tensor
    if tensor.is_sparse:
        return sparse.mean(state, tensor)
    load = _Load(tensor, layers)
    if not compresses:
        return _exact(state, load)
    if state.zeros.asks(layers, tensor.device):
        state.bytes_sent += len(layers)
        travelling = state.zeros.travelling(layers, load.pieces, state.group)
        exchange.count_left_out(state, tensor, layers, travelling)
        if not any(travelling):
            return tensor  # zero on all ranks
        if not all(travelling):
            load = _Load(tensor, layers, travelling)
    state.measure(load.layers, load.pieces)
    widths = [state.width(layer) for layer in load.layers]
    segments = exchange.segments_of(widths, [layer.numel for layer in load.layers], state.bucket)
    if tensor.dtype not in COMPRESSED_DTYPES:
        state.say(str(tensor.dtype), f"{tensor.dtype} gradients are sent exact")
    if segments.exact or tensor.dtype not in COMPRESSED_DTYPES:
        return _exact(state, load)

    def compressed() -> Tensor:
        return exchange.all_reduce(state, load.data, load.layers, segments)

    if state.when == "always":
        result = compressed()
    else:
        key = tuple(map(id, load.layers))
        wins = state.contest.verdict(key)
        if wins is False:
            return _exact(state, load)
        result = compressed() if wins else _contested(state, key, compressed, load)
    state.watch.look(load.layers, load.split(result), load.pieces, state.group.rank())
    return load.unpack(result)


class _Load:
    """The layers of a bucket that travel, in one tensor: the bucket itself if all do."""

    def __init__(self, tensor: Tensor, layers: Sequence[Layer], travelling: Sequence[bool] | None = None) -> None:
        self.tensor, self.whole = tensor, travelling is None
        chosen = travelling or [True] * len(layers)
        pieces = tensor.split_with_sizes([layer.numel for layer in layers])
        self.layers = [layer for layer, travels in zip(layers, chosen, strict=True) if travels]
        self.pieces = [piece for piece, travels in zip(pieces, chosen, strict=True) if travels]
        self.data = tensor if self.whole else torch.cat(self.pieces)

    def split(self, result: Tensor) -> Sequence[Tensor]:
        return result.split_with_sizes([layer.numel for layer in self.layers])

    def unpack(self, result: Tensor) -> Tensor:
        """The tensor for DDP: the result itself, which DDP copies to the gradients, or the bucket with the result
        filled in."""
        if self.whole:
            return result
        for piece, mean in zip(self.pieces, self.split(result), strict=True):
            piece.copy_(mean)
        return self.tensor


def _exact(state: State, load: _Load) -> torch.futures.Future[torch.Tensor]:
    """An asynchronous all_reduce, which includes the error that earlier compression left."""
    kept = [layer for layer in load.layers if layer.residual is not None]
    for layer, piece in zip(load.layers, load.split(load.data), strict=True):
        if layer.residual is not None:
            piece.add_(layer.residual.reshape(-1))
    state.layers.forget(kept)
    exchange.count_exact(state, load.data)
    load.data.div_(state.group.size())
    work = dist.all_reduce(load.data, group=state.group, async_op=True)
    mean: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: load.unpack(done.value()[0]))
    return mean


def _contested(state: State, key: tuple[int, ...], compressed: Callable[[], Tensor], load: _Load) -> Tensor:
    """One of the timed calls. After the last one, the first verdict against compression is logged."""
    copy = load.data.clone()

    def exact() -> None:
        exchange.count_exact(state, copy)
        dist.all_reduce(copy, group=state.group)

    result, times = state.contest.measure(key, compressed, exact, load.data, state.group)
    if times is not None and times[0] >= times[1]:
        size = load.data.numel() * load.data.element_size() / 1e6
        state.say(
            "slower",
            f"a bucket of {size:.2f} MB takes {times[0] * 1e3:.2f} ms compressed and {times[1] * 1e3:.2f} ms exact: it "
            "is sent exact from now on, and so are others where compression loses",
        )
    return result
