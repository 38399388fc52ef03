"""Progress of the runs on rank 0: one bar per run on a terminal, an occasional line in a log file."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .training import Progress as StepListener


class Bars(Progress):
    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:>5}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, TextColumn("{task.fields[losses]}"), console=console, disable=console.quiet)

    def follow(self, name: str, steps: int) -> StepListener:
        """Adds a bar and returns a function that the training calls after each step."""
        task = self.add_task(name, total=steps, losses="")
        latest = math.nan

        def listener(step: int, loss: float, held_out: float | None) -> None:
            nonlocal latest
            latest = latest if held_out is None else held_out
            losses = f"loss {loss:.3f}  held-out {latest:.3f}"
            self.update(task, completed=step, losses=losses)
            if held_out is not None and not self.console.is_terminal:
                self.console.print(f"{name:>5}  step {step:4d}  {losses}")

        return listener
