#!/usr/bin/env bash
# Makes this machine able to build and run the project: missing Debian packages through the machine's own
# apt (as root), and the pinned Bun from npm into .tools/. Does nothing that is done.
#   scripts/bootstrap.sh image    besides what makes a Debian image and serves it
#   scripts/bootstrap.sh test     besides what the tests and benchmarks need, that of image included
#   scripts/bootstrap.sh useful   instead tries the packages that tests do better with; says so where that fails
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/versions.sh

say() { printf '  %-7s %s\n' "$1" "$2"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

case ${1:-} in ''|useful) wanted=() ;; image) wanted=(image:) ;; test) wanted=(image: test:) ;; *) die "usage: bootstrap.sh [image|test|useful]" ;; esac
missing=() useful=()
here() { if [[ $1 == /* ]]; then [[ -e $1 ]]; else command -v "$1" >/dev/null 2>&1 || [[ -x /usr/sbin/$1 || -x /sbin/$1 ]]; fi; }
while read -r probe package more; do
  case $probe in
    ''|\#*) ;;
    \?) here "$package" || useful+=("$more") ;;
    *:) [[ " ${wanted[*]} " != *" $probe "* ]] || here "$package" || missing+=("$more") ;;
    *) here "$probe" || missing+=("$package") ;;
  esac
done < scripts/packages.txt

# As many of the packages as are given; a service package must not start its daemon on the machine that builds.
log= policy=/usr/sbin/policy-rc.d made=
trap '[[ -z $made ]] || rm -f $policy' EXIT
install() {
  say APT "$*"
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  if [[ ! -e $policy ]]; then printf '#!/bin/sh\nexit 101\n' > $policy; chmod 755 $policy; made=1; fi
  local once=(apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@")
  "${once[@]}" >>"$log" 2>&1 || { apt-get -o DPkg::Lock::Timeout=120 update >>"$log" 2>&1 && "${once[@]}" >>"$log" 2>&1; }
}

if [[ ${1:-} == useful ]]; then
  ((${#useful[@]})) || exit 0
  if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]] || ! install "${useful[@]}"; then say SKIPPED "not installed, and not needed: ${useful[*]}"; fi
  [[ -z $log ]] || rm -f "$log"
  exit 0
fi

if ((${#missing[@]})); then
  command -v apt-get >/dev/null || die "these packages are missing and there is no apt-get: ${missing[*]}. Install their equivalents, then run make again."
  [[ $(id -u) == 0 ]] || die "these packages are missing: ${missing[*]}. Run: sudo apt-get install -y --no-install-recommends ${missing[*]}"
  install "${missing[@]}" || { tail -n 20 "$log" >&2; die "apt-get could not install: ${missing[*]} (full log: $log)"; }
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
