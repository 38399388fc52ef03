#!/usr/bin/env bash
# ark_torch with another PyTorch: the build, the quick tests, PyTorch's own suite and a sample of the compiler's tests.
#
#   tools/test_torch.sh VERSION      "2.14.1"
#
# Everything lies under build/torch-VERSION: an environment (env; ARK_TORCH_ENV names another one that has this PyTorch,
# and gets ark_torch installed), the sources (src: one extension serves one PyTorch, so the working tree keeps its own),
# logs, and row.json, the outcome. The last line printed is the outcome's row for docs/pytorch-versions.md. The exit code
# is 0 when all has passed. ARK_TORCH_STAGES="quick suite compile" names the stages that run after the build.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 VERSION" >&2; exit 2; }
version=$1
cd "$(dirname "$0")/.."
root=$PWD/build/torch-$version
env=${ARK_TORCH_ENV:-$root/env}
python=$env/bin/python
stages=${ARK_TORCH_STAGES-quick suite compile}
mkdir -p "$root"

log() { echo "[torch $version] $*" >&2; }
fail() { log "$1, see $2"; tail -n 20 "$2" >&2; exit 1; }

# What the tests import; the linters of `dev` are not needed, and a PyTorch that pip brings is the one asked for.
tools=$(sed 's/ *[#;].*//' requirements/dev.txt | grep -vE '^(ruff|mypy|clang-format|matplotlib|plotille|nvidia|$)')
if [ -z "${ARK_TORCH_ENV:-}" ] && [ ! -e "$root/env-is-made" ]; then
  log "making $env"
  "${PYTHON:-python3}" -m venv "$env"
  # shellcheck disable=SC2086  # one requirement a word
  "$python" -m pip install -q --disable-pip-version-check "torch==$version" $tools >"$root/pip.log" 2>&1 ||
    fail "no environment" "$root/pip.log"
  touch "$root/env-is-made"
fi
found=$(TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" -c 'import torch; print(torch.__version__)') ||
  { log "$python has no PyTorch"; exit 1; }
[ "${found%%+*}" = "$version" ] || { log "$env has PyTorch $found"; exit 1; }

# The files of the working tree with their times, so that only what changed is compiled; objects stay in src/build.
mkdir -p "$root/src"
find "$root/src" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
  [ ! -f "$file" ] || printf '%s\0' "$file"
done | tar --null -T - -cf - | tar -xf - -C "$root/src"
cd "$root/src"
unset PYTHONPATH
export PATH="$env/bin:$PATH" ARK_TEST_RESULTS="$root/results"
rm -rf "$ARK_TEST_RESULTS"

log "building"
begun=$SECONDS
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . >"$root/build.log" 2>&1 ||
  fail "the build failed" "$root/build.log"
built_s=$((SECONDS - begun))

declare -A what=(
  [quick]="-m quick tests"
  [suite]="--night -k-2] tests/distributed/test_pytorch_suite.py"
  [compile]="tests/compile/test_fast_call.py tests/compile/test_collectives.py tests/compile/test_wrapped.py
    tests/compile/test_operators.py tests/compile/test_fallback.py"
)
passed=1
for stage in $stages; do
  log "$stage"
  # shellcheck disable=SC2086  # options and files
  "$python" -m pytest -q -p no:cacheprovider --junitxml="$root/$stage.xml" ${what[$stage]} >"$root/$stage.log" 2>&1 ||
    { passed=0; log "$stage failed, see $root/$stage.log"; }
done

"$python" - "$root" "$found" "$built_s" "$stages" <<'END'
import datetime
import json
import pathlib
import platform
import sys
import xml.etree.ElementTree as tree

root, torch, built_s, stages = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].split()
row = {"torch": torch, "python": platform.python_version(), "date": str(datetime.date.today()), "build_s": built_s}
for stage in stages:
    suite = next(tree.parse(root / f"{stage}.xml").iter("testsuite"))
    failures = int(suite.get("failures")) + int(suite.get("errors"))
    row[stage] = {"passed": int(suite.get("tests")) - failures - int(suite.get("skipped")), "failed": failures}
counted = root / "results" / "distributed_suite.json"  # how many of PyTorch's bodies passed
if "suite" in stages and counted.exists():
    row["suite"] = json.loads(counted.read_text())["rows"][-1]
(root / "row.json").write_text(json.dumps(row) + "\n")


def cell(stage: str) -> str:
    counts = row.get(stage)
    return f"{counts['passed']} passed, {counts['failed']} failed" if counts else "not run"


print(f"| {row['torch']} | {row['python']} | {built_s} s | {cell('quick')} | {cell('suite')} | {cell('compile')} | {row['date']} |")
END
[ $passed = 1 ]
