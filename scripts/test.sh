#!/usr/bin/env bash
# Runs every check and test and ends with one line `N passed, N failed, N skipped`.
# AENV_TEST_FILTER limits the run to test files whose path contains it.
set -uo pipefail
cd "$(dirname "$0")/.."
. scripts/versions.sh
export PATH="$PWD/.tools/bin:$PATH" CI=${CI:-}
# What tests and the tools they compare with say and make is not to depend on whose terminal this is.
umask 022
export TZ=UTC LC_ALL=C.UTF-8
# A proxy of this machine's is for downloads: what tests start is on loopback addresses.
export no_proxy="${no_proxy:-${NO_PROXY:-}},localhost,127.0.0.1,::1"
export NO_PROXY=$no_proxy
work=$(mktemp -d)
declare -A behind=()
trap '((${#behind[@]} == 0)) || kill "${behind[@]}" 2> /dev/null; rm -rf "$work"' EXIT
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
# Several files at once; what failed is in a report beside the log.
parallel() { # name, timeout seconds, timeout of a test in ms, files
  local name=$1 limit=$2 ms=$3; shift 3
  suite "$name" "$limit" --parallel=2 --timings=tests/timings.json --timeout "$ms" \
    --reporter=junit --reporter-outfile="$work/$name.xml" "${@/#/./}"
  [[ -e $work/$name.xml ]] || return
  bun scripts/test-report.ts "$name" "$work/$name.xml" "$(summed fail "$name")" "$(summed error "$name")" "$@" > "$work/reported"
  grep '^suite ' "$work/$name.failures" >> "$work/reported"
  mv "$work/reported" "$work/$name.failures"
  again "$name" "$ms"
}
summed() { # pass, fail, skip or error; name: the last line of bun's that counts them
  local n
  n=$(sed -nE "s/^ *([0-9]+) $1s?\$/\1/p" "$work/$2.log" | tail -1)
  echo "${n:-0}"
}
count() { # name, status
  local name=$1 rc=$2 p f s t
  local log=$work/$name.log
  p=$(summed pass "$name") f=$(summed fail "$name") s=$(summed skip "$name")
  t=$(grep -cE '^Ran [0-9]+ tests? across' "$log")
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  # the name of each failed test, with the last error printed before it; files that died or could not be loaded
  awk -v suite="$name" '
    /^[[:alnum:]_.\/-]+\.test\.ts:$/{file = substr($0, 1, length($0) - 1); why = ""}
    /^✗ .* \(worker crashed: /{print suite ": " substr($0, index($0, " ") + 1)}
    /^# Unhandled error between tests/{print suite ": " file " (error between tests)"}
    /^[A-Za-z]*[Ee]rror: /{why = "\n    " substr($0, 1, 400); lines = 1; next}
    /^ +at /{lines = 0}
    /^\(fail\) /{sub(/^\(fail\) /, ""); sub(/ \[[0-9.]+ms\]$/, "")
      if (!($0 in seen)) print suite ": " $0 why; seen[$0] = 1; why = ""; lines = 0; next}
    /^\((pass|skip)\) /{why = ""; lines = 0; next}
    lines > 0 && lines < 12 && NF > 0 {why = why "\n    " substr($0, 1, 400); lines++}' "$log" > "$work/$name.failures"
  # No summary (killed, exited early) or a bad status without a counted failure is a failure of its own.
  if [[ $t == 0 || ( $rc != 0 && $f == 0 ) ]]; then
    echo "suite $name ended with status $rc and without a complete report" | tee -a "$work/$name.failures"; failed=$((failed + 1))
  fi
}

# What failed beside others runs once more alone, a few files at most: time limits of theirs are not meant for processors
# that are shared. It has to pass there, and is told at the end.
again() { # name, timeout of a test in ms
  local name=$1 limit=$2 files=() f
  f=$(summed fail "$name")
  if [[ -e $work/$name.xml.files ]]; then mapfile -t files < "$work/$name.xml.files"
  elif [[ ! -e $work/$name.xml ]]; then
    mapfile -t files < <(awk '
      /^[[:alnum:]_.\/-]+\.test\.ts:$/{file = substr($0, 1, length($0) - 1)}
      /^# Unhandled error between tests/ || /^\(fail\) /{print file}' "$work/$name.log" | sort -u)
  fi
  ((f > 0 && ${#files[@]} > 0 && ${#files[@]} <= 4)) || return 0
  for file in "${files[@]}"; do
    note "once more, alone: $file"
    timeout --kill-after=20 600 bun test --timeout "$limit" "./$file" 2>&1 | tee "$work/alone.log"
    # One that ends early has status 0 and no report.
    [[ ${PIPESTATUS[0]} == 0 ]] && grep -qE '^Ran [0-9]+ tests? across' "$work/alone.log" || return 0
  done
  passed=$((passed + f)) failed=$((failed - f))
  mv "$work/$name.failures" "$work/$name.again"
}

# A suite beside others, for what they leave of the processors; its report follows theirs.
suite_behind() { # the arguments of `suite`
  local name=$1 limit=$2; shift 2
  timeout --kill-after=20 "$limit" nice -n "${behind_nice:-5}" "${runner[@]}" bun test "$@" > "$work/$name.log" 2>&1 &
  behind[$name]=$!
}
report() { # name
  wait "${behind[$1]}"; status=$?
  unset "behind[$1]"
  note "$1"
  cat "$work/$1.log"
  count "$1" "$status"
}

filter=${AENV_TEST_FILTER:-}
mapfile -t unit < <(find src ffi scripts tests -name '*.test.ts' -not -path 'tests/e2e/*' -not -path 'tests/rig/*' -not -path 'tests/fuzz/*' | grep -F -- "$filter" | sort)
mapfile -t e2e < <(find tests/e2e -name '*.test.ts' | grep -F -- "$filter" | sort)
mapfile -t agent < <(find tests/agent -name '*.test.ts' | grep -F -- "$filter" | sort)
mapfile -t fuzz < <(find tests/fuzz -name '*.test.ts' | grep -F -- "$filter" | sort)
mapfile -t rig < <(cd tests && find rig -name '*.test.ts' | grep -F -- "$filter" | sort)

# ublk and KVM, in a machine of its own (docs/rig.md), which is prepared beside the first tests.
if ((${#rig[@]})); then
  { scripts/firecracker.sh || echo "the tests with Firecracker are left out"; scripts/rig.sh -p; } > "$work/prepare.log" 2>&1 &
  behind[prepare]=$!
fi
# A machine that ends by itself (125), stands still or loses its time (124), as the emulator makes kernels do now and
# then, has said nothing of what is tested: another is started, twice at most, while there is time. Where guests are
# nested the emulator also ends those: it has to pass once. Most of that comes with a second processor.
rig_part() { # part, `suite` or `suite_behind`
  local file=${1%% *} only=() runner=(scripts/rig.sh -t 640 -C tests)
  [[ $1 == "$file" ]] || { only=(-t "${1#* }"); runner+=(-c 1); }
  # shellcheck disable=SC2016
  [[ -z ${behind[prepare]:-} ]] || runner=(bash -c 'tail --pid="$0" -f /dev/null; exec "$@"' "${behind[prepare]}" "${runner[@]}")
  runner+=(--)
  "$2" "rig ${1##*/}" 900 --timeout 240000 "./$file" "${only[@]}"
}
died() { [[ $status == 12[45] || ( $status != 0 && $1 == *" on "* ) ]]; }

# The agent's suite once more, against a build that stops at the first bad access, and the rig's parts without nested
# guests run beside the unit tests, the decoders' fuzzing beside those of whole servers. Slow files begin first
# (tests/timings.json; `bun test --update-timings` measures them).
if ((${#agent[@]})); then
  if make -s build/san/envd; then AENV_ENVD=build/san/envd suite_behind "agent under sanitizers" 1200 --timeout 120000 "${agent[@]/#/./}"
  else failed=$((failed + 1)); echo "build of the agent with sanitizers" > "$work/san.failures"; fi
fi
for file in "${rig[@]}"; do [[ $file == */sandbox.test.ts ]] || rig_part "$file" suite_behind; done
# What tests of servers start with; if it cannot be had they say so.
if ((${#e2e[@]})); then
  scripts/make-debian-image.sh .aenv/image > "$work/image.log" 2>&1 &
  behind[image]=$!
fi
((${#unit[@]} == 0)) || parallel unit 1800 120000 "${unit[@]}"
if [[ -n ${behind["agent under sanitizers"]:-} ]]; then
  report "agent under sanitizers"
  AENV_ENVD=build/san/envd again "agent under sanitizers" 120000
fi
((${#fuzz[@]} == 0)) || behind_nice=10 suite_behind fuzz 1800 --timeout 120000 "${fuzz[@]/#/./}"
if ((${#e2e[@]})); then
  wait "${behind[image]}"
  unset "behind[image]"
  cat "$work/image.log"
fi
((${#e2e[@]} == 0)) || parallel e2e 2400 180000 "${e2e[@]}"

parts=()
if ((${#rig[@]})); then
  note "the rig"
  wait "${behind[prepare]}"; prepared=$?
  unset "behind[prepare]"
  cat "$work/prepare.log"
  if ((prepared == 0)); then
    # A machine for each file, and in the file with nested guests for each VMM.
    for file in "${rig[@]}"; do
      if [[ $file != */sandbox.test.ts ]]; then parts+=("$file"); continue; fi
      parts+=("$file on qemu")
      if [[ -x ${AENV_TEST_FIRECRACKER:-.tools/firecracker/firecracker} ]]; then parts+=("$file on firecracker")
      else echo "SKIPPED: tests/$file on firecracker, there is no binary of it"; skipped=$((skipped + 1)); fi
    done
  else
    echo "SKIPPED: tests/rig/*, the rig cannot be made here (see above)"; skipped=$((skipped + ${#rig[@]}))
  fi
fi
for part in "${parts[@]}"; do [[ $part != *" on "* ]] || rig_part "$part" suite_behind; done
[[ -z ${behind[fuzz]:-} ]] || report fuzz
for part in "${parts[@]}"; do
  name="rig ${part##*/}" beside=''
  for attempt in 1 2 3; do
    before=("$passed" "$failed" "$skipped")
    if [[ -n ${behind[$name]:-} ]]; then report "$name"; ran=beside; else rig_part "$part" suite; ran=alone; fi
    if died "$part"; then
      if ((SECONDS >= 1700 || attempt == 3)); then break; fi
      echo "the rig's machine or a guest in it died, attempt $attempt of 3; last words are above"
    elif [[ $status != 0 && $ran == beside && -z $beside ]]; then
      beside=$(cat "$work/$name.failures")
      echo "once more, alone: $part"
    else break; fi
    passed=${before[0]} failed=${before[1]} skipped=${before[2]}
  done
  [[ $status != 0 || -z $beside ]] || echo "$beside" > "$work/$name.again"
  if [[ $status == 12[45] ]]; then
    passed=${before[0]} failed=${before[1]} skipped=$((before[2] + 1))
    echo "SKIPPED: tests/$part, the emulated machine did not live long enough $attempt times"
    rm -f "$work/$name.failures"
  fi
done

note "the end"
# What failed, once more: the last lines of a long log are those that people see first.
failures=$(cat "$work"/*.failures 2> /dev/null | head -120)
[[ -z $failures ]] || printf '\nfailed:\n%s\n' "$failures"
alone=$(cat "$work"/*.again 2> /dev/null | head -60)
[[ -z $alone ]] || printf '\nfailed beside other tests, passed alone:\n%s\n' "$alone"
printf '\n%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
((failed == 0))
