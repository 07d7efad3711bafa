#!/usr/bin/env bash
# Installs, upgrades or removes the AgentENV server as a systemd service, or its command line alone. The server's
# part needs root; none needs anything but this file: unit, configuration and host set-up come out of the executable itself.
#
#   install.sh [install] --from FILE|URL [--sha256 HEX] [--no-start]
#   install.sh uninstall [--purge]
#   install.sh cli --from FILE|URL [--sha256 HEX]
#
# cli         only aenv, the command line, for this user or machine: no root, no service, macOS and arm64, too
# --from      the executable, or a release archive (.tar.gz) that holds it; a file or an https:// URL
# --sha256    what its SHA-256 must be; without it a URL needs a file of the same name plus .sha256 beside it
# --no-start  prepare everything, start nothing
# --purge     also remove state, configuration and the account: templates, snapshots and paused sandboxes are lost
#
# Installing over an older version is an upgrade: the configuration stays, running sandboxes go on, and a new
# version that does not come up is taken back. Environment: PREFIX (/usr/local), AENV_HOME_PATH (/var/lib/aenv),
# AENV_VIRTUALIZATION_MODE (auto), AENV_SERVICE_USER and AENV_SERVICE_GROUP (aenv), SKIP_SETUP=1 (no packages, no
# dependencies: agentenv setup is left to you), INSTALL_DIR (cli: /usr/local/bin if it can be written, else ~/.local/bin).
set -euo pipefail
umask 022

prefix=${PREFIX:-/usr/local}
user=${AENV_SERVICE_USER:-aenv}
group=${AENV_SERVICE_GROUP:-aenv}
mode=${AENV_VIRTUALIZATION_MODE:-}
confdir=/etc/aenv
envfile=/etc/default/aenv
unit=/etc/systemd/system/aenv.service
bin=$prefix/bin/agentenv

