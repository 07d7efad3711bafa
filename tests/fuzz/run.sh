#!/usr/bin/env bash
# Fuzzes the agent's decoders and prints what was run. An input that fails is left in build/fuzz.
#   AENV_FUZZ_EXECUTIONS  by the driver of this directory, over all targets (default 10 million)
#   AENV_FUZZ_SECONDS     by libFuzzer on top, for each target, where it is installed (default 60)
#   AENV_FUZZ_SEED        default: the time
set -euo pipefail
cd "$(dirname "$0")/../.."
total=${AENV_FUZZ_EXECUTIONS:-10000000} seconds=${AENV_FUZZ_SECONDS:-60} seed=${AENV_FUZZ_SEED:-$(date +%s)}
export CRASH_DIR=build/fuzz
tests/fuzz/build.sh "$CRASH_DIR"
echo "fuzzing with seed $seed"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$CRASH_DIR/driver" tests/fuzz/corpus all "$total" "$seed" | tee "$log"
if [[ -x $CRASH_DIR/fuzz-text ]]; then
  ls "$CRASH_DIR" | sed -n 's/^fuzz-//p' | xargs -P "$(nproc)" -n 1 tests/fuzz/libfuzzer.sh "$CRASH_DIR" "$seconds" "$seed" | tee -a "$log"
else
  echo "libFuzzer is not installed here (packages clang and libclang-rt-dev): the driver alone was run"
fi
awk '/ executions/ { n += $2 } END { printf "fuzzing: %d executions in all, none failed\n", n }' "$log"
