#!/usr/bin/env bash
# Runs one command inside a throw-away virtual machine (QEMU; no KVM needed) whose distribution kernel has
# ublk, nbd, tun and a nested /dev/kvm. The machine's root is this machine's own root, read-only, under a
# RAM overlay: same tools, same paths, and nothing written there outlives the run. /scratch is an ext4 disk,
# TMPDIR lies on it. See docs/rig.md.
#
#   scripts/rig.sh [options] [--] COMMAND [ARG...]
#     -C DIR      folder to run in (default: the checkout)
#     -t SECONDS  limit for the whole run, start of the machine included (default 600)
#     -m MIB      memory (default 4096)      -c N  vCPUs (default 2)
#     -M "MODS"   modules loaded first; most others load on demand
#     -o DIR      share DIR read-write, at the same path (repeatable)
#     -e NAME[=V] pass an environment variable (repeatable)
#     -p          only prepare: kernel and initial file system
#     -v          the guest's kernel log and boot times, on standard error
#   RIG_CACHE (default .aenv/rig), AENV_TEST_HOME (QEMU; default .aenv/home), RIG_SCRATCH_MIB (default 16384),
#   RIG_APPEND (kernel parameters), RIG_CPU and RIG_QEMU_ARGS tune the rest.
#
# Standard output and error come back apart, as they are written; the command's standard input is empty.
# Exit status: the command's own; 124 past the limit, or when the machine stands still or its clock runs on; 125 when it
# could not be started or died.
# A machine that dies, or takes over 90 s, before its command starts is started again, twice at most.
set -euo pipefail

root=$(realpath "$(dirname "$0")/..")
cache=${RIG_CACHE:-$root/.aenv/rig} home=${AENV_TEST_HOME:-$root/.aenv/home}
mods='kvm-amd ublk_drv nbd tun loop' dir=$root limit=600 mem=4096 cpus=2 verbose='' prepare=''
rw=() env=("PATH=$root/.tools/bin:$PATH" "HOME=${HOME:-/root}" "LANG=${LANG:-C.UTF-8}" "TMPDIR=/scratch/tmp"
  "AENV_TEST_HOME=$home" RIG=1)

die() { echo "rig: $*" >&2; exit 125; }

while getopts C:t:m:c:M:o:e:pv opt; do
  case $opt in
    C) dir=$(realpath "$OPTARG");; t) limit=$OPTARG;; m) mem=$OPTARG;; c) cpus=$OPTARG;; M) mods=$OPTARG;;
    o) rw+=("$(realpath "$OPTARG")");;
    e) if [[ $OPTARG == *=* ]]; then env+=("$OPTARG"); else env+=("$OPTARG=${!OPTARG-}"); fi;;
    p) prepare=1;; v) verbose=1;; *) exit 125;;
  esac
