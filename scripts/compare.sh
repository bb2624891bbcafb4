#!/usr/bin/env bash
# usage: scripts/compare.sh [OPTION]…
#
# Runs `berth rehearse --netns --compare haproxy,port-sharing` with the two newest kube-apiservers of
# tests/kube-apiserver, which it builds if they are not there, at 100 new connections a second and with
# 200 watches. OPTIONs go to `berth rehearse`. Needs haproxy in PATH, or leaves it out and says so.
#
# Variables:
#   BERTH   the berth to run; built for release with cargo if not given

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[[ ${1:-} != -h && ${1:-} != --help ]] || { usage && exit 0; }
cd "$root"

# What the environment names is of one version alone.
unset KUBE_APISERVER KUBECTL
need_versions
need_program BERTH berth

printf -v old %q "$OLD_KUBE_APISERVER"
printf -v new %q "$KUBE_APISERVER"
# By the environment, so that an option can override it.
exec env BERTH_REHEARSE_WATCHES=200 "$BERTH" rehearse --netns --old "$old" --new "$new" --etcd "$ETCD" \
    --compare haproxy,port-sharing "$@"
