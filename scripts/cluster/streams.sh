# shellcheck shell=bash
# Part of scripts/cluster.sh and scripts/direct/node.sh: the pod that kubectl streams from and to, and a forwarded port.

# What the pods of the test run.
readonly TOOL_IMAGE=localhost/tool:test

# A pod whose container prints a line each 100 ms, and echoes on port 8080.
make_tool() {
    kubectl create -f - >>"$work/kubectl.log" 2>&1 <<TEXT
apiVersion: v1
kind: Pod
metadata: {name: tool}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - {name: tool, image: $TOOL_IMAGE, imagePullPolicy: Never, command: [/usr/local/bin/pause, serve]}
TEXT
    # After a gap the scheduler's informers come back with client-go's delays, of up to a minute.
    await 180 "the tool's pod to be ready" tool_is_ready
}
tool_is_ready() { [[ $(kubectl get pod tool -o 'jsonpath={.status.containerStatuses[0].ready}') == true ]]; }

# forward PORT KUBECTL…: becomes a process on another host that sends lines through a forwarded port, and prints what comes back. It ends
# with kubectl, or with what it forwards.
forward() {
    # shellcheck disable=SC2016
    exec ip netns exec far bash -c '
        "$@" port-forward pod/tool "$0:8080" >/dev/null &
        trap "kill $! 2>/dev/null" EXIT
        trap "exit" TERM
        until exec 3<>"/dev/tcp/127.0.0.1/$0"; do kill -0 $! || exit; sleep 0.1; done 2>/dev/null
        while echo line >&3 && read -rt 15 -u 3 line; do echo "$line"; sleep 0.1; done' "$@"
}
