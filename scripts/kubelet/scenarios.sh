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

# A second pod beside the first, by hand: another file, another name, the new version.
roll_by_hand() {
    local old
    heading "a second pod with kube-apiserver $NEW, and the first one's end"
    follow_pod kube-apiserver
    old=$uid
    now 'at[second]'
    # The kubelet reads no file with a dot; a rename is all or nothing.
    sed "s/:$OLD\$/:$NEW/; s/^  name: kube-apiserver\$/&-next/" $manifests/kube-apiserver.yaml >$manifests/.next
    mv $manifests/.next $manifests/kube-apiserver-next.yaml
    await 60 "the second pod to join" has_joined_pod kube-apiserver-next
    now 'at[joined]'
    row "joined after" "$(seconds second joined)"
    await 10 "connections with both" answers_are $(($(answers) + 200))
    now 'at[remove]'
    rm $manifests/kube-apiserver.yaml
    await 60 "the first pod to end" has_exited "${ids[$old-berth]}"
    await 10 "connections with the second alone" answers_are $(($(answers) + 100))
    now 'at[rolled]'
    part "connections meanwhile" "${at[second]}" "${at[rolled]}"
    check_end "$old" "${at[remove]}"
}

# check_end UID SINCE: of a pod that the kubelet ended; its shim last
check_end() {
    local apiserver shim joined_left
    read -r -a apiserver <<<"$(exit_of "${ids[$1-kube-apiserver]}")"
    read -r -a shim <<<"$(exit_of "${ids[$1-berth]}")"
    expect "kube-apiserver's exit status" "${apiserver[1]}" -eq 0 "$1-kube-apiserver.log"
    expect "the shim's exit status" "${shim[1]}" -eq 0 "$1-berth.log"
    expect "the shim ends after kube-apiserver" "${shim[0]}" -gt "${apiserver[0]}" "$1-berth.log"
    row "ended after" "kube-apiserver $(((apiserver[0] - $2) / 1000)) ms, shim $(((shim[0] - $2) / 1000)) ms (exit status 0 both)"
}

seconds() { awk -v from="${at[$1]}" -v to="${at[$2]}" 'BEGIN { printf "%.1f s", (to - from) / 1e6 }'; }

back_again() { :; }
check_load() { stop load 20; }
