#!/usr/bin/env bash
# usage: scripts/defects.sh [--times N] [DEFECT...]
#
# Puts defects that berth once had back into a copy of its sources, one at a time, and prints for each which tests find it: after how many
# states the search of every state does (N times as many as every day; 10 if not said), whether the random walks do, and whether a test that
# was written for it, or another one of the same machine, does. DEFECT is the name of a file in tests/defects, without `.patch`; all if none
# is given. Exit status 1 if the search does not find one.
#
# The last results: the smallest number of states after which a search of the same machine finds the defect, and whether 250 random
# walks do:
#
#   a-command-begins-unprepared           501  no     an-end-of-a-connection-is-a-death      32  yes
#   a-guard-is-not-told-on                518  no     an-orphan-is-not-adopted               53  no
#   a-listener-is-given-early               5  yes    back-to-who-was-drained              2531  no
#   a-listener-is-not-given               235  no     handshakes-are-cut                     13  no
#   a-newcomer-waits-for-nobody             5  yes    the-last-forgets-its-guards            57  no
#   a-relief-expires                       22  no     what-is-decided-is-announced            0  yes
#   a-sibling-that-leaves-is-cover         10  no     who-leaves-lets-go-uncovered           28  yes
#   an-end-is-before-a-stall              171  no

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The random walks, by their names.
readonly WALKS=(every_order_of_events_keeps_the_invariants clients_are_served_and_the_bridge_ends_well
    an_instance_serves_at_all_times_and_the_upgrade_ends a_reboot_or_a_silent_shim_does_not_turn_the_upgrade_back an_upgrade_that_fails_also_fails_after_a_reboot)

# finds FILTER...: whether a test of the copy fails, and after how many states if it says so; dies if it does not build. $crate and $copy say
# of which.
finds() {
    local log=$copy.log
    if (cd "$copy" && BERTH_STATES=$times "$CARGO" test --locked --quiet --release --package "$crate" --lib -- "$@") >"$log" 2>&1; then
        echo no
    elif grep -q '^test result: FAILED' "$log"; then
        sed -n 's/^.*: after \([0-9]*\) states, by:$/\1/p' "$log" | sort -n | head -n 1 | grep . || echo yes
    else
        cat "$log" >&2
        die $EX_SOFTWARE "$copy: no test ran"
    fi
}

main() {
    local times=10 patch name crate copy search walks others status=0 patches=() skips=()
    parse_options 'times=^[1-9][0-9]*$' 'ARGUMENT=^[a-z-]+$' -- "$@"
    need_cargo
    cd "$root"
    if ((${#arguments[@]})); then
        for name in "${arguments[@]}"; do patches+=("tests/defects/$name.patch"); done
    else
        patches=(tests/defects/*.patch)
    fi
    mkdir -p target/defects
    copy=$(mktemp -d "$PWD/target/defects/XXXXXX")
    # shellcheck disable=SC2064 # the name is local here
    trap "rm -rf -- '$copy' '$copy.log'" EXIT
    # From one defect to the next, a few lines of one crate change.
    export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target/defects/build} CARGO_INCREMENTAL=1
    for name in "${WALKS[@]}"; do skips+=(--skip "$name"); done
    printf '%-34s %-8s %-6s %s\n' defect states walks others
    for patch in "${patches[@]}"; do
        [[ -e $patch ]] || wrong_usage "no defect $patch"
        rm -rf -- "${copy:?}"/*
        git ls-files -z --cached --others --exclude-standard | tar --null -T - -c | tar -x -C "$copy"
        (cd "$copy" && patch -s -p1) <"$patch" || die $EX_SOFTWARE "$patch does not fit: adapt it to the sources"
        crate=berth-$(sed -n 's|^+++ b/crates/\([a-z]*\)/.*|\1|p' "$patch" | head -n 1)
        search=$(finds machine::tests::states::) walks=$(finds "${WALKS[@]}") others=$(finds --skip states:: "${skips[@]}" machine::)
        [[ $search != no ]] || status=1
        name=${patch##*/}
        printf '%-34s %-8s %-6s %s\n' "${name%.patch}" "$search" "$walks" "$others"
    done
    return $status
}

main "$@"
