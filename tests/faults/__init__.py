"""Faults of all parts of the code, for tests/mutations.py."""

from faults import collectives, compiler, dma, frontend, health, jit, kernels, operators, process_group, python, shm
from faults.fault import Fault

FAULTS: tuple[Fault, ...] = tuple(
    one
    for part in (collectives, dma, shm, health, jit, compiler, kernels, process_group, operators, frontend, python)
    for one in part.FAULTS
)
