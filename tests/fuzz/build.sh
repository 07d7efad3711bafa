#!/usr/bin/env bash
# Builds the fuzz targets under ASan and UBSan into DIR: the driver of this directory, which needs gcc alone; and, where a
# clang with libFuzzer is installed, one program per target (fuzz-TARGET). Does nothing that is done.
#   tests/fuzz/build.sh DIR
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?directory}
mkdir -p "$out"
exec 9>"$out/lock"
flock 9
targets=(http json protobuf envelope multipart exchange gzip text)
common=(-std=c11 -g -O2 -D_GNU_SOURCE -fno-strict-aliasing -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
mapfile -t sources < <(ls c/envd/*.c | grep -v -e /main.c -e /copy.c -e /pack.c)
sources+=(tests/fuzz/targets.c)
newest=$(ls -t c/envd/*.[ch] tests/fuzz/*.[ch] tests/fuzz/build.sh | head -1)

# COMPILER SUBDIR FLAGS…: the objects, as many at a time as there are processors.
objects() {
  local compiler=$1 dir=$out/$2; shift 2
  mkdir -p "$dir"
  printf '%s\n' "${sources[@]}" |
    xargs -P "$(nproc)" -I{} sh -c 'src=$1 dir=$2; shift 2; "$@" -c -o "$dir/$(basename "$src" .c).o" "$src"' x {} "$dir" "$compiler" "${common[@]}" "$@"
}

if [[ ! -e $out/driver || $newest -nt $out/driver ]]; then
  objects gcc own -Wall -Wextra -Werror -fsanitize-coverage=trace-pc
  gcc "${common[@]}" -Wall -Wextra -Werror -o "$out/driver" "$out"/own/*.o tests/fuzz/driver.c
fi
if command -v clang >/dev/null && echo 'int LLVMFuzzerTestOneInput(const unsigned char *p, unsigned long n) { return p && n ? 0 : 0; }' |
  clang -x c -fsanitize=fuzzer,address,undefined -o "$out/probe" - 2>/dev/null; then
  if [[ ! -e $out/fuzz-text || $newest -nt $out/fuzz-text ]]; then
    objects clang clang -fsanitize=fuzzer-no-link
    for target in "${targets[@]}"; do
      clang "${common[@]}" -fsanitize=fuzzer "-DTARGET=\"$target\"" -o "$out/fuzz-$target" "$out"/clang/*.o tests/fuzz/libfuzzer.c
    done
  fi
else
  rm -f "$out"/fuzz-*
fi
