"""embedding_bag_all_to_all on CPU ranks: bits, gradients, bad input, compilers, groups."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.embedding import Case, check, draw, gradient_of, random_case, reference, same
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor

from ark_torch.ops import embedding_bag_all_to_all

pytestmark = [ark_only]
NAME = "embedding_bag_all_to_all"


def _random(rank: Rank, seed: int, count: int) -> None:
    rank.init()
    torch.set_num_threads(1)
    random = Random(seed)
    for number in range(count):
        check(random_case(random, rank.world_size, 100 * seed + number), rank.rank, rank.world_size)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_shapes(world: int) -> None:
    run_ranks(_random, world, world, 20)
