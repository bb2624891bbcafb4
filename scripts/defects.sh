#!/usr/bin/env bash
# usage: scripts/defects.sh [--times N] [DEFECT...]
#
# Puts defects that berth once had back into a copy of its sources, one at a time, and prints for each which tests find it: the search of
# every state (N times as many as every day; 20 if not said) and the random walks. DEFECT is the name of a file in tests/defects, without
# `.patch`; all if none is given. Exit status 1 if the search does not find one.

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# finds FILTER...: whether a test of the copy fails; dies if it does not build. $crate and $copy say of which.
finds() {
    local log=$copy.log
    if (cd "$copy" && BERTH_STATES=$times "$CARGO" test --locked --quiet --release --package "$crate" --lib -- "$@") >"$log" 2>&1; then
        echo no
    elif grep -q '^test result: FAILED' "$log"; then
        echo yes
    else
        cat "$log" >&2
        die $EX_SOFTWARE "$copy: no test ran"
    fi
}

main() {
    local times=20 patch name crate copy search walks status=0 patches=()
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
    trap 'rm -rf -- "$copy" "$copy.log"' EXIT
    export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target/defects/build}
    printf '%-34s %-8s %s\n' defect states walks
    for patch in "${patches[@]}"; do
        [[ -e $patch ]] || wrong_usage "no defect $patch"
        rm -rf -- "${copy:?}"/*
        git ls-files -z --cached --others --exclude-standard | tar --null -T - -c | tar -x -C "$copy"
        (cd "$copy" && patch -s -p1) <"$patch" || die $EX_SOFTWARE "$patch does not fit: adapt it to the sources"
        crate=berth-$(sed -n 's|^+++ b/crates/\([a-z]*\)/.*|\1|p' "$patch" | head -n 1)
        search=$(finds machine::tests::states::) walks=$(finds --skip states:: machine::)
        [[ $search == yes ]] || status=1
        name=${patch##*/}
        printf '%-34s %-8s %s\n' "${name%.patch}" "$search" "$walks"
    done
    return $status
}

main "$@"
