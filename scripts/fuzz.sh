#!/usr/bin/env bash
# usage: scripts/fuzz.sh [TARGET...] [--seconds N] [--seed N]
#
# Runs each fuzz target (all of fuzz/fuzz_targets, if none is named): first what is in fuzz/corpus/TARGET, then a number
# of new inputs that takes about 20 s, or new inputs for N seconds. Needs a C++ compiler.
#
#   --seconds N   how long each looks for new inputs; 0: only the corpus
#   --seed N      of what is random (1)
#
# An input that breaks a target is left in target/fuzz/artifacts/TARGET, and the command that repeats it is printed.

export RUST_BACKTRACE=0

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# What cargo-fuzz gives the compiler: libFuzzer, on a stable compiler, without a sanitizer (berth's own unsafe code is a few system calls;
# what is looked for is panics and wrong answers).
readonly FLAGS=(
    -Cpasses=sancov-module
    -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares
    --cfg fuzzing
)
# New inputs of a target, and of those that are slow: about 20 s each on 2 cores. A number, and no time: what is tried
# should not depend on the machine.
readonly RUNS=2000000
readonly -A FEWER=([client_hello]=25000 [descriptors]=150000 [kubeconfig]=400000 [manifest_edit]=250000 [manifest_inject]=90000 [metrics_page]=15000)
# Megabytes that a target may use, seconds that one input may take.
readonly MEMORY=1024 PATIENCE=10

main() {
    local targets all seconds='' seed=1 target failed=()
    readarray -t all < <(find "$root/fuzz/fuzz_targets" -name '*.rs' -printf '%f\n' | sed 's/\.rs$//' | sort)
    parse_options 'seconds=^[0-9]+$' 'seed=^[0-9]+$' "ARGUMENT=$(one_of "${all[@]}")" -- "$@"
    targets=("${arguments[@]:-${all[@]}}")
    cd "$root"
    command -v c++ >/dev/null || unavailable "no C++ compiler, which libfuzzer-sys needs (Debian: g++)"
    build_targets "${targets[@]}"
    for target in "${targets[@]}"; do
        run "$target" || failed+=("$target")
    done
    ((!${#failed[@]})) || die 1 "found something: ${failed[*]}"
    say "${#targets[@]} targets, seed $seed: nothing found"
}

# build_targets TARGET...
build_targets() {
    local host bins
    readarray -t bins < <(printf -- '--bin=%s\n' "$@")
    host=$("${RUSTC:-rustc}" -vV | sed -n 's/^host: //p')
    # With --target the flags leave build scripts and macros alone, which have no fuzzer to link with.
    CARGO_ENCODED_RUSTFLAGS=$(printf '%s\n' "${FLAGS[@]}" | paste -sd $'\x1f') \
        "${CARGO:-cargo}" build --locked --package berth-fuzz "${bins[@]}" --profile fuzz --target "$host" --target-dir target/fuzz >&2 ||
        die $EX_SOFTWARE "cargo build failed; the reason is above"
    directory=target/fuzz/$host/fuzz
}

# run TARGET: false if something was found
run() {
    local target=$1 corpus=() artifacts=target/fuzz/artifacts/$1 log status=0 began options fresh seeds=() new fixed=() cov runs
    began=$SECONDS
    fresh=target/fuzz/new/$target
    # Each run begins with what is committed.
    rm -rf -- "$fresh"
    mkdir -p "$artifacts" "$fresh"
    log=$artifacts/log
    # With its code and heap always in the same place, a build and a seed try the same inputs again.
    ! setarch -R true 2>/dev/null || fixed=(setarch -R)
    options=("-artifact_prefix=$artifacts/" "-rss_limit_mb=$MEMORY" "-timeout=$PATIENCE" "-seed=$seed" -print_final_stats=1)
    [[ ! -f fuzz/dictionaries/$target ]] || options+=("-dict=fuzz/dictionaries/$target")
    [[ ! -d fuzz/corpus/$target ]] || corpus=("fuzz/corpus/$target")
    readarray -t seeds < <(find "${corpus[@]:-/dev/null}" -type f | sort)
    if ((${#seeds[@]})); then
        "$directory/$target" "${options[@]}" "${seeds[@]}" >"$log" 2>&1 || status=$?
    fi
    if ((!status)) && [[ $seconds != 0 ]]; then
        if [[ $seconds ]]; then options+=("-max_total_time=$seconds"); else options+=("-runs=${FEWER[$target]:-$RUNS}"); fi
        # -len_control=0: the seeds are small, and an edit needs a whole file.
        "${fixed[@]}" "$directory/$target" "${options[@]}" -max_len=4096 -len_control=0 "$fresh" \
            "${corpus[@]}" >"$log" 2>&1 || status=$?
    fi
    if ((status)); then
        grep -v '^[0-9a-z]*,\|^MS: \|^Base64: \|^INFO: \|^#[0-9]\|NEW_FUNC' "$log" | tail -n 40 >&2
        # What broke it: a new input, or the seed that was the last to be run.
        new=$(sed -n 's/.*Test unit written to //p; s/^Running: //p' "$log" | tail -n 1)
        say "$target: exit status $status; again with: $directory/$target $new"
        return 1
    fi
    # What was run, and how much code it reached.
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
    cov=$(grep -o 'cov: [0-9]* ft: [0-9]*' "$log" | tail -n 1 || true)
    say "$(printf '%-16s %3d seeds, %9d runs, %s, %d s' "$target" ${#seeds[@]} "${runs:-0}" "${cov:-no coverage}" $((SECONDS - began)))"
}

main "$@"
