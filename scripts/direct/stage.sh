# shellcheck shell=bash
# Part of scripts/direct.sh: the node, and the direct path in shims' status.

# The other addresses that kube-apiserver's certificate names.
readonly OTHER_IPS="$VIP $OBSERVER_IP $RELAYED_IP $STEERED_IP $HAPROXY_IP $CLIENT_IP"
usual_logs=({a,old,new,last}{,-api}.log observer.log kube-proxy.log)

# What makes listeners of Go's as the kernel can steer to them, and as Go makes them by default where the kernel has MPTCP.
readonly PLAIN=multipathtcp=0 MULTIPATH=multipathtcp=2

# The instance without berth is there once, for whichever part comes first.
need_observer() {
    [[ -z ${pid[observer]:-} ]] || return 0
    say "starting kube-apiserver $NEW without berth"
    GODEBUG=$MULTIPATH start_observer
}

# of_direct INSTANCE FILTER: by jq, of the direct path in its shim's status
of_direct() {
    "$BERTH" status --run-dir "$work/run" --json |
        jq -r --arg id "$1" ".instances[] | select(.instance == \$id) | .shim.direct | $2"
}
steers() { [[ $(of_direct "$1" .on) == true ]]; }
opened() { of_direct "$1" .opened; }
# opened_are INSTANCE LEAST
opened_are() { (($(opened "$1") >= $2)); }

# dial NAMESPACE SERVER CURL-OPTION…: a new connection
dial() {
    ip netns exec "$1" curl --silent --show-error --fail --max-time 10 --cacert "$work/ca.crt" \
        --connect-to "kubernetes:443:$2" "${@:3}" https://kubernetes/version
}
