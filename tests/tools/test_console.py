"""The command `ark`: its help, its speed, and its answers to misspelled names."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from support import start

from ark_torch import __main__ as console
from ark_torch import __version__, _autoload, _suggest
from ark_torch.errors import IncompatibleTorch

pytestmark = pytest.mark.quick


def ark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs in a separate process, which reports at its end whether it has imported torch."""
    code = (
        f"import sys; sys.orig_argv = ['python', '-m', 'ark_torch', *{list(arguments)!r}]; "
        f"sys.argv = ['-m', *{list(arguments)!r}]; import atexit; "
        "atexit.register(lambda: print('torch imported' if 'torch' in sys.modules else 'no torch')); "
        f"from ark_torch.__main__ import main; sys.exit(main({list(arguments)!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=start.TESTS.parent, capture_output=True, text=True, timeout=120
    )


def test_help_lists_every_command_without_torch() -> None:
    done = ark("--help")
    assert done.returncode == 0 and done.stdout.endswith("no torch\n"), done.stdout + done.stderr
    for name, (module, does) in console.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(does)}$", done.stdout, re.M)
        assert callable(importlib.import_module(module).main)
    assert ark("--version").stdout.startswith(f"ark_torch {__version__}\n")


@pytest.mark.parametrize("name", console.COMMANDS)
def test_help_of_a_command(name: str) -> None:
    done = ark(name, "--help")
    assert done.returncode == 0 and done.stdout.endswith("no torch\n"), done.stdout + done.stderr
    assert done.stdout.startswith(f"usage: ark {name} ")
    assert max(map(len, done.stdout.splitlines())) <= 121
    for theirs in ("MISSED", "readme", "goal"):
        assert theirs not in done.stdout, "what concerns this project's own work is for its developers"


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ark_torch", "trace", "no-such-file"],
        cwd=start.TESTS.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "no-such-file" in done.stderr and "Traceback" not in done.stderr


def test_tools_are_no_programs_of_their_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ark_torch.tools.trace", "file"],
        cwd=start.TESTS.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and "use `ark trace`" in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["docter"], "there is no command 'docter' (did you mean 'doctor'?); see ark --help"),
        (["xyzzy"], "there is no command 'xyzzy'; see ark --help"),
        (["--hlep"], "unrecognized arguments: --hlep"),
    ],
)
def test_wrong_names(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        console.main(arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main([]) == 2
    assert "commands:\n  doctor" in capsys.readouterr().err


def test_another_pytorch_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuses() -> None:
        raise IncompatibleTorch("install the other one")

    monkeypatch.setattr(_autoload, "ready", refuses)
    assert console.main(["explain", "module:function"]) == 2
    assert capsys.readouterr().err == "ark explain: install the other one\n"


def test_entry_point() -> None:
    text = (start.TESTS.parent / "pyproject.toml").read_text(encoding="utf-8")
    (value,) = re.findall(r'\[project\.scripts\]\nark = "([^"]+)"', text)
    assert importlib.metadata.EntryPoint("ark", value, "console_scripts").load() is console.main


@pytest.mark.parametrize(
    ("program", "is_it"),
    [
        (["/opt/bin/ark", "doctor"], True),
        (["-m", "ark_torch", "doctor"], True),
        (["-m", "ark_torch.env"], False),
        (["train.py", "ark"], False),
        (["-c", "import ark_torch"], False),
    ],
)
def test_the_command_is_known_by_its_call(program: list[str], is_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", *program])
    monkeypatch.setattr(sys, "argv", ["-m", *program[2:]] if program[0] in ("-m", "-c") else program)
    assert _autoload._is_command() is is_it


def test_suggestions() -> None:
    known = ["ARK_DEBUG", "ARK_DISPATCH"]
    assert _suggest.closest("ark-debug", known) == "ARK_DEBUG"
    assert _suggest.closest("ARK_DISPACH", known) == "ARK_DISPATCH"
    assert _suggest.closest("ARK_XYZ", known) == "" == _suggest.did_you_mean("ARK_XYZ", known)
    assert _suggest.did_you_mean("ARK_DEBUGG", known) == " (did you mean 'ARK_DEBUG'?)"


@pytest.mark.parametrize("backend", ["ark_torch", "ARK_TORCH", "cpu:ark_torch,cuda:ark_torch"])
def test_the_package_is_not_the_backend(backend: str) -> None:
    before = list(dist.Backend.backend_list), dict(dist.Backend._plugins)
    with pytest.raises(ValueError, match=r'no backend "ark_torch"; did you mean "ark"\?'):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized() and not dist.is_backend_available("ark_torch")
    assert not hasattr(dist.Backend, "ARK_TORCH"), "nobody else meets the name"
    assert before == (list(dist.Backend.backend_list), dict(dist.Backend._plugins))


def test_options_and_groups_have_a_repr() -> None:
    import ark_torch

    options = ark_torch.Options()
    options.spin_us, options.dispatch = 7, [("all_reduce", "two_shot", "both", 8, 4096, 128)]
    shown = repr(options)
    assert shown.startswith("ark_torch.Options(shared_memory=AUTO, debug=False, node=-1, spin_us=7, ")
    for name, bad in (("reduction", "quick"), ("order", "rank")):
        with pytest.raises(ValueError, match=f"{name} is '{bad}': it takes "):
            setattr(options, name, bad)
    assert "reduction='exact', order='node'" in shown and shown.endswith("dispatch=<1 rules>, cuda_dispatch=<0 rules>)")
    dist.init_process_group("ark", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert re.fullmatch(r"<ark group '[^']*': rank 0 of 1, shared memory>", repr(group)), repr(group)
    finally:
        dist.destroy_process_group()
    assert repr(ark_torch.resident(test_suggestions)) == "<ark_torch.resident of test_suggestions, not called yet>"
