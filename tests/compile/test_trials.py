"""Numbers for symbolic sizes: which batches are followed, and that all sizes that depend on one get theirs."""

from __future__ import annotations

from typing import Any

import pytest
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ark_torch.compile.graph_edits import NotFused
from ark_torch.compile.trials import known_equal, trials_of

pytestmark = [pytest.mark.quick]


def _symbols(count: int) -> list[Any]:
    shapes = ShapeEnv()
    return [shapes.create_unbacked_symint() for _ in range(count)]


def test_fixed_sizes_are_their_own_numbers() -> None:
    (trial,) = trials_of(12, 2)
    assert trial(12) == 12
    with pytest.raises(NotFused, match="several symbols"):
        trial(_symbols(1)[0])


@pytest.mark.parametrize(("parts", "offset"), [(2, 0), (3, 0), (4, 1)])
def test_a_batch_is_divided(parts: int, offset: int) -> None:
    (batch,) = _symbols(1)
    whole = batch - offset
    one, other = trials_of(whole, parts)
    assert one(whole) != other(whole)
    for trial in (one, other):
        assert trial(whole) % parts == 0 and trial(whole // parts) == trial(whole) // parts
        assert trial(batch) == trial(whole) + offset and trial(whole * 3 + 2) == 3 * trial(whole) + 2


def test_what_is_not_followed() -> None:
    batch, other = _symbols(2)
    with pytest.raises(NotFused, match="several symbols"):
        trials_of(batch + other, 2)
    with pytest.raises(NotFused, match="not known to be divided"):
        trials_of(2 * batch + 1, 2)
    with pytest.raises(NotFused, match="several symbols"):
        trials_of(batch, 2)[0](other)


def test_known_equal() -> None:
    batch, other = _symbols(2)
    assert known_equal(batch, batch) and known_equal(2, 2) and known_equal("sum", "sum")
    assert not known_equal(batch, other) and not known_equal(batch, 2) and not known_equal("sum", "mean")
