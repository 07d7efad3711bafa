#!/usr/bin/env bash
# A local OCI registry (Debian's docker-registry) on a free loopback port, with all its files in one directory.
#   registry.sh start DIR    starts it unless it runs; prints its URL
#   registry.sh stop DIR     stops it; the images stay
#   registry.sh url DIR      prints the URL of the running one, else fails
set -euo pipefail
die() { echo "error: $*" >&2; exit 1; }
usage() { sed -n '3,5s/^#  //p' "$0" >&2; exit 2; }

[[ $# == 2 ]] || usage
command=$1 dir=$2
mkdir -p "$dir"; dir=$(cd "$dir" && pwd)
pidfile=$dir/registry.pid urlfile=$dir/registry.url log=$dir/registry.log config=$dir/config.yml

pid() { [[ -s $pidfile ]] && cat "$pidfile"; }
# Ours: the pid may have been given to another process since.
running() { local p; p=$(pid) && [[ -r /proc/$p/cmdline ]] && tr '\0' '\n' <"/proc/$p/cmdline" | grep -qxF "$config"; }
answers() { curl -fs -o /dev/null --max-time 2 --noproxy '*' "$1/v2/"; }

start() {
  if running; then cat "$urlfile"; return; fi
  command -v docker-registry >/dev/null || die "docker-registry is not installed: apt-get install docker-registry"
  local attempt port i url
  for ((attempt = 0; attempt < 20; attempt++)); do
    port=$((20000 + (RANDOM * 32768 + RANDOM) % 12000)) url=http://127.0.0.1:$port
    if (exec 8<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue; fi # somebody's already
    cat > "$config" <<YAML
version: 0.1
log: {level: warn, accesslog: {disabled: true}}
storage:
  filesystem: {rootdirectory: $dir/data}
  delete: {enabled: true}
http: {addr: "127.0.0.1:$port"}
YAML
    # A session of its own: it outlives the script and its terminal.
    setsid docker-registry serve "$config" >"$log" 2>&1 </dev/null 9>&- &
    echo $! > "$pidfile"; echo "$url" > "$urlfile"
    for ((i = 0; i < 300; i++)); do
      # Not `running`: between fork and exec the process does not have its own command line yet.
      [[ -d /proc/$(pid) ]] || break
      if answers "$url" && running; then echo "$url"; return; fi
      sleep 0.05
    done
    grep -q 'address already in use' "$log" || break
  done
  if running; then kill "$(pid)"; fi
  rm -f "$pidfile" "$urlfile"
  die "the registry did not start; the end of $log: $(tail -n 5 "$log")"
}

stop() {
  if running; then
    local p i; p=$(pid); kill "$p"
    for ((i = 0; i < 100; i++)); do [[ -d /proc/$p ]] || break; sleep 0.05; done
    [[ ! -d /proc/$p ]] || kill -9 "$p"
  fi
  rm -f "$pidfile" "$urlfile"
}

exec 9>"$dir/lock"; flock 9
case $command in
  start) start;;
  stop) stop;;
  url) running || die "no registry runs in $dir: scripts/registry.sh start $dir"; cat "$urlfile";;
  *) usage;;
esac
