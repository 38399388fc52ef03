#!/usr/bin/env bash
# Runs all benchmarks and tests for four GPUs (or eight), part by part, within a time limit.
#
#   RANKS=4 SECONDS_ALL=570 benchmarks/four_gpus.sh [FOLDER] [PART ...]
#
# A completed part leaves FOLDER/PART.done and is not run again: repeat the call with the same folder until every part
# is done. A failed part is reported and leaves FOLDER/PART.log; the others still run. WHEEL=file installs the package
# from that file first. DEVICE=cpu runs the benchmarks on CPU ranks with small sizes, to test them. Parts, in their order:
#
#   check        installs WHEEL, if that is given; what is installed, and what `ark doctor` says of this machine
#   tune         ark tune --cuda: the dispatch table of this machine, FOLDER/tuned.json
#   dispatch     all_reduce by each engine, alone and beside products
#   collectives  every collective against NCCL and PyTorch's symmetric memory, in graphs and eager
#   nodes        some collectives of ark's group as two nodes, the stage between them by NCCL
#   interference the default all_reduce and all_gather beside products
#   decode       a step of Llama 1B, tensor parallel, against Inductor and eager over NCCL
#   decode8b     the same for 16 layers of Llama 8B
#   prefill      2048 tokens by 8 layers of Llama 8B, tensor parallel
#   account      where the time of that step goes, and its timeline for Perfetto
#   training     GPT-2 XL: one graph, DDP, FSDP2
#   compressed   all_reduces of few bits, without peer access between the GPUs
#   bits         GPT-2 XL, captured, with gradients of 4 bits, without peer access
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
WHEEL=${WHEEL:-}
LIMIT=${SECONDS_ALL:-570}
FOLDER=${1:-benchmarks/results/gpus_$RANKS}
shift
PARTS=("${@:-check tune dispatch collectives nodes interference decode decode8b prefill account training compressed bits products embedding moe pipeline dlrm tests:1/4 tests:2/4 tests:3/4 tests:4/4}")
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
  # shellcheck disable=SC2046  # one word an argument; the last of an option counts
  "$PYTHON" "benchmarks/$1.py" --device "$DEVICE" --ranks "$RANKS" --output "$FOLDER/$PART.json" "${@:2}" $(small)
}

never=18446744073709551615

# What makes a part small enough for CPU ranks.
small() {
  [[ $DEVICE == cpu ]] || return 0
  case $PART in
  dispatch | interference) echo --product 128 --megabytes 1 ;;
  training | bits) echo --models tiny --steps 2 ;;
  compressed) echo --sizes 0.0078125 0.25 ;;
  products) echo --shapes all_reduce-6x16x8 reduce_scatter-8x16x10 ;;
  embedding) echo --shapes T2-D16-L4-B8 --rows 50 ;;
  moe) echo --shapes E4-K2-16x24-T6 ;;
  pipeline) echo --hidden 32 --heads 2 --sequence 16 --micro-batches 4 --layers 2 --rounds 1 --steps 1 ;;
  dlrm) echo --shapes D8-L1-B12 --rows 40 --width 16 ;;
  esac
}

