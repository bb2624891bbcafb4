#!/usr/bin/env bash
# usage: scripts/soak.sh MINUTES [--seed N] [--rate N] [--picture FILE]
#
# Runs a berth of real processes for minutes or hours while clients of all kinds go through it and everything goes wrong by
# chance: upgrades, SIGKILL, SIGSTOP, no descriptors, a full run directory, a clock that jumps, and two
# versions that meet. Exits with 0 only if clients of every kind were served, nothing was lost beyond what a kill takes,
# nothing grew, the logs have no error that docs/troubleshooting.md does not explain, and the same clients were seen to
# lose by two kills at the start that nothing allows (the control). All of it stays on 127.0.0.0/8 and ends by itself.
# Faults that need root (a run directory that can be filled) or libfaketime are skipped, with a message.
#
# Variables:
#   BERTH            the binary (built otherwise, with its release profile)
#   BERTH_PREVIOUS   a binary of the release before (the same otherwise, until there is one)
#   BENCH            berth-bench, which makes the load (built otherwise, with its release profile)

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$root"

main() {
    [[ ${1:-} != -h && ${1:-} != --help ]] || { usage && exit 0; }
    [[ ${1:-} =~ ^[0-9]+(\.[0-9]+)?$ ]] || wrong_usage "give the minutes first"
    local minutes=$1 dir status=0
    shift
    need_program BENCH berth-bench
    need_program BERTH berth
    dir=$(mktemp -d)
    # Both are started again and again: a build meanwhile must not change them.
    cp -- "$BERTH" "$dir/berth"
    cp -- "$BENCH" "$dir/berth-bench"
    set -- soak --minutes "$minutes" --berth "$dir/berth" --dir "$dir" "$@"
    set -- "$@" --previous "${BERTH_PREVIOUS:-$dir/berth}"
    if faketime; then set -- "$@" --faketime "$faketime"; fi
    if unshare --mount true 2>/dev/null; then
        mkdir "$dir/run"
        # shellcheck disable=SC2016  # Its own arguments.
        unshare --mount sh -c 'mount -t tmpfs -o size=512k,mode=0700 tmpfs "$1" && shift && exec "$@"' \
            - "$dir/run" "$dir/berth-bench" "$@" --small-run-dir || status=$?
    else
        "$dir/berth-bench" "$@" || status=$?
    fi
    if ((status)); then
        echo "the logs are in $dir/log"
    else
        rm -rf -- "$dir"
    fi
    exit $status
}

# faketime: libfaketime's library for programs of several threads, if it is installed.
faketime() {
    faketime=$(find /usr/lib /usr/lib64 /usr/local/lib -name libfaketimeMT.so.1 -print -quit 2>/dev/null || true)
    [[ -n $faketime ]]
}

main "$@"
