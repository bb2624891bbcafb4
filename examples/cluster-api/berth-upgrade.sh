#!/usr/bin/env -S -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C bash -p
# shellcheck shell=bash
# Upgrades the only control-plane node of a cluster in place, by kubeadm under `berth bridge`. On the node:
# /usr/local/sbin/berth-upgrade, owned by root, mode 0755.
#
#   berth-upgrade check VERSION   says whether an upgrade could begin; changes nothing
#   berth-upgrade run VERSION     begins one unless one runs, has failed or is done, and answers at once
#
# The last line of the output is the answer. Exit status: 0 `can: VERSION` or `done: VERSION`; 3 `in progress: STEP`; 69 `refused: WHY`,
# and nothing was changed; 64 wrong arguments; 1 `failed: WHY`, and every later call fails, too, until somebody has removed
# /var/lib/berth-upgrade/attempt. No caller's environment gets here (see the first line).
set -euo pipefail
umask 022
cd /

readonly STATE=/var/lib/berth-upgrade MANIFESTS=/etc/kubernetes/manifests
readonly VERSION='^v1\.(0|[1-9][0-9]{0,2})\.(0|[1-9][0-9]{0,2})$'
# The reason for which the last question was answered with no.
why=

main() {
    [[ $# == 2 && $1 =~ ^(check|run)$ && $2 =~ $VERSION ]] || answer 64 "usage: berth-upgrade check|run v1.MINOR.PATCH"
    ((EUID == 0)) || answer 64 "berth-upgrade needs root"
    install -d -m 700 "$STATE"
    # One call at a time decides. The other lock is held for as long as an upgrade runs.
    exec 8>"$STATE/gate" 9>"$STATE/lock"
    flock -w 20 8 || answer 1 "failed: another call has not been answered for 20 s"
    "$1" "$2"
}

# answer STATUS LINE
answer() {
    printf '%s\n' "$2"
    exit "$1"
}

# Sets `endpoint`, where this node's kube-apiserver listens, and `node`, the name that its kubelet has.
find_node() {
    local key=kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint
    why="$MANIFESTS/kube-apiserver.yaml has no annotation $key"
    endpoint=$(sed -n "s|^ *$key: ['\"]\?\([^'\"]*\)['\"]\?\$|\1|p" "$MANIFESTS/kube-apiserver.yaml") && [[ $endpoint =~ ^[]0-9a-f.:[]+$ ]] || return 1
    why="no kube-apiserver at $endpoint tells this kubelet its name"
    node=$(ask kubelet auth whoami -o 'jsonpath={.status.userInfo.username}') || return 1
    node=${node#system:node:}
    [[ $node =~ ^[a-z0-9.-]+$ ]] || return 1
}

# ask USER ARGUMENT…: kubectl with this node's kube-apiserver, not through a load balancer
ask() { kubectl --kubeconfig "/etc/kubernetes/$1.conf" --server "https://$endpoint" --request-timeout 5s "${@:2}"; }

served_version() { ask admin get --raw /version | sed -n 's/^ *"gitVersion": "\([^"]*\)".*/\1/p'; }

# Whether the node is of this version: no bridge answers in its place, and kube-apiserver at its port, the static pods' manifests
# and the kubelet, both the program and what runs, say so. No file of this script is asked.
is_at() {
    local name status=0 said
    # A bridge that hangs has the same exit status as none.
    why="berth bridge status does not say that no bridge is on"
    said=$(berth bridge status 2>&1) || status=$?
    [[ $status == 69 && $said == *"no bridge is on: "* ]] || return 1
    why="kube-apiserver at $endpoint is not ready, or not of $1"
    [[ $(ask admin get --raw /readyz) == ok && $(served_version) == "$1" ]] || return 1
    for name in kube-apiserver kube-controller-manager kube-scheduler; do
        why="the image in $MANIFESTS/$name.yaml is not of $1"
        grep -qxE " *image: [^ ]*/$name:${1//./\\.}" "$MANIFESTS/$name.yaml" || return 1
    done
    why="the kubelet is not of $1, or node $node is not ready"
    [[ $(kubelet --version) == "Kubernetes $1" ]] || return 1
    [[ $(ask admin get node "$node" -o 'jsonpath={.status.nodeInfo.kubeletVersion} {.status.conditions[?(@.type=="Ready")].status}') == "$1 True" ]] || return 1
    why=
}

can_begin() {
    local current _ minor patch current_minor current_patch said
    current=$(served_version) || :
    why="kube-apiserver at $endpoint does not say which version it is"
    [[ $current =~ $VERSION ]] || return 1
    IFS=. read -r _ minor patch <<<"$1"
    IFS=. read -r _ current_minor current_patch <<<"$current"
    why="$1 is neither a later patch of $current nor of the next minor version"
    ((minor == current_minor + 1 || (minor == current_minor && patch > current_patch))) || return 1
    is_at "$current" || return 1
    why="$node is not the only control-plane node"
    [[ $(ask admin get nodes -l node-role.kubernetes.io/control-plane -o name) == "node/$node" ]] || return 1
    said=$(berth bridge --dry-run -- kubeadm upgrade apply "$1" --yes 2>&1) || {
        why="berth bridge --dry-run: ${said##*$'\n'}"
        return 1
    }
    why=
}

check() {
    read_attempt
    [[ ! $running ]] || answer 1 "failed: an upgrade to $attempt is running"
    can_begin "$1" || answer 69 "refused: $why"
    answer 0 "can: $1"
}

run() {
    read_attempt
    if [[ $running ]]; then
        [[ $attempt == "$1" ]] || answer 1 "failed: an upgrade to $attempt is running"
        answer 3 "in progress: $(tail -n 1 "$STATE/step")"
    fi
    if is_at "$1"; then answer 0 "done: $1"; fi
    [[ $attempt != "$1" ]] || answer 1 "failed: the upgrade to $1 ended well, and now $why"
    can_begin "$1" || answer 69 "refused: $why"
    rm -f "$STATE/result"
    echo "begins" >"$STATE/step"
    write attempt "$1"
    # In a session of its own: the caller's may end.
    setsid -f bash -p -euo pipefail -c "$(declare -p STATE MANIFESTS why endpoint node && declare -f); upgrade \"\$1\"" upgrade "$1" \
        </dev/null >>"$STATE/log" 2>&1 8>&-
    answer 3 "in progress: begins"
}

# Reads the last upgrade's version and whether it runs. An upgrade that did not end well, or has no result, is the end.
read_attempt() {
    local result=none
    attempt=none running=
    [[ ! -e $STATE/attempt ]] || attempt=$(<"$STATE/attempt")
    flock -n 9 || running=yes
    [[ $running ]] || {
        [[ ! -e $STATE/result ]] || result=$(<"$STATE/result")
        [[ $attempt == none || $result == 0 ]] || answer 1 "failed: the upgrade to $attempt ended with status $result: \
$(tail -n 1 "$STATE/step"). See $STATE/log and berth bridge status; when the node is well, remove $STATE/attempt"
        find_node || answer 1 "failed: $why"
    }
}

# write FILE TEXT: the whole file or none, after a power failure, too
write() {
    echo "$2" >"$STATE/$1.new"
    sync "$STATE/$1.new"
    mv "$STATE/$1.new" "$STATE/$1"
    sync "$STATE"
}

step() { echo "$*" | tee "$STATE/step"; }

# The upgrade itself. Its descriptor 9 has the lock, which ends with it: no child gets it. A kill leaves no result, which counts as a failure.
upgrade() {
    trap 'write result $?' EXIT
    trap 'exit 143' TERM
    {
        step "install kubeadm $1"
        install-kubernetes kubeadm "$1"
        [[ $(kubeadm version -o short) == "$1" ]]
        step "berth bridge -- kubeadm upgrade apply $1"
        berth bridge -- kubeadm upgrade apply "$1" --yes
        step "berth bridge -- install kubelet $1, and restart it"
        # shellcheck disable=SC2016
        berth bridge -- bash -p -euc 'install-kubernetes kubelet "$1" && systemctl daemon-reload && systemctl restart kubelet' kubelet "$1"
        for ((i = 0; i < 60; i++)); do
            if is_at "$1"; then exit 0; fi
            step "wait until the node is of $1: $why"
            sleep 5
        done
        exit 1
    } 9>&-
}

main "$@"
