#!/usr/bin/env bash
# usage: scripts/arm64.sh [STEP]...
#
# Builds berth and its tests for arm64, static, and runs them on this amd64 machine under Debian's qemu-user. That knows neither bpf(2)
# nor sock_diag(7), ptrace(2), openat2(2) and some options of sockets: tests that need these find it out and say so ("skipped: …"). Needs
# root, since the kernel is told how to run programs of arm64 (binfmt_misc); Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and
# qemu-user-static; and Rust's library (rustup target add aarch64-unknown-linux-gnu).
#
# Each STEP, or all:
#   help          berth --help
#   units         the unit tests of all crates
#   integration   the integration tests of relay, handover, leases and records
#   rehearse      an upgrade with simulated apiservers, through berth

. "$(dirname "${BASH_SOURCE[0]}")/release/common.sh"

readonly TARGET=aarch64-unknown-linux-gnu
readonly STEPS=(help units integration rehearse)
readonly BINFMT=/proc/sys/fs/binfmt_misc
# Debian's own line for the kernel.
readonly CONFIGURATION=/usr/lib/binfmt.d/qemu-aarch64.conf

# Tests that do not find out themselves what is missing here: what that is, their names, or the beginning of them.
cannot() {
    cat <<'LIST'
no sock_diag(7)                            sock_diag::tests::a_reply_is_not_waited_for_beyond_the_limit
all descriptors of a message are passed    seqpacket::tests::a_message_that_does_not_fit_leaves_no_open_descriptor
no IP_BIND_ADDRESS_NO_PORT                 socket::tests::connections_inherit_the_mark_of_a_listener_of_either_family
TCP_INFO has one figure                    socket::tests::a_listener_gets_the_requested_backlog
vfork(2) shares no memory                  apiserver::tests::a_command_is_asked_for_its_version
no openat2(2)                              pod::tests::a_copy_has_modes_and_links_and_nothing_more
no openat2(2)                              pod::tests::mounts_in_a_containers_root_are_left_out
no openat2(2)                              pod::tests::a_fifo_in_place_of_a_file_does_not_block
no openat2(2)                              pod::tests::directories_that_the_runtime_made_for_the_container_are_copied
all descriptors of a message are passed    handover::liars::a_peer_that_lies_is_refused
no ptrace(2)                               handover::death::one_thread_that_hangs_expires_the_lease_too
no ptrace(2)                               handover::listeners::a_shim_accepts_when_its_accept_loop_runs
no ptrace(2)                               handover::listeners::a_shim_has_left_when_its_accept_loops_have_ended
no ptrace(2)                               handover::listeners::a_shim_whose_thread_is_blocked_leaves_and_ends
no ptrace(2)                               handover::upgrades::consecutive_upgrades_lose_nothing
a shim starts within a third of its lease  handover::listeners::foreign_listeners_are_counted_before_anybody_leaves
LIST
}

main() {
    local step compiler
    parse_options "ARGUMENT=$(one_of "${STEPS[@]}")" -- "$@"
    ((${#arguments[@]})) || arguments=("${STEPS[@]}")
    need_root "namespaces and binfmt_misc"
    need_cargo
    [[ -f $CONFIGURATION ]] || unavailable "no $CONFIGURATION: Debian's qemu-user-static"
    [[ -d $(rustc --print sysroot)/lib/rustlib/$TARGET ]] || unavailable "Rust has no $TARGET here: rustup target add $TARGET"
    compiler=$(compiler "$TARGET")
    # Static, so that they need nothing of arm64 here.
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$compiler
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS=-Ctarget-feature=+crt-static
    # Each translates on a core of its own, some ten times slower than it would run.
    export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(nproc)}
    cd "$root"
    # All at once, with the features that tests have.
    "$CARGO" test --locked --no-run --target "$TARGET" --lib --test integration || die $EX_SOFTWARE "cargo test failed; the reason is above"
    berth=$(target_directory)/$TARGET/debug/berth
    can_run
    for step in "${arguments[@]}"; do
        say "$step"
        "step_$step"
    done
}

# can_run: the kernel runs programs of arm64
can_run() {
    mountpoint -q "$BINFMT" || mount -t binfmt_misc binfmt_misc "$BINFMT"
    if [[ ! -e $BINFMT/qemu-aarch64 ]]; then
        cat "$CONFIGURATION" >"$BINFMT/register"
        trap 'echo -1 >"$BINFMT/qemu-aarch64"' EXIT
    fi
}

step_help() {
    "$berth" --version
    "$berth" --help
}

step_units() { tests --workspace --exclude berth-fuzz --lib; }

# One after the other: clients of two tests at once wait longer than they should.
step_integration() { RUST_TEST_THREADS=1 tests --test integration -- relay:: handover::; }

# 20 a second are the fewest that a rehearsal takes.
step_rehearse() { "$berth" rehearse --compare berth --rate 20 --watches 2; }

# tests OPTION... [-- NAME...]: of cargo test, in a network namespace of their own with few sockets in TIME_WAIT: without
# sock_diag(7), shims read the list of all sockets again and again.
tests() {
    local line skip=()
    while IFS= read -r line; do
        say "skipped: ${line##* }: ${line%%  *}"
        skip+=(--skip "${line##* }")
    done < <(cannot)
    [[ " $* " == *" -- "* ]] || set -- "$@" --
    # shellcheck disable=SC2016  # Its own arguments.
    unshare --net sh -c 'ip link set lo up && echo 64 >/proc/sys/net/ipv4/tcp_max_tw_buckets && exec "$@"' - \
        "$CARGO" test --locked --no-fail-fast --target "$TARGET" "$@" "${skip[@]}"
}

main "$@"
