"""A rank that calls every operator in which computation and communication share kernels, on small random tensors.

It is for compute-sanitizer (test_sanitizer.py). A program of its own, so that nothing but these kernels runs in it.

    PYTHONPATH=tests python tests/gpu/fused_tasks.py RANKS RANK FILE [--on-cpu]

FILE is of the store in which the ranks meet.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from random import Random

import torch
import torch.distributed as dist
from support import embedding, moe, products

import ark_torch  # noqa: F401  (registers the backend)
from ark_torch.distributed import compressed_all_reduce
from ark_torch.ops import moe_combine, moe_dispatch, moe_layer

BF16 = torch.bfloat16


def bags(rank: int, world: int, device: torch.device) -> None:
    random = Random(7)
    for number in range(4):
        case = embedding.random_case(random, world, number, (torch.float32, BF16))
        embedding.check(case, rank, world, device=device)
        embedding.check_sparse(case, rank, world, device)
        embedding.check_updates(case, rank, world, number % 2 == 0, device)


def matmuls(rank: int, world: int, device: torch.device) -> None:
    for number, name in enumerate(products.OPERATORS):
        rows = 24 * world if name == "matmul_reduce_scatter" else 24
        for m, form in ((rows, "unfused"), (rows, "default"), (8 * rows, "default")):
            case = products.Case(name, m, [72] * world, [136] * world, BF16, b="transposed", seed=number)
            a, b = products.draw(case, rank, device)
            got = case.call(a, b, **({"form": form} if form != "default" and device.type == "cuda" else {}))
            depth = 72 if name == "all_gather_matmul" else 72 * world
            products.close(got, products.exact(case, rank, world), depth, (case, form))


def experts(rank: int, world: int, device: torch.device) -> None:
    for number, dtype in enumerate((torch.float32, BF16)):
        case = moe.Case([33, 7][:world] + [5] * (world - 2), 2, 2, 40, dtype, "distinct", seed=number)
        x, ids, weights = moe.draw(case, rank, device)
        unfused = moe.Unfused(case, ids)
        rows, counts, handle = moe_dispatch(x, ids, num_experts=case.experts)
        used = int(unfused.counts.sum())
        products.same(rows[:used], unfused.there(x), case)
        products.same(counts.cpu(), unfused.counts, case)
        products.same(moe_combine(rows, handle, weights), unfused.back(rows[:used], weights, len(x)), case)
        w1, w2 = moe.draw_experts(case, rank, 48, True, device)[:2]
        x = x.clone().requires_grad_()
        result = moe_layer(x, ids, weights, w1.requires_grad_(), w2.requires_grad_())
        result.float().square().mean().backward()
        assert all(one.grad is not None and one.grad.isfinite().all() for one in (x, w1, w2)), case


def few_bits(rank: int, world: int, device: torch.device) -> None:
    for count in (5, 4096, 70_001):
        inputs = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(world)]
        got = compressed_all_reduce(inputs[rank].to(device), bits=8)
        torch.testing.assert_close(got.cpu(), sum(inputs), rtol=0.0, atol=0.2)


def main() -> int:
    world, rank, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    on_cpu = "--on-cpu" in sys.argv
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank % torch.cuda.device_count())
    if not on_cpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(file, world)
    dist.init_process_group("ark", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=170))
    for task in (bags, matmuls, experts, few_bits):
        task(rank, world, device)
        print(f"right: {task.__name__}", flush=True)
    dist.destroy_process_group()
    print("right: all", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
