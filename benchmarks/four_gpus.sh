#!/usr/bin/env bash
# Runs all benchmarks and tests for four GPUs (or eight), part by part, within a time limit.
#
#   RANKS=4 SECONDS_ALL=570 benchmarks/four_gpus.sh [FOLDER] [PART ...]
#
# A completed part leaves FOLDER/PART.done and is not run again: repeat the call with the same folder until every part
# is done. A failed part is reported and leaves FOLDER/PART.log; the others still run. The package must be installed.
# DEVICE=cpu runs the benchmarks on CPU ranks with small sizes, to test them. Parts, in their order:
#
#   tune         ark tune --cuda: the dispatch table of this machine, FOLDER/dispatch.json
#   dispatch     all_reduce by each engine, alone and beside products
#   collectives  every collective against NCCL and PyTorch's symmetric memory, in graphs and eager
#   nodes        some collectives of ark's group as two nodes, the stage between them by NCCL
#   interference the default all_reduce and all_gather beside products
#   decode       a step of Llama 1B, tensor parallel, against Inductor and eager over NCCL
#   account      where the time of that step goes, and its timeline for Perfetto
#   training     GPT-2 XL: one graph, DDP, FSDP2
#   products     products fused with a collective
#   embedding    pooled embeddings with their all-to-all
#   moe          mixtures of experts: dispatch, experts, combine
#   pipeline     a pipeline-parallel step, one stage per GPU
#   dlrm         a whole step of a DLRM
#   tests:i/n    every n-th test of tests/gpu, starting with the i-th
set -u
cd "$(dirname "$0")/.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1

RANKS=${RANKS:-4}
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}
LIMIT=${SECONDS_ALL:-570}
FOLDER=${1:-benchmarks/results/gpus_$RANKS}
shift
PARTS=("${@:-tune dispatch collectives nodes interference decode account training products embedding moe pipeline dlrm tests:1/4 tests:2/4 tests:3/4 tests:4/4}")
# shellcheck disable=SC2206  # one word a part
PARTS=(${PARTS[*]})
mkdir -p "$FOLDER"
BEGUN=$(date +%s)

left() { echo $((LIMIT - $(date +%s) + BEGUN)); }

# --seconds of a benchmark: at most $1, and no more than are left.
at_most() {
  local rest
  rest=$(($(left) - 15))
  echo $((rest < $1 ? rest : $1))
}

benchmark() { # PROGRAM ARGUMENT...: into the part's JSON
  "$PYTHON" "benchmarks/$1.py" --device "$DEVICE" --ranks "$RANKS" --output "$FOLDER/$PART.json" "${@:2}"
}

never=18446744073709551615
SMALL=""
[[ $DEVICE == cpu ]] && SMALL="--product 128 --megabytes 1"

run_part() {
  case $PART in
  tune) "$PYTHON" -m ark_torch tune --cuda --ranks "$RANKS" --rounds 3 --output "$FOLDER/dispatch.json" ;;
  dispatch)
    local each=() blocks
    for blocks in 24 32 48 64; do
      each+=(--ark "bulk$blocks:copy_engine_from=$never,bulk_from=1048576,ring_blocks=$blocks")
    done
    benchmark interference --operations all_reduce --megabytes 8 16 25 64 256 1024 --rounds 3 --window-ms 8 $SMALL \
      --seconds "$(at_most 200)" --ark "rings:bulk_from=$never" --ark "engine:copy_engine_from=1048576" \
      "${each[@]}" --contenders nccl ark ark_rings ark_engine ark_bulk{24,32,48,64}
    ;;
  collectives) "$PYTHON" benchmarks/cuda_collectives.py --ranks "$RANKS" --output "$FOLDER/$PART.json" ;;
  nodes)
    "$PYTHON" benchmarks/cuda_collectives.py --ranks "$RANKS" --nodes 2 --sizes 8192 1048576 16777216 67108864 \
      --operations all_reduce all_gather reduce_scatter --output "$FOLDER/$PART.json"
    ;;
  interference) benchmark interference --rounds 3 --seconds "$(at_most 150)" $SMALL ;;
  decode)
    "$PYTHON" benchmarks/decode.py --device "${DEVICE/cpu/as-cuda}" --ranks "$RANKS" --output "$FOLDER" \
      --ways eager ark inductor "inductor, max-autotune" --no-compile-times --seconds "$(at_most 400)"
    ;;
  account)
    "$PYTHON" benchmarks/loop_account.py --device "${DEVICE/cpu/as-cuda}" --ranks "$RANKS" --output "$FOLDER" \
      --timeline "$FOLDER/step.json.gz"
    ;;
  training)
    benchmark training --models gpt2-xl --modes graph captured captured_fsdp2 ddp fsdp2 --rounds 2 --no-bandwidth --seconds "$(at_most 300)" \
      --ark "engine:copy_engine_from=25165824"
    ;;
  products) benchmark fused_products --rounds 3 --seconds "$(at_most 200)" ;;
  embedding) benchmark fused --rounds 3 --seconds "$(at_most 120)" ;;
  moe) benchmark fused_moe --rounds 3 --seconds "$(at_most 200)" ;;
  pipeline) benchmark pipeline --seconds "$(at_most 120)" ;;
  dlrm) benchmark dlrm_step --rounds 3 --seconds "$(at_most 150)" ;;
  tests:*)
    ARK_TEST_RANKS=$RANKS "$PYTHON" -m pytest -v -rfEs --tb=short --durations=20 --night --shard "${PART#tests:}" \
      -p no:cacheprovider tests/gpu
    ;;
  *)
    echo "$PART is no part: see the head of $0" >&2
    return 2
    ;;
  esac
}

failed=()
for PART in "${PARTS[@]}"; do
  name=${PART//[:\/]/-}
  [[ -e $FOLDER/$name.done ]] && continue
  if (($(left) < 40)); then
    echo "# $PART: not begun, $(left) s are left"
    continue
  fi
  at=$(date +%s)
  # SIGINT first, so that pytest still reports failures.
  export -f run_part benchmark left at_most
  export PART FOLDER RANKS DEVICE PYTHON LIMIT BEGUN SMALL never
  timeout -s INT -k 10 "$(($(left) - 12))" bash -c run_part >"$FOLDER/$name.log" 2>&1
  code=$?
  echo "# $PART: exit code $code after $(($(date +%s) - at)) s"
  if ((code == 0)) || [[ $PART == tests:* && $code == 1 ]]; then touch "$FOLDER/$name.done"; else failed+=("$PART"); fi
done
echo "# failed: ${failed[*]:-none}"
((${#failed[@]} == 0))
