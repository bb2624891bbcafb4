#!/usr/bin/env bash
# usage: scripts/again.sh RUNS [--busy] [--log FILE] -- COMMAND...
#
# Runs COMMAND until it ran RUNS times at this commit, and exits with 1 if one of these runs failed. Each run is a line of
# FILE: commit, time, exit status, seconds, busy or idle, COMMAND. Runs that are there already count, so that it goes on
# where it ended. What a run that failed printed is kept beside FILE.
#
#   --busy       beside four busy loops, a build from nothing that begins again and again, and a loop that writes 8 MiB to the disk
#                and starts ten processes; what these write is in target/, and removed at the end
#   --log FILE   where the lines are (target/again.log)

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Beside a command that is to be disturbed.
readonly LOOPS=4

computes() { while goes_on; do :; done; }
# Starts processes that compute, read and write: a small package, and what that needs.
builds() {
    while goes_on; do
        "$CARGO" build --locked --quiet --package berth-exec --target-dir "$scratch/target" </dev/null
        rm -rf -- "$scratch/target"
    done
}
writes() {
    while goes_on; do
        dd if=/dev/zero of="$scratch/file" bs=1M count=8 conv=fsync status=none
        for _ in {1..10}; do /bin/true; done
    done
}
goes_on() { kill -0 $$ 2>/dev/null; }

# disturb: begins what disturbs, each in a process group of its own that ends with this script, whatever ends that
disturb() {
    need_cargo
    scratch=$(mktemp -d target/again.XXXXXX)
    trap 'kill -KILL "${groups[@]/#/-}" 2>/dev/null || :; wait 2>/dev/null || :; rm -rf -- "$scratch"' EXIT
    set -m
    for what in $(yes computes | head -n $LOOPS) builds writes; do
        $what &
        groups+=($!)
    done
    set +m
}

main() {
    local busy=false beside=idle log=target/again.log commit began status output ran
    parse_options busy log=. 'ARGUMENT=^[1-9][0-9]*$' -- "$@"
    ((${#arguments[@]} == 1)) || wrong_usage "give the number of runs"
    ((${#command[@]})) || wrong_usage "no COMMAND"
    ! $busy || beside=busy
    set -- "${command[@]}"
    [[ -z $(git status --porcelain --untracked-files=no) ]] || die $EX_USAGE "uncommitted changes: a count is of a commit"
    commit=$(git rev-parse --short HEAD)
    mkdir -p "$(dirname "$log")"
    touch "$log"
    groups=()
    ! $busy || disturb
    # The lines of this commit, this command and this kind.
    count() { awk -F '\t' -v commit="$commit" -v beside="$beside" -v command="$*" '$1 == commit && $5 == beside && $6 == command' "$log"; }
    output=$(mktemp)
    while ran=$(count "$@" | wc -l) && ((ran < arguments[0])); do
        began=$SECONDS status=0
        "$@" >"$output" 2>&1 </dev/null || status=$?
        printf '%s\t%(%FT%TZ)T\t%d\t%d\t%s\t%s\n' "$commit" -1 "$status" $((SECONDS - began)) "$beside" "$*" >>"$log"
        tail -n 1 "$log"
        ((!status)) || cp -- "$output" "$log.$commit.$beside.$((ran + 1))"
    done
    rm -f -- "$output"
    failed=$(count "$@" | awk -F '\t' '$3 != 0' | wc -l)
    printf '%d runs, %d failed\n' "$(count "$@" | wc -l)" "$failed"
    ((!failed))
}

main "$@"
