#!/usr/bin/env bash
# What a new user does, on a machine as new as his: install from a download, run as a service, first sandbox, upgrade
# with a sandbox running, a bad upgrade, a crash, stop and start, uninstall; then the same by Debian package.
#   try-fresh.sh [--keep]     --keep leaves the machine after a failure (scripts/fresh-machine.sh run DIR bash)
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $(id -u) == 0 ]] || { echo "error: namespaces need root" >&2; exit 1; }
keep=${1:-}
cache=$PWD/.aenv/try-fresh
mkdir -p "$cache"
dir=$(mktemp -d /tmp/aenv-fresh-XXXXXX)
began=$SECONDS phase_began=$SECONDS failed=1
registry=$cache/registry

cleanup() {
  # Killed by number: the ones this script started.
  [[ ! -s $dir/web-pid ]] || kill "$(cat "$dir/web-pid")" 2>/dev/null || true
  scripts/registry.sh stop "$registry" 2>/dev/null || true
  if ((failed)) && [[ -s $dir/pid ]]; then
    echo "--- the server's log" >&2
    in_fresh journalctl -u aenv --no-pager -n 30 >&2 || true
    if [[ $keep == --keep ]]; then echo "the machine stays: scripts/fresh-machine.sh run $dir bash; … stop $dir" >&2; return; fi
  fi
  scripts/fresh-machine.sh stop "$dir" || true
}
trap cleanup EXIT

