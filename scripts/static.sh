#!/usr/bin/env bash
# usage: scripts/static.sh [--target TRIPLE] [-- CARGO_OPTION...]
#
# Builds a static berth, with the profile dist, and prints the directory that it is in: berth inject, serve and the
# like, without berth rehearse. The bytes depend on the sources, their revision, Rust, the C compiler and the C
# library, not on directories.
#
#   --target TRIPLE   another target of this machine's kernel, such as aarch64-unknown-linux-gnu (rustup target add; Debian's
#                     gcc-aarch64-linux-gnu and libc6-dev-arm64-cross) or x86_64-unknown-linux-musl (needs a musl-gcc)
#   CARGO_OPTION...   what to build, for cargo build (--package berth, with the features of the image)
#
# Variables: BERTH_REVISION, which the metric berth_build_info names, if not git's commit; CARGO and RUSTC, if not those on PATH;
# CARGO_HOME and CARGO_TARGET_DIR, as Cargo reads them

. "$(dirname "${BASH_SOURCE[0]}")/release/common.sh"

main() {
    target=
    parse_options 'target=-linux-' -- "$@"
    ((${#command[@]})) || command=("${BERTH[@]}")
    need_cargo
    rustc=$(command -v -- "${RUSTC:-rustc}") || unavailable "no rustc here: put it on PATH or set RUSTC"
    target=${target:-$(host)}
    [[ -d $("$rustc" --print sysroot)/lib/rustlib/$target ]] ||
        unavailable "Rust has no $target here: rustup target add $target"
    use_compiler

    target_dir=$(realpath -m -- "${CARGO_TARGET_DIR:-$root/target}")
    home=$(realpath -m -- "${CARGO_HOME:-$HOME/.cargo}")
    # Where configuration of Cargo and overrides of rustup are looked for.
    cd "$root"
    # Cargo gives these to tests, and a dependency that reads them would be rebuilt.
    unset CARGO_MANIFEST_DIR CARGO_MANIFEST_PATH CARGO_MANIFEST_LINKS "${!CARGO_PKG_@}"
    # The sources have to be there before their directories are known.
    "$CARGO" fetch --locked --target "$target" >&2 ||
        unavailable "the dependencies cannot be had; Cargo's reason is above"
    # With --target these flags leave build scripts and macros alone, which could not be static.
    BERTH_REVISION=$(revision) CARGO_ENCODED_RUSTFLAGS=$(flags | paste -sd $'\x1f') \
        "$CARGO" build --locked --profile dist --target "$target" --target-dir "$target_dir" "${command[@]}" >&2 ||
        die $EX_SOFTWARE "cargo build failed; the reason is above"
    printf '%s\n' "$target_dir/$target/dist"
}

# For another architecture a compiler of its own links; ring's build finds it by itself.
use_compiler() {
    local linker=CARGO_TARGET_${target//-/_}_LINKER compiler
    compiler=$(compiler "$target")
    [[ $compiler == cc ]] || export "${linker^^}=$compiler"
}

# One a line. Panics name the file that they are in: not with the directories of whoever built it.
flags() {
    local directory
    printf '%s\n' -Ctarget-feature=+crt-static "--remap-path-prefix=$root=/berth"
    # One for each registry or mirror of it.
    for directory in "$home"/registry/src/*/; do
        printf '%s\n' "--remap-path-prefix=${directory%/}=/cargo"
    done
}

main "$@"
