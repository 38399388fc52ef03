#!/bin/bash
# RDMA on the kernel's verbs without a NIC: soft-RoCE in a virtual machine (guest.sh). Two parts, each in its own guest:
# the engine's C++ tests, then PyTorch's ranks on two nodes joined by a wire that loses packets.
#
#   tests/rdma/run.sh [engine|ranks]      default: both
#
# Bounded by GUEST_SECONDS (default 240 for the engine, 900 for the ranks). Prints what passed and its counts. The exit
# code is not 0 if anything failed or no guest could be started.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$PWD/.venv/bin/python
work=$PWD/build/rdma; mkdir -p "$work"
export GUEST_OUT=${GUEST_OUT:-$work/guest}
failed=0

engine() {
  "${CXX:-c++}" -std=c++20 -O1 -w -Icsrc -Iark_torch/kernels tests/rdma/engine_test.cpp build/extension/libark_core.a \
    -lgtest -lgtest_main -pthread -ldl -o "$work/engine_tests"
  GUEST_SECONDS=${GUEST_SECONDS:-240} tests/rdma/guest.sh "$work/engine_tests"
}

ranks() {
  GUEST_SECONDS=${GUEST_SECONDS:-900} tests/rdma/guest.sh env PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/distributed:$PWD/tests/rdma" \
    PYTHONDONTWRITEBYTECODE=1 TMPDIR=/tmp ARK_COSTS=assumed "$python" -m pytest -p no:cacheprovider -p no:xdist \
    --durations=5 -v -rA --capture=fd tests/rdma/soft_roce.py
}

for part in ${1:-engine ranks}; do
  echo "== $part, $(date +%H:%M:%S)"
  if "$part"; then echo "== $part: passed"; else code=$?; echo "== $part: failed (exit code $code)"; failed=1; fi
done
exit $failed
