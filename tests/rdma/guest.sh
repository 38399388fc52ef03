#!/bin/bash
# Runs a command as root in a virtual machine whose kernel has soft-RoCE (software RDMA), and returns its exit code.
#
#   guest.sh COMMAND [ARGUMENT...]
#
# The guest sees this machine's whole file system at the same paths, read-only under a temporary overlay. Only GUEST_OUT
# is really writable. It has two RDMA devices, rxe_a (10.78.0.1) and rxe_b (10.78.0.2), at the two ends of a veth wire
# (wire_a, wire_b), on which `tc qdisc ... netem` can drop packets. Kernel and user space are Debian packages,
# downloaded once into GUEST_FOLDER. Exit code: the command's; 124: time limit; 125: no guest could be started.
set -euo pipefail
FOLDER=${GUEST_FOLDER:-${XDG_CACHE_HOME:-$HOME/.cache}/ark_torch/soft-roce}
OUT=${GUEST_OUT:-$FOLDER/out}
SECONDS_AT_MOST=${GUEST_SECONDS:-300}
PACKAGES="busybox-static kmod cpio iproute2 ibverbs-utils ibverbs-providers libibverbs1 libnl-3-200 libnl-route-3-200"
# In load order by modules.dep: the diskless root (9p), the wire, and soft-RoCE, which needs crc32.
MODULES="virtio_pci 9pnet_virtio 9p overlay crc32_generic veth sch_netem rdma_rxe ib_uverbs"

say() { echo "guest.sh: $*" >&2; }
die() { say "$*"; exit 125; }
[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$FOLDER" "$OUT"
FOLDER=$(cd "$FOLDER" && pwd -P); OUT=$(cd "$OUT" && pwd -P)
case "$FOLDER$OUT" in *' '*) die "no spaces, please, in $FOLDER and $OUT";; esac

unpack() {  # the packages' files: a kernel with its modules, and the overlay of the guest's root
  command -v apt-get >/dev/null || die "this needs Debian's packages (apt-get)"
  command -v qemu-system-x86_64 >/dev/null || {
    [ "$(id -u)" = 0 ] || die "please run: sudo apt-get install qemu-system-x86"
    say "installing qemu-system-x86"
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -q --no-install-recommends qemu-system-x86 \
      >"$FOLDER/apt.log" 2>&1 || die "apt-get install failed: $FOLDER/apt.log"; }
  # The newest full kernel: the -cloud- ones have neither soft-RoCE nor 9p.
  local kernel; kernel=$(apt-cache pkgnames linux-image- | grep -E '^linux-image-[0-9.]+-[0-9]+-amd64$' | sort -V | tail -1) || true
  [ -n "$kernel" ] || die "no linux-image-*-amd64 is known: run apt-get update"
  say "downloading $kernel and RDMA's user space"
  local work=$FOLDER/unpacked; rm -rf "$work" "$FOLDER/over"; mkdir -p "$work/debs" "$work/root" "$FOLDER/over/usr/lib"
  # shellcheck disable=SC2086
  (cd "$work/debs" && timeout 300 apt-get download -q "$kernel" $PACKAGES >"$FOLDER/apt.log" 2>&1) ||
    die "apt-get download failed: $FOLDER/apt.log"
  local deb; for deb in "$work"/debs/*.deb; do
    case ${deb##*/} in
      linux-image*|busybox*|kmod*|cpio*) dpkg -x "$deb" "$work/root";;
      *) dpkg -x "$deb" "$FOLDER/over";;
    esac
  done
  local folder; for folder in bin sbin lib; do  # where / has links into /usr, such folders would hide them
    [ -d "$FOLDER/over/$folder" ] || continue
    mkdir -p "$FOLDER/over/usr/$folder"; cp -a "$FOLDER/over/$folder/." "$FOLDER/over/usr/$folder/"; rm -r "$FOLDER/over/$folder"
  done
  make_initrd "$work" "${kernel#linux-image-}"
  cp "$work"/root/boot/vmlinuz-* "$FOLDER/vmlinuz"
  rm -rf "$work"
}