phase() { printf '\n[%3d s] %s\n' $((SECONDS - began)) "$1"; phase_began=$SECONDS; }
die() { printf 'FAILED (after %d s in this step): %s\n' $((SECONDS - phase_began)) "$1" >&2; exit 1; }
ok() { printf '        ok: %s\n' "$1"; }
in_fresh() { scripts/fresh-machine.sh run "$dir" "$@"; }
# What is said, indented; the status is the command's.
show() { "$@" 2>&1 | sed 's/^/        | /'; return "${PIPESTATUS[0]}"; }
aenv() { in_fresh env HOME=/root "$bindir/aenv" "$@"; }
main_pid() { in_fresh systemctl show -p MainPID --value aenv; }
wait_health() {
  local i
  for ((i = 0; i < 300; i++)); do
    [[ $(in_fresh curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/health || true) != 204 ]] || return 0
    sleep 0.2
  done
  die "the server does not answer"
}
counter() { aenv exec "$id" -- cat /tmp/counter; }
# The process in the sandbox that counts is the one that was started, and goes on.
goes_on() {
  local before after
  before=$(counter); sleep 1.2; after=$(counter)
  [[ ${before%% *} == "$counting" && ${after%% *} == "$counting" && ${after##* } -gt ${before##* } ]] ||
    die "the sandbox's process did not go on: pid $counting, $before -> $after"
  ok "$1: process $counting in the sandbox goes on (${before##* } -> ${after##* })"
}
files() { in_fresh find / -xdev \( -path /var/cache -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /tmp -o -path /root \) -prune -o ! -type d ! -lname '/etc/alternatives/*' -print | sort; }

phase "a fresh machine: Debian's base system, systemd, nothing of ours"
base=$(scripts/fresh-machine.sh base "$cache")
scripts/fresh-machine.sh start "$dir" "$base" >/dev/null
ok "$(in_fresh sh -c '. /etc/os-release; echo "$PRETTY_NAME"'), $(in_fresh systemctl is-system-running), pid 1 is $(in_fresh cat /proc/1/comm)"

phase "two versions to install"
version_a=$(dist/agentenv --version | cut -d' ' -f2) version_b=$version_a-next
.tools/bin/bun scripts/build.ts --out "build/fresh/agentenv" --version "$version_b" >/dev/null
mkdir -p "$dir/in/web"
tar -C dist -czf "$dir/in/web/agentenv-$version_a-linux-x64.tar.gz" --transform "s,^,agentenv-$version_a/," agentenv
(cd "$dir/in/web" && sha256sum ./*.tar.gz | sed 's, \./, ,' > "agentenv-$version_a-linux-x64.tar.gz.sha256")
cp build/fresh/agentenv "$dir/in/agentenv-next"
cp scripts/install.sh "$dir/in/"
# shellcheck disable=SC2016
printf '#!/bin/sh\ncase $1 in --version) echo "agentenv 99.0.0 (broken)";; serve) echo "broken on purpose" >&2; exit 1;; *) /mnt/in/agentenv-next "$@" | sed s,/mnt/in/agentenv-next,/usr/local/bin/agentenv,;; esac\n' > "$dir/in/agentenv-broken"
chmod 755 "$dir/in"/agentenv-*
# shellcheck disable=SC2016
nsenter -t "$(cat "$dir/pid")" -n env WEB="$dir/in/web" .tools/bin/bun -e \
  'Bun.serve({ hostname: "127.0.0.1", port: 8899, fetch: (r) => new Response(Bun.file(process.env.WEB + new URL(r.url).pathname)) })' >/dev/null 2>&1 &
echo $! > "$dir/web-pid"
ok "$version_a as an archive on a web server, $version_b as a file, one that does not start"
before=$(files)

phase "install.sh: what it refuses"
refuses() { local said; if said=$(in_fresh "${@:2}" 2>&1); then die "accepted: $1"; fi; grep -qF -- "$1" <<<"$said" || die "said something else than \"$1\": $said"; ok "refused: $1"; }
refuses "the checksum of /mnt/in/agentenv-next is" bash /mnt/in/install.sh --from /mnt/in/agentenv-next --sha256 "$(printf '0%.0s' {1..64})"
refuses "is a directory of the system" env AENV_HOME_PATH=/ bash /mnt/in/install.sh --from /mnt/in/agentenv-next
refuses "is no account to run a server as" env AENV_SERVICE_USER=../x bash /mnt/in/install.sh --from /mnt/in/agentenv-next
refuses "is not https" bash /mnt/in/install.sh --from http://example.org/agentenv
refuses "is not the AgentENV executable" bash /mnt/in/install.sh --from /bin/true
[[ $(files) == "$before" ]] || die "a refused installation left files"

phase "install.sh from a URL: packages, account, dependencies, service"
bindir=/usr/local/bin
show in_fresh bash /mnt/in/install.sh --from "http://127.0.0.1:8899/agentenv-$version_a-linux-x64.tar.gz" || die "install.sh failed"
wait_health
pid=$(main_pid)
[[ $(in_fresh stat -c %U "/proc/$pid") == aenv ]] || die "the server runs as $(in_fresh stat -c %U "/proc/$pid")"
[[ $(in_fresh sed -n 's/^CapEff:\t*//p' "/proc/$pid/status") == 0000000000201000 ]] || die "capabilities: $(in_fresh grep Cap "/proc/$pid/status")"
[[ $(in_fresh readlink "/proc/$pid/ns/mnt") == "$(in_fresh readlink /proc/1/ns/mnt)" ]] || die "the service has a mount namespace of its own"
ok "$(in_fresh $bindir/agentenv --version) runs as user aenv with CAP_NET_ADMIN and CAP_SYS_ADMIN, nothing more"
show in_fresh sh -c "set -a; . /etc/default/aenv; exec $bindir/agentenv doctor" || die "doctor is not content"

phase "the command line alone, as a plain user"
in_fresh useradd --create-home plain
show in_fresh runuser -u plain -- env HOME=/home/plain bash /mnt/in/install.sh cli --from /mnt/in/agentenv-next || die "install.sh cli failed"
[[ $(in_fresh stat -c %U /home/plain/.local/bin/aenv) == plain ]] || die "not the user's"
in_fresh userdel --remove plain 2>/dev/null

phase "first sandbox"
url=$(nsenter -t "$(cat "$dir/pid")" -n scripts/registry.sh start "$registry")
scripts/make-debian-image.sh .aenv/image >/dev/null
nsenter -t "$(cat "$dir/pid")" -n .tools/bin/bun scripts/oci-image.ts push .aenv/image "$url/agentenv/debian-python:latest" >/dev/null
in_fresh sh -c "printf 'http://127.0.0.1:8000\n%s\n' \"\$(cat /var/lib/aenv/secrets/api-key)\" | HOME=/root $bindir/aenv auth" >/dev/null
show aenv pull "${url#http://}/agentenv/debian-python:latest" --name python --cpu 1 --memory 512 || die "no template"
id=$(aenv start python -d --timeout 3600)
show aenv exec "$id" -- python3 -c 'import platform; print("Python", platform.python_version(), "on", platform.release())' || die "no Python"
# shellcheck disable=SC2016
counting=$(aenv exec "$id" -- sh -c 'setsid sh -c "echo \$\$ > /tmp/pid; i=0; while :; do i=\$((i+1)); echo \$\$ \$i > /tmp/counter.new; mv /tmp/counter.new /tmp/counter; sleep 0.2; done" >/dev/null 2>&1 & sleep 1; cat /tmp/pid')
goes_on "started"

phase "upgrade in place to $version_b while the sandbox runs"
show in_fresh bash /mnt/in/install.sh --from /mnt/in/agentenv-next || die "the upgrade failed"
[[ $(in_fresh $bindir/agentenv --version | cut -d' ' -f2) == "$version_b" ]] || die "the version is $(in_fresh $bindir/agentenv --version)"
[[ $(main_pid) != "$pid" ]] || die "the former server still runs"
[[ $(in_fresh readlink "/proc/$(main_pid)/exe") == $bindir/agentenv ]] || die "not the new executable: $(in_fresh readlink "/proc/$(main_pid)/exe")"
goes_on "after the upgrade"

phase "an upgrade to a version that does not start is taken back"
if show in_fresh bash /mnt/in/install.sh --from /mnt/in/agentenv-broken; then die "a broken version was accepted"; fi
wait_health
[[ $(in_fresh $bindir/agentenv --version | cut -d' ' -f2) == "$version_b" ]] || die "the former version is not back"
goes_on "after the bad upgrade"

phase "the server is killed with -9; systemd starts it again"
pid=$(main_pid)
in_fresh sh -c "kill -9 $pid"
for ((i = 0; i < 100; i++)); do now=$(main_pid); [[ $now != "$pid" && $now != 0 ]] && break; sleep 0.2; done
wait_health
goes_on "after the crash"

phase "stop: paused and stored; start: resumed where it was"
in_fresh systemctl stop aenv
if in_fresh sh -c 'for p in /proc/[0-9]*; do readlink $p/exe; done' 2>/dev/null | grep -q qemu; then die "a VM runs without its server"; fi
in_fresh systemctl start aenv
wait_health
aenv resume "$id" >/dev/null || die "the sandbox does not resume"
goes_on "after stop and start"

phase "uninstall"
show in_fresh bash /mnt/in/install.sh uninstall || die "uninstall failed"
left=$(comm -13 <(echo "$before") <(files) | grep -vE '^/(var/lib/aenv|etc/aenv|etc/default/aenv)(/|$)' || true)
# Packages it brought are the machine's own now.
packaged=$(in_fresh sh -c 'cat /var/lib/dpkg/info/*.list' | sort -u)
left=$(comm -23 <(sed 's,^/\(bin\|lib\|lib64\|sbin\)/,/usr/\1/,' <<<"$left" | sort -u) <(sed 's,^/\(bin\|lib\|lib64\|sbin\)/,/usr/\1/,' <<<"$packaged" | sort -u) |
  grep -vE '^$|/__pycache__|^/etc/(passwd|group|shadow|gshadow|subuid|subgid|ld\.so\.cache|apt/)|^/etc/rc[0-9S]\.d|^/var/lib/systemd|^/etc/alternatives|^/usr/share/(locale|man|doc)|\.dpkg-new$' || true)
[[ -z $left ]] || die "left behind: $left"
links=$(in_fresh ip -br link | grep -cE '^veth' || true); tables=$(in_fresh nft list tables)
[[ $links == 0 && $tables != *agentenv* ]] || die "network objects left: $links links, tables: $tables"
# shellcheck disable=SC2016
in_fresh sh -c 'for p in /proc/[0-9]*; do [ "$(stat -c %U $p 2>/dev/null)" != aenv ] || exit 1; done' || die "processes of aenv are left"
ok "nothing is left but /var/lib/aenv, /etc/aenv, /etc/default/aenv and the account"

phase "the Debian package, over the data that stayed"
DEB_COMPRESS='-Zgzip -z1' scripts/deb.sh dist/agentenv "$version_a" "$dir/in/agentenv.deb" >/dev/null
bindir=/usr/bin
show in_fresh env DEBIAN_FRONTEND=noninteractive dpkg --force-confold -i /mnt/in/agentenv.deb || die "dpkg -i failed"
wait_health
aenv resume "$id" >/dev/null || die "the sandbox of before does not resume"
goes_on "under the package"
show in_fresh dpkg -i /mnt/in/agentenv.deb || die "the package does not upgrade"
wait_health
goes_on "after the package's upgrade"
show in_fresh dpkg --purge agentenv || die "dpkg --purge failed"
for path in /var/lib/aenv /etc/aenv /etc/default/aenv /run/aenv/netns /etc/sysctl.d/99-aenv.conf; do
  if in_fresh test -e "$path"; then die "the purge left $path"; fi
done
ok "purged"

failed=0
printf '\ntry-fresh: all of it works, %d s\n' $((SECONDS - began))
