#!/usr/bin/env bash
# Builds the fuzz targets under ASan and UBSan into DIR: with libFuzzer, one program per target (fuzz-TARGET), when a
# clang that has it is installed; and always the driver of this directory, which needs gcc alone.
#   tests/fuzz/build.sh DIR
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?directory}
mkdir -p "$out"
common=(-std=c11 -g -D_GNU_SOURCE -fno-strict-aliasing -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
mapfile -t sources < <(ls c/envd/*.c | grep -v -e /main.c -e /copy.c)
newest=$(ls -t c/envd/*.[ch] tests/fuzz/*.[ch] | head -1)
if [[ ! -e $out/driver || $newest -nt $out/driver ]]; then
  objects=()
  for file in "${sources[@]}"; do
    object=$out/$(basename "$file" .c).o
    gcc "${common[@]}" -O2 -Wall -Wextra -Werror -fsanitize-coverage=trace-pc -c -o "$object" "$file"
    objects+=("$object")
  done
  gcc "${common[@]}" -O2 -Wall -Wextra -Werror -o "$out/driver" "${objects[@]}" tests/fuzz/targets.c tests/fuzz/driver.c
fi
if command -v clang >/dev/null && echo 'int LLVMFuzzerTestOneInput(const unsigned char *p, unsigned long n) { return p && n ? 0 : 0; }' |
  clang -x c -fsanitize=fuzzer -o "$out/probe" - 2>/dev/null; then
  for target in http json protobuf envelope multipart gzip text; do
    clang "${common[@]}" -O2 -fsanitize=fuzzer "-DTARGET=\"$target\"" -o "$out/fuzz-$target" "${sources[@]}" \
      tests/fuzz/targets.c tests/fuzz/libfuzzer.c
  done
fi