make_initrd() {  # $1: unpacked packages, $2: the kernel's version
  local tree=$1/initrd modules=$1/root/lib/modules/$2 name line file
  mkdir -p "$tree"/{bin,mods,proc,sys,dev,host,over,out,scratch,root}
  ln -sf kmod "$1/root/bin/depmod"; "$1/root/bin/depmod" -b "$1/root" "$2"
  for name in $MODULES; do
    line=$(grep -E "/$name\.ko(\.xz)?:" "$modules/modules.dep") || die "the kernel $2 has no module $name"
    for file in $(tr ' ' '\n' <<<"${line#*:}" | tac) "${line%%:*}"; do
      [ -e "$tree/mods/${file##*/}" ] && continue
      cp "$modules/$file" "$tree/mods/"; echo "${file##*/}" >>"$tree/mods/order"
    done
  done
  cp "$1/root/bin/busybox" "$tree/bin/"; ln -s busybox "$tree/bin/sh"
  cat >"$tree/init" <<'INIT'
#!/bin/sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in $(cat /mods/order); do insmod /mods/$module || echo "guest: no module $module"; done
p9=trans=virtio,version=9p2000.L,msize=512000
fail() { echo "guest: $*"; poweroff -f; }
mount -t 9p -o $p9,ro,cache=loose host /host && mount -t 9p -o $p9,ro,cache=loose over /over &&
  mount -t tmpfs -o size=70% scratch /scratch && mkdir /scratch/upper /scratch/work &&
  mount -t overlay -o lowerdir=/over:/host,upperdir=/scratch/upper,workdir=/scratch/work root /root || fail "no root"
out=$(sed 's/.*guest_out=\([^ ]*\).*/\1/' /proc/cmdline)
mkdir -p /root$out; mount -t 9p -o $p9 out /root$out || fail "no $out"
for kind in proc sysfs devtmpfs; do mount -t $kind $kind /root/$(echo $kind | sed 's/sysfs/sys/;s/devtmpfs/dev/'); done
mkdir -p /root/dev/pts /root/dev/shm; mount -t devpts pts /root/dev/pts; mount -t tmpfs shm /root/dev/shm
mount -t tmpfs run /root/run
chroot /root /bin/bash "$out/.command" </dev/null >"/root$out/output" 2>&1
echo $? >"/root$out/exit-code"; sync; poweroff -f
INIT
  chmod +x "$tree/init"
  (cd "$tree" && find . | "$1/root/bin/cpio" -o -H newc --quiet | gzip -1) >"$FOLDER/initrd.gz"
}

exec 9>"$FOLDER/.lock"; flock 9
version=$(sha256sum "$0" | cut -d' ' -f1)  # rebuilds what another version of this file has made
[ "$(cat "$FOLDER/ready" 2>/dev/null)" = "$version" ] || { unpack; echo "$version" >"$FOLDER/ready"; }
flock -u 9
exec 8>"$OUT/.lock"; flock -n 8 || die "another guest uses $OUT"
rm -f "$OUT/exit-code" "$OUT/console"; : >"$OUT/output"

# Commands of the guest's shell: the wire, the two devices, then the command. Packets between two addresses of one
# machine would use the loopback; two routing tables send them over the wire.
{ cat <<'SETUP'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 SOFT_ROCE=1
unset LD_LIBRARY_PATH
hostname soft-roce; echo "127.0.0.1 localhost soft-roce" >/etc/hosts
ip link set lo up
ip link add wire_a type veth peer name wire_b
ip addr add 10.78.0.1/24 dev wire_a; ip addr add 10.78.0.2/24 dev wire_b
for end in wire_a wire_b; do ip link set $end mtu 4300 up; ip rule add pref 5 iif $end lookup local; done
for end in all wire_a wire_b; do
  echo 1 >/proc/sys/net/ipv4/conf/$end/accept_local; echo 0 >/proc/sys/net/ipv4/conf/$end/rp_filter
done
ip route add 10.78.0.2 dev wire_a src 10.78.0.1 table 100; ip route add 10.78.0.1 dev wire_b src 10.78.0.2 table 100
ip rule add pref 6 to 10.78.0.0/24 lookup 100; ip rule add pref 10 lookup local; ip rule del pref 0
rdma link add rxe_a type rxe netdev wire_a && rdma link add rxe_b type rxe netdev wire_b || exit 125
for attempt in $(seq 50); do
  grep -q ffff /sys/class/infiniband/rxe_b/ports/1/gids/* 2>/dev/null && break; sleep 0.1
done
ulimit -l unlimited
SETUP
  printf 'cd %q || exit 125\n' "$PWD"; printf '%q ' "$@"; echo; } >"$OUT/.command"

share() { echo "local,path=$1,mount_tag=$2,security_model=none,multidevs=remap$3"; }
tail -n +1 -f "$OUT/output" 2>/dev/null & followers=$!
trap 'kill $followers 2>/dev/null || true' EXIT
trap 'exit 143' TERM INT HUP
late=0
timeout -k 5 "$SECONDS_AT_MOST" qemu-system-x86_64 -nodefaults -no-user-config -machine q35 \
  -accel "${GUEST_ACCEL:-tcg,thread=multi}" -cpu max -smp "${GUEST_CPUS:-2}" -m "${GUEST_MEMORY:-4G}" \
  -kernel "$FOLDER/vmlinuz" -initrd "$FOLDER/initrd.gz" \
  -append "console=ttyS0 panic=-1 quiet mitigations=off guest_out=$OUT" \
  -virtfs "$(share / host ,readonly=on)" -virtfs "$(share "$FOLDER/over" over ,readonly=on)" \
  -virtfs "$(share "$OUT" out '')" -serial "file:$OUT/console" -display none -monitor none -no-reboot \
  </dev/null >"$OUT/qemu.log" 2>&1 &
machine=$!; followers="$followers $machine"
wait $machine || late=$?
sleep 0.3
[ $late -ne 124 ] && [ $late -ne 137 ] || { say "not done within $SECONDS_AT_MOST s"; exit 124; }
[ -s "$OUT/exit-code" ] || { tail -n 20 "$OUT/qemu.log" "$OUT/console" >&2; die "the guest died"; }
exit "$(cat "$OUT/exit-code")"
