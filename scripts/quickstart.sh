#!/usr/bin/env bash
# The main job on a fresh machine: server, template from a real Debian image, Python in a microVM through
# the unmodified E2B client, pause and resume. Idempotent: what is there is used.
# Of the environment: AENV_HOME_PATH, AENV_RUNTIME_PATH, AENV_DEPS_PATH, AENV_CONFIG_PATH and API_ADDR say which server,
# as for server.sh; AENV_QUICKSTART_IMAGE which image (a reference, or "local" for a Debian made here); else a public
# registry's where one answers. What it starts besides the server, it ends.
set -euo pipefail
cd "$(dirname "$0")/.."
eval "$(scripts/server.sh env 2>/dev/null)"
template=quickstart
began=$SECONDS
phase_began=$SECONDS

if [[ -t 1 ]]; then bold=$'\e[1m' plain=$'\e[0m'; else bold='' plain=''; fi
phase() { phase_began=$SECONDS; printf '\n%s[%s] %s%s\n' "$bold" "$1" "$2" "$plain"; }
ok() { printf '      done in %d s\n' $((SECONDS - phase_began)); }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

url=http://$API_ADDR

scripts/server.sh privileged || die "network namespaces and taps need root: sudo make quickstart"

phase 1/4 "guest kernel, VMM and server"
scripts/server.sh start quiet
eval "$(scripts/server.sh env)" # this server, whatever the caller's E2B_* say
ok

phase 2/4 "a real Debian image with Python"
registry_dir=$AENV_HOME_PATH/registry
trap '[[ ! -d $registry_dir ]] || { scripts/registry.sh stop "$registry_dir"; rm -rf "$registry_dir"; }' EXIT
has_template() { dist/aenv template list --output json | grep -q "\"$template\""; }
image=
if has_template; then echo "      template $template is there"
else
  # A public registry where one answers, otherwise an image made from this machine's own apt sources
  # in a local registry; both are pulled the same way.
  image=${AENV_QUICKSTART_IMAGE:-}
  if [[ -z $image ]] && scripts/server.sh public-registry; then image=docker.io/library/python:3.12-slim; fi
  if [[ -z $image || $image == local ]]; then
    scripts/bootstrap.sh image
    registry=$(scripts/registry.sh start "$registry_dir")
    image=${registry#http://}/agentenv/debian-python:latest
    scripts/make-debian-image.sh .aenv/image "$registry/agentenv/debian-python:latest"
  fi
fi
ok

phase 3/4 "template $template: image to block layers, boot, snapshot"
if [[ -n $image ]]; then
  dist/aenv pull "$image" --name "$template" --cpu 1 --memory 512
  if [[ -n ${registry:-} ]]; then
    scripts/registry.sh stop "$registry_dir"
    echo "      the registry it was pulled from, $registry, was temporary and is stopped"
  fi
else echo "      nothing to do"; fi
ok

phase 4/4 "Python in a microVM through the e2b client"
.tools/bin/bun scripts/quickstart.ts "$template"
ok

cat <<EOF

${bold}AgentENV works.${plain} It took $((SECONDS - began)) s, without the build of the executable.

  server     $url          API page: $url/docs
  key        $AENV_HOME_PATH/secrets/api-key
  log        $AENV_HOME_PATH/logs/server.log

Try it:
  eval "\$(scripts/server.sh env)"                PATH and E2B_*, for aenv and the E2B SDKs alike
  aenv start $template                      a shell in a new sandbox
  aenv list                                      what there is
  aenv pull IMAGE --name NAME                    a template from an image of any registry that answers here

Stop:  make stop   (running sandboxes are paused and stored; make start brings the server back)
EOF
