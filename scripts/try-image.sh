#!/usr/bin/env bash
# Tries deploy/docker/Dockerfile where there is no container engine: carries out its instructions on Debian's base
# system, then starts the entry point as a container has it (namespaces, default capabilities and those of
# compose.yaml, its devices), makes a template and runs a command in a sandbox. Not tried: the engine itself, compose.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $(id -u) == 0 ]] || { echo "error: namespaces need root" >&2; exit 1; }
cache=$PWD/.aenv/try-fresh
mkdir -p "$cache"
dir=$(mktemp -d /tmp/aenv-image-XXXXXX)
root=$dir/root registry=$cache/image-registry
die() { echo "FAILED: $*" >&2; [[ ! -s $dir/console.log ]] || tail -n 30 "$dir/console.log" >&2; exit 1; }
unbuild() { local m; for m in "$root/proc" "$root/dev"; do ! mountpoint -q "$m" || umount -l "$m"; done; }
cleanup() { unbuild; scripts/registry.sh stop "$registry" || true; scripts/fresh-machine.sh stop "$dir" || true; }
trap cleanup EXIT
in_image() { scripts/fresh-machine.sh run "$dir" "$@"; }

base=$(scripts/fresh-machine.sh base "$cache")
mkdir -p "$root" "$dir/in"
tar -xpf "$base" -C "$root" --exclude='./dev/*'
cp /etc/resolv.conf "$root/etc/resolv.conf"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mknod -m 666 "$root/dev/null" c 1 3; mknod -m 666 "$root/dev/urandom" c 1 9

entrypoint=()
: > "$dir/in/env"
while IFS= read -r line; do
  word=${line%% *} rest=${line#* }
  case $word in
    RUN) echo "  RUN     ${rest:0:90}"; chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive sh -ec "$rest" >"$dir/run.log" 2>&1 || { tail -n 20 "$dir/run.log" >&2; die "RUN $rest"; };;
    COPY)
      read -ra words <<<"$rest"
      [[ ${words[0]} == --chmod=* ]] || die "COPY without --chmod: $rest"
      for file in "${words[@]:1:${#words[@]}-2}"; do
        grep -qxF "!$file" deploy/docker/Dockerfile.dockerignore || die "$file is not in the build context"
        echo "  COPY    $file"; install -D -m "${words[0]#--chmod=}" "$file" "$root${words[-1]}$(basename "$file")"
      done;;
    ENV) tr ' ' '\n' <<<"$rest" | grep '=' >> "$dir/in/env";;
    ENTRYPOINT) mapfile -t entrypoint < <(grep -oE '"[^"]*"' <<<"$rest" | tr -d '"');;
    FROM) [[ $rest == debian:*-slim ]] || die "FROM $rest"; echo "  FROM    $rest (this machine's Debian base system stands for it)";;
    VOLUME|EXPOSE|STOPSIGNAL|HEALTHCHECK) ;;
    *) die "the instruction $word is not known here";;
  esac
done < <(sed -e '/^#/d' deploy/docker/Dockerfile | sed -e ':a' -e '/\\$/{N;s/\\\n *//;ta' -e '}' | sed '/^$/d')
unbuild
echo "  image   $(du -sh "$root" | cut -f1), entry point ${entrypoint[*]}"

pid=$(scripts/fresh-machine.sh start "$dir" - "${entrypoint[@]}")
for ((i = 0; i < 1500; i++)); do
  [[ -d /proc/$pid ]] || die "the entry point ended"
  # The file's own health check, as it is.
  if in_image bash -c "$(grep -oP '(?<="bash", "-c", ").*(?="\]$)' deploy/docker/Dockerfile | sed 's/\\\\/\\/g')" 2>/dev/null; then break; fi
  sleep 0.2
done
((i < 1500)) || die "not healthy within 300 s"
echo "  healthy after $((i / 5)) s; pid 1 is $(in_image cat /proc/1/comm), user $(stat -c %u "/proc/$pid"), $(grep CapEff "/proc/$pid/status" | tr '\t' ' ')"

url=$(nsenter -t "$pid" -n scripts/registry.sh start "$registry")
scripts/make-debian-image.sh .aenv/image >/dev/null
nsenter -t "$pid" -n .tools/bin/bun scripts/oci-image.ts push .aenv/image "$url/agentenv/debian-python:latest" >/dev/null
in_image sh -c "printf 'http://127.0.0.1:8000\n%s\n' \"\$(cat /var/lib/aenv/secrets/api-key)\" | HOME=/root aenv auth" >/dev/null
in_image env HOME=/root aenv pull "${url#http://}/agentenv/debian-python:latest" --name python --cpu 1 --memory 512 >/dev/null 2>&1 || die "no template"
id=$(in_image env HOME=/root aenv start python -d)
said=$(in_image env HOME=/root aenv exec "$id" -- python3 -c 'print(6 * 7)')
[[ $said == 42 ]] || die "the sandbox said: $said"
echo "  sandbox said $said"
kill -TERM "$pid"
for ((i = 0; i < 600; i++)); do [[ -d /proc/$pid ]] || break; sleep 0.1; done
[[ ! -d /proc/$pid ]] || die "SIGTERM did not end it"
echo "try-image: works"
