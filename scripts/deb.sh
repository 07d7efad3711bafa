#!/usr/bin/env bash
# Makes the Debian package of the server from a built executable, with dpkg-deb.
#   deb.sh EXECUTABLE VERSION OUT.deb
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# == 3 ]] || { sed -n '3s/^#  *//p' "$0" >&2; exit 2; }
exe=$(realpath "$1") version=$2 out=$3
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

install -D -m 755 "$exe" "$stage/usr/bin/agentenv"
ln -s agentenv "$stage/usr/bin/aenv"
install -D -m 644 deploy/systemd/aenv.service "$stage/lib/systemd/system/aenv.service"
install -D -m 640 deploy/systemd/aenv.default "$stage/etc/default/aenv"
install -D -m 640 config/default.toml "$stage/etc/aenv/config.toml"
install -D -m 644 deploy/debian/copyright "$stage/usr/share/doc/agentenv/copyright"
for shell in bash:bash-completion/completions/aenv zsh:zsh/vendor-completions/_aenv fish:fish/vendor_completions.d/aenv.fish; do
  mkdir -p "$stage/usr/share/$(dirname "${shell#*:}")"
  "$exe" completion "${shell%%:*}" > "$stage/usr/share/${shell#*:}"
done
mkdir -p "$stage/DEBIAN"
for script in postinst prerm postrm; do install -m 755 "deploy/debian/$script" "$stage/DEBIAN/$script"; done
printf '/etc/default/aenv\n/etc/aenv/config.toml\n' > "$stage/DEBIAN/conffiles"
(cd "$stage" && find usr lib etc -type f -print0 | sort -z | xargs -0 md5sum) > "$stage/DEBIAN/md5sums"
sed -e "s/@VERSION@/$version/" -e "s/@SIZE@/$(du -sk --exclude=DEBIAN "$stage" | cut -f1)/" deploy/debian/control > "$stage/DEBIAN/control"
find "$stage" -type d -exec chmod 755 {} +
mkdir -p "$(dirname "$out")"
# The release sets a fixed time; DEB_COMPRESS is for tests, which have none to spend.
# shellcheck disable=SC2086
dpkg-deb --root-owner-group ${DEB_COMPRESS:--Zxz -z3} --build "$stage" "$out" >/dev/null
echo "  DEB     $out"
