"""Optimizers that the backward pass of embedding_bag_all_to_all applies in place: no gradient of a table is made.

They are `torch.optim.Optimizer`s, so that learning rate schedulers, `state_dict` and `param_groups` are as usual; what
differs is that `step()` has nothing left to do. The learning rate is a tensor beside the tables, which the update reads
when it runs: who changes it in place changes captured CUDA graphs and compiled functions, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class FusedOptimizer(torch.optim.Optimizer):
    """What the optimizers of this module share; not one by itself."""

    _kind = ""
    _adapts = False  # keeps a number a row
    trigger: Tensor  # takes a gradient, of no elements, in the place of the tables: so that there is a backward pass

    def __init__(self, tables: Iterable[Tensor], lr: float | Tensor, eps: float = 0.0) -> None:
        name = type(self).__name__
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise ValueError(f"ark: {name}: lr is {lr}. Pass 0 or more.")
        if not eps >= 0:
            raise ValueError(f"ark: {name}: eps is {eps}. Pass 0 or more.")
        super().__init__([{"params": list(tables)}], {"lr": lr, "eps": eps})
        self._views = any(table._is_view() for table in self.tables)
        # Here, not in a compiled function: Dynamo of PyTorch 2.11 lets none write an optimizer's attributes.
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
        """A number that somebody has written into `param_groups` becomes the tensor's value."""
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
        """What the operator is told: kind, state of each table, learning rate and eps."""
        known = self.tables
        if any(all(table is not one for one in known) for table in tables):
            raise ValueError(
                f"ark: embedding_bag_all_to_all: optimizer is a {type(self).__name__} of other tables. Make it with "
                "the tensors that are passed as tables."
            )
        if self._views and torch.compiler.is_compiling():
            # Inductor (to 2.15) copies a view that an operator writes, and may read beyond its end.
            raise ValueError(
                "ark: embedding_bag_all_to_all: a table that optimizer= updates is a view into other memory, which "
                "torch.compile does not write in place. Give each table memory of its own, as table.clone() has."
            )
        state = [self.state[table]["sum"] for table in tables] if self._adapts else []
        return self._kind, state, self.lr, self.param_groups[0]["eps"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates nothing: the backward pass has. A learning rate that was set as a number is taken over."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._place_rate()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the tensors that are there, which captured graphs have."""
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
    """Stochastic gradient descent: `row -= lr * gradient`, for rows that bags name; no momentum, no weight decay.

    Args:
        tables: the tables of `embedding_bag_all_to_all`, in place of which the backward pass is to write; perhaps none.
        lr: the learning rate; a tensor of one element is copied.

    The same bits as `torch.optim.SGD` on the sparse gradient where rows are float32; rows of half types take the
    gradient as it was summed, in float32, and are rounded once.

    Raises:
        ValueError: lr is negative.

    Example:
        >>> optimizer = ark_torch.ops.SGD(tables, lr=0.1)
        >>> embedding_bag_all_to_all(tables, indices, offsets, optimizer=optimizer).sum().backward()  # rows are new
    """

    _kind = "sgd"

    def __init__(self, tables: Iterable[Tensor], lr: float | Tensor = 1e-2) -> None:
        super().__init__(tables, lr)


class RowwiseAdagrad(FusedOptimizer):
    """Adagrad with one number a row (FBGEMM's and TorchRec's EXACT_ROWWISE_ADAGRAD).

    `sum += mean(gradient ** 2)` over the row's columns, `row -= lr / (sqrt(sum) + eps) * gradient`, for rows that bags
    name: what all bags bring a row is added up first. `state[table]["sum"]` is `[rows]`, float32 (float64 of float64
    tables), zero at first. The squares are added in a fixed order: blocks of 32 columns by neighbours, then the blocks.

    Args:
        tables: the tables of `embedding_bag_all_to_all`, in place of which the backward pass is to write; perhaps none.
        lr: the learning rate; a tensor of one element is copied.
        eps: added to the root.

    Raises:
        ValueError: lr or eps is negative.
    """

    _kind = "rowwise_adagrad"
    _adapts = True

    def __init__(self, tables: Iterable[Tensor], lr: float | Tensor = 1e-2, eps: float = 1e-8) -> None:
        super().__init__(tables, lr, eps)
