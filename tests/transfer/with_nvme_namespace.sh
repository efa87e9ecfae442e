#!/usr/bin/env bash
# with_nvme_namespace.sh COMMAND...: runs it with HALFMOON_TEST_BLOCK_DEVICE naming a namespace of
# NVMe over Fabrics. This machine is both ends: the kernel's target (nvmet) exports a loop device
# over TCP at 127.0.0.1, the kernel's host (nvme-tcp) connects to it.
#
# Wants root. Where the kernel or nvme-cli is missing it says so and runs the command without the
# variable; what is there and does not work is a failure. Exits as the command does.
set -euo pipefail

NQN=nqn.2024-01.org.halfmoon:test
PORT=${NVME_PORT:-4420}
BYTES=$((64 * 1024 * 1024))
TARGET=/sys/kernel/config/nvmet
SUBSYSTEM=$TARGET/subsystems/$NQN
LISTENER=$TARGET/ports/$PORT

without() {
    echo "skipped: a namespace of NVMe over Fabrics: $1"
    exec "${@:2}"
}

for tool in nvme losetup modprobe; do
    command -v $tool >/dev/null || without "no $tool" "$@"
done
[ "$(id -u)" = 0 ] || without "only root can make one" "$@"
missing=$(modprobe -a loop nvmet nvmet-tcp nvme-tcp 2>&1) || without "${missing##*$'\n'}" "$@"
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
[ ! -e "$SUBSYSTEM" ] || { echo "$SUBSYSTEM exists: it is in use, or was left behind" >&2; exit 1; }

# What was made, taken apart in reverse, however this ends.
clean() {
    set +e
    nvme disconnect -n $NQN >/dev/null
    rm -f "$LISTENER/subsystems/$NQN"
    rmdir "$LISTENER" "$SUBSYSTEM/namespaces/1" "$SUBSYSTEM"
    losetup -d "$loop"
    rm -f "$backing"
}
backing=$(mktemp /tmp/nvme-namespace.XXXXXX)
truncate -s $BYTES "$backing"
loop=$(losetup -f --show "$backing")
trap clean EXIT

mkdir "$SUBSYSTEM" "$SUBSYSTEM/namespaces/1" "$LISTENER"
echo 1 >"$SUBSYSTEM/attr_allow_any_host"
echo -n "$loop" >"$SUBSYSTEM/namespaces/1/device_path"
echo 1 >"$SUBSYSTEM/namespaces/1/enable"
echo tcp >"$LISTENER/addr_trtype"
echo ipv4 >"$LISTENER/addr_adrfam"
echo 127.0.0.1 >"$LISTENER/addr_traddr"
echo "$PORT" >"$LISTENER/addr_trsvcid"
ln -s "$SUBSYSTEM" "$LISTENER/subsystems/"
nvme connect -t tcp -a 127.0.0.1 -s "$PORT" -n $NQN

# The kernel makes the device a moment later.
device=
for _ in $(seq 100); do
    for controller in /sys/class/nvme/nvme*; do
        [ "$(cat "$controller/subsysnqn" 2>/dev/null)" = $NQN ] || continue
        device=/dev/${controller##*/}n1
    done
    [ -b "$device" ] && break
    sleep 0.1
done
[ -b "$device" ] || { echo "connected to $NQN, but no block device came" >&2; exit 1; }
echo "$device: $((BYTES / 1024 / 1024)) MiB over $(cat "/sys/class/nvme/$(basename "${device%n1}")/transport")"

rc=0
HALFMOON_TEST_BLOCK_DEVICE=$device "$@" || rc=$?
# What the host reads is what lies at the target.
cmp "$device" "$backing" || rc=1
exit $rc
