"""Registers the backend "ark" with torch.distributed. It imports no torch itself: PyTorch calls register() at the end
of its own import, where any exception would break `import torch` for every program in the environment.

So register() never raises: it keeps the failure and reports it when a program asks for the backend. Programs that use
other backends see no change; see _hide_until_named.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

_registered = False
_failures: list[Exception] = []
_warned = False
_failures_of_help: list[Exception] = []  # errors of an optional extra, never raised


def register() -> None:
    """Entry point of torch.backends: makes "ark" known. It may run any number of times and never raises."""
    global _registered
    if _registered:
        return
    try:
        import torch.distributed as dist

        if dist.is_available() and "ark" not in dist.Backend.backend_list:
            # A list: PyTorch would split a string into letters.
            dist.Backend.register_backend("ark", _create, extended_api=True, devices=["cpu", "cuda"])
            _hide_until_named(dist.Backend)
            dist.Backend.ARK_TORCH = _Misnamed()  # type: ignore[attr-defined]
        _name_logs()
        _name_artifacts()
        _registered = True
        if _torch_is_importing() and (_problem() or _untested()) is not None:
            # _create reports the problem, and so does `import ark_torch`, which must therefore run again.
            sys.modules.pop("ark_torch", None)
    except Exception as error:
        _failures.append(error)


def register_by_name() -> None:
    """Entry point of torch.distributed.backends. PyTorch 2.14 and later call it for a program that names "ark", and
    then look into Backend._plugins. Raises ImportError if the backend could not be registered."""
    import torch.distributed as dist

    register()
    if _failures:
        raise ImportError("ark_torch could not register its backend with PyTorch.") from _failures[-1]
    _ = dist.Backend.ARK  # type: ignore[attr-defined]  # no longer hidden: see _hide_until_named


def _name_artifacts() -> None:
    """Makes torch.compiler.load_cache_artifacts() know ark's artifacts, which a program calls before it compiles. A
    convenience like _name_logs."""
    try:
        from torch.compiler._cache import CacheArtifactFactory

        if "ark" not in CacheArtifactFactory._artifact_types:
            from ark_torch import _artifacts

            CacheArtifactFactory.register(_artifacts.ArkArtifact)
    except Exception as error:
        _failures_of_help.append(error)


def _name_logs() -> None:
    """Enables TORCH_LOGS="+ark", which PyTorch reads right after its import has called us. This is a convenience and
    never fails: Python's logger "ark_torch.compile" works without it."""
    try:
        from torch._logging._internal import log_registry, register_log

        if "ark" not in log_registry.log_alias_to_log_qnames:
            register_log("ark", "ark_torch.compile")  # not its parent, whose level PyTorch would reset
    except Exception as error:  # a private part of PyTorch
        _failures_of_help.append(error)


def on_import() -> None:
    """Runs at `import ark_torch`: raises if PyTorch and the extension do not fit each other, else registers."""
    if _torch_is_importing():
        return  # PyTorch imports us to call register()
    if _is_command():
        return  # `ark doctor` must run where the check fails; the other tools call ready() later
    ready()


def ready() -> None:
    """Checks that PyTorch and the extension fit each other, then registers. Its ImportError names the remedy."""
    _check()
    register()
    if _failures:
        raise ImportError("ark_torch could not register its backend with PyTorch.") from _failures[-1]


def program() -> str:
    """The path of the running script, or the name after -m. Valid only in the main module and its first imports."""
    arguments = len(getattr(sys, "argv", ()))  # a program that embeds Python may have none
    return next(iter(sys.orig_argv[-arguments:]), "") if arguments else ""


def _is_command() -> bool:
    """Whether this process is `ark` or `python -m ark_torch`, which import this package first."""
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
        _warned = True  # set first: a program may turn warnings into exceptions
        warnings.warn(news, stacklevel=2)


def _create(options: Any, backend_options: Any) -> Any:
    """PyTorch calls this for each new group. The extension is loaded only here."""
    _check()
    from ark_torch.distributed.group import create

    return create(options, backend_options)


class _Name:
    """Backend.ARK until its first read, which puts the plugin where PyTorch looks for it."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def __get__(self, _: object, backend: Any) -> str:
        backend._plugins.setdefault(_Key("ARK"), self._plugin)
        return "ark"


class _Misnamed:
    """Backend.ARK_TORCH, for programs that name the backend by its package: PyTorch would answer "Unknown backend type"
    without the right name. Only Backend("ark_torch") sees it; for all other code the attribute does not exist."""

    def __get__(self, _: object, backend: Any) -> str:
        if sys._getframe(1).f_code is not backend.__new__.__code__:
            raise AttributeError("ARK_TORCH")
        raise ValueError(
            'There is no backend "ark_torch"; did you mean "ark"? The package ark_torch brings it: '
            'init_process_group(backend="ark"), or "cpu:ark,cuda:ark".'
        )


class _Key(str):
    """The plugin's key "ARK", which also equals "ark".

    To choose a group's default backend, PyTorch compares this upper-case key with the lower-case names of a
    "device:backend" list; without this class "cpu:ark" would have no default backend.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other.upper() == "ARK"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _hide_until_named(backend: Any) -> None:
    """Keeps the plugin out of Backend._plugins until a program names "ark".

    While any plugin is registered, PyTorch 2.11 to 2.13 gives a group made as "cpu:gloo" no default backend: its name()
    becomes "undefined", and calls on the default backend raise. A program that never says "ark" must not notice that
    the package is installed. Every path to a group reads Backend.ARK first.
    """
    plugin = backend._plugins.pop("ARK", None)
    if plugin is not None:
        backend.ARK = _Name(plugin)
