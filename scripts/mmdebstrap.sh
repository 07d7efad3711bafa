#!/usr/bin/env bash
# mmdebstrap with its arguments, and no open descriptors but the standard ones. It writes the number of one it opens into a
# command for /bin/sh (`cat >&11`), which takes one digit: with the locks and pipes of who calls it, it would not work.
set -euo pipefail
command -v mmdebstrap >/dev/null || { echo "error: mmdebstrap is not installed: apt-get install mmdebstrap" >&2; exit 1; }
for fd in /proc/self/fd/*; do
  fd=${fd##*/}
  ((fd <= 2)) || eval "exec $fd>&-"
done
exec mmdebstrap "$@"
