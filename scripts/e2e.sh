#!/usr/bin/env bash
# usage: scripts/e2e.sh [--rate N] [--keep] [--help]
#
# Upgrades of a real kube-apiserver behind berth, in network namespaces that it makes and removes: from
# `berth run` to `berth exec` and `berth serve` as a pod has them, then from pod to pod, each stopped as
# a kubelet does it, once with --shutdown-delay-duration=0 and once with 5s. What is asserted is seen from outside (the clients, the
# audit logs, /proc), not in berth's own words.
# Needs root, ip, openssl, jq, cargo and the binaries of scripts/kube-apiserver.sh, which it builds if
# they are not there.
#
#   --rate N   new TLS connections a second (100, and no fewer); a machine that cannot keep it fails
#   --keep     keep the directory with the logs, and print where it is; failures keep it too
#   --help     this text
#
# Variables:
#   BERTH      the berth to test; built with cargo if not given
#   CARGO      the cargo command, if not the one on PATH
#   and those of scripts/kube-apiserver.sh
#
# Exit status: 0 all held; 1 something did not; 64 a wrong argument; 69 something is missing; 70 a build failed.

# shellcheck source=scripts/e2e/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/e2e/common.sh"
# All the time that it may take, in seconds; 50 to 80 are needed.
readonly LIMIT=180

# Watches through the berth.
readonly WATCHES=3
# The instances, in the order in which they take over from one another. a is `berth run`; the others are
# two processes each, `berth exec` and `berth serve`, as a pod with a sidecar has them.
readonly INSTANCES=(a b c d)
# Each one's --shutdown-delay-duration, in seconds: that long it serves after SIGTERM.
readonly -A DELAY=([a]=3 [b]=0 [c]=5 [d]=0)

main() {
    keep=false rate=$LEAST_RATE
    parse_options keep 'rate=^[1-9][0-9]{2,3}$' -- "$@"
    # shellcheck source=scripts/e2e/clients.sh
    . "$root/scripts/e2e/clients.sh"
    # shellcheck source=scripts/e2e/checks.sh
    . "$root/scripts/e2e/checks.sh"

    need_root "network namespaces"
    need_tools ip openssl jq "${CARGO:=cargo}"
    need_binaries
    set_stage
    sample_listeners &
    pid[sampler]=$!

    first_instance
    upgrade_that_must_not_be
    upgrade a b
    upgrade b c
    upgrade c d
    end_clients

    check_all
    report "kube-apiserver $version"
}

# a alone, with everything that looks on.
first_instance() {
    say "starting a, kube-apiserver $version"
    start_run a a
    await 60 "a to listen on $HOST_IP:$PORT" listeners_are 1
    await 30 "the namespace default" kubectl get --raw /api/v1/namespaces/default
    await 30 "the Service kubernetes to have an address" service_has_addresses
    endpoints[a]=$(service_addresses)
    start_watches
    watch_past_the_berth a
    now 'at[load]'
    start_load
    start_writer
    await 10 "the first 100 connections" answers_are 100
}

# The new version's manifest has a flag that the new version does not know.
upgrade_that_must_not_be() {
    say "starting b with a flag that does not exist"
    now 'at[broken]'
    start_run broken b --no-such-flag
    unset 'needed[broken]'
    await 30 "b to end" has_ended broken
    now 'at[broken-ended]'
    take_exit broken
    "$BERTH" status --run-dir "$work/run" --json >"$work/broken.status.json"
    await 10 "100 connections more" answers_are $(($(answers) + 100))
    now 'at[broken-over]'
}

# upgrade OLD NEW
upgrade() {
    local old=$1 new=$2 before
    say "starting $new as it should be"
    now "at[$new]"
    start_pod "$new"
    await 60 "$new to serve" has_served "$new" 1
    now "at[$new-joined]"
    before=$(served_by "$old")
    await 20 "both to serve 100 connections" both_served "$old" $((before + 100)) "$new" 100
    watch_past_the_berth "$new"
    endpoints[$old$new]=$(service_addresses)
    now "at[$old-stop]"
    say "stopping $old"
    stop_instance "$old"
    now "at[$old-left]"
    await 10 "100 connections more" answers_are $(($(answers) + 100))
    # kube-apiserver's own reconciler puts the survivor's address back within 10 s (design).
    await 20 "the Service kubernetes to have an address again" service_has_addresses
    now "at[$old-service]"
    endpoints[$new]=$(service_addresses)
    held[$new]=$(own_inodes "$new")
}

main "$@"
