"""Optimizers that the backward pass of embedding_bag_all_to_all applies in place, without a gradient of the tables.

They are `torch.optim.Optimizer`s, so learning rate schedulers, `state_dict` and `param_groups` work as usual, but
`step()` has nothing left to do. The learning rate is a tensor on the tables' device, which the update reads when it
runs: changing it in place also affects captured CUDA graphs and compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of this module's optimizers."""

    _kind = ""
    _adapts = False  # whether it keeps one number per row
    trigger: Tensor  # empty; takes a gradient instead of the tables, so that there is a backward pass

    def __init__(self, tables: Iterable[Tensor], lr: float | Tensor, eps: float = 0.0) -> None:
        name = type(self).__name__
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise ValueError(f"ark: {name}: lr is {lr}. Pass 0 or more.")
        if not eps >= 0:
            raise ValueError(f"ark: {name}: eps is {eps}. Pass 0 or more.")
        super().__init__([{"params": list(tables)}], {"lr": lr, "eps": eps})
        self._views = any(table._is_view() for table in self.tables)
        # Here, not in a compiled function: Dynamo of PyTorch 2.11 cannot write an optimizer's attributes.
        rate = self._place_rate()
        like = self.tables[0] if self.tables else rate
        self.trigger = torch.empty(0, dtype=like.dtype, device=like.device, requires_grad=True)
        for table in self.tables if self._adapts else ():
            dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
            self.state[table]["sum"] = torch.zeros(table.shape[0], dtype=dtype, device=table.device)

    @property
    def tables(self) -> list[Tensor]:
        return list(self.param_groups[0]["params"])

    @property
    def lr(self) -> Tensor:
        """The learning rate: one element, on the tables' device. `lr.fill_(0.1)` changes it everywhere."""
        return self._place_rate()

    def _place_rate(self) -> Tensor:
        """Copies a number written into `param_groups` into the tensor."""
        group, tables = self.param_groups[0], self.tables
        like = tables[0] if tables else torch.empty(0)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        rate = group["lr"]
        known: Tensor | None = getattr(self, "_rate", None)
        if known is not None and rate is known and known.device == like.device:
            return known
        if known is None or known.device != like.device:
            known = torch.empty((), dtype=dtype, device=like.device)
        with torch.no_grad():
            known.copy_(rate) if isinstance(rate, Tensor) else known.fill_(rate)
        self._rate: Tensor = known
        group["lr"] = known
        return known

    def update_of(self, tables: list[Tensor]) -> tuple[str, list[Tensor], Tensor, float]:
        """The operator's arguments: kind, state of each table, learning rate and eps."""
        known = self.tables
        if any(all(table is not one for one in known) for table in tables):
            raise ValueError(
                f"ark: embedding_bag_all_to_all: optimizer is a {type(self).__name__} of other tables. Make it with "
                "the tensors that are passed as tables."
            )
        if self._views and torch.compiler.is_compiling():
            # Inductor (up to 2.15) copies a view that an operator writes, and may read beyond its end.
            raise ValueError(
                "ark: embedding_bag_all_to_all: a table that optimizer= updates is a view into other memory, which "
                "torch.compile does not write in place. Give each table memory of its own, as table.clone() has."
            )
        state = [self.state[table]["sum"] for table in tables] if self._adapts else []
        return self._kind, state, self.lr, self.param_groups[0]["eps"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates nothing, since the backward pass has done so. Applies a learning rate that was set as a number."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._place_rate()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the existing tensors, which captured graphs use."""
        (group,), states = state_dict["param_groups"], state_dict["state"]
        if len(group["params"]) != len(self.tables):
            raise ValueError(
                f"ark: {type(self).__name__}: state_dict is of {len(group['params'])} tables, and this optimizer of "
                f"{len(self.tables)}. Load what the same tables on this rank have saved."
            )
        with torch.no_grad():
            for number, table in zip(group["params"], self.tables, strict=True):
                if self._adapts:
                    self.state[table]["sum"].copy_(states[number]["sum"])
        self.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
        self._place_rate()


class SGD(FusedOptimizer):
    """Stochastic gradient descent: `row -= lr * gradient`, for the bags' rows; no momentum, no weight decay.

    Args:
        tables: the tables of `embedding_bag_all_to_all` that the backward pass updates; possibly none.
        lr: the learning rate; a one-element tensor is copied.

    For float32 rows the result has the same bits as `torch.optim.SGD` on the sparse gradient. Rows of half precision
    use the float32 sum of the gradient and are rounded once.

    Raises:
        ValueError: lr is negative.

    Example:
        >>> optimizer = ark_torch.ops.SGD(tables, lr=0.1)
        >>> embedding_bag_all_to_all(tables, indices, offsets, optimizer=optimizer).sum().backward()  # updates rows
    """

    _kind = "sgd"

    def __init__(self, tables: Iterable[Tensor], lr: float | Tensor = 1e-2) -> None:
        super().__init__(tables, lr)


class RowwiseAdagrad(FusedOptimizer):
    """Adagrad with one number per row (EXACT_ROWWISE_ADAGRAD of FBGEMM and TorchRec).

    `sum += mean(gradient ** 2)` over the row's columns, then `row -= lr / (sqrt(sum) + eps) * gradient`, for the bags'
    rows; a row's gradient is first summed over all bags. `state[table]["sum"]` is `[rows]`, float32 (float64 for
    float64 tables), initially zero. The squares are added in a fixed order: pairwise in blocks of 32 columns, then
    block by block.

    Args:
        tables: the tables of `embedding_bag_all_to_all` that the backward pass updates; possibly none.
        lr: the learning rate; a one-element tensor is copied.
        eps: added to the square root.

    Raises:
        ValueError: lr or eps is negative.
    """

    _kind = "rowwise_adagrad"
    _adapts = True

    def __init__(self, tables: Iterable[Tensor], lr: float | Tensor = 1e-2, eps: float = 1e-8) -> None:
        super().__init__(tables, lr, eps)
