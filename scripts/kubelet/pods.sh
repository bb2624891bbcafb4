# shellcheck shell=bash
# Part of scripts/kubelet.sh: the pods, as the kubelet, containerd and berth report them.

kubectl() { "$KUBECTL" "${kubectl_options[@]}" "$@"; }

# serves VERSION: it is ready, and of this version
serves() {
    kubectl get --raw /readyz && [[ $(kubectl get --raw /version) == *"\"gitVersion\": \"$1\""* ]]
}

# pod NAME FILTER: by jq, of the pod with this metadata.name in its manifest, as the kubelet has it
pod() {
    "$KUBECTL" get --raw /pods --server http://127.0.0.1:10255 |
        jq -er --arg name "$1-node" ".items[] | select(.metadata.name == \$name) | $2"
}

uid_of() { pod "$1" .metadata.uid; }

# pod_is_ready NAME: every probe of every container that runs has passed, and none was started again
pod_is_ready() {
    pod "$1" '[.status.initContainerStatuses[]?, .status.containerStatuses[]] |
        length > 0 and all(.ready and .restartCount == 0) and any(.name == "kube-apiserver" and .started)' | grep -x true
}

pod_has_joined() { "$BERTH" status | grep -E "^\S+ +$(uid_of "$1") +joined +ready "; }

# follow_pod NAME: sets uid; the IDs of its containers stay known when the pod is gone
follow_pod() {
    local container
    uid=$(uid_of "$1")
    for container in kube-apiserver berth; do
        ids[$uid-$container]=$(pod "$1" "[.status.initContainerStatuses[]?, .status.containerStatuses[]] | .[] |
            select(.name == \"$container\") | .containerID | sub(\".*//\"; \"\")")
    done
}

# Keeps the logs of all containers, as logs/UID-CONTAINER.NUMBER, which the kubelet removes with the pods. A pod
# of the same manifest has the same UID, and its first log is number 0 again.
keep_logs() {
    # Not by way of /var/log, which is another mount.
    local directory=$work/node/var/log/pods log name
    mkdir "$work/logs"
    while :; do
        for log in "$directory"/*/*/*.log; do
            name=${log#"$directory"/*_*_}
            name=${name%.log}
            name=${name/\//-}
            name=$work/logs/${name/\//.}
            [[ ! -e $log || $log -ef $name ]] || ln -f --backup=numbered "$log" "$name" 2>/dev/null || :
        done
        pause 0.2
    done
}

# log_of CONTAINER [UID]: its name under $work
log_of() { echo "logs/${2:-$uid}-$1.0"; }

# exit_of ID: when the container's process ended, in microseconds, and with what status, from containerd's events
exit_of() {
    sed -n 's|.* /tasks/exit \({.*\)|\1|p' "$work/events.out" | jq -r --arg id "$1" '
        select(.container_id == $id and .id == $id) | "\(.exited_at) \(.exit_status // 0)"' | {
        read -r time status && echo "$(microseconds "$time") $status"
    }
}
has_exited() { [[ -n $(exit_of "$1") ]]; }

# logged_at WORD LOG: when the line that ends in the word was written
logged_at() { microseconds "$(grep " $1\$" "$2" | tail -n 1 | cut -d' ' -f1)"; }
microseconds() { date -d "$1" +%s%6N; }
