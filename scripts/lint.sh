#!/usr/bin/env bash
# Formatter and linter, types, import directions, shell syntax. Prints a line per check.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=0
step() {
  local name=$1 start=${EPOCHREALTIME/[.,]/} out; shift
  if out=$("$@" 2>&1); then printf '  ok      %s (%d ms)\n' "$name" $(((${EPOCHREALTIME/[.,]/} - start) / 1000))
  else printf '  FAILED  %s\n%s\n' "$name" "$out"; failed=1; fi
}
shells() { local f; for f in scripts/*.sh .ci/run tests/rig/*.sh; do [[ ! -e $f ]] || bash -n "$f" || return 1; done; }
step "format and lint (biome)" node_modules/.bin/biome check --error-on-warnings .
step "types (tsc)" node_modules/.bin/tsc -p tsconfig.json
step "import directions (dependency-cruiser)" .tools/bin/bun node_modules/dependency-cruiser/bin/dependency-cruiser.mjs --config .dependency-cruiser.cjs src ffi
step "shell scripts" shells
exit $failed
