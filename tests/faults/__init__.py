"""Faults of all parts of the code, for tests/mutations.py."""

from faults import collectives, compiler, dma, health, jit, kernels, memory, operators, plan, process_group, python
from faults.fault import Fault

FAULTS: tuple[Fault, ...] = tuple(
    one
    for part in (collectives, dma, memory, health, jit, plan, kernels, process_group, operators, compiler, python)
    for one in part.FAULTS
)
