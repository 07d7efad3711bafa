#!/usr/bin/env bash
# A machine as a new user has it: Debian's base system with systemd as its init, in namespaces of its own (mounts,
# processes, network, names, control groups) with a way out through this machine. Gone when it stops.
#   fresh-machine.sh base CACHE         make the root file system as a tar in that directory, unless it is there;
#                                       prints its path
#   fresh-machine.sh start DIR FILE [INIT [ARGUMENT]...]
#                                       unpack it into DIR/root (-: it is there) and boot it; prints the pid of its
#                                       init, which is systemd, or INIT with the environment of DIR/env, as a container
#   fresh-machine.sh run DIR CMD...     run a command in it
#   fresh-machine.sh stop DIR           end it and remove DIR
# Devices, kernel modules and kernel settings are this machine's: there is no udev in it, and /proc/sys is read-only
# but for the network's part.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
die() { echo "error: $*" >&2; exit 1; }
usage() { sed -n '4,10s/^#  //p' "$0" >&2; exit 2; }
[[ $(id -u) == 0 ]] || die "needs root"

PACKAGES=systemd,systemd-sysv,dbus,ca-certificates,curl

make_base() {
  local file
  file=$1/base-$(cat - /etc/os-release <<<"$PACKAGES" | sha256sum | cut -c1-16).tar
  if [[ -s $file ]]; then echo "$file"; return; fi
  command -v mmdebstrap >/dev/null || die "mmdebstrap is not installed: apt-get install mmdebstrap"
  mkdir -p "$(dirname "$file")"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$repo/.tools/bin/bun" "$repo/scripts/oci-image.ts" sources > "$work/host.sources"
  "$repo/scripts/mmdebstrap.sh" --verbose --variant=minbase --format=tar --include="$PACKAGES" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$work/root.tar" - < "$work/host.sources" > "$work/log" 2>&1 ||
    { tail -n 15 "$work/log" >&2; die "mmdebstrap failed"; }
  mv "$work/root.tar" "$file"
  echo "$file"
}

