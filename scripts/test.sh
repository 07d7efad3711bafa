#!/usr/bin/env bash
# Runs every check and test and ends with one line `N passed, N failed, N skipped`.
# AENV_TEST_FILTER limits the run to test files whose path contains it.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/versions.sh
export PATH="$PWD/.tools/bin:$PATH" CI=${CI:-}
work=$(mktemp -d)
fuzzing=
trap '[[ -z $fuzzing ]] || kill "$fuzzing" 2> /dev/null; rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0 runner=()
note() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

scripts/bootstrap.sh useful

note "lint"
if scripts/lint.sh; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "lint" > "$work/lint.failures"; fi

note "guest kernel, initrd and VMM for the microVM tests"
export AENV_TEST_HOME=${AENV_TEST_HOME:-$PWD/.aenv/home}
if dist/agentenv setup --home "$AENV_TEST_HOME"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "setup: microVM tests cannot run without it" | tee "$work/setup.failures"; fi

# One process per file group: a crash of one file is that file's failure. The counts come from bun's own report.
suite() { # name, timeout seconds, bun test arguments; $runner: what they run under
  local name=$1 limit=$2; shift 2
  note "$name"
  local log=$work/$name.log
  timeout --kill-after=20 "$limit" "${runner[@]}" bun test "$@" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  count "$name" "$status"
}
count() { # name, status
  local name=$1 rc=$2 p f s t
  local log=$work/$name.log
  p=$(sed -nE 's/^ *([0-9]+) pass$/\1/p' "$log" | tail -1) f=$(sed -nE 's/^ *([0-9]+) fail$/\1/p' "$log" | tail -1)
  s=$(sed -nE 's/^ *([0-9]+) skip$/\1/p' "$log" | tail -1) t=$(grep -cE '^Ran [0-9]+ tests? across' "$log")
  passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0})) skipped=$((skipped + ${s:-0}))
  # the name of each failed test, with the last error printed before it
  awk -v suite="$name" '/^error: /{why = $0} /^\(fail\) /{sub(/^\(fail\) /, ""); sub(/ \[[0-9.]+ms\]$/, "")
    if (!($0 in seen)) print suite ": " $0 (why ? "\n    " substr(why, 1, 300) : ""); seen[$0] = 1; why = ""}
    /^\(pass\) /{why = ""}' "$log" > "$work/$name.failures"
  # No summary (killed, exited early) or a bad status without a counted failure is a failure of its own.
  if [[ $t == 0 || ( $rc != 0 && ${f:-0} == 0 ) ]]; then
    echo "suite $name ended with status $rc and without a complete report" | tee -a "$work/$name.failures"; failed=$((failed + 1))
  fi
}

filter=${AENV_TEST_FILTER:-}
mapfile -t unit < <(find src ffi scripts tests -name '*.test.ts' -not -path 'tests/e2e/*' -not -path 'tests/rig/*' -not -path 'tests/fuzz/*' | grep -F -- "$filter" | sort)
mapfile -t e2e < <(find tests/e2e -name '*.test.ts' | grep -F -- "$filter" | sort)
((${#unit[@]} == 0)) || suite unit 900 --parallel=2 --timeout 30000 "${unit[@]/#/./}"
mapfile -t agent < <(find tests/agent -name '*.test.ts' | grep -F -- "$filter" | sort)
if ((${#agent[@]})); then
  # The suite of the guest agent once more, against a build that stops at the first bad access.
  if make -s build/san/envd; then AENV_ENVD=build/san/envd suite "agent under sanitizers" 400 --timeout 60000 "${agent[@]/#/./}"
  else failed=$((failed + 1)); echo "build of the agent with sanitizers" > "$work/san.failures"; fi
fi
# Fuzzing takes what the microVM tests leave of the processors; its report follows theirs.
mapfile -t fuzz < <(find tests/fuzz -name '*.test.ts' | grep -F -- "$filter" | sort)
if ((${#fuzz[@]})); then
  timeout --kill-after=20 900 nice -n 10 bun test --timeout 30000 "${fuzz[@]/#/./}" > "$work/fuzz.log" 2>&1 &
  fuzzing=$!
fi
((${#e2e[@]} == 0)) || suite e2e 1200 --parallel=2 --timeout 180000 "${e2e[@]/#/./}"
if [[ -n $fuzzing ]]; then
  wait "$fuzzing"; rc=$? fuzzing=
  note fuzz
  cat "$work/fuzz.log"
  count fuzz "$rc"
fi

mapfile -t rig < <(cd tests && find rig -name '*.test.ts' | grep -F -- "$filter" | sort)
if ((${#rig[@]})); then
  # ublk and KVM, in a machine of its own (docs/rig.md).
  scripts/firecracker.sh || echo "the tests with Firecracker are left out"
  if scripts/rig.sh -p; then
    # A machine for each file, and in the file with nested guests for each VMM. One that ends by itself (125) or stands
    # still (124), as the emulator's nested virtualization makes kernels do now and then, has said nothing of what is
    # tested: another is started, twice at most, while there is time.
    parts=()
    for file in "${rig[@]}"; do
      if [[ $file != */sandbox.test.ts ]]; then parts+=("$file"); continue; fi
      parts+=("$file on qemu")
      if [[ -x ${AENV_TEST_FIRECRACKER:-.tools/firecracker/firecracker} ]]; then parts+=("$file on firecracker")
      else echo "SKIPPED: tests/$file on firecracker, there is no binary of it"; skipped=$((skipped + 1)); fi
    done
    for part in "${parts[@]}"; do
      file=${part%% *} only=()
      [[ $part == "$file" ]] || only=(-t "${part#* }")
      runner=(scripts/rig.sh -t 640 -C tests --)
      for attempt in 1 2 3; do
        before=("$passed" "$failed" "$skipped")
        suite "rig ${part##*/}" 700 --timeout 240000 "./$file" "${only[@]}"
        # Where guests are nested the emulator also ends those: it has to pass once.
        late=$((SECONDS >= 1700 || attempt == 3)) died=0
        [[ $status != 12[45] ]] || died=1
        if ((died == 0 && (status == 0 || late || ${#only[@]} == 0))); then break; fi
        passed=${before[0]} failed=${before[1]} skipped=${before[2]}
        echo "the rig's machine or a guest in it died, attempt $attempt of 3; last words are above"
        ((late == 0)) || break
      done
      if [[ $status == 12[45] ]]; then
        echo "SKIPPED: tests/$part, the emulated machine did not live long enough $attempt times"; skipped=$((skipped + 1))
        rm -f "$work/rig ${part##*/}.failures"
      fi
      runner=()
    done
  else
    echo "SKIPPED: tests/rig/*, the rig cannot be made here (see above)"; skipped=$((skipped + ${#rig[@]}))
  fi
fi

note "the end"
# What failed, once more: the last lines of a long log are those that people see first.
failures=$(cat "$work"/*.failures 2> /dev/null | head -120)
[[ -z $failures ]] || printf '\nfailed:\n%s\n' "$failures"
printf '\n%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
((failed == 0))
