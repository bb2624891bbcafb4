# shellcheck shell=bash
# Part of scripts/kubelet.sh: what is done to the static pods, and what must hold.

declare -gA ids=()

# From kubeadm's own manifest to one behind berth: the one time when there is a gap.
first_switch() {
    local name=kube-apiserver
    heading "berth inject, of kube-apiserver $OLD"
    start_load
    await 10 "the first connections" answers_are 100
    now 'at[inject]'
    "$BERTH" inject --image "$IMAGE" --write 2>"$work/inject.log" || fail "berth inject" inject.log
    await 60 "the pod to run" pod $name '.status.containerStatuses[] | select(.started != null) | .name'
    await 60 "$name to join" has_joined_pod $name
    await 10 "connections again" answers_are $(($(answers) + 100))
    now 'at[injected]'
    row "gap of the first switch" "$(gap "${at[inject]}" "${at[injected]}")"
    await 60 "all probes to pass" pod_is_ready $name
    follow_pod $name
    row "probes" "startup, readiness and liveness pass, nothing restarted"
}

has_joined_pod() { has_joined "$(uid_of "$1")"; }

# gap FROM TO: how long no connection succeeded, from the first that was lost to the first after the last
gap() {
    awk -v from="$1" -v to="$2" '$1 < from || $1 > to { next }
        $3 != "ok" { first = first ? first : $1; last = $1; end = 0; n++ }
        $3 == "ok" && last && !end { end = $1 }
        END { if (n) printf "%.1f s (%d connections lost)", (end - first) / 1e6, n; else print "none" }' "$work/load.out"
}