say() { printf '%s\n' "$*"; }
step() { printf '  %-12s %s\n' "$1" "$2"; }
die() { printf 'Error: %s\n' "$1" >&2; [[ -z ${2:-} ]] || printf '  %s\n' "$2" >&2; exit 1; }
# With an argument: that word is why.
usage() { [[ -z ${1:-} ]] || printf 'Error: unknown option or command: %s\n\n' "$1" >&2; sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
# A value of the environment file; nothing where the file or the key is not there.
setting() { [[ ! -r $envfile ]] || sed -n "s/^$1=//p" "$envfile" | tail -n 1; }
systemd() { [[ -d /run/systemd/system ]] && command -v systemctl >/dev/null; }

home=${AENV_HOME_PATH:-$(setting AENV_HOME_PATH)}
home=${home:-/var/lib/aenv}

check_arguments() {
  [[ $(id -u) == 0 ]] || die "the installer changes the machine and needs root" "run it with sudo"
  [[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] || die "the server runs on x86_64 Linux, this is $(uname -sm)"
  local name
  for name in "$user" "$group"; do
    [[ $name =~ ^[a-z_][a-z0-9_-]*$ && $name != root ]] || die "\"$name\" is no account to run a server as" "AENV_SERVICE_USER and AENV_SERVICE_GROUP name an account of its own"
  done
  [[ $home == /* ]] || die "AENV_HOME_PATH $home is not absolute"
  case $(realpath -m "$home") in
    /|/bin|/boot|/dev|/etc|/home|/lib|/opt|/proc|/root|/run|/sbin|/srv|/sys|/tmp|/usr|/var|/var/lib)
      die "AENV_HOME_PATH $home is a directory of the system" "choose a directory of its own, such as /var/lib/aenv";;
  esac
  [[ ! -L $home ]] || die "AENV_HOME_PATH $home is a symbolic link" "name the directory it points to"
  [[ ! -e $home || -d $home ]] || die "AENV_HOME_PATH $home is not a directory"
}

# Puts the wanted executable at $work/agentenv.
fetch() {
  local from=$1 want=$2 got found file=$work/download
  # Up to the first slash it must be this machine and nothing else: no longer name, no user before an @.
  local here='^http://(127\.0\.0\.1|localhost)(:[0-9]+)?/'
  [[ $from != http://* || $from =~ $here ]] || die "$from is not https" "what is installed as a privileged service must not be changeable on its way"
  case $from in
    https://*|http://*)
      command -v curl >/dev/null || die "curl is not installed" "install it, or download the file yourself and give its path"
      step download "$from"
      curl -fsSL --proto-redir =https --retry 3 -o "$file" "$from" || die "cannot download $from"
      if [[ -z $want ]]; then
        want=$(curl -fsSL --proto-redir =https --retry 3 "$from.sha256" | cut -d' ' -f1) || die "there is no checksum at $from.sha256" "give the one you trust with --sha256"
      fi;;
    *)
      [[ -f $from ]] || die "there is no file $from"
      cp "$from" "$file"
      if [[ -z $want && -f $from.sha256 ]]; then want=$(cut -d' ' -f1 "$from.sha256"); fi;;
  esac
  if [[ -n $want ]]; then
    got=$( (sha256sum "$file" 2>/dev/null || shasum -a 256 "$file") | cut -d' ' -f1)
    [[ $(tr '[:upper:]' '[:lower:]' <<<"$want") == "$got" ]] || die "the checksum of $from is $got, not $want" "download it again; if that does not help, do not install it"
    step checksum "$got"
  fi
  if [[ $(head -c 2 "$file" | od -An -tx1 | tr -d ' ') == 1f8b ]]; then
    mkdir "$work/unpacked"
    tar -xzf "$file" -C "$work/unpacked" || die "$from cannot be unpacked"
    found=$(find "$work/unpacked" -type f \( -name agentenv -o -name aenv \) | head -n 1)
    [[ -n $found ]] || die "$from holds no agentenv"
    mv "$found" "$work/agentenv"
  else mv "$file" "$work/agentenv"; fi
  chmod 755 "$work/agentenv"
  version=$("$work/agentenv" --version 2>/dev/null) || die "$from does not run on this machine"
  [[ $version == agentenv\ * ]] || die "$from is not the AgentENV executable"
}

packages() {
  local missing=() entry
  for entry in ip:iproute2 nft:nftables nsenter:util-linux setpriv:util-linux dpkg-deb:dpkg xz:xz-utils; do
    command -v "${entry%%:*}" >/dev/null || [[ -x /usr/sbin/${entry%%:*} ]] || missing+=("${entry#*:}")
  done
  [[ -e /etc/ssl/certs/ca-certificates.crt ]] || missing+=(ca-certificates)
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || die "these are missing: ${missing[*]}" "install your distribution's packages for them, then run this again"
  step packages "${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  local log=$work/apt.log
  apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
    { apt-get -o DPkg::Lock::Timeout=120 update >>"$log" 2>&1 &&
      apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1; } ||
    { tail -n 15 "$log" >&2; die "apt-get could not install ${missing[*]}"; }
}

account() {
  getent group "$group" >/dev/null || { step group "$group"; groupadd --system "$group"; }
  getent passwd "$user" >/dev/null || {
    step user "$user"
    useradd --system --gid "$group" --home-dir "$home" --no-create-home --shell /usr/sbin/nologin "$user"
  }
}

# Writes standard input to a file by a rename: what reads it sees the old one or the new one.
put() { # path mode owner
  local temporary
  temporary=$(mktemp "$1.XXXXXX")
  cat > "$temporary"
  chown "$3" "$temporary"; chmod "$2" "$temporary"
  mv -f "$temporary" "$1"
}

configuration() {
  install -d -m 750 -o root -g "$group" "$confdir"
  [[ -e $confdir/config.toml ]] || { step config "$confdir/config.toml"; "$bin" config default | put "$confdir/config.toml" 640 "root:$group"; }
  mkdir -p "$(dirname "$envfile")"
  if [[ ! -e $envfile ]]; then
    step environment "$envfile"
    "$bin" setup --print environment |
      sed -e "s,^AENV_HOME_PATH=.*,AENV_HOME_PATH=$home," -e "s,^AENV_VIRTUALIZATION_MODE=.*,AENV_VIRTUALIZATION_MODE=${mode:-auto}," |
      put "$envfile" 640 "root:$group"
  else
    # Lines that are there stay as they are; keys a newer version needs are added.
    local line
    "$bin" setup --print environment | grep -E '^[A-Z_]+=' | while read -r line; do
      grep -q "^${line%%=*}=" "$envfile" || printf '%s\n' "$line" >> "$envfile"
    done
  fi
}

# A command of the executable under the service's environment, as the service's user or as root.
# shellcheck disable=SC1090
with_environment() { ( set -a; . "$envfile"; set +a; exec "$@" ); }
as_service() { with_environment setpriv --reuid="$user" --regid="$group" --init-groups --inh-caps=-all env HOME="$home" "$@"; }

healthy() { # seconds
  local address i
  address=$(setting API_ADDR); address=${address:-127.0.0.1:8000}
  address=${address/#0.0.0.0:/127.0.0.1:}
  for ((i = 0; i < $1 * 5; i++)); do
    # Without curl: bash's own sockets.
    if { exec 9<>"/dev/tcp/${address%:*}/${address##*:}"; } 2>/dev/null; then
      printf 'GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' >&9
      if IFS= read -r -t 5 answer <&9 && [[ $answer == *" 204 "* ]]; then exec 9>&-; return 0; fi
      exec 9>&-
    fi
    # Started again and again, or given up: no need to wait for the end of the time.
    if systemctl is-failed --quiet aenv || (($(systemctl show -p NRestarts --value aenv) - ${restarts:-0} >= 2)); then return 1; fi
    sleep 0.2
  done
  return 1
}

take_back() {
  [[ -x $bin.previous ]] || die "the server does not come up" "see: journalctl -u aenv"
  mv -f "$bin.previous" "$bin"
  systemctl reset-failed aenv || true
  restarts=0
  systemctl restart aenv || true
  if healthy 30; then die "the new version does not come up: the former one is back and runs" "see: journalctl -u aenv"; fi
  die "neither the new version nor the former one comes up" "see: journalctl -u aenv"
}

install_server() {
  local from='' sha256='' start=1 was=''
  while (($#)); do
    case $1 in
      --from) from=${2:?--from needs a file or URL}; shift 2;;
      --sha256) sha256=${2:?--sha256 needs a checksum}; shift 2;;
      --no-start) start=; shift;;
      *) usage "$1";;
    esac
  done
  [[ -n $from ]] || usage
  check_arguments
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  fetch "$from" "$sha256"
  [[ ! -x $bin ]] || was=$("$bin" --version 2>/dev/null || echo unknown)
  if [[ -z ${SKIP_SETUP:-} ]]; then packages; fi
  # A configuration the new version does not take: said before anything is changed.
  if [[ -e $envfile ]]; then
    with_environment "$work/agentenv" config check >/dev/null || die "the new version does not take this configuration" "nothing was changed"
  fi
  account
  mkdir -p "$prefix/bin"
  if [[ -n $was ]]; then
    step upgrade "$was -> $version"
    ln -f "$bin" "$bin.previous"
  else step install "$bin ($version)"; fi
  mv -f "$work/agentenv" "$bin.new"; mv -f "$bin.new" "$bin"
  ln -sfn agentenv "$prefix/bin/aenv"
  configuration
  home=$(setting AENV_HOME_PATH)
  step host "devices, groups, kernel settings, directories"
  with_environment "$bin" setup --host --runtime-user "$user" --runtime-group "$group" | sed -n 's/^done  */               /p'
  if [[ -z ${SKIP_SETUP:-} ]]; then
    step setup "guest kernel and virtual machine monitor"
    as_service "$bin" setup
  fi
  mkdir -p "$(dirname "$unit")"
  "$bin" setup --print unit --runtime-user "$user" --runtime-group "$group" | put "$unit" 644 root:root
  if ! systemd; then
    say "Installed. There is no systemd here: start it as $unit says (user, capabilities, environment)."
    return
  fi
  systemctl daemon-reload
  systemctl enable --quiet aenv
  if [[ -z $start ]]; then say "Installed. Start it with: systemctl start aenv"; return; fi
  systemctl reset-failed aenv 2>/dev/null || true # counts of before
  restarts=$(systemctl show -p NRestarts --value aenv)
  # Sandboxes outlive the server: a restart leaves them to the next one.
  if systemctl is-active --quiet aenv; then step restart "running sandboxes go on"; systemctl restart aenv || take_back
  else step start aenv.service; systemctl start aenv || take_back; fi
  healthy 60 || take_back
  rm -f "$bin.previous"
  say "The server runs: http://$(setting API_ADDR), key in $home/secrets/api-key, log: journalctl -u aenv"
}

install_cli() {
  local from='' sha256='' target=${INSTALL_DIR:-}
  while (($#)); do
    case $1 in
      --from) from=${2:?--from needs a file or URL}; shift 2;;
      --sha256) sha256=${2:?--sha256 needs a checksum}; shift 2;;
      *) usage "$1";;
    esac
  done
  [[ -n $from ]] || usage
  if [[ -z $target ]]; then
    if [[ -w /usr/local/bin ]]; then target=/usr/local/bin
    elif [[ -n ${HOME:-} ]]; then target=$HOME/.local/bin
    else die "HOME is not set, and /usr/local/bin cannot be written" "name a directory in INSTALL_DIR"; fi
  fi
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  fetch "$from" "$sha256"
  mkdir -p "$target"
  # Beside a server's executable aenv is its link, and stays so.
  [[ ! -L $target/aenv ]] || die "$target/aenv is a link to $(readlink "$target/aenv")" "choose another place with INSTALL_DIR"
  cp "$work/agentenv" "$target/aenv.new"
  mv -f "$target/aenv.new" "$target/aenv"
  step install "$target/aenv ($version)"
  case :$PATH: in *:"$target":*) ;; *) say "Add $target to your PATH.";; esac
}

uninstall_server() {
  local purge=
  case ${1:-} in '') ;; --purge) purge=1;; *) usage "$1";; esac
  check_arguments
  if systemd && [[ -e $unit ]]; then
    step stop "aenv.service: running sandboxes are paused and stored"
    systemctl disable --quiet --now aenv
  fi
  # What a stop that ran out of time left: VMs and the block daemon of this account.
  if getent passwd "$user" >/dev/null; then end_leftovers; fi
  rm -f "$unit" "$bin" "$bin.previous" "$prefix/bin/aenv" /etc/udev/rules.d/99-agentenv-ublk.rules \
    /etc/modules-load.d/aenv.conf /etc/sysctl.d/99-aenv.conf
  ! systemd || systemctl daemon-reload
  local runtime
  runtime=$(setting AENV_RUNTIME_PATH); runtime=${runtime:-/run/aenv}
  awk -v dir="$runtime/" 'index($2, dir) == 1 { print $2 }' /proc/self/mounts | sort -r |
    while read -r mount; do umount "$mount" 2>/dev/null || umount -l "$mount"; done
  rm -rf --one-file-system "${runtime:?}"
  if [[ -n $purge ]]; then
    rm -rf "${home:?}" "$confdir" "$envfile"
    userdel "$user" 2>/dev/null || true
    groupdel "$group" 2>/dev/null || true
    say "Removed, with all data."
  else say "Removed. Data and configuration stay: $home $confdir $envfile and the user $user (--purge removes them)."; fi
}

