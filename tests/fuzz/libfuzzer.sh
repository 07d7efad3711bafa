#!/usr/bin/env bash
# One target under libFuzzer for a time; prints "TARGET: N executions …". An input that fails is left in DIR.
#   tests/fuzz/libfuzzer.sh DIR SECONDS SEED TARGET
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$1 seconds=$2 seed=$3 target=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/corpus"
if ! "$dir/fuzz-$target" -max_total_time="$seconds" -max_len=1024 -seed="$((seed % 4294967295))" -print_final_stats=1 -verbosity=1 \
  -artifact_prefix="${CRASH_DIR:-$dir}/$target-" "$work/corpus" "tests/fuzz/corpus/$target" >"$work/log" 2>&1; then
  tail -n 25 "$work/log" >&2
  exit 1
fi
runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$work/log")
cover=$(grep -o 'cov: [0-9]*' "$work/log" | tail -1)
printf '%s: %d executions by libFuzzer, %d inputs kept, %s edges, %d s\n' "$target" "$runs" "$(ls "$work/corpus" | wc -l)" "${cover#cov: }" "$seconds"
