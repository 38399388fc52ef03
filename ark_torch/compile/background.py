"""A thread that compiles regions while the program runs: the C++ part, with the compiler as a child process.

Nothing of torch._dynamo, AOTAutograd or Inductor runs here, since their tracing sets process-wide flags. A job lives as
long as its result is wanted; a job without references is not started. At exit the compiler's process is ended and the
thread joined, within a time limit. A forked child has no such thread; its jobs restart on demand.
"""

from __future__ import annotations

import atexit
import collections
import os
import threading
import weakref
from collections.abc import Callable

from ark_torch.compile.report import log

_EXIT_S = 20.0


class Job:
    """Calls `work` with a function that says whether to give up. `state`: "new", "waiting", "done" or "failed"."""

    def __init__(self, work: Callable[[Callable[[], bool]], None], title: str) -> None:
        self._work, self._title = work, title
        self.state = "new"

    def submit(self) -> None:
        if self.state == "new":
            self.state = "waiting"
            _jobs.submit(self)

    def run(self, stopped: Callable[[], bool]) -> None:
        try:
            self._work(stopped)
            self.state = "done"
        except Exception as error:
            self.state = "failed"
            if not stopped():
                log.warning("%s: ark's regions are not compiled, and it stays as it is: %s", self._title, error)
                log.debug("in the background", exc_info=True)


class _Jobs:
    """The thread and its queue. The thread ends when the queue is empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[weakref.ref[Job]] = collections.deque()
        self._running: weakref.ref[Job] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._stopping:
                return
            self._waiting.append(weakref.ref(job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="ark-compile", daemon=True)
                self._thread.start()

    def active(self) -> bool:
        return self._thread is not None

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._stopping or not self._waiting:
                    self._thread = None
                    return
                self._running = self._waiting.popleft()
            if (job := self._running()) is not None:
                job.run(lambda: self._stopping)
            del job

    def stop(self) -> None:
        """Called at exit."""
        from ark_torch import _C

        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            _C.plan.stop_compilers()
            thread.join(_EXIT_S)

    def unfinished(self) -> list[Job]:
        known = [*self._waiting, *([self._running] if self._running is not None else [])]
        return [job for reference in known if (job := reference()) is not None and job.state == "waiting"]


_jobs = _Jobs()


def active() -> bool:
    """Whether something is being compiled, which takes cores from calls being timed."""
    return _jobs.active()


def _forked() -> None:
    global _jobs
    for job in _jobs.unfinished():
        job.state = "new"
    _jobs = _Jobs()


def _stop() -> None:
    _jobs.stop()  # of this process, which may be a forked one


atexit.register(_stop)
os.register_at_fork(after_in_child=_forked)
