#!/usr/bin/env bash
# Prints the figures of docs/performance.md. AENV_BENCH limits it to one file of tests/bench, e.g. lifecycle.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.tools/bin:$PATH" AENV_LOG_LEVEL=${AENV_LOG_LEVEL:-warn}
export AENV_TEST_HOME=${AENV_TEST_HOME:-$PWD/.aenv/home}
dist/agentenv setup --home "$AENV_TEST_HOME"
for file in tests/bench/*.bench.ts; do
  name=$(basename "$file" .bench.ts)
  [[ -z ${AENV_BENCH:-} || $AENV_BENCH == "$name" ]] || continue
  bun "$file"
done