# Processes of the service's account that are this executable or its VMs: those work below the home.
leftovers() {
  local dir uid real
  uid=$(id -u "$user")
  real=$(realpath -m "$home")
  for dir in /proc/[0-9]*; do
    [[ $(stat -c %u "$dir" 2>/dev/null) == "$uid" ]] || continue
    case $(readlink "$dir/exe" 2>/dev/null) in
      "$bin"*|"$real"/*|*/qemu-system-*|*/firecracker|*/firecracker\ *) printf '%s\n' "${dir#/proc/}"; continue;;
    esac
    case $(readlink "$dir/cwd" 2>/dev/null) in "$real"|"$real"/*) printf '%s\n' "${dir#/proc/}";; esac
  done
}

end_leftovers() {
  local i pid
  for ((i = 0; i < 50; i++)); do
    mapfile -t pids < <(leftovers)
    ((${#pids[@]})) || return 0
    for pid in "${pids[@]}"; do if ((i < 25)); then kill "$pid" 2>/dev/null || true; else kill -9 "$pid" 2>/dev/null || true; fi; done
    sleep 0.2
  done
  die "processes of $user do not end: ${pids[*]}"
}

case ${1:-} in
  -h|--help) usage 2>&1;;
  uninstall) shift; uninstall_server "$@";;
  install) shift; install_server "$@";;
  cli) shift; install_cli "$@";;
  --*) install_server "$@";;
  *) usage "${1:-}";;
esac
