"""Registers the backend "ark" with torch.distributed. Imports no torch by itself: PyTorch calls register() at the end
of its own import, where any exception would break `import torch` for every program of the environment.

So nothing that can go wrong here is raised: it is kept, and told when somebody asks for the backend. And nothing
changes for programs that use other backends: see _hide_until_named.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

_registered = False
_failures: list[Exception] = []
_warned = False
_failures_of_help: list[Exception] = []  # nobody is stopped by them


def register() -> None:
    """Entry point of torch.backends: make "ark" known. May be called any number of times; never raises."""
    global _registered
    if _registered:
        return
    try:
        import torch.distributed as dist

        if dist.is_available() and "ark" not in dist.Backend.backend_list:
            # A list: a string would be taken letter by letter.
            dist.Backend.register_backend("ark", _create, extended_api=True, devices=["cpu", "cuda"])
            _hide_until_named(dist.Backend)
            dist.Backend.ARK_TORCH = _Misnamed()  # type: ignore[attr-defined]
        _name_logs()
        _registered = True
        if _torch_is_importing() and (_problem() or _untested()) is not None:
            # Told by _create to whoever asks for "ark", and by `import ark_torch`, which must therefore run again.
            sys.modules.pop("ark_torch", None)
    except Exception as error:
        _failures.append(error)


def register_by_name() -> None:
    """Entry point of torch.distributed.backends: PyTorch (2.14 on) calls it for a program that names "ark", and then
    looks into Backend._plugins. ImportError where the backend could not be registered."""
    import torch.distributed as dist

    register()
    if _failures:
        raise ImportError("ark_torch could not register its backend with PyTorch.") from _failures[-1]
    _ = dist.Backend.ARK  # type: ignore[attr-defined]  # no longer hidden: see _hide_until_named


def _name_logs() -> None:
    """TORCH_LOGS="+ark": PyTorch reads the variable right after its import has called us. A help, so never a failure:
    without it, Python's logger "ark_torch.compile" is as good."""
    try:
        from torch._logging._internal import log_registry, register_log

        if "ark" not in log_registry.log_alias_to_log_qnames:
            register_log("ark", "ark_torch.compile")  # not its parent, whose level PyTorch would reset
    except Exception as error:  # a part of PyTorch that it promises nobody
        _failures_of_help.append(error)


def on_import() -> None:
    """`import ark_torch`: raises when PyTorch and the extension do not belong together, registers otherwise."""
    if _torch_is_importing():
        return  # PyTorch imports us to call register()
    if _is_command():
        return  # its doctor has to run where the check fails; other tools call ready() when they know what to do
    ready()


def ready() -> None:
    """Checks that PyTorch and the extension belong together, and registers. ImportError names the remedy."""
    _check()
    register()
    if _failures:
        raise ImportError("ark_torch could not register its backend with PyTorch.") from _failures[-1]


def program() -> str:
    """What Python was asked to run: the path of a script, or the name behind -m. A program's main module alone can ask,
    and what it imports first."""
    arguments = len(getattr(sys, "argv", ()))  # a program that embeds Python need not have any
    return next(iter(sys.orig_argv[-arguments:]), "") if arguments else ""


def _is_command() -> bool:
    """Whether this process is `ark` or `python -m ark_torch`, whose import of this package comes first of all."""
    return program().rpartition("/")[2] in ("ark", "ark_torch")


def _torch_is_importing() -> bool:
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def _problem() -> str | None:
    import torch

    from ark_torch import _support

    return _support.problem(torch.__version__, _support.built_for())


def _untested() -> str | None:
    import torch

    from ark_torch import _support

    return _support.untested(torch.__version__)


def _check() -> None:
    global _warned
    from ark_torch.errors import IncompatibleTorch

    why = _problem()
    if why is not None:
        raise IncompatibleTorch(why)
    news = _untested()
    if news is not None and not _warned:
        _warned = True  # before: a program may turn warnings into exceptions
        warnings.warn(news, stacklevel=2)


def _create(options: Any, backend_options: Any) -> Any:
    """What PyTorch calls for each new group. Only here is the extension loaded."""
    _check()
    from ark_torch.distributed.group import create

    return create(options, backend_options)


class _Name:
    """Backend.ARK until it is first read: then the plugin is put where PyTorch looks for it."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def __get__(self, _: object, backend: Any) -> str:
        backend._plugins.setdefault(_Key("ARK"), self._plugin)
        return "ark"


class _Misnamed:
    """Backend.ARK_TORCH, for programs that name the backend by its package: PyTorch would say "Unknown backend type"
    without the right name. Only Backend("ark_torch") reads it; for everybody else there is no such attribute."""

    def __get__(self, _: object, backend: Any) -> str:
        if sys._getframe(1).f_code is not backend.__new__.__code__:
            raise AttributeError("ARK_TORCH")
        raise ValueError(
            'There is no backend "ark_torch"; did you mean "ark"? The package ark_torch brings it: '
            'init_process_group(backend="ark"), or "cpu:ark,cuda:ark".'
        )


class _Key(str):
    """The plugin's key "ARK", which also equals "ark".

    To choose a group's default backend PyTorch compares this upper-case key with the lower-case names of a
    "device:backend" list, so that "cpu:ark" would have none.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other.upper() == "ARK"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _hide_until_named(backend: Any) -> None:
    """Keep the plugin out of Backend._plugins until a program names "ark".

    While any plugin is registered, PyTorch (2.11 to 2.13) gives a group made as "cpu:gloo" no default backend: its
    name() turns to "undefined", and what goes through the default backend raises. A program that never says "ark"
    must not notice that the package is installed. Every path to a group reads Backend.ARK first.
    """
    plugin = backend._plugins.pop("ARK", None)
    if plugin is not None:
        backend.ARK = _Name(plugin)
