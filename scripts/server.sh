#!/usr/bin/env bash
# Starts and stops the server of this checkout in the background. State lives in .aenv/, the executable in dist/.
#   server.sh privileged                succeeds where a server can be started: CAP_NET_ADMIN and CAP_SYS_ADMIN
#   server.sh public-registry           succeeds where Docker Hub answers
#   server.sh start|stop|status|env     env: lines for eval: PATH, the paths above, E2B_* for aenv and the SDKs
set -euo pipefail
cd "$(dirname "$0")/.."
export AENV_HOME_PATH=${AENV_HOME_PATH:-$PWD/.aenv/home}
# Socket paths are short by law (107 bytes), a checkout's path may not be.
own_runtime=; [[ -n ${AENV_RUNTIME_PATH:-} ]] || own_runtime=1
export AENV_RUNTIME_PATH=${AENV_RUNTIME_PATH:-/run/aenv-$(printf %s "$PWD" | cksum | cut -d' ' -f1)}
export API_ADDR=${API_ADDR:-127.0.0.1:8000}
export AENV_CONFIG_PATH=${AENV_CONFIG_PATH:-}
# Credentials for dist/aenv, away from the user's own; it finds them there.
client=$AENV_HOME_PATH/client key_file=$AENV_HOME_PATH/secrets/api-key
pidfile=$AENV_HOME_PATH/server.pid addrfile=$AENV_HOME_PATH/server.addr log=$AENV_HOME_PATH/logs/server.log
running() { [[ -f $pidfile ]] && kill -0 "$(cat "$pidfile")" 2>/dev/null && grep -qa agentenv "/proc/$(cat "$pidfile")/cmdline" 2>/dev/null; }
# Where the running server listens is what it was started with, whatever this shell has in API_ADDR.
wanted=$API_ADDR
if running && [[ -s $addrfile ]]; then API_ADDR=$(cat "$addrfile"); fi
store_credentials() { printf 'http://%s\n%s\n' "$API_ADDR" "$(cat "$key_file")" | env -u E2B_API_URL XDG_CONFIG_HOME="$client" dist/aenv auth >/dev/null; }
# What can be done next here: a template that is there, or an image from where one can be had.
try_it() {
  [[ ${1:-} != quiet ]] || return 0
  local line='  %-46s %s\n' templates
  printf 'Try it:\n'
  # shellcheck disable=SC2016 # to be typed as it stands
  printf "$line" 'eval "$(scripts/server.sh env)"' 'PATH and E2B_*, for aenv and the E2B SDKs alike'
  templates=$(E2B_API_URL=http://$API_ADDR E2B_API_KEY=$(cat "$key_file" 2>/dev/null) timeout 5 dist/aenv template list --output json 2>/dev/null) || true
  if grep -q '"quickstart"' <<<"$templates"; then printf "$line" 'aenv start quickstart' 'a shell in a new sandbox'; fi
  if public_registry; then
    printf "$line" 'aenv pull python:3.12-slim --name py' 'a template from any OCI image' 'aenv start py' 'a shell in a new sandbox'
  else
    printf "$line" 'aenv pull HOST:PORT/IMAGE --name NAME' 'from a registry of yours: Docker Hub does not answer'
    if ! grep -q '"quickstart"' <<<"$templates"; then printf "$line" 'make quickstart' 'without a registry: a Debian image made here'; fi
  fi
}
# Whether Docker Hub answers from here.
public_registry() {
  local status; status=$(curl -s -o /dev/null -w '%{http_code}' --connect-timeout 3 --max-time 5 https://registry-1.docker.io/v2/) || true
  [[ $status == 200 || $status == 401 ]]
}
privileged() {
  local effective; effective=$(sed -n 's/^CapEff:\t//p' /proc/self/status)
  ((($((16#$effective)) & 0x201000) == 0x201000))
}
# How many sandboxes run; nothing where that cannot be told.
count_running() {
  local list
  list=$(E2B_API_URL=http://$API_ADDR E2B_API_KEY=$(cat "$key_file" 2>/dev/null) timeout 5 dist/aenv list --output json 2>/dev/null) || return 0
  grep -c '"state": "running"' <<<"$list" || true
}

case ${1:-} in
  privileged) privileged;;
  public-registry) public_registry;;
  start)
    if running; then store_credentials; echo "server already runs (pid $(cat "$pidfile")), http://$API_ADDR"
      [[ $wanted == "$API_ADDR" || $wanted == 127.0.0.1:8000 ]] || echo "for http://$wanted: make stop, then API_ADDR=$wanted make start"
      try_it "${2:-}"; exit 0; fi
    privileged || { echo "error: network namespaces and taps need root: sudo make start" >&2; exit 1; }
    mkdir -p "$AENV_HOME_PATH/logs"
    dist/agentenv setup --home "$AENV_HOME_PATH"
    from=$(stat -c %s "$log" 2>/dev/null || echo 0)
    setsid dist/agentenv serve >>"$log" 2>&1 </dev/null &
    echo $! > "$pidfile"; printf %s "$API_ADDR" > "$addrfile"
    for ((i = 0; i < 100; i++)); do
      # With its own key: a server of somebody else may answer there.
      if running && [[ -s $key_file ]] &&
         curl -fs -o /dev/null --max-time 1 -H "X-API-Key: $(cat "$key_file")" "http://$API_ADDR/v2/sandboxes"; then
        store_credentials
        echo "server started (pid $(cat "$pidfile")), http://$API_ADDR, log $log"; try_it "${2:-}"; exit 0
      fi
      if ! running; then echo "error: the server ended at once; what it said (all of it: $log):" >&2; tail -c "+$((from + 1))" "$log" | tail -n 15 >&2; rm -f "$pidfile"; exit 1; fi
      sleep 0.1
    done
    echo "error: no answer from http://$API_ADDR/health within 10 s; see $log" >&2; exit 1;;
  stop)
    if ! running; then echo "no server runs"; rm -f "$pidfile"; exit 0; fi
    pid=$(cat "$pidfile") count=$(count_running); kill -TERM "$pid"
    cleared() { rm -f "$pidfile" "$addrfile"; [[ -z $own_runtime ]] || rm -rf --one-file-system "$AENV_RUNTIME_PATH" 2>/dev/null || true; }
    for ((i = 0; i < 900; i++)); do kill -0 "$pid" 2>/dev/null || { cleared; echo "server stopped$([[ ${count:-0} == 0 ]] || echo "; running sandboxes that were paused: $count (aenv resume ID after make start)")"; exit 0; }; sleep 0.1; done
    echo "error: the server (pid $pid) still runs after 90 s; see $log" >&2; exit 1;;
  status) if running; then echo "running, pid $(cat "$pidfile"), http://$API_ADDR"; else echo "not running"; exit 3; fi;;
  env)
    printf 'export AENV_HOME_PATH=%q AENV_RUNTIME_PATH=%q API_ADDR=%q\n' "$AENV_HOME_PATH" "$AENV_RUNTIME_PATH" "$API_ADDR"
    printf 'export PATH=%q:"$PATH"\n' "$PWD/dist"
    if [[ -s $key_file ]]; then
      printf 'export E2B_API_URL=%q E2B_SANDBOX_URL=%q E2B_API_KEY="$(cat %q)"\n' "http://$API_ADDR" "http://$API_ADDR" "$key_file"
    else echo "no server has run here yet: make start" >&2; fi;;
  *) echo "usage: scripts/server.sh start|stop|status|env" >&2; exit 2;;
esac
