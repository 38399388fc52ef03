"""Compares the ranks' flight records: who is behind, at which operation, and which operations do not match.

A group's collectives have the same sequence number on every rank, so records are compared number by number. For ranks
without a record (killed) the others recorded at the failure what they saw of them in shared memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ark_torch.tools.flight_dumps import Dump, Group, Operation, Peer, Progress

# Operations whose number of elements must be equal on all ranks; others (all_to_all) cannot be compared.
_SAME_INPUT = {"all_reduce", "all_reduce_coalesced", "all_reduce_sparse", "broadcast", "reduce", "gather", "all_gather"}
_SAME_INPUT |= {"all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}
_SAME_OUTPUT = {"all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "scatter"}


@dataclass(frozen=True)
class Seen:
    """A rank's progress in a group, and the record that reports it."""

    progress: Progress
    by: int  # global rank; the rank itself if it has a record
    waiting_on: int | None = None  # global rank
    lost: bool = False


def ranks_text(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Job:
    """The records of one job's ranks."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.dumps = dict(sorted(dumps.items()))
        self.failed_at: dict[str, int] = {}
        for failure in (failure for dump in self.dumps.values() for failure in dump.failures):
            if failure.group is not None:
                known = self.failed_at.get(failure.group, failure.time_ns)
                self.failed_at[failure.group] = min(known, failure.time_ns)
        self.groups: dict[str, Group] = {}
        self._blame: dict[str, dict[int, list[int]]] = {}
        self._tables: dict[str, dict[int, dict[int, Operation]]] = {}
        for dump in self.dumps.values():
            for name, group in dump.groups.items():
                self.groups.setdefault(name, group)
            for operation in dump.operations:
                if not operation.is_p2p and not self.too_late(dump.rank, operation):
                    row = self._tables.setdefault(operation.group, {}).setdefault(operation.sequence, {})
                    row[dump.rank] = operation

    def too_late(self, rank: int, operation: Operation) -> bool:
        """Whether the rank called the operation after others had given up waiting for it.

        It may still have completed, if the data already published was all that it needed.
        """
        failed_at = self.failed_at.get(operation.group, operation.time_created_ns)
        return operation.time_created_ns > failed_at and rank in self.blamed(operation.group)

    def blamed(self, group: str) -> dict[int, list[int]]:
        """Rank named by an error -> ranks that raised it."""
        if group in self._blame:
            return self._blame[group]
        blame: dict[int, list[int]] = {}
        for dump in self.dumps.values():
            for failure in dump.failures[:1]:
                culprit = dump.groups[group].to_global(failure.peer) if failure.group == group else None
                if culprit is not None:
                    blame.setdefault(culprit, []).append(dump.rank)
        self._blame[group] = blame
        return blame

    def collectives(self, group: str) -> dict[int, dict[int, Operation]]:
        """sequence -> rank -> operation, in order."""
        return dict(sorted(self._tables.get(group, {}).items()))

    def _reports(self, group: str) -> Iterator[tuple[int, int, Peer]]:
        """(global rank reported on, reporter, observed state), first failures first."""
        for dump in self.dumps.values():
            for failure in dump.failures:
                if failure.group != group:
                    continue
                for peer in failure.peers:
                    rank = dump.groups[group].to_global(peer.rank)
                    if rank is not None:
                        yield rank, dump.rank, peer

    def progress(self, group: str) -> dict[int, Seen]:
        """The progress of every member with any information."""
        seen: dict[int, Seen] = {}
        for rank, by, peer in self._reports(group):
            waiting = self.groups[group].to_global(peer.waiting_on)
            known = seen.get(rank)
            if known is None or (known.progress.scheduled, known.lost) < (peer.progress.scheduled, peer.lost):
                seen[rank] = Seen(peer.progress, by, waiting, peer.lost or (known is not None and known.lost))
        for rank, dump in self.dumps.items():
            if group in dump.groups:
                report = seen.get(rank)
                waiting = None if report is None else report.waiting_on
                progress = dump.groups[group].collective
                late = [
                    op.sequence
                    for op in dump.operations
                    if op.group == group and self.too_late(rank, op) and not op.is_p2p
                ]
                if late:
                    progress = replace(progress, scheduled=min(progress.scheduled, min(late) - 1))
                seen[rank] = Seen(progress, rank, waiting)
        return dict(sorted(seen.items()))


def _signature(operation: Operation) -> tuple[object, ...]:
    name = operation.operation
    return (
        name,
        operation.dtype,
        operation.reduce_op,
        operation.root,
        operation.input_elements if name in _SAME_INPUT else None,
        operation.output_elements if name in _SAME_OUTPUT else None,
    )


def mismatches(job: Job, group: str) -> Iterator[str]:
    """Operations with one sequence number that cannot be the same collective; the majority is assumed right."""
    for sequence, row in job.collectives(group).items():
        signatures = {rank: _signature(operation) for rank, operation in row.items()}
        usual = Counter(signatures.values()).most_common(1)[0][0]
        odd = [rank for rank, signature in signatures.items() if signature != usual]
        if odd:
            agree = [rank for rank in row if rank not in odd]
            parts = [f"rank {rank} called {row[rank].title}" for rank in odd]
            yield f"sequence {sequence}: {ranks_text(agree)} called {row[agree[0]].title}, but {'; '.join(parts)}"


def stragglers(job: Job, group: str) -> Iterator[str]:
    """The ranks that the others wait for."""
    seen = job.progress(group)
    if not seen:
        return
    members = job.groups[group].ranks
    silent = [rank for rank in members if rank not in seen]
    if silent:
        yield f"{ranks_text(silent)} left no record and no other rank reports on it"
    for culprit, accusers in job.blamed(group).items():
        yield f"{ranks_text(accusers)} failed because of rank {culprit}"
    furthest = max(state.progress.scheduled for state in seen.values())
    rows = job.collectives(group)
    for rank, state in seen.items():
        ended = " (its process ended)" if state.lost else ""
        source = "" if state.by == rank else f", as rank {state.by} saw"
        if state.progress.scheduled < furthest:
            missed = state.progress.scheduled + 1
            row = rows.get(missed, {})
            title = next((operation.title for operation in row.values()), "an operation no record still holds")
            waiting = [other for other in row if other != rank and row[other].state != "completed"]
            tail = f"; {ranks_text(waiting)} called it" if waiting else ""
            yield f"rank {rank}{ended} is behind: it has not called sequence {missed}, {title}{tail}{source}"
        elif state.lost:
            yield f"rank {rank}{ended} in sequence {state.progress.completed + 1}{source}"
    if all(state.progress.scheduled == furthest for state in seen.values()):
        done = min(state.progress.completed for state in seen.values())
        late = [rank for rank, state in seen.items() if state.progress.completed < furthest]
        if late and done < furthest:
            row = rows.get(done + 1, {})
            title = next((operation.title for operation in row.values()), "an operation no record still holds")
            if len(late) < len(seen):
                yield f"all called sequence {done + 1}, {title}, and {ranks_text(late)} did not finish it"
            else:
                yield f"all called sequence {done + 1}, {title}, and none finished it"


Pair = tuple[str, int, int, int]  # group, global source, global destination, tag


def messages(job: Job) -> dict[Pair, tuple[list[Operation], list[Operation]]]:
    """Sends and receives by pair of ranks, in order, except receives from any source, whose sender is unknown."""
    pairs: dict[Pair, tuple[list[Operation], list[Operation]]] = {}
    for dump in job.dumps.values():
        for operation in dump.operations:
            peer = dump.groups[operation.group].to_global(operation.peer)
            if operation.is_p2p and operation.operation in ("send", "recv") and peer is not None:
                sending = operation.operation == "send"
                source, target = (dump.rank, peer) if sending else (peer, dump.rank)
                sides = pairs.setdefault((operation.group, source, target, operation.tag), ([], []))
                sides[0 if sending else 1].append(operation)
    return pairs


def message_number(operations: list[Operation], index: int, wrapped: bool) -> int | None:
    """The number of this message in its pair, from 1; None if the record no longer shows it."""
    if operations[index].p2p_sequence > 0:
        return operations[index].p2p_sequence
    return None if wrapped else index + 1


def unpaired(job: Job) -> Iterator[str]:
    """Sends without a receive and vice versa, if both ranks' records reach back far enough."""
    for (group, source, target, tag), sides in messages(job).items():
        if source not in job.dumps or target not in job.dumps:
            continue
        totals = []
        for rank, side in zip((source, target), sides, strict=True):
            totals.append(message_number(side, len(side) - 1, job.dumps[rank].wrapped) if side else 0)
        sent, received = totals
        if sent is None or received is None or (not all(sides) and any(job.dumps[r].wrapped for r in (source, target))):
            continue
        rank, peer, side = (source, target, sides[0]) if sent > received else (target, source, sides[1])
        waiting = [operation for operation in side if operation.state != "completed"]
        if sent != received and waiting:
            what = "received" if sent > received else "sent"
            yield (
                f"group {group}: rank {rank} waits in {waiting[-1].title} (message {max(sent, received)} from rank "
                f"{source} to rank {target}, tag {tag}), which rank {peer} has not {what}"
            )
