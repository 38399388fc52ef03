"""Numbers for symbolic sizes: which batches are followed, and that all sizes that depend on one get theirs."""

from __future__ import annotations

from typing import Any

import pytest
from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ark_torch.compile.graph_edits import NotFused
from ark_torch.compile.trials import known_equal, trials_of

pytestmark = [pytest.mark.quick]


def _symbols(count: int) -> list[Any]:
    shapes = ShapeEnv()
    return [shapes.create_unbacked_symint() for _ in range(count)]


def _of_call(shapes: ShapeEnv, value: int, name: str) -> Any:
    """A symbol whose value in this call is known, as those of torch.compile."""
    source = LocalSource(name)
    symbol = shapes.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=value, source=source)


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


def test_other_symbols_have_their_value_once_they_are_fixed() -> None:
    shapes = ShapeEnv()
    batch, tables, unmet = (_of_call(shapes, value, name) for value, name in ((12, "batch"), (3, "tables"), (7, "n")))
    trials = trials_of(batch, 2)
    assert [trial(batch * tables) for trial in trials] == [3 * trial(batch) for trial in trials]
    assert not shapes.guards
    for trial in trials:
        trial.fix()
    assert tables.node.maybe_as_int() == 3
    assert batch.node.maybe_as_int() is None and unmet.node.maybe_as_int() is None
    assert any("Eq" in str(guard.expr) for guard in shapes.guards)
    shapes.frozen = True
    with pytest.raises(NotFused, match="several symbols"):
        trials[0](unmet)


def test_known_equal() -> None:
    batch, other = _symbols(2)
    assert known_equal(batch, batch) and known_equal(2, 2) and known_equal("sum", "sum")
    assert not known_equal(batch, other) and not known_equal(batch, 2) and not known_equal("sum", "mean")
