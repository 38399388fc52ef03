"""What each call compares, in C++: objects that dictionaries hold, tensors' addresses, and which are trained."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from ark_torch import _C
from ark_torch.train.layout import Layout, Slots
from ark_torch.train.models import take_apart

pytestmark = pytest.mark.quick


def test_objects_in_dictionaries() -> None:
    one, other = [1], [1]  # equal, but not the same
    dicts = [{"a": one, "b": None}, {}, {"c": other}]
    slots = Slots(dicts)
    assert slots.same()
    dicts[2]["c"] = one
    assert not slots.same()
    dicts[2]["c"] = other
    assert slots.same()
    dicts[1]["d"] = other
    assert not slots.same()
    del dicts[1]["d"], dicts[0]["a"]
    assert not slots.same()
    assert _C._holds([], []) and not _C._holds([], [one]) and not _C._holds([{"a": one}], [])
    with pytest.raises(TypeError, match="dicts has an element that is no dict"):
        _C._holds([one], [])  # type: ignore[list-item]


def test_addresses_and_gradients() -> None:
    tensors = [torch.ones(3), torch.ones(4, requires_grad=True), torch.empty(0)]
    addresses = [int.from_bytes(_C._addresses(tensors)[at : at + 8], "little") for at in (0, 8, 16)]
    assert addresses == [t.data_ptr() for t in tensors]
    assert _C._trained(tensors) == bytes([0, 1, 0])
    for look in (_C._addresses, _C._trained):
        with pytest.raises(TypeError, match="tensors has an element that is no tensor"):
            look([tensors[0], 3])  # type: ignore[list-item]


def test_hundreds_of_parameters_take_microseconds() -> None:
    """The bound is that of a busy machine: it takes some 20 us."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(300))
    layout = Layout(take_apart(model, None), torch.optim.SGD(model.parameters(), lr=0.1))
    taken = []
    for _ in range(20):
        begin = time.perf_counter()
        assert not layout.changed()
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 200e-6, min(taken)
