"""Modes and options: unknown ones are refused with the names of known ones, and the table matches Options."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ark_torch.compile import ark, options
from ark_torch.errors import InvalidOption

pytestmark = pytest.mark.quick


def test_table_and_fields_agree() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(options.Options)}
    assert fields == {option.name: option.default for option in options.OPTIONS}
    assert options.parse(None, None) == options.Options() == options.parse("default", {})


def test_values_are_taken() -> None:
    chosen = options.parse(None, {"choose": "ark", "fallback": False, "threads": 3, "minimum": None})
    assert chosen == options.Options(choose="ark", fallback=False, threads=3, minimum=2)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"chose": "ark"}, ["'chose'", "(did you mean 'choose'?)", "choose, differentiate_twice, fallback, minimum"]),
        ({"max_autotune": True}, ["'max_autotune'", 'not known to backend "ark"; it knows cache, choose']),
        ({"choose": "best"}, ["'best'; it takes 'ark', 'inductor', 'measure'"]),
        ({"choose": "Inductor"}, ["'Inductor' (did you mean 'inductor'?)"]),
        ({"choose": ["ark"]}, ["'ark', 'inductor', 'measure'"]),
        ({"fallback": 1}, ["options['fallback'] is 1", "bool"]),
        ({"threads": 0}, ["options['threads'] is 0", "above 0"]),
        ({"threads": True}, ["options['threads'] is True"]),
        ({"threads": 100_000}, ["options['threads'] is 100000", "cores, so it takes at most", "4 a core"]),
    ],
)
def test_bad_options_name_what_is_known(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InvalidOption) as error:
        options.parse(None, given)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"max-autotune.*known modes are 'default'"):
        options.parse("max-autotune", None)


def test_a_mode_that_is_nearly_one() -> None:
    with pytest.raises(InvalidOption, match=r"known modes are 'default' \(did you mean 'default'\?\); everything else"):
        options.parse("defualt", None)


def test_the_package_is_not_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile(backend="ark_torch") finds an entry point that raises an error with the backend's name."""
    entry = importlib.metadata.EntryPoint("ark_torch", "ark_torch.compile:ark_torch", "torch_dynamo_backends")
    pyproject = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'{entry.name} = "{entry.value}"' in pyproject.partition("torch_dynamo_backends")[2]
    torch._dynamo.list_backends()  # finds the entry points
    monkeypatch.setitem(torch._dynamo.backends.registry._BACKENDS, "ark_torch", entry)
    with pytest.raises(InvalidOption, match=r'no backend "ark_torch"; did you mean "ark"\?'):
        torch.compile(torch.nn.Linear(3, 3), backend="ark_torch")


def test_through_torch_compile() -> None:
    model = torch.compile(torch.nn.Linear(3, 3), backend="ark", options={"chose": "ark"})
    with pytest.raises(Exception, match=r"options\['chose'\] is not known"):
        model(torch.ones(3))


def test_entry_point_is_listed_and_imports_nothing_heavy() -> None:
    """Dynamo finds the name, and importing the module imports neither Dynamo nor Inductor."""
    assert "ark" in torch._dynamo.list_backends() and callable(ark)
    code = (
        "import sys, ark_torch.compile; "
        "assert not [m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
