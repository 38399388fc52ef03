"""Graphs that ark runs whole, in AOTAutograd's cache: a later process loads them, and neither traces nor lowers them.

PyTorch decides what may be kept (torch._functorch.config.enable_autograd_cache, TORCHINDUCTOR_CACHE_DIR). Its key has
the graph, its inputs, most modes and its version. The key's tag has what is not in there: ark's options and costs, and
modes that PyTorch 2.11 leaves out. An entry has AOTAutograd's wrappers and an AheadOfTime (ahead.py). PyTorch's
interface is private; where it differs, graphs are traced as without.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

import ark_torch
from ark_torch import env
from ark_torch.compile import costs, precision, saved
from ark_torch.compile.options import Options
from ark_torch.compile.report import log

if TYPE_CHECKING:
    from ark_torch.compile.ahead import Opened

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@functools.cache
def _code() -> str:
    """This build of ark_torch: what another lowers or plans differently is compiled anew."""
    from ark_torch import _C

    text = hashlib.sha256(saved.version().encode())
    folder = Path(ark_torch.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        text.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    built = Path(_C.__file__).stat()
    return f"{text.hexdigest()} {built.st_size} {built.st_mtime_ns}"


def _modes() -> tuple[Any, ...]:
    kinds = [kind for kind in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(kind)]
    attention: Any = torch.backends.cuda
    return (
        [(kind, torch.get_autocast_dtype(kind)) for kind in kinds],
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        precision.tf32(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
    )


def _tag(options: Options, threads: int, example_inputs: Sequence[Any]) -> str:
    gpus = {x.device.index for x in example_inputs if isinstance(x, torch.Tensor) and x.is_cuda}
    measured = [costs.of_gpu(gpu) for gpu in sorted(gpus)]
    machine = sorted(saved.instructions()), torch.backends.cpu.get_cpu_capability(), measured
    return repr(("ark", _code(), options, threads, env.read(), _modes(), machine))


def usable(example_inputs: Sequence[Any]) -> bool:
    """Whether graphs of these inputs may be kept. Ranks must decide alike, and each has a cache of its own; memory that
    inputs share is in no key; passes that are dumped must run."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return False
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    try:
        places = {x.untyped_storage()._cdata for x in tensors}
        if env.read().dump_passes:
            return False
    except (RuntimeError, NotImplementedError, ValueError):  # a subclass without a storage; the region says what is bad
        return False
    return len(tensors) == len(example_inputs) == len(places) and all(type(x) in _PLAIN for x in tensors)


@contextlib.contextmanager
def opened(title: str, options: Options, threads: int, example_inputs: Sequence[Any]) -> Iterator[Opened | None]:
    """Within it AOTAutograd looks up what compilers of serializable() make. Yields what gets the loaded graph, or None
    if there is no cache."""
    try:
        from torch._functorch import config
        from torch.compiler import config as compiler_config

        from ark_torch.compile import ahead

        tag = f"{compiler_config.cache_key_tag} {_tag(options, threads, example_inputs)}"
        patch: Any = compiler_config
        patches = config.patch(bundled_autograd_cache=True), patch.patch(cache_key_tag=tag)
        serializable(lambda graph, inputs: None)
        key = _light_key()
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        log.debug("AOTAutograd's cache is not used: %s", error)
        yield None
        return
    with ahead.loading(title) as found, patches[0], patches[1], key:
        yield found


def _light_key() -> Any:
    """For the key, PyTorch imports all of Inductor's code generators (a second), to ask them for passes that users have
    registered. Graphs that are kept take none of Inductor's code, so their key leaves these out."""
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache

    make = autograd_cache.autograd_cache_key
    none: dict[str, Any] = {
        "init_backend_registration": lambda: None,
        "custom_backend_passes": {},
        "custom_backend_codegen_configs": {},
    }
    if not all(hasattr(codecache, name) for name in none):
        return contextlib.nullcontext()

    @functools.wraps(make)
    def key(*arguments: Any, **named: Any) -> Any:
        with mock.patch.multiple(codecache, **none):
            return make(*arguments, **named)

    return mock.patch.object(autograd_cache, "autograd_cache_key", key)


def serializable(compiler: Callable[..., Any]) -> Any:
    """A compiler whose results AOTAutograd keeps."""
    from torch._functorch.aot_autograd import SerializableAOTDispatchCompiler
    from torch._inductor.output_code import OutputCode

    return SerializableAOTDispatchCompiler(OutputCode, compiler)


def not_kept() -> None:
    """Within opened(): what the compiler returns is a plain function, which AOTAutograd does not try to save."""
    from torch._functorch import config

    config.bundled_autograd_cache = False
