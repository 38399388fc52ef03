"""Modes and options: what is not known is refused with the names of what is; the table is what Options holds."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

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
        ({"chose": "ark"}, ["'chose'", "choose, differentiate_twice, fallback, minimum, threads"]),
        ({"choose": "best"}, ["'best'", "'ark', 'inductor', 'measure'"]),
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


def test_through_torch_compile() -> None:
    model = torch.compile(torch.nn.Linear(3, 3), backend="ark", options={"chose": "ark"})
    with pytest.raises(Exception, match=r"options\['chose'\] is not known"):
        model(torch.ones(3))


def test_entry_point_is_listed_and_imports_nothing_heavy() -> None:
    """The name is found by Dynamo, and importing the module pulls in neither Dynamo nor Inductor."""
    assert "ark" in torch._dynamo.list_backends() and callable(ark)
    code = (
        "import sys, ark_torch.compile; "
        "assert not [m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
