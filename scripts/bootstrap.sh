#!/usr/bin/env bash
# Makes this machine able to build, run and test the project: missing Debian packages through the
# machine's own apt (as root), and the pinned Bun from npm into .tools/. Does nothing that is done.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/versions.sh

say() { printf '  %-7s %s\n' "$1" "$2"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

missing=()
while read -r probe package; do
  case $probe in ''|\#*) continue;; esac
  if [[ $probe == /* ]]; then [[ -e $probe ]] || missing+=("$package")
  elif ! command -v "$probe" >/dev/null 2>&1 && [[ ! -x /usr/sbin/$probe && ! -x /sbin/$probe ]]; then missing+=("$package"); fi
done < scripts/packages.txt

if ((${#missing[@]})); then
  command -v apt-get >/dev/null || die "these packages are missing and there is no apt-get: ${missing[*]}. Install their equivalents, then run make again."
  [[ $(id -u) == 0 ]] || die "these packages are missing: ${missing[*]}. Run: sudo apt-get install -y --no-install-recommends ${missing[*]}"
  say APT "${missing[*]}"
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  # A service package must not start its daemon on the machine that builds.
  policy=/usr/sbin/policy-rc.d made=
  if [[ ! -e $policy ]]; then printf '#!/bin/sh\nexit 101\n' > $policy; chmod 755 $policy; made=1; fi
  trap '[[ -z $made ]] || rm -f $policy' EXIT
  install() { apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1; }
  install || { apt-get -o DPkg::Lock::Timeout=120 update >>"$log" 2>&1 && install; } || { tail -n 20 "$log" >&2; die "apt-get could not install: ${missing[*]} (full log: $log)"; }
  rm -f "$log"
fi

mkdir -p .tools/bin
if [[ $(.tools/bin/bun --version 2>/dev/null || true) != "$BUN_VERSION" ]]; then
  rm -f .tools/bin/bun
  if [[ $(bun --version 2>/dev/null || true) == "$BUN_VERSION" ]]; then
    ln -s "$(command -v bun)" .tools/bin/bun
  else
    command -v npm >/dev/null || die "neither Bun $BUN_VERSION nor npm is installed. Install Node.js with npm (or Bun $BUN_VERSION), then run make again."
    case $(uname -m) in x86_64) arch=x64;; aarch64) arch=aarch64;; *) die "no Bun for $(uname -m)";; esac
    say NPM "bun $BUN_VERSION"
    # The package with the binary itself: works with install scripts blocked.
    npm install --prefix .tools/bun --ignore-scripts --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
      "@oven/bun-linux-$arch@$BUN_VERSION" >/dev/null
    ln -s "../bun/node_modules/@oven/bun-linux-$arch/bin/bun" .tools/bin/bun
  fi
  [[ $(.tools/bin/bun --version) == "$BUN_VERSION" ]] || die "Bun $BUN_VERSION does not run on this machine"
fi
