# shellcheck shell=bash
# Part of scripts/kubelet.sh: what is done to the static pods, and what must hold.

declare -gA ids=()

# From kubeadm's own manifest to one behind berth: the one time when there is a gap.
first_switch() {
    local name=kube-apiserver
    heading "berth inject, of kubeadm's manifest with kube-apiserver $OLD"
    change_in_place inject --image "$IMAGE"
    await 60 "all probes to pass" pod_is_ready $name
    row "probes" "startup, readiness and liveness pass, nothing was restarted"
}

# change_in_place COMMAND…: berth writes into the manifest, and the kubelet ends the pod before it starts it again
change_in_place() {
    now 'at[change]'
    "$BERTH" "$@" --write 2>"$work/$1.log" || fail "berth $1" "$1.log"
    await 60 "connections to fail" lost_since "${at[change]}"
    await 90 "connections again" served_since "$EPOCHREALTIME"
    now 'at[changed]'
    row "gap" "$(gap "${at[change]}" "${at[changed]}")"
}

# roll FROM TO VERSION: a second pod beside the first, under another file and pod name, then the first one's
# end: all by hand
roll() {
    local from=$1 to=$2 version=$3 old
    heading "$from to $to, kube-apiserver $version"
    follow_pod "$from"
    old=$uid
    now 'at[second]'
    # The kubelet reads no file with a dot; a rename is all or nothing.
    sed "s/:$OLD\$/:$version/; s/^  name: $from\$/  name: $to/" "$manifests/$from.yaml" >$manifests/.next
    mv $manifests/.next "$manifests/$to.yaml"
    await 60 "$to to join" pod_has_joined "$to"
    now 'at[joined]'
    row "joined after" "$(seconds second joined)"
    await 10 "connections with both" answers_are $(($(answers) + 100))
    now 'at[remove]'
    rm "$manifests/$from.yaml"
    await 60 "$from to end" has_exited "${ids[$old-berth]}"
    await 10 "connections with $to alone" answers_are $(($(answers) + 100))
    now 'at[rolled]'
    part "connections meanwhile" "${at[second]}" "${at[rolled]}"
    check_end "$old" "${at[remove]}"
    await 20 "the Service kubernetes to have an address" service_is whole
    row "Service kubernetes empty" "$(service_gap "${at[second]}")"
}

# check_end UID SINCE: of a pod that the kubelet ended: the hook first, then kube-apiserver, its shim last
check_end() {
    local log=$work/$1-berth.log apiserver shim words
    read -r -a apiserver <<<"$(exit_of "${ids[$1-kube-apiserver]}")"
    read -r -a shim <<<"$(exit_of "${ids[$1-berth]}")"
    expect "kube-apiserver's exit status" "${apiserver[1]}" -eq 0 "$1-kube-apiserver.log"
    expect "the shim's exit status" "${shim[1]}" -eq 0 "$1-berth.log"
    words=$(grep -oE 'INFO (told to drain|left|SIGTERM|drained)' "$log" | paste -sd,)
    expect "what the shim hears and does" "$words" == "INFO told to drain,INFO left,INFO SIGTERM,INFO drained" "$1-berth.log"
    expect "the shim is stopped after kube-apiserver has ended" "$(logged_at SIGTERM "$log")" -ge "${apiserver[0]}" "$1-berth.log"
    row "ended after" "kube-apiserver $(((apiserver[0] - $2) / 1000)) ms, then its shim $(((shim[0] - $2) / 1000)) ms, exit status 0"
}

# A pod that is alone has nobody to take over while the kubelet starts it again.
lone_restart() {
    heading "an instance alone, changed in place: inject --side-container plain"
    follow_pod kube-apiserver
    change_in_place inject --image "$IMAGE" --side-container plain
    cp "$work/$uid-berth.log" "$work/lone-berth.log"
    await 60 "all probes to pass" pod_is_ready kube-apiserver
}

# The manifest is kubeadm's again, and berth is not there.
back_again() {
    heading "berth eject"
    change_in_place eject
    sed "s/:$OLD\$/:$NEW/" "$work/kubeadm.yaml" >"$work/wanted.yaml"
    diff -u "$work/wanted.yaml" $manifests/kube-apiserver.yaml >"$work/eject.diff" || :
    expect "lines that differ from what kubeadm wrote" "$(wc -l <"$work/eject.diff")" -eq 0 eject.diff
    await 30 "kube-apiserver $NEW to be ready without berth" serves "$NEW"
    expect "shims that run" "$("$BERTH" status | grep -c ' joined ' || :)" -eq 0
}

# lost_since TIME, served_since TIME: a connection that began then failed, was answered
lost_since() { [[ -n $(awk -v from="$1" '$1 >= from && $3 != "ok"' "$work/load.out") ]]; }
served_since() { [[ -n $(awk -v from="${1/./}" '$1 >= from && $3 == "ok"' "$work/load.out") ]]; }

# gap FROM TO: from the first connection that was lost to the next that was answered after the last lost one
gap() {
    awk -v from="$1" -v to="$2" '$1 < from || $1 > to { next }
        $3 != "ok" { if (!n++) first = $1; last = $1 }
        $3 == "ok" { ok[++m] = $1 }
        END {
            for (i = m; i && ok[i] > last; i--) end = ok[i]
            printf "%.1f s, %d connections lost", (end - first) / 1e6, n
        }' "$work/load.out"
}

seconds() { awk -v from="${at[$1]}" -v to="${at[$2]}" 'BEGIN { printf "%.1f s", (to - from) / 1e6 }'; }

# What the Service kubernetes has for addresses, each change in a line: its time, and empty or whole.
watch_service() {
    local line time state last=
    local path='/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?watch=1&fieldSelector=metadata.name%3Dkubernetes'
    while :; do
        kubectl --request-timeout 0 get --raw "$path" 2>/dev/null || :
        # An apiserver ended it.
        pause 0.1
    done | while read -r line; do
        now time
        [[ $line == *'"addresses":["'* ]] && state=whole || state=empty
        [[ $state == "$last" ]] || echo "$time $state"
        last=$state
    done >"$work/service.out"
}
service_is() { [[ $(tail -n 1 "$work/service.out") == *" $1" ]]; }

# service_gap FROM
service_gap() {
    awk -v from="$1" '$1 < from { next } $2 == "empty" { begin = $1 } $2 == "whole" && begin { sum += $1 - begin; begin = 0 }
        END { if (sum) printf "%.1f s", sum / 1e6; else print "never" }' "$work/service.out"
}

end_clients() {
    stop load 20
    expect "connections at all" "$(answers)" -ge 1000 load.log
}
