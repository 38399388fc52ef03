"""Ranks that are started once and run many test bodies, one after the other.

A rank on a GPU takes seconds to start: its CUDA context, its first collective, its kernels. A crew pays that once. Each
body creates its own process group. On any error (a body raises or does not return, a rank ends) the crew is closed and
the next body gets fresh ranks, so that a test cannot break the next one. Tests that need ranks of their own (other
environment variables, a kill) use a Job (support/launcher.py).
"""

from __future__ import annotations

import atexit
import gc
import inspect
import random
import signal
from collections.abc import Callable
from typing import Any

import torch

from support import start
from support.launcher import DEFAULT_TIMEOUT, Job
from support.rank import Rank, describe, load

# When one rank has raised, the others usually wait for it. They get this long to finish and report.
OTHERS_S = 10.0


def serve(rank: Rank) -> int:
    """The body of a crew's job: runs tasks until it is told that there are no more."""
    # Ctrl-C in a terminal also reaches the ranks. They ignore it, because pytest ends them and still reports failures.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = 0
    job = rank.job
    while True:
        task = rank.wait_for("task")
        if task is None:
            return done
        done += 1
        rank.fresh(f"{job}/{done}")
        torch.manual_seed(1234 + rank.rank)
        random.seed(1234 + rank.rank)
        path, name, args = task
        try:
            outcome = ("result", load(path, name)(rank, *args))
            _leave()
        except BaseException as error:  # the test process must hear of any error
            outcome = ("exit", error.code) if isinstance(error, SystemExit) else ("error", describe(error))
        rank.report(f"done{done}", outcome)
        del outcome


def _leave() -> None:
    """Releases what the end of the process would release."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Crew:
    """Started ranks that wait for tasks."""

    def __init__(self, count: int, env: dict[str, str | None] | None = None) -> None:
        self._job = Job(serve, count, env=env, destroy=False)
        self._tasks = 0
        self.count = count
        self.alive = True
        start.keep(self._job.pids)

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """Runs the body on every rank. Returns values in rank order, or raises RanksFailed and ends the crew."""
        self._tasks += 1
        event, job = f"done{self._tasks}", self._job
        job.go_all("task", (inspect.getfile(body), body.__qualname__, args))

        def told(rank: int) -> Any:
            return job.outcomes[rank].events.get(event)

        def all_told() -> bool:
            return all(told(rank) or job.has_ended(rank) for rank in range(self.count))

        def trouble() -> bool:
            return any(job.has_ended(rank) or (told(rank) or ("result",))[0] != "result" for rank in range(self.count))

        try:
            job.wait_until(lambda: all_told() or trouble(), timeout, f"{body.__qualname__} on all ranks")
            if trouble():
                for rank, outcome in enumerate(job.outcomes):
                    if told(rank) and told(rank)[0] != "result":
                        outcome.kind, outcome.value = told(rank)
                job.wait_until(all_told, OTHERS_S, f"{body.__qualname__} on the other ranks")
                job.fail(f"{body.__qualname__} failed")
        except BaseException:  # the job has asked its ranks for their stacks and ended them
            self.close()
            raise
        return [outcome.events.pop(event)[1] for outcome in job.outcomes]

    def close(self) -> None:
        """Ends the ranks at once."""
        if not self.alive:
            return
        self.alive = False
        start.forget(self._job.pids)
        self._job.close()

    def finish(self, timeout: float = 60.0) -> None:
        """Lets the ranks end by themselves, and checks that they do."""
        if self.alive:
            try:
                self._job.go_all("task")
                self._job.values(timeout)
            finally:
                self.close()


_crews: dict[int, Crew] = {}


def crew_of(count: int, env: dict[str, str | None]) -> Crew:
    """Returns the crew with that many ranks and starts it if necessary. All callers of a run share one environment."""
    crew = _crews.get(count)
    if crew is None or not crew.alive:
        crew = _crews[count] = Crew(count, env)
    return crew


def finish_all() -> None:
    """Ends the run: every rank of every crew must end cleanly."""
    crews = list(_crews.values())
    _crews.clear()
    for crew in crews:
        crew.finish()


atexit.register(lambda: [crew.close() for crew in _crews.values()])
