#!/usr/bin/env bash
# usage: scripts/try.sh [--yes]
#
# Makes a cluster of one node by `kubeadm init` of the version before the newest (scripts/cluster.sh), and opens a shell on the node, with
# kubectl, berth and the newest kubeadm. Clients that never retry dial kube-apiserver: a pod by the Service, another host, the node by
# localhost. This upgrades the node, and shows below the command's output how many connections are answered and lost:
#
#     counted berth bridge -- kubeadm upgrade apply VERSION --yes --ignore-preflight-errors all
#
# `counted` takes any other command, too. When the shell ends, all is removed; so it is on Ctrl-C before there is a shell, and on SIGTERM.
# Of the directories in the shell /etc, /usr, /run, /var/lib, /var/log and HOME are the node's; the others are the machine's. There is no
# CoreDNS, which kubeadm's preflight misses. BERTH_SETTLE is 10s, to save time.
# Needs root, what scripts/cluster.sh needs, script (Debian: bsdutils), and 4 GB on the file system of TMPDIR; where Go
# builds Kubernetes first, its caches take up to 10 GB more.
#
#   --yes   no shell: upgrade the node, and exit with 1 if the upgrade fails or a connection is lost
#
# Variables: BERTH, the berth to try; TLS_LOAD, the clients: built with cargo if not given

. "$(dirname "${BASH_SOURCE[0]}")/stage.sh"
. "$root/scripts/cluster/outside.sh"

# MB: the images of two versions, packed and unpacked, and the node's own programs.
readonly SPACE=4000
# New connections a second, each way.
readonly RATE=20
# Ways to kube-apiserver: name, network namespace, server, source address. scripts/cluster.sh has these addresses.
readonly WAYS=("service pod 10.96.0.1:443 10.244.1.2" "address far $HOST_IP:$PORT $CLIENT_IP" "localhost - 127.0.0.1:$PORT 127.0.0.1")

main() {
    local yes=false nodes=1 temporary=${TMPDIR:-/tmp} free
    parse_options yes -- "$@"
    if [[ ${TRY_ON_NODE:-} ]]; then
        be_operator
        return
    fi
    need_all
    need_tools script
    $yes || TRY_TERMINAL=$(stty -g 2>/dev/null) || wrong_usage "a shell needs a terminal: give --yes"
    [[ $(realpath -- "$temporary") != /@(etc|usr|run|var/lib|var/log)?(/*) ]] || unavailable "a node has a $temporary of its own: set TMPDIR to another directory"
    free=$(df --output=avail -BMB -- "$temporary" | tail -n 1)
    ((${free%MB} >= SPACE)) || unavailable "$temporary has ${free// /} of room, and the cluster needs $SPACE MB: set TMPDIR to another directory"
    need_versions
    need_program BERTH berth
    export BERTH TRY_TERMINAL
    say "a cluster of Kubernetes $OLD is made, which takes a minute or two"
    exec "$root/scripts/cluster.sh" -- env TRY_ON_NODE=yes "$root/scripts/try.sh" "$@"
}

# be_operator: on the node, when the cluster is ready
be_operator() {
    local way name namespace server source figures from status=0 lost=0
    # A directory that is removed with the node.
    export HOME=/run/try
    work=$HOME upgrade="berth bridge -- kubeadm upgrade apply $NEW --yes --ignore-preflight-errors all"
    mkdir "$work"
    watch_over 86400
    install "$BERTH" /usr/bin/berth
    install "$PROGRAMS/$NEW/kubeadm" /usr/bin
    for way in "${WAYS[@]}"; do
        read -r name namespace server source <<<"$way"
        start_needed "$name" "$namespace" "$TLS_LOAD" --server "$server" --ca /etc/kubernetes/pki/ca.crt --rate $RATE --source "$source"
    done
    for name in "${WAYS[@]%% *}"; do await 20 "connections: $name" answers_are $RATE "$name"; done
    now from
    # shellcheck disable=SC2086 # words
    if $yes; then counted $upgrade || status=$?; else open_shell; fi
    for name in "${WAYS[@]%% *}"; do
        stop "$name" 60
        ((exits[$name] == 0)) || fail "the clients ended with ${exits[$name]}: $name" "$name.log"
        figures=$(window "$from" 9e18 "$name")
        say "new connections, $name: $(words "$figures")"
        lost=$((lost + $(lost "$figures")))
    done
    ! $yes || ((status + lost == 0)) || fail "exit status of the upgrade $status, $lost connections lost"
}

open_shell() {
    cat >~/.bashrc <<TEXT
$(declare -f counted show counts)
cd
PS1='try:\w\\$ '
echo '
A node with Kubernetes $OLD. Clients dial it $((${#WAYS[@]} * RATE)) times a second, and never retry. This upgrades it, and counts:

    counted $upgrade

Without "berth bridge --", clients have an outage. "exit" removes all.
'
TEXT
    # A terminal of its own has job control. What a script starts in the background ignores these signals.
    env --default-signal=INT,QUIT SHELL=/bin/bash script --quiet --command bash /dev/null
}

# counted COMMAND…: runs it, and counts meanwhile
counted() {
    "$@" 2>&1 | show "${EPOCHREALTIME/./}"
    return "${PIPESTATUS[0]}"
}

# show FROM: standard input, and below it on a terminal the counts since then
show() {
    local line clear=''
    # Ctrl-C is for the command.
    trap '' INT
    [[ ! -t 1 ]] || clear=$'\e[K'
    # A question is a line without an end.
    while IFS= read -rt 1 line || (($? > 128)) || [[ $line ]]; do
        [[ ! $line ]] || printf '%s%s\n' "$line" "$clear"
        [[ ! $clear ]] || printf '%s%s\r' "$(counts "$1")" "$clear"
    done
    counts "$1"
}

# counts FROM: of the new connections that began since then
counts() {
    cat ~/*.out | awk -F '[:,]' -v from="$1" '
        $2 >= from { if (/"outcome":"ok"/) answered++; else lost++ }
        END { printf "new connections: %d answered, %d lost\n", answered, lost }'
}

main "$@"
