#!/usr/bin/env bash
# usage: scripts/etcd-history.sh [--short | --pause MIB] [--changes N] [--each N] [--seed N] [--etcd VERSION]... [--keep] [--check]
#
# A real etcd with one member is replaced under `berth bridge` again and again, while clients read, write, compare and swap, and watch, and
# while etcd, the temporary etcd and the bridge are killed, hang, are defragmented and compacted at random moments (tests/etcd-history).
# porcupine judges whether what clients were answered is linearizable. Besides: nothing that was acknowledged is gone, revisions never go
# back, watches have each revision once, and the node's etcd opens each data directory alone afterwards. The control is the way that is
# not safe: a second etcd that waits inside etcd for the lock on the database. It must be found within 20 changes of hands.
# In namespaces, with the data in memory. Needs root, ip, unshare, setpriv, timeout, cargo, Go and the binaries of scripts/kube-apiserver.sh.
#
#   --short            the control, then as many changes of hands as fit into what the control leaves of 90 s, and into 48 s at
#                      least; without kubeadm's backup, which is copied back 15 s after etcd was stopped
#   --pause MIB        without the control and without faults, with a database of this size: how long clients wait
#   --changes N        changes of hands: from own etcd to the temporary one, and back (500)
#   --each N           how many of them with one data directory (50)
#   --seed N           what is drawn at random; printed (a new one each time)
#   --etcd VERSION     3.5 or 3.6; several take turns (both; with --short 3.6)
#   --keep             keep the data and the logs, and print where they are; failures keep them too
#   --check            only check that all is there, without building
#
# Variables: BERTH, the berth to test; built with cargo if not given

. "$(dirname "${BASH_SOURCE[0]}")/etcd/stage.sh"

# Seconds of the short form, the least of its changes of hands, the most of the control (chance decides how many of its 20 changes
# of hands it needs), and a change of hands where much of what is done to it hangs for 12 s.
readonly SHORT=90 LEAST=48 CONTROL=300 CHANGE=8

main() {
    short=false keep=false check=false changes=500 each=50 seed='' pause='' etcd=()
    parse_options short keep check 'pause=^[1-9][0-9]{0,4}$' 'changes=^[1-9][0-9]{0,5}$' 'each=^[1-9][0-9]{0,3}$' 'seed=^[0-9]{1,9}$' 'etcd+=^3\.[56]$' -- "$@"
    local options=() status=0 left
    ! $short || ((${#etcd[@]})) || etcd=(3.6)
    begin_work
    if $short; then
        SECONDS=0
        history control $CONTROL -size 256 "${options[@]}" || status=1
        left=$((SHORT - SECONDS > LEAST ? SHORT - SECONDS : LEAST))
        history history $left -size 16 -changes "$changes" -each "$changes" -backups none -limit $((left - 35))s "${options[@]}" || status=1
    elif [[ $pause ]]; then
        history history $((300 + changes * (CHANGE + pause / 50))) -all -calm -size "$pause" -changes "$changes" -each "$changes" "${options[@]}" || status=1
    else
        history control $CONTROL -size 256 "${options[@]}" || status=1
        history history $((300 + changes * CHANGE)) -all -limit $((60 + changes * CHANGE))s -size 64 -changes "$changes" -each "$each" "${options[@]}" || status=1
    fi
    ((!status)) || keep=true
    return $status
}

# history WHAT SECONDS OPTION…: one run, with its data in memory; what is left of it goes into $work
history() {
    mkdir -- "$work/$1"
    # shellcheck disable=SC2016
    in_namespaces "$1" "$2" bash -euc 'mount -t tmpfs -o size=$2m history /mnt
        status=0
        "${@:3}" || status=$?
        rm -rf /mnt/template-*
        if ((status)) || $1; then cp -a /mnt/. "$0"; fi
        exit $status' "$work/$1" "$keep" $((4096 + 5 * ${pause:-0})) "$HISTORY" -what "$1" -work /mnt "${@:3}"
}

main "$@"
