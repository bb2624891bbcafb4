#!/usr/bin/env bash
# usage: scripts/service.sh [--upgrades N] [--away SECONDS]... [--keep]
#
# Upgrades of a real kube-apiserver behind berth, in network namespaces, judged at the Service `kubernetes`: by clients that dial its address
# through a real kube-proxy, and by what that has in the kernel. Then etcd stops for a while, and a shim is killed.
# Needs root, ip, nft, openssl, jq, cargo and the binaries of scripts/kube-apiserver.sh, which it builds if they are not there.
#
#   --upgrades N       upgrades with --cluster, and as many without (3)
#   --away SECONDS     for so long etcd is stopped (20)
#   --keep             keep the directory with the logs, and print where it is; failures keep it too
#
# Variables: BERTH, the berth to test; built with cargo if not given

export TZ=UTC

. "$(dirname "${BASH_SOURCE[0]}")/stage.sh"

# New connections a second.
readonly rate=$LEAST_RATE
# The default of --shutdown-delay-duration.
readonly -A DELAY=()

main() {
    local seconds
    keep=false upgrades=3 away=()
    parse_options keep 'upgrades=^[1-9][0-9]{0,2}$' 'away+=^[1-9][0-9]{0,2}$' -- "$@"
    ((${#away[@]})) || away=(20)
    # All the time that it may take, in seconds.
    LIMIT=$((240 + 60 * upgrades + $(IFS=+ && echo "${away[*]}") * 2))
    . "$root/scripts/service/stage.sh"
    . "$root/scripts/service/seen.sh"

    need_root "network namespaces"
    need_tools ip nft openssl jq "${CARGO:=cargo}"
    need_kubernetes
    version=$(kubernetes_version "$KUBE_APISERVER")
    need_program BERTH berth debug
    need_clients
    set_stage
    start_observer
    start_node

    first_instance
    heading "$upgrades upgrades with --cluster"
    upgrade_all kept
    shim_killed
    for seconds in "${away[@]}"; do etcd_away "$seconds"; done
    killed_is_forgotten
    lone_shim
    heading "$upgrades upgrades without it"
    upgrade_all plain
    end_load
    report "kube-apiserver and kube-proxy $version"
}

# start_next NUMBER: another instance, which makes so many. After an upgrade, kube-apiserver's own reconciler puts the address back
# within 10 s.
start_next() {
    next_instance
    start_pod "$instance"
    await 60 "$instance to serve" shims_are joined "$1"
    await 30 "the Service to have kube-apiserver's own address" service_has_addresses
}

first_instance() {
    say "starting kube-apiserver $version"
    start_next 1
    await 20 "kube-proxy to send clients there" proxied
    load_to load $SERVICE_IP:$SERVICE_PORT
    await 10 "the first 100 connections" answers_are 100
}

# upgrade_all WAY: one instance after another; what clients were refused, and what the kernel had, from one stop to the next
upgrade_all() {
    local way=$1 number old refused=0 in_kernel=0 empty=0 from to figures shown=()
    now "at[$way]"
    for ((number = 1; number <= upgrades; number++)); do
        old=$instance
        start_next 2
        now from
        at[stop-$way-$number]=$from
        say "stopping $old, $way $number"
        stop_instance "$old"
    done
    await 20 "the Service to have kube-apiserver's own address" service_has_addresses
    await 10 "the address in kube-proxy" proxied
    await 10 "100 connections more" answers_are $(($(answers) + 100))
    now "at[stop-$way-$number]"
    for ((number = 1; number <= upgrades; number++)); do
        from=${at[stop-$way-$number]} to=${at[stop-$way-$((number + 1))]}
        figures=$(at_service "$from" "$to")
        shown+=("$(lost "$figures")")
        (($(lost "$figures") == 0)) || refused=$((refused + 1))
        (($(spells kernel "$from" "$to") == 0)) || in_kernel=$((in_kernel + 1))
        (($(spells union "$from" "$to") == 0)) || empty=$((empty + 1))
    done
    from=${at[$way]} to=${at[stop-$way-$number]}
    figures=$(at_service "$from" "$to")
    row "connections to $SERVICE_IP" "$(words_of "$figures")"
    row "lost in each upgrade" "${shown[*]}"
    row "upgrades in which clients lost" "$refused of $upgrades"
    row "in which the kernel had no address" "$in_kernel of $upgrades"
    row "in which all slices were empty" "$empty of $upgrades$(longest_spell "$from" "$to")"
    if [[ $way == kept ]]; then
        expect "connections lost with --cluster" "$(lost "$figures")" -eq 0 load.log
        expect "spells without an address in kube-proxy, with --cluster" \
            "$(spells kernel "$from" "$to")" -eq 0 kernel.log
        expect "spells without an address in all slices, with --cluster" \
            "$(spells union "$from" "$to")" -eq 0 slices.log
        expect "only $NODE wrote the slice" "$(slices_in_service)" == "berth-$NODE-ipv4,kubernetes" slices.log
    else
        expect "upgrades in which clients lost something without --cluster: at least half" $((refused * 2)) -ge "$upgrades" load.log
        expect "upgrades in which the slices were empty without --cluster: at least half" $((empty * 2)) -ge "$upgrades" slices.log
    fi
}

# The shim of the old instance dies in the middle of an upgrade: with it go the connections that it had, nothing else.
shim_killed() {
    local old=$instance figures refused
    killed=$old
    say "an upgrade in which a shim is killed"
    heading "an upgrade in which the old one's shim gets SIGKILL"
    start_next 2
    now 'at[killed]'
    kill_now "$old"
    stop "$old-api" 30
    await 20 "the Service to have kube-apiserver's own address" service_has_addresses
    await 10 "100 connections more" answers_are $(($(answers) + 100))
    now 'at[killed-over]'
    figures=$(at_service "${at[killed]}" "${at[killed-over]}")
    refused=$(by_jq "map(select(.began >= ${at[killed]} and lost and (.detail | kind) == \"refused\")) | length" "$work/load.out")
    row "connections to $SERVICE_IP" "$(words_of "$figures"); $refused refused"
    expect "connections refused when a shim was killed" "$refused" -eq 0 load.log
    # Those that it was relaying at that moment.
    expect "connections lost when a shim was killed: only its own" "$(lost "$figures")" -le 5 load.log
    expect "spells without an address in kube-proxy" "$(spells kernel "${at[killed]}" "${at[killed-over]}")" -eq 0 kernel.log
    expect "spells without an address in all slices" "$(spells union "${at[killed]}" "${at[killed-over]}")" -eq 0 slices.log
}

# Its Lease is removed by the one that lives. Time in which nothing could be read does not count.
killed_is_forgotten() {
    local gone
    await 60 "the Lease of the killed shim to be removed" have_leases no "$NODE.$killed"
    gone=$(lease_events "${at[killed]}" 9e18 | awk -v name="$NODE.$killed" '$2 == "DELETED" && $3 == name { print $1 }')
    row "Lease of the killed shim" "removed after $(((gone - at[killed]) / 1000000)) s"
    expect "ms until the Lease of the killed shim was removed" $(((gone - at[killed]) / 1000)) -ge 30000 leases.log
}

# etcd_away SECONDS: two more nodes have Leases; while nothing can be written, all of them look dead.
etcd_away() {
    local seconds=$1 figures name removed
    say "etcd is away for $seconds s"
    heading "etcd stopped for $seconds s, with 3 nodes"
    for name in cp-2 cp-3; do start_other_node "$name"; done
    await 30 "their Leases" have_leases yes cp-2.cp-2 cp-3.cp-3
    now 'at[away]'
    kill -STOP "${pid[etcd]}"
    pause "$seconds"
    kill -CONT "${pid[etcd]}"
    now 'at[back]'
    # Everybody has renewed twice, so everybody has read twice.
    for name in "$NODE" cp-2 cp-3; do
        await 40 "$name to renew its Lease" renewed "$name" 2
    done
    await 20 "the Service to have kube-apiserver's own address" service_has_addresses
    await 10 "100 connections more" answers_are $(($(answers) + 100))
    now 'at[away-over]'
    figures=$(window "${at[away]}" "${at[away-over]}")
    row "connections to $SERVICE_IP" "$(words "$figures")"
    row "first renewal after it was back" "$((($(first_renewal) - at[back]) / 1000)) ms"
    removed=$(removed "${at[away]}" "${at[away-over]}" | awk -v killed="$NODE.$killed" '$0 != killed' | xargs)
    row "slices and Leases that were removed" "${removed:-none}"
    expect "connections lost while etcd was away" "$(lost "$figures")" -eq 0 load.log
    expect "slices and Leases that were removed while etcd was away, or after" "$removed" == "" slices.log leases.log
    expect "spells without an address in kube-proxy" "$(spells kernel "${at[away]}" "${at[away-over]}")" -eq 0 kernel.log
    expect "spells without an address in all slices" "$(spells union "${at[away]}" "${at[away-over]}")" -eq 0 slices.log
    for name in cp-2 cp-3; do stop "$name" 10; done
    await 10 "their Leases to be removed" have_leases no cp-2.cp-2 cp-3.cp-3
}

# The last shim of the node ends, and then its slice must have gone before it stops listening; the apiserver stays. It comes
# back, and so does the slice.
lone_shim() {
    say "a lone shim ends and comes back"
    heading "a lone shim ends"
    now 'at[lone]'
    stop "$instance" 20
    await 10 "its Lease to be removed" have_leases no "$NODE.$instance"
    now 'at[lone-over]'
    expect "what is removed" "$(removed "${at[lone]}" "${at[lone-over]}" | xargs)" == "berth-$NODE-ipv4 $NODE.$instance" slices.log leases.log
    expect "the slice is removed before the shim stops listening" \
        "$(grep -oE 'is out of the Service|INFO left' "$work/$instance.log" | paste -sd ' ')" == "is out of the Service INFO left" "$instance.log"
    expect "its exit status" "${exits[$instance]}" == 0 "$instance.log"
    mv -- "$work/$instance.log" "$work/$instance-ended.log"
    start_shim "$instance"
    await 20 "it to serve again" shims_are joined 1
    await 20 "the slice to be there again" slice_is_there
    # The control begins with a shim that writes nothing. Its own slice goes with the one that does.
    stop "$instance" 20
    cluster=()
    start_shim "$instance"
    await 20 "it to serve without --cluster" shims_are joined 1
    await 20 "kube-proxy to send clients there" proxied
    await 10 "100 connections more" answers_are $(($(answers) + 100))
}

end_load() {
    stop load 20
    expect "new connections a second that this machine kept up" "$(pace)" -ge "$rate" load.log
}

main "$@"
