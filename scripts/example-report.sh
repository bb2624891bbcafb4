#!/usr/bin/env bash
# usage: scripts/example-report.sh [--help]
#
# Rehearses an upgrade between the two newest kube-apiservers of tests/kube-apiserver, which it builds if they are
# not there, through HAProxy, a shared port, nothing at all and berth, with two faults, and writes
# examples/report.html. Takes about six minutes; needs haproxy in PATH, and cargo if BERTH is not given.
#
# Variables:
#   BERTH   the berth to run; built for release with cargo if not given
#   CARGO   the cargo command, if not the one on PATH
#
# Exit status: 0 written; 1 the rehearsal lost something, and the page says so; 64 a wrong argument;
# 69 something is missing; 70 the build failed, or the page would name this machine or is too large, and is left as it was;
# 71 this machine was too busy to tell, and 75 the rehearsal proves nothing: the page is left as it was.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
readonly PAGE=examples/report.html
# Large enough for four runs, small enough for a repository.
readonly MOST_BYTES=540000

main() {
    parse_options -- "$@"
    command -v haproxy >/dev/null || unavailable "no haproxy in PATH: install it, the page compares with it"
    # What the environment names is of one version alone.
    unset KUBE_APISERVER KUBECTL
    need_versions
    need_program BERTH berth
    cd "$root"

    # In a directory of its own, so that the command on the page is what anyone would type.
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/old" "$work/new"
    ln -s "$OLD_KUBE_APISERVER" "$work/old/kube-apiserver"
    ln -s "$KUBE_APISERVER" "$work/new/kube-apiserver"
    ln -s "$ETCD" "$work/etcd"
    local status=0
    rehearse || status=$?
    ((status <= 1)) || exit "$status"
    check "$work/report.html"
    cp -- "$work/report.html" "$PAGE"
    printf '%s: %s bytes\n' "$PAGE" "$(stat -c %s "$PAGE")"
    exit "$status"
}

# Variables for berth would be part of the command.
rehearse() (
    clean_environment
    cd "$work"
    "$BERTH" rehearse --netns --old old/kube-apiserver --new new/kube-apiserver --etcd ./etcd \
        --compare haproxy,port-sharing,none --fault bad-flag,kill-shim --watches 4 --slow-readers 2 --seed 7 \
        --shutdown-watch-termination-grace-period 10s --report report.html
)

# Nothing of this machine's names and directories may be in the page.
check() {
    local page=$1 word
    for word in "$PWD" "$HOME/" "$work" "${TMPDIR:-/tmp}/" /home/ /root/; do
        ! grep -qF -- "$word" "$page" || die $EX_SOFTWARE "the page names $word: it is left as it was"
    done
    # A short name may be part of a word.
    ! grep -qwF -- "$(uname -n)" "$page" || die $EX_SOFTWARE "the page names this machine: it is left as it was"
    (($(stat -c %s "$page") <= MOST_BYTES)) || die $EX_SOFTWARE "the page is larger than $MOST_BYTES bytes"
}

main "$@"
