#!/usr/bin/env bash
# usage: scripts/again.sh RUNS [--busy] -- COMMAND...
#
# Runs COMMAND so many times, and exits with 1 if one of these runs failed. What such a run printed is kept in target/again.
#
#   --busy   beside four busy loops, a build from nothing that begins again and again, and a loop that writes 8 MiB to the disk
#            and starts ten processes; what these write is in target/, and removed at the end

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
    local busy=false run began status log logs failed=0
    groups=()
    parse_options busy 'ARGUMENT=^[1-9][0-9]*$' -- "$@"
    ((${#arguments[@]} == 1)) || wrong_usage "give the number of runs"
    ((${#command[@]})) || wrong_usage "no COMMAND"
    mkdir -p target/again && logs=$(mktemp -d target/again/XXXXXX)
    ! $busy || disturb
    for ((run = 1; run <= arguments[0]; run++)); do
        log=$logs/$run.log began=$SECONDS status=0
        "${command[@]}" >"$log" 2>&1 </dev/null || status=$?
        printf 'run %d: exit status %d, %d s\n' "$run" "$status" $((SECONDS - began))
        if ((status)); then failed=$((failed + 1)); else rm -- "$log"; fi
    done
    printf '%d runs, %d failed%s\n' "${arguments[0]}" "$failed" "$( ((!failed)) || printf ': %s' "$logs")"
    ((!failed))
}

main "$@"
