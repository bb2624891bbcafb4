#!/usr/bin/env bash
# Takes the HAProxy sidecar of a kube-apiserver off its port, and loses nothing: what waits in its
# queue goes to berth's listener on the same port. HAProxy goes on with the connections that it has.
# Run it on the node, as root, when berth has joined. Tested by tests/examples/migration.rs, with HAProxy 2.6 full
# and clients in its queue.
set -euo pipefail

readonly EX_USAGE=64 EX_UNAVAILABLE=69
readonly MIGRATE=/proc/sys/net/ipv4/tcp_migrate_req

usage() {
    cat <<'TEXT'
usage: leave-port.sh ADDRESS:PORT

Takes every HAProxy off ADDRESS:PORT of this node, such as 10.0.0.5:6443, where berth listens too. Sets
the sysctl net.ipv4.tcp_migrate_req, which is to stay 1 until the old pod is gone. Needs root, ss and Linux
5.14. To bring HAProxy back: kill -TTIN to the process that it names.

Exit status: 0 off the port, or was off before; 64 a wrong argument; 69 berth does not listen there, or the
kernel is too old: nothing was done; 1 HAProxy still listens.
TEXT
}

die() {
    echo "leave-port.sh: $2" >&2
    exit "$1"
}

# listeners NAME: IDs of the processes of that name that listen on the address
listeners() {
    ss -Hltnp "src $address" | { grep -o "\"$1\",pid=[0-9]*" || true; } | sed 's/.*=//' | sort -u
}

case ${1:-} in
    -h | --help) usage && exit 0 ;;
    *:*) address=$1 ;;
    *) usage >&2 && exit $EX_USAGE ;;
esac
[[ -n $(listeners berth) ]] || die $EX_UNAVAILABLE "no berth listens on $address: what waits at HAProxy would be reset"
[[ -w $MIGRATE ]] || die $EX_UNAVAILABLE "$MIGRATE cannot be written: Linux 5.14 and root are needed"

echo 1 >$MIGRATE
for pid in $(listeners haproxy); do
    echo "pauses HAProxy, process $pid" >&2
    # Its documented signal to pause. By SIGUSR1 it would end with its last connection, and the kubelet would start it again.
    kill -TTOU "$pid"
done
for _ in {1..200}; do
    [[ -n $(listeners haproxy) ]] || break
    sleep 0.1
done
[[ -z $(listeners haproxy) ]] || die 1 "HAProxy still listens on $address"
# Kernels before mid 2026 do not wake the new owner of what was moved; a new connection does.
host=${address%:*} host=${host#[} host=${host%]}
: 2>/dev/null >"/dev/tcp/$host/${address##*:}" || true
