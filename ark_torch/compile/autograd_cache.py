"""Graphs that ark runs whole, in AOTAutograd's cache: a later process loads them, and neither traces nor lowers them.

PyTorch decides what may be kept, and under which key (torch._functorch.config.enable_autograd_cache,
TORCHINDUCTOR_CACHE_DIR): the graph, inputs, modes, its versions and the machine. What ark adds, such as its options and
costs, is in that key's tag. An entry has AOTAutograd's wrappers and an AheadOfTime (ahead.py). PyTorch's interface is
private; where it differs, graphs are traced as without.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ark_torch import env
from ark_torch.compile import costs, precision, saved
from ark_torch.compile.options import Options
from ark_torch.compile.report import log

if TYPE_CHECKING:
    from ark_torch.compile.ahead import AheadOfTime


@functools.cache
def _code() -> str:
    """This build of ark_torch: what another lowers or plans differently is compiled anew."""
    from ark_torch import _C

    text = hashlib.sha256(saved.version().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text.update(path.read_bytes())
    built = Path(_C.__file__).stat()
    return f"{text.hexdigest()} {built.st_size} {built.st_mtime_ns}"


def _tag(options: Options, threads: int, example_inputs: Sequence[Any]) -> str:
    gpus = {x.device.index for x in example_inputs if isinstance(x, torch.Tensor) and x.is_cuda}
    measured = [costs.of_gpu(gpu) for gpu in sorted(gpus)]
    machine = sorted(saved.instructions()), torch.backends.cpu.get_cpu_capability(), measured
    return repr(("ark", _code(), options, threads, env.read(), precision.tf32(), *machine))


def usable(example_inputs: Sequence[Any]) -> bool:
    """Whether graphs of these inputs may be kept. Ranks must decide alike, and each has a cache of its own; memory that
    inputs share is in no key."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return False
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    try:
        places = {x.untyped_storage()._cdata for x in tensors}
    except (RuntimeError, NotImplementedError):  # a subclass without a storage
        return False
    return len(tensors) == len(example_inputs) == len(places) and all(type(x) in _PLAIN for x in tensors)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@contextlib.contextmanager
def opened(options: Options, threads: int, example_inputs: Sequence[Any]) -> Iterator[list[AheadOfTime] | None]:
    """Within it AOTAutograd looks up what compilers of serializable() make. Yields a list that has what was loaded, or
    None if there is no cache."""
    try:
        from torch._functorch import config
        from torch.compiler import config as compiler_config

        from ark_torch.compile import ahead

        tag = f"{compiler_config.cache_key_tag} {_tag(options, threads, example_inputs)}"
        patch: Any = compiler_config
        patches = config.patch(bundled_autograd_cache=True), patch.patch(cache_key_tag=tag)
        serializable(lambda graph, inputs: None)
    except (ImportError, AttributeError, ValueError) as error:
        log.debug("AOTAutograd's cache is not used: %s", error)
        yield None
        return
    ahead.loaded.clear()
    with patches[0], patches[1]:
        yield ahead.loaded


def serializable(compiler: Callable[..., Any]) -> Any:
    """A compiler whose results AOTAutograd keeps."""
    from torch._functorch.aot_autograd import SerializableAOTDispatchCompiler
    from torch._inductor.output_code import OutputCode

    return SerializableAOTDispatchCompiler(OutputCode, compiler)