run_part() {
  case $PART in
  check)
    if [[ -n $WHEEL ]]; then "$PYTHON" -m pip install --quiet --no-deps --force-reinstall "$WHEEL" || return 1; fi
    "$PYTHON" -c "import ark_torch; print('ark_torch', ark_torch.__version__, 'in', ark_torch.__file__)" || return 1
    "$PYTHON" -m ark_torch doctor || [[ $DEVICE == cpu ]]
    ;;
  tune) "$PYTHON" -m ark_torch tune --cuda --ranks "$RANKS" --rounds 3 --output "$FOLDER/tuned.json" ;;
  dispatch)
    local each=() blocks
    for blocks in 24 32 48 64; do
      each+=(--ark "bulk$blocks:copy_engine_from=$never,bulk_from=1048576,ring_blocks=$blocks")
    done
    benchmark interference --operations all_reduce --megabytes 8 16 25 64 256 1024 --rounds 3 --window-ms 8 \
      --seconds "$(at_most 200)" --ark "rings:bulk_from=$never" --ark "engine:copy_engine_from=1048576" \
      "${each[@]}" --contenders nccl ark ark_rings ark_engine ark_bulk{24,32,48,64}
    ;;
  collectives) "$PYTHON" benchmarks/cuda_collectives.py --ranks "$RANKS" --output "$FOLDER/$PART.json" ;;
  nodes)
    "$PYTHON" benchmarks/cuda_collectives.py --ranks "$RANKS" --nodes 2 --sizes 8192 1048576 16777216 67108864 \
      --operations all_reduce all_gather reduce_scatter --output "$FOLDER/$PART.json"
    ;;
  interference) benchmark interference --rounds 3 --seconds "$(at_most 150)" ;;
  decode)
    "$PYTHON" benchmarks/decode.py --device "${DEVICE/cpu/as-cuda}" --ranks "$RANKS" --output "$FOLDER" \
      --ways eager ark inductor "inductor, max-autotune" --no-compile-times --seconds "$(at_most 400)"
    ;;
  decode8b | prefill)
    local which=(--layers 16)
    [[ $PART == prefill ]] && which=(--layers 8 --prompt 2048)
    "$PYTHON" benchmarks/decode.py --device "${DEVICE/cpu/as-cuda}" --ranks "$RANKS" --output "$FOLDER" --shape 8b \
      "${which[@]}" --turns 10 --ways ark inductor "inductor, max-autotune" --no-compile-times --seconds "$(at_most 300)"
    ;;
  account)
    "$PYTHON" benchmarks/loop_account.py --device "${DEVICE/cpu/as-cuda}" --ranks "$RANKS" --output "$FOLDER" \
      --timeline "$FOLDER/step.json.gz"
    ;;
  training)
    benchmark training --models gpt2-xl --modes graph captured captured_fsdp2 ddp fsdp2 --rounds 2 --no-bandwidth \
      --seconds "$(at_most 300)" --ark "engine:copy_engine_from=25165824"
    ;;
  compressed)
    ARK_DISABLE_P2P=1 NCCL_P2P_DISABLE=1 benchmark compressed --rounds 3 --sizes 0.0078125 1 8 64 256 \
      --seconds "$(at_most 90)"
    ;;
  bits)
    ARK_DISABLE_P2P=1 NCCL_P2P_DISABLE=1 benchmark training --models gpt2-xl --modes captured --bits 4 --rounds 2 \
      --no-bandwidth --seconds "$(at_most 200)"
    ;;
  products) benchmark fused_products --rounds 3 --seconds "$(at_most 200)" ;;
  embedding) benchmark fused --rounds 3 --seconds "$(at_most 120)" ;;
  moe) benchmark fused_moe --rounds 3 --seconds "$(at_most 200)" ;;
  pipeline) benchmark pipeline --seconds "$(at_most 120)" ;;
  dlrm) benchmark dlrm_step --rounds 3 --seconds "$(at_most 150)" ;;
  tests:*)
    export ARK_TEST_RANKS=$RANKS
    local test=("$PYTHON" -m pytest -v -rfEs --tb=short --durations=20 --night --shard "${PART#tests:}" -p no:cacheprovider)
    "${test[@]}" -n 3 --dist loadgroup -m "not alone" tests/gpu
    local code=$?
    "${test[@]}" -m alone tests/gpu
    local alone=$?
    return $((code != 0 ? code : alone == 5 ? 0 : alone))
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
  export -f run_part benchmark small left at_most
  export PART FOLDER RANKS DEVICE PYTHON LIMIT BEGUN WHEEL never
  timeout -s INT -k 10 "$(($(left) - 12))" bash -c run_part >"$FOLDER/$name.log" 2>&1
  code=$?
  echo "# $PART: exit code $code after $(($(date +%s) - at)) s"
  if ((code == 0)) || [[ $PART == tests:* && $code == 1 ]]; then touch "$FOLDER/$name.done"; else failed+=("$PART"); fi
done
echo "# failed: ${failed[*]:-none}"
((${#failed[@]} == 0))