# Runs as the first process of the new namespaces; becomes the machine's init.
init() {
  local root=$1 device; shift
  mount --make-rprivate /
  mount --bind "$root" "$root"
  mount -t proc proc "$root/proc"
  mount --bind "$root/proc/sys" "$root/proc/sys"
  mount --bind "$root/proc/sys/net" "$root/proc/sys/net"
  mount -o remount,bind,ro "$root/proc/sys"
  mount -t sysfs -o ro sysfs "$root/sys"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  mount -t tmpfs -o mode=755 tmpfs "$root/dev"
  for device in 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0'; do
    # shellcheck disable=SC2086
    mknod -m 666 "$root/dev/${device%% *}" c ${device#* }
  done
  mkdir "$root/dev/net" "$root/dev/pts" "$root/dev/shm"
  # As a kernel without udev makes them: root's alone.
  mknod -m 600 "$root/dev/net/tun" c 10 200
  [[ ! -c /dev/kvm ]] || mknod -m 600 "$root/dev/kvm" c 10 232
  mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
  ln -s pts/ptmx "$root/dev/ptmx"
  ln -s /proc/self/fd "$root/dev/fd"
  mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
  mount -t tmpfs -o mode=755 tmpfs "$root/run"
  # What stands in for this machine's files: shown read-only where the new user finds a download.
  mkdir -p "$root/mnt/in"
  mount --bind "$(dirname "$root")/in" "$root/mnt/in"
  hostname fresh
  cd "$root"
  mkdir -p old
  pivot_root . old
  umount -l /old
  rmdir /old
  if (($#)); then
    mount -o remount,rw /sys
    install -d -m 750 /run/aenv
    # shellcheck disable=SC2046
    exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin $(cat /mnt/in/env) \
      setpriv --bounding-set=-all,+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap,+net_bind_service,+sys_chroot,+kill,+audit_write,+net_admin,+sys_admin "$@"
  fi
  exec env -i container=fresh PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin /lib/systemd/systemd --log-target=console
}

# This machine's side of the way out; the subnet is the first of 192.168.200-249 that nobody has.
connect() {
  local dir=$1 pid=$2 n name
  for ((n = 200; n < 250; n++)); do ip -4 route show | grep -q "192\.168\.$n\." || break; done
  name=fresh-$pid
  echo "$name" > "$dir/network"
  ip link add "$name" type veth peer name eth0 netns "$pid"
  ip addr add "192.168.$n.1/30" dev "$name"
  ip link set "$name" up
  nsenter -t "$pid" -n ip addr add "192.168.$n.2/30" dev eth0
  nsenter -t "$pid" -n ip link set lo up
  nsenter -t "$pid" -n ip link set eth0 up
  nsenter -t "$pid" -n ip route add default via "192.168.$n.1"
  sysctl -q -w net.ipv4.ip_forward=1 2>/dev/null || echo 1 > /proc/sys/net/ipv4/ip_forward
  nft -f - <<NFT
table ip $name {
  chain out { type nat hook postrouting priority srcnat; ip saddr 192.168.$n.0/30 masquerade; }
}
NFT
}

in_machine() { local pid; pid=$(cat "$1/pid"); shift; nsenter -t "$pid" -m -u -i -n -p -C -- env -C / "$@"; }

start() {
  local dir=$1 base=$2 cgroup i state unshare; shift 2
  mkdir -p "$dir/root" "$dir/in"
  [[ $base == - ]] || tar -xpf "$base" -C "$dir/root" --exclude='./dev/*'
  cp /etc/resolv.conf "$dir/root/etc/resolv.conf"
  # How this machine's apt gets through, if it takes something: proxies and their certificates.
  apt-config dump 2>/dev/null | grep -iE '^Acquire::(http|https)::(proxy|CaInfo|Verify)' > "$dir/root/etc/apt/apt.conf.d/99way" || true
  : > "$dir/root/etc/machine-id"
  # The unified hierarchy, which this machine may have elsewhere or nowhere.
  cgroup=/sys/fs/cgroup
  if [[ ! -e $cgroup/cgroup.controllers ]]; then
    cgroup=$dir/cgroup; mkdir "$cgroup"; mount -t cgroup2 cgroup2 "$cgroup"
  fi
  mkdir "$cgroup/fresh-$$"
  echo "$cgroup/fresh-$$" > "$dir/cgroup-path"
  (
    echo "$BASHPID" > "$cgroup/fresh-$$/cgroup.procs"
    exec setsid unshare -m -u -i -n -p -C -f "$0" init "$dir/root" "$@" > "$dir/console.log" 2>&1 </dev/null
  ) &
  unshare=$!
  for ((i = 0; i < 100; i++)); do
    [[ -d /proc/$unshare ]] || { cat "$dir/console.log" >&2; die "the machine ended at once"; }
    pid=$(cat "/proc/$unshare/task/$unshare/children" 2>/dev/null || true); pid=${pid%% *}
    # Its own program by now, not the shell that prepared it.
    if [[ -n $pid && ! -e /proc/$pid/root/old && -e /proc/$pid/root/mnt/in && $(cat "/proc/$pid/comm") != fresh-machine* ]]; then break; fi
    sleep 0.1
  done
  [[ -n ${pid:-} ]] || die "the machine has no init"
  echo "$pid" > "$dir/pid"
  connect "$dir" "$pid"
  if (($#)); then echo "$pid"; return; fi
  for ((i = 0; i < 300; i++)); do
    state=$(in_machine "$dir" systemctl is-system-running 2>/dev/null || true)
    case $state in running|degraded) echo "$pid"; return;; esac
    sleep 0.2
  done
  die "the machine does not come up ($state); see $dir/console.log"
}

stop() {
  local dir=$1 name cgroup i
  if [[ -s $dir/pid ]]; then
    kill -9 "$(cat "$dir/pid")" 2>/dev/null || true
    for ((i = 0; i < 100; i++)); do [[ -d /proc/$(cat "$dir/pid") ]] || break; sleep 0.1; done
  fi
  if [[ -s $dir/network ]]; then
    name=$(cat "$dir/network")
    nft delete table ip "$name" 2>/dev/null || true
    ip link del "$name" 2>/dev/null || true
  fi
  if [[ -s $dir/cgroup-path ]]; then
    cgroup=$(cat "$dir/cgroup-path")
    for ((i = 0; i < 50; i++)); do
      find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null || true
      [[ -d $cgroup ]] || break
      sleep 0.1
    done
    ! mountpoint -q "$dir/cgroup" || umount "$dir/cgroup"
  fi
  rm -rf --one-file-system "$dir"
}

command=${1:-}; shift || usage
case $command in
  base) [[ $# == 1 ]] || usage; make_base "$1";;
  start) [[ $# -ge 2 ]] || usage; start "$(realpath "$1")" "${@:2}";;
  run) [[ $# -ge 2 ]] || usage; in_machine "$@";;
  stop) [[ $# == 1 ]] || usage; stop "$(realpath "$1")";;
  init) init "$@";;
  *) usage;;
esac
