#!/usr/bin/env bash
# usage: scripts/etcd-power.sh [--copies N] [--seed N] [--etcd VERSION]... [--keep] [--check]
#
# What a power loss leaves of a real etcd that is replaced under `berth bridge`. Its data is on ext4, in an image on a btrfs in another image;
# a copy of the inner image by reflink, at a random moment of changes of hands, is what the disk has then. Afterwards each is mounted, and
# the node's etcd, alone, has to open it and have all that was acknowledged before the copy. The control is an etcd that does not sync:
# some of its copies must lack something. Needs what scripts/etcd-history.sh needs, a kernel with btrfs, ext4 and loop devices, mkfs.btrfs,
# mkfs.ext4, and 3 GB on the file system of TMPDIR.
#
#   --copies N         copies of the disk (50)
#   --etcd VERSION     3.5 or 3.6; of several each has its part of the copies (both)
#   --seed, --keep, --check, and variables: as scripts/etcd-history.sh has them

. "$(dirname "${BASH_SOURCE[0]}")/etcd/stage.sh"

# Of the image for etcd's data, and of the one in which that and its copies are; files with holes.
readonly INNER=512M OUTER=16G
# Copies of the control.
readonly CONTROL=8

main() {
    local status=0 options=()
    keep=false check=false copies=50 seed='' etcd=()
    parse_options keep check 'copies=^[1-9][0-9]{0,3}$' 'seed=^[0-9]{1,9}$' 'etcd+=^3\.[56]$' -- "$@"
    need_tools umount mkfs.btrfs mkfs.ext4 truncate
    need_file_systems
    begin_work
    power bridge $((300 + copies * 20)) -copies "$copies" "${options[@]}" || status=1
    power control 300 -unsafe -copies $CONTROL -etcd "$ETCD" || status=1
    ((!status)) || keep=true
    return $status
}

# The kernel has them built in or loads them when they are mounted first.
need_file_systems() {
    local name
    [[ -c /dev/loop-control ]] || unavailable "this kernel has no loop devices (/dev/loop-control)"
    for name in btrfs ext4; do
        grep -qw "$name" /proc/filesystems || modprobe "$name" 2>/dev/null || unavailable "this kernel has no $name"
    done
}

# power NAME SECONDS OPTION…: one run on file systems of its own
power() {
    local name=$1 status=0
    mkdir -p -- "$work/$name"/{outer,data,logs}
    # A loop device that mount(8) made goes with the mount, and that with the namespace.
    # shellcheck disable=SC2016
    in_namespaces "$name" "$2" bash -euc 'cd "$0" && inner=outer/data.img
        truncate -s "$1" outer.img && mkfs.btrfs -q outer.img &>mkfs.log && mount -o loop,noatime outer.img outer
        truncate -s "$2" "$inner" && mkfs.ext4 -q "$inner" && mount -o loop,noatime "$inner" data
        "$3" -what power -work "$0/logs" -image "$0/$inner" -mount "$0/data" "${@:4}"' \
        "$work/$name" $OUTER $INNER "$HISTORY" "${@:3}" || status=$?
    [[ $keep == true || $status != 0 ]] || rm -rf -- "${work:?}/$name"
    return $status
}

main "$@"