done
shift $((OPTIND - 1))
[[ -n $prepare || $# -gt 0 ]] || die "no command (see the head of $0)"
[[ $(uname -m) == x86_64 ]] || die "the rig is an x86_64 machine"
for tool in busybox cpio mke2fs flock; do
  PATH=$PATH:/usr/sbin:/sbin command -v $tool > /dev/null || die "$tool is missing; make deps installs it"
done
mkdir -p "$cache"; cache=$(realpath "$cache")

# ---- once per kernel: kernel with modules, and a small initial file system ----

exec 9> "$cache/lock"; flock 9
parts=$("$root/.tools/bin/bun" "$root/scripts/rig-parts.ts" "$cache" "$home") || exit 125
eval "$parts" # kernel, qemu, qemu_version, qemu_data, qemu_modules, qemu_libraries, tick_khz

stage1() { cat <<'S1'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t devtmpfs dev /dev
for m in $($b cat /mods); do $b insmod /bin/$m.ko; done
$b mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose root /ro
$b mount -t tmpfs -o size=75%,mode=755 tmpfs /rw
$b mkdir /rw/up /rw/work
$b mount -t overlay -o lowerdir=/ro,upperdir=/rw/up,workdir=/rw/work overlay /new || exec $b reboot -f
$b mkdir -p /new/run/rig /new/scratch
$b cp /stage2 $b /new/run/rig/
$b umount /proc /dev
exec $b switch_root /new /run/rig/stage2
S1
}

# Process 1 on the real root. $run/job and $run/cmd, made for each run, say what to do.
stage2() { cat <<'S2'
#!/run/rig/busybox sh
b=/run/rig/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
$b mkdir -p /dev/pts /dev/shm
$b mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
$b mount -t tmpfs tmpfs /dev/shm
$b mount -t cgroup2 cgroup2 /sys/fs/cgroup
$b mount -t debugfs debugfs /sys/kernel/debug
$b ln -s /proc/self/fd /dev/fd; for n in 0:stdin 1:stdout 2:stderr; do $b ln -s fd/${n%:*} /dev/${n#*:}; done
for a in $($b cat /proc/cmdline); do case $a in rig.run=*) run=${a#*=};; esac; done
. "$run/job"
mark() { echo "rig: $1 at $($b cut -d' ' -f1 /proc/uptime) s" > /dev/console; }
mark "root up"
$b mkdir -p /lib/modules; $b mount --bind "$modules" /lib/modules
printf '#!%s sh\nexec %s modprobe "$@"\n' $b $b > /run/rig/modprobe; $b chmod +x /run/rig/modprobe
echo /run/rig/modprobe > /proc/sys/kernel/modprobe
for m in virtio_blk ext4 $mods; do { $b modprobe $m || mark "no module $m"; } & done; wait
$b mount -t ext4 /dev/vda /scratch && $b mkdir -p -m 1777 /scratch/tmp || mark "no scratch disk"
$b ip link set lo up; $b hostname rig
n=0; while read -r d; do
  $b mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose rw$n "$d"; n=$((n+1))
done < "$run/rw"
# The command writes to pipes, not to the ports: a port cannot be opened twice, so /dev/stdout would fail.
port() { for p in /sys/class/virtio-ports/*; do [ "$($b cat $p/name)" != $1 ] || echo ${p##*/}; done; }
for s in out err; do
  $b mkfifo /run/rig/$s; { $b cat /run/rig/$s > /dev/$(port $s); : > /run/rig/$s.end; } &
done
# A sign of life of every processor, and the clock's time.
{ while :; do
    for c in $($b seq 0 $(($($b nproc) - 1))); do $b taskset $($b printf %x $((1 << c))) $b sleep 1; done
    $b cut -d' ' -f1 /proc/uptime
  done > /dev/$(port beat); } &
mark "command starts"
"$run/cmd" < /dev/null > /run/rig/out 2> /run/rig/err
rc=$?; mark "command ended"
# A pipe's end comes with the last process that holds it; one that stays behind is not waited for.
for i in $($b seq 40); do [ -e /run/rig/out.end ] && [ -e /run/rig/err.end ] && break; $b sleep 0.05; done
while read -r d; do $b sync -f "$d"; done < "$run/rw"
# Writes to a port do not wait for the host: say how much it should have got.
sent() { $b sed -n 's/^bytes_sent: //p' /sys/kernel/debug/virtio-ports/$(port $1); }
echo $rc $(sent out) $(sent err) > /dev/$(port status)
$b sleep 30; $b reboot -f
S2
}

initrd=$cache/initrd-$(basename "$kernel")-$(sed '/^# ---- one run/q' "$0" | cksum | cut -d' ' -f1).img
if [[ ! -e $initrd ]]; then
  tree=$(mktemp -d "$cache/initrd.XXXXXX")
  mkdir -p "$tree"/{bin,dev,proc,ro,rw,new}
  cp "$(command -v busybox)" "$tree/bin/busybox"
  ! ldd "$tree/bin/busybox" &> /dev/null || die "busybox must be a static one (package busybox-static)"
  # 9p and what it needs, in load order: the lines of modules.dep name what comes first last.
  deps() { sed -n "s#^\([^:]*/\)\?$1\.ko:##p" "$kernel"/modules/*/modules.dep | tr ' ' '\n' | sed '/^$/d' | tac; }
  for m in 9pnet_virtio 9p overlay; do
    for f in $(deps $m) "$(cd "$kernel"/modules/* && find . -name "$m.ko")"; do
      n=$(basename "$f" .ko); [[ -n $n && ! -e $tree/bin/$n.ko ]] || continue
      cp "$kernel"/modules/*/"$f" "$tree/bin/$n.ko"; echo "$n" >> "$tree/mods"
    done
  done
  stage1 > "$tree/init"; stage2 > "$tree/stage2"; chmod +x "$tree/init" "$tree/stage2"
  rm -f "$cache"/initrd-*.img
  (cd "$tree" && find . | cpio -o -H newc --quiet) > "$initrd.tmp"
  mv "$initrd.tmp" "$initrd"; rm -rf "$tree"
fi
exec 9>&-
[[ -z $prepare ]] || { echo "rig: $(basename "$kernel"), QEMU $qemu_version"; exit 0; }

# ---- one run ----

run=$(mktemp -d "$cache/run.XXXXXX"); pids=()
cleanup() { [[ ${#pids[@]} -eq 0 ]] || kill -9 "${pids[@]}" 2> /dev/null || :; rm -rf "$run"; }
trap cleanup EXIT; trap 'exit 130' INT TERM

args=()
IFS=: read -ra data <<< "$qemu_data"
for d in "${data[@]}"; do args+=(-L "$d"); done
[[ -z $qemu_modules ]] || export QEMU_MODULE_DIR=$qemu_modules
[[ -z $qemu_libraries ]] || export LD_LIBRARY_PATH=$qemu_libraries
# QEMU before 10 emulates cmpxchg16b wrongly.
cpu=${RIG_CPU:-EPYC}
[[ -n ${RIG_CPU:-} || ${qemu_version%%.*} -ge 10 ]] || cpu+=,-cx16

printf '%s=%q\n' modules "$kernel/modules" mods "$mods" > "$run/job"
printf '%s\n' "${rw[@]}" | sed '/^$/d' > "$run/rw"
{ echo '#!/bin/bash'; printf 'export %q\n' "${env[@]}"; printf 'cd %q || exit 126\nexec' "$dir"
  printf ' %q' "$@"; echo; } > "$run/cmd"
chmod +x "$run/cmd"
truncate -s "${RIG_SCRATCH_MIB:-16384}M" "$run/scratch"
PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -E lazy_itable_init=1,lazy_journal_init=1 -O ^has_journal "$run/scratch"

share() { args+=(-virtfs "local,path=$2,mount_tag=$1,security_model=none,multidevs=remap$3"); }
share root / ,readonly=on
n=0; for d in "${rw[@]}"; do share rw$n "$d" ''; n=$((n + 1)); done
for p in out err status beat; do
  args+=(-chardev "file,id=$p,path=$run/$p" -device "virtserialport,chardev=$p,name=$p")
done
mkfifo "$run/status"; exec 8<> "$run/status"

started() { grep -aq 'rig: command starts' "$run/console"; }

# A machine of which one processor shows no life is not waited for, nor one whose clock runs on. The emulator hands the
# host's time stamp counter through, and the kernel is told its frequency: measured on a busy host it was found several
# times too low, and the limits of tests ended before their time. A host that was moved may have another counter.
STILL_S=60 AHEAD_S=20

attempt() {
  local vm streams began beat last='' last_at first='' first_at
  : > "$run/out"; : > "$run/err"; : > "$run/console"; : > "$run/beat"
  "$qemu" -M q35,memory-backend=ram -accel tcg,thread=multi,tb-size=1024 -cpu "$cpu" -smp "$cpus" -m "$mem" \
    -object memory-backend-memfd,id=ram,size="$mem"M,share=on \
    -nodefaults -no-user-config -display none -no-reboot \
    -chardev "file,id=console,path=$run/console" -serial chardev:console \
    -kernel "$kernel/vmlinux" -initrd "$initrd" \
    -append "console=ttyS0 $([[ -n $verbose ]] && echo loglevel=6 || echo loglevel=3) panic=-1 mitigations=off tsc=reliable tsc_early_khz=$tick_khz rig.run=$run ${RIG_APPEND:-}" \
    -device virtio-serial-pci -device virtio-rng-pci \
    -drive "file=$run/scratch,format=raw,if=none,id=scratch,cache=unsafe,discard=unmap,aio=threads" \
    -device virtio-blk-pci,drive=scratch \
    "${args[@]}" ${RIG_QEMU_ARGS:-} \
    8>&- < /dev/null > "$run/qemu.log" 2>&1 & vm=$!; pids+=($vm)
  tail -s 0.1 -f -c +1 --pid=$vm "$run/out" 8>&- & streams=($!)
  tail -s 0.1 -f -c +1 --pid=$vm "$run/err" 8>&- >&2 & streams+=($!)
  pids+=("${streams[@]}")
  ended='' outs=0 errs=0 began=$SECONDS
  while [[ -z $ended ]]; do
    if read -r -t 1 -u 8 status outs errs; then ended=done
    elif ! kill -0 $vm 2> /dev/null || { ((SECONDS - began > 90)) && ! started; }; then ended=dead outs=0 errs=0
    elif ((SECONDS >= limit)); then ended=late outs=0 errs=0
    else
      beat=$(tail -n 1 "$run/beat")
      [[ -n $last || -z $beat ]] || first=${beat%.*} first_at=$SECONDS
      if [[ $beat != "$last" ]]; then last=$beat last_at=$SECONDS
      elif [[ -n $last ]] && ((SECONDS - last_at >= STILL_S)); then ended=still outs=0 errs=0; fi
      ahead=0
      [[ -z $last ]] || ahead=$((${last%.*} - first - (SECONDS - first_at)))
      ((ahead < AHEAD_S)) || ended=ahead outs=0 errs=0
    fi
  done
  for ((i = 0; i < 100; i++)); do
    (($(stat -c %s "$run/out") < outs || $(stat -c %s "$run/err") < errs)) || break; sleep 0.05
  done
  kill -9 $vm 2> /dev/null || :; wait $vm 2> /dev/null || :
  wait "${streams[@]}" || :
  [[ -z $verbose ]] || cat "$run/console" >&2
}

start=$EPOCHREALTIME
for try in 1 2 3; do
  attempt
  [[ $ended == dead ]] && ! started || break
  [[ $try == 3 ]] || echo "rig: the machine died while starting; once more" >&2
done
[[ -z $verbose ]] || echo "$start $EPOCHREALTIME" | awk '{printf "rig: %.1f s in all\n", $2 - $1}' >&2
case $ended in
  done) exit "$status";;
  still) echo "rig: the machine stands still, no sign of life of a processor for $STILL_S s" >&2
         tail -n 20 "$run/console" >&2 || :; exit 124;;
  ahead) echo "rig: the machine's clock ran on, it is $ahead s ahead" >&2
         tail -n 20 "$run/console" >&2 || :; exit 124;;
  late) echo "rig: over $limit s" >&2; tail -n 20 "$run/console" >&2 || :; exit 124;;
  dead) cat "$run/qemu.log" >&2 2> /dev/null || :
        tail -n 40 "$run/console" >&2 || :; die "the machine ended without a status";;
esac
