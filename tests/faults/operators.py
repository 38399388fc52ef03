"""Faults of csrc/ops, of compressed collectives, and of the search for fused operators."""

from faults.fault import fault

OPS = "csrc/ops/"
COMPRESSION = "ark_torch/distributed/compression/"

FAULTS = (
    fault(
        "operators.owner_forgets",
        OPS + "compressed_cpu.cpp",
        "  const auto feedback = owed == nullptr ? compressed::Feedback::none : compressed::Feedback::added_to;\n",
        "  const auto feedback = compressed::Feedback::none;\n",
        "what the owner of a bucket loses when it quantises the sum is lost for ever",
        "tests/distributed/test_compressed_collectives.py",
    ),
    fault(
        "operators.sum_for_mean",
        OPS + "compressed_cpu.cpp",
        "    if (sum.average) kernels.divide(sums, bucket.numel, static_cast<float>(sum.ranks));\n",
        "",
        "a mean of compressed gradients is their sum",
        "tests/distributed/test_compressed_collectives.py",
    ),
    fault(
        "operators.code_past_the_last",
        "csrc/collectives/compressed/quantizer_kernels.hpp",
        "    t = smaller(t, F32{} + levels);\n",
        "    t = smaller(t, F32{} + levels + 1.0f);\n",
        "a largest element rounded up by chance becomes the smallest",
        "collectives.quantizer_test",
        "tests/distributed/test_compressed_collectives.py",
    ),
    fault(
        "operators.one_seed",
        COMPRESSION + "state.py",
        "0x9E3779B97F4A7C15 + self.calls)",
        "0x9E3779B97F4A7C15)",
        "rounding by chance errs in the same direction in each step",
        "tests/distributed/test_compression_ddp.py",
        "tests/distributed/test_compression_layers.py",
    ),
    fault(
        "operators.plan_of_old_bits",
        COMPRESSION + "state.py",
        "            layer.chosen, layer.sums = bits, None\n        self.plans.clear()\n",
        "            layer.chosen, layer.sums = bits, None\n",
        "bits that Auto chooses are never used",
        "tests/distributed/test_compression_plan.py",
    ),
    fault(
        "operators.plan_of_old_checkpoint",
        COMPRESSION + "state.py",
        "moved=before != world)\n        self.plans.clear()\n",
        "moved=before != world)\n",
        "a loaded checkpoint's bits are never used",
        "tests/distributed/test_compression_plan.py",
    ),
    fault(
        "operators.plan_of_another_type",
        COMPRESSION + "plan.py",
        "        return self.dtype is data.dtype and self.device == data.device\n",
        "        return True\n",
        "gradients of another type are exchanged and counted as those of before",
        "tests/distributed/test_compression_plan.py",
    ),
    fault(
        "operators.slots_never_read",
        COMPRESSION + "ddp.py",
        "    if bucket.index() == 0:\n        state.watch.look(state.group.rank())\n",
        "",
        "a NaN on a GPU is never told",
        "tests/distributed/test_compression_watch.py",
    ),
    fault(
        "operators.nonfinite_of_the_last",
        OPS + "compressed_cpu.cpp",
        "  if (bad.numel() != 0) *result.nonfinite = std::min(*result.nonfinite, bad.const_data_ptr<int64_t>()[0]);\n",
        "  if (bad.numel() != 0) *result.nonfinite = bad.const_data_ptr<int64_t>()[0];\n",
        "a later layer's NaN hides an earlier one's",
        "tests/distributed/test_compression_watch.py",
    ),
    fault(
        "operators.drawn_in_is_lost",
        COMPRESSION + "loading.py",
        "    residual.add_(full).sub_(drawn).nan_to_num_(0.0, 0.0, 0.0)\n",
        "",
        "what few bits leave out of a bucket is never sent",
        "tests/distributed/test_compression_ddp.py",
        "tests/distributed/test_compression_layers.py",
        "tests/distributed/test_compression_accuracy.py",
    ),
    fault(
        "operators.unstable_entries",
        OPS + "embedding_gradient_cpu.cpp",
        "  std::stable_sort(by_row.order.begin(), by_row.order.end(),\n"
        "                   [&](int64_t one, int64_t other) { return table.indices[one] < table.indices[other]; });\n",
        "  std::sort(by_row.order.begin(), by_row.order.end(), [&](int64_t one, int64_t other) {\n"
        "    const auto left = table.indices[one], right = table.indices[other];\n"
        "    return left != right ? left < right : one > other;\n"
        "  });\n",
        "a row's gradient is added up in another order than on a GPU",
        "tests/ops/test_embedding_updates.py",
        "tests/ops/test_embedding_bag_all_to_all.py",
    ),
    fault(
        "operators.rate_of_construction",
        "ark_torch/ops/optimizers.py",
        "            known.copy_(rate) if isinstance(rate, Tensor) else known.fill_(rate)\n",
        "            known.copy_(rate) if isinstance(rate, Tensor) else None\n",
        "a learning rate that was written as a number never counts",
        "tests/ops/test_embedding_updates.py",
    ),
    fault(
        "operators.order_unseen",
        "ark_torch/compile/embeddings.py",
        "    return as_many and bool((value.reshape(-1) == wanted.reshape(-1)).all())",
        "    return as_many",
        "pooled rows in an order of their own come in the operator's",
        "tests/compile/test_embeddings.py",
    ),
    fault(
        "operators.padding_unseen",
        "ark_torch/compile/embeddings.py",
        '        if given.get("padding_idx", -1) not in (-1, None):\n',
        '        if given.get("padding_idx", -1) is None:\n',
        "rows that a program pads with are added",
        "tests/compile/test_embeddings.py",
    ),
    fault(
        "operators.expert_counts",
        OPS + "moe_cpu.cpp",
        "rank_counts.narrow(1, rank * routing.local(), routing.local())",
        "rank_counts.narrow(1, 0, routing.local())",
        "a rank's experts are given the first rank's numbers of rows",
        "tests/ops/test_moe.py",
    ),
)
