#!/usr/bin/env bash
# Makes a real Debian system with python3 as an OCI image, from this machine's own apt sources.
#   make-debian-image.sh DIR [REFERENCE]
# DIR becomes an OCI image layout; an image that is there already and made of the same things is kept.
# REFERENCE, e.g. http://127.0.0.1:5000/debian-python:latest: also push it there.
set -euo pipefail
cd "$(dirname "$0")/.."
die() { echo "error: $*" >&2; exit 1; }
[[ $# == 1 || $# == 2 ]] || { sed -n '3,5s/^# *//p' "$0" >&2; exit 2; }
dir=$1 reference=${2:-}
bun=.tools/bin/bun
command -v mmdebstrap >/dev/null || die "mmdebstrap is not installed: apt-get install mmdebstrap"

mkdir -p "$dir"; dir=$(cd "$dir" && pwd)
# One at a time: the second finds what the first has made.
exec 9> "$dir/.lock"; flock 9
work=$(mktemp -d "$dir/.work-XXXXXX")
trap 'rm -rf "$work"' EXIT

# Small and whole: a shell, the usual tools, certificates, curl, sudo, Python, and `ss`, which the SDK's `waitForPort` asks.
packages=bash,ca-certificates,curl,iproute2,passwd,procps,python3,sudo
$bun scripts/oci-image.ts sources > "$work/host.sources"
codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
made_of=$(cat "$0" "$work/host.sources" | sha256sum | cut -c1-64)

if [[ -s $dir/index.json && $(cat "$dir/made-of" 2>/dev/null) == "$made_of" ]]; then
  echo "  image                  Debian $codename with python3 is there ($dir)"
else
  start=$SECONDS
  rm -f "$dir/made-of"
  echo "  image                  making Debian $codename with python3 …"
  export SOURCE_DATE_EPOCH=1700000000
  # Verbose, for the log: what apt says is the reason where it fails.
  scripts/mmdebstrap.sh --verbose --variant=apt --format=tar --include="$packages" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
    --aptopt='Acquire::Retries "3"' --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/info/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-include=/usr/share/locale/locale.alias' \
    --customize-hook='chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash user' \
    --customize-hook='echo "user ALL=(ALL:ALL) NOPASSWD: ALL" > "$1/etc/sudoers.d/user" && chmod 440 "$1/etc/sudoers.d/user"' \
    --customize-hook='rm -f "$1/etc/resolv.conf" "$1/etc/hostname"' \
    "$codename" "$work/rootfs.tar" - < "$work/host.sources" > "$work/log" 2>&1 ||
    { tail -n 15 "$work/log" >&2; die "mmdebstrap failed"; }
  $bun scripts/oci-image.ts pack "$work/rootfs.tar" "$dir"
  echo "$made_of" > "$dir/made-of"
  echo "  image                  made in $((SECONDS - start)) s"
fi
exec 9>&-
[[ -z $reference ]] || $bun scripts/oci-image.ts push "$dir" "$reference"
