#!/usr/bin/env bash
# Fuzzes the agent's decoders: AENV_FUZZ_EXECUTIONS in all (default 10 million), AENV_FUZZ_SEED (default: the time).
# Prints what was run; an input that fails is left in build/fuzz. With libFuzzer its programs run on top, a minute each.
set -euo pipefail
cd "$(dirname "$0")/../.."
total=${AENV_FUZZ_EXECUTIONS:-10000000} seed=${AENV_FUZZ_SEED:-$(date +%s)} out=build/fuzz
tests/fuzz/build.sh "$out"
echo "fuzzing with seed $seed"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
CRASH_DIR=$out "$out/driver" tests/fuzz/corpus all "$total" "$seed" | tee "$log"
for program in "$out"/fuzz-*; do
  [[ -x $program ]] || continue
  corpus=$(mktemp -d)
  "$program" -max_total_time=60 -artifact_prefix="$out/" "$corpus" "tests/fuzz/corpus/${program##*fuzz-}" 2>&1 | tail -3
  rm -rf "$corpus"
done
awk '{ n += $2 } END { printf "fuzzing: %d executions in all\n", n }' "$log"
