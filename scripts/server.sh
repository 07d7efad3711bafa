#!/usr/bin/env bash
# Starts and stops the server of this checkout in the background. State lives in .aenv/, the executable in dist/.
#   server.sh start|stop|status|env
set -euo pipefail
cd "$(dirname "$0")/.."
export AENV_HOME_PATH=${AENV_HOME_PATH:-$PWD/.aenv/home}
# Socket paths are short by law (107 bytes), a checkout's path may not be.
export AENV_RUNTIME_PATH=${AENV_RUNTIME_PATH:-/run/aenv-$(printf %s "$PWD" | cksum | cut -d' ' -f1)}
export API_ADDR=${API_ADDR:-127.0.0.1:8000}
export AENV_CONFIG_PATH=${AENV_CONFIG_PATH:-}
pidfile=$AENV_HOME_PATH/server.pid log=$AENV_HOME_PATH/logs/server.log
running() { [[ -f $pidfile ]] && kill -0 "$(cat "$pidfile")" 2>/dev/null && grep -qa agentenv "/proc/$(cat "$pidfile")/cmdline" 2>/dev/null; }

case ${1:-} in
  start)
    if running; then echo "server already runs (pid $(cat "$pidfile")), http://$API_ADDR"; exit 0; fi
    mkdir -p "$AENV_HOME_PATH/logs"
    dist/agentenv setup --home "$AENV_HOME_PATH"
    setsid dist/agentenv serve >>"$log" 2>&1 </dev/null &
    echo $! > "$pidfile"
    for ((i = 0; i < 100; i++)); do
      # With its own key: a server of somebody else may answer there.
      if running && [[ -s $AENV_HOME_PATH/secrets/api-key ]] &&
         curl -fs -o /dev/null --max-time 1 -H "X-API-Key: $(cat "$AENV_HOME_PATH/secrets/api-key")" "http://$API_ADDR/v2/sandboxes"; then
        echo "server started (pid $(cat "$pidfile")), http://$API_ADDR, log $log"; exit 0
      fi
      if ! running; then echo "error: the server ended at once; the last lines of $log:" >&2; tail -n 15 "$log" >&2; rm -f "$pidfile"; exit 1; fi
      sleep 0.1
    done
    echo "error: no answer from http://$API_ADDR/health within 10 s; see $log" >&2; exit 1;;
  stop)
    if ! running; then echo "no server runs"; rm -f "$pidfile"; exit 0; fi
    pid=$(cat "$pidfile"); kill -TERM "$pid"
    for ((i = 0; i < 900; i++)); do kill -0 "$pid" 2>/dev/null || { rm -f "$pidfile"; echo "server stopped"; exit 0; }; sleep 0.1; done
    echo "error: the server (pid $pid) still runs after 90 s; see $log" >&2; exit 1;;
  status) if running; then echo "running, pid $(cat "$pidfile"), http://$API_ADDR"; else echo "not running"; exit 3; fi;;
  env) printf 'AENV_HOME_PATH=%s\nAENV_RUNTIME_PATH=%s\nAPI_ADDR=%s\n' "$AENV_HOME_PATH" "$AENV_RUNTIME_PATH" "$API_ADDR";;
  *) echo "usage: scripts/server.sh start|stop|status|env" >&2; exit 2;;
esac
