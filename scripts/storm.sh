#!/usr/bin/env bash
# usage: scripts/storm.sh [--rounds N] [--clients N] [--informers N] [PART...]
#
# Measures what clients meet in a storm, with --max-openings off and auto by turns, and prints a table of medians in
# Markdown for each part. The instance has one CPU, clients and berth have the others; all are in a network namespace that ends
# with them. Needs root, cargo, two CPUs, and for the last two parts openssl and the binaries of scripts/kube-apiserver.sh, which it
# builds if they are not there. Have nothing else run meanwhile.
#
#   reconnect   an instance whose handshakes and requests take 1 ms of CPU each; 5,000 clients come at once
#   greedy      the same instance; one source opens 2,000 connections a second for 30 s, beside 50 others with 2 a second
#   real        reconnect to a kube-apiserver, which has etcd beside it on its CPU and an RSA key of 2,048 bits
#   ramp        a kube-apiserver is restarted; 2,000 informers list 500 ConfigMaps of 1.5 KB and watch them again
#   all if none is given; about 20 minutes
#
#   --rounds N      times that each part is measured with each value (3)
#   --clients N     clients that come at once (5,000)
#   --informers N   informers of ramp (2,000)
#   --help          this text
#
# Variables:
#   BERTH   the berth to measure, instead of a built one
#   CARGO   the cargo command, if not the one on PATH
#   and those of scripts/kube-apiserver.sh for the newest version, and of Cargo, such as CARGO_TARGET_DIR
#
# Exit status: 0 measured; 64 a wrong argument; 69 something is missing, or broke down; 70 a build failed.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
readonly PARTS=(reconnect greedy real ramp)

main() {
    # shellcheck disable=SC2034 # By their names.
    local parts part name options=() rounds='' clients='' informers=''
    local number='^[1-9][0-9]{0,5}$'
    parse_options "rounds=$number" "clients=$number" "informers=$number" "ARGUMENT=$(one_of "${PARTS[@]}")" -- "$@"
    for name in rounds clients informers; do [[ -z ${!name} ]] || options+=("--$name" "${!name}"); done
    parts=("${arguments[@]:-${PARTS[@]}}")
    need_root "network namespaces"
    (($(nproc) > 1)) || unavailable "two CPUs are needed: one for the instance, and one for its clients and berth"
    need_cargo
    need_program BERTH berth
    if needs_kubernetes "${parts[@]}"; then
        type -P openssl >/dev/null || unavailable "no openssl here, which makes kube-apiserver's key"
        need_kubernetes
    fi
    build --quiet --release --bin berth-bench
    bench=$(target_directory)/release/berth-bench
    work=$(mktemp -d -t berth-storm.XXXXXX)
    child=
    trap clear EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # The directory of the parts' files, so that nothing is left of one that was killed.
    export TMPDIR=$work
    # What an option does not set is to be the default.
    unset "${!BERTH_@}"
    if needs_kubernetes "${parts[@]}"; then
        openssl genpkey -quiet -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out "$work/server.key"
        options+=(--kube-apiserver "$KUBE_APISERVER" --etcd "$ETCD" --server-key "$work/server.key")
    fi
    for part in "${parts[@]}"; do
        say "$part"
        printf '\n%s, by %s%s\n\n' "$part" "$("$BERTH" --version)" "$(needs_kubernetes "$part" && echo ", $("$KUBE_APISERVER" --version)")"
        # In the background: a signal interrupts `wait`.
        "$bench" storm "$part" --berth "$BERTH" "${options[@]}" &
        child=$!
        wait "$child"
        child=
    done
}

# Ends the processes that it started.
clear() {
    [[ -z $child ]] || { kill -TERM "$child" && wait "$child"; } 2>/dev/null || :
    rm -rf -- "$work"
}

needs_kubernetes() { [[ " $* " == *" real "* || " $* " == *" ramp "* ]]; }

main "$@"
