# shellcheck shell=bash
# Part of scripts/direct.sh: streams to a container of a real kubelet, steered and relayed.

part_streams() {
    local name lines
    say "making a cluster"
    mkdir "$work/streams"
    BERTH=$BERTH TLS_LOAD=$TLS_LOAD "$root/scripts/cluster.sh" -- "$root/scripts/direct/node.sh" "$work/streams" >"$work/cluster.log" 2>&1 ||
        fail "streams in a cluster" cluster.log streams/shim.log streams/kubectl.log
    heading "$(printf '  %-34s %-36s %s' "lines before, after the shim's SIGKILL" "--direct on" "--direct off")"
    for name in logs {exec,port-forward}-{websocket,spdy}; do
        lines=$(awk -v name="$name" '$2 == name { line[$1] = $3 ", " $4 } END { printf "%-36s %s", line["on"], line["off"] }' "$work/streams/streams")
        row "kubectl $name" "$lines"
    done
    row "open on the direct path" "$(<"$work/streams/open")"
    expect "streams that went on when their shim was killed, steered" "$(awk '$1 == "on" && $4 >= 50' "$work/streams/streams" | wc -l)" -eq 5
    expect "streams that ended when their shim was killed, relayed" "$(awk '$1 == "off"' "$work/streams/streams" | wc -l)" -eq 5
    expect "open connections on the direct path" "$(<"$work/streams/open")" -ge 5
}
