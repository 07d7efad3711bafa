#!/usr/bin/env bash
# Makes everything a release consists of, with checksums and a bill of materials.
#   release.sh [DIR]     DIR: default dist/release; must not exist or is made anew
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-dist/release}")
bun=.tools/bin/bun
die() { echo "error: $*" >&2; exit 1; }
version=$($bun -e 'console.log(require("./package.json").version)')
dist/agentenv --version | grep -q "^agentenv $version " || die "dist/agentenv is not version $version: run make"
[[ -z $(git status --porcelain --untracked-files=no) ]] || echo "  note    the work tree has changes that are not committed"
# The same commit gives the same archives.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf "$out"; mkdir -p "$out"
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

pack() { # name, files: an archive with one directory of that name
  local name=$1; shift
  mkdir "$stage/$name"
  cp -L "$@" "$stage/$name/"
  tar -C "$stage" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -cf - "$name" | gzip -n -6 > "$out/$name.tar.gz"
  echo "  TAR     $name.tar.gz"
}

pack "agentenv-$version-linux-x64" dist/agentenv scripts/install.sh LICENSE README.md CHANGELOG.md
for platform in linux-arm64 darwin-arm64 darwin-x64; do
  $bun scripts/build.ts --cli-for "$platform" --out "$stage/$platform/aenv" >/dev/null
  pack "aenv-$version-$platform" "$stage/$platform/aenv" LICENSE
done
scripts/deb.sh dist/agentenv "$version" "$out/agentenv_${version}_amd64.deb"
cp scripts/install.sh "$out/"
$bun scripts/sbom.ts dist/agentenv "$version" > "$out/agentenv-$version.cdx.json"
echo "  SBOM    agentenv-$version.cdx.json"
cd "$out"
for file in *; do sha256sum "$file" > "$stage/sum"; cat "$stage/sum" >> "$stage/SHA256SUMS"; cp "$stage/sum" "$stage/$file.sha256"; done
mv "$stage"/*.sha256 "$stage/SHA256SUMS" .
echo "  release $out ($(find . -type f | wc -l) files, $(du -sh . | cut -f1))"
