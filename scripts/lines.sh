#!/usr/bin/env bash
# usage: scripts/lines.sh [--help]
#
# Prints the lines of Rust of each crate without tests, comments and blank lines, then their sum, then all lines of scripts and of
# documents. Tests are files below a directory tests/, files tests.rs, and the item after a `#[cfg(test)]` at the beginning of a line.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# rust DIRECTORY: lines of code
rust() {
    git ls-files -- "$1/*.rs" | grep -vE '(^|/)(tests|snapshots)/|(^|/)tests\.rs$' | while IFS= read -r file; do
        awk '
            /^#\[cfg\(test\)\]/ { test = 1; next }
            test && /^(\}|.*;$)/ { test = test == 2 && !/^\}/ ? 2 : 0; next }
            test { if (!/^#\[/) test = 2; next }
            !/^[[:space:]]*(\/\/.*)?$/ { n++ }
            END { print n + 0 }' "$file"
    done | awk '{ n += $1 } END { print n + 0 }'
}

main() {
    local crate lines sum=0
    parse_options -- "$@"
    cd "$root"
    for crate in src crates/*; do
        lines=$(rust "$crate")
        printf '%-18s %6d\n' "${crate#crates/}" "$lines"
        ((sum += lines))
    done
    printf '%-18s %6d\n' "in all" $sum
    printf '%-18s %6d\n' scripts "$(git ls-files -- scripts | xargs cat | wc -l)"
    printf '%-18s %6d\n' documents "$(git ls-files -- '*.md' | xargs cat | wc -l)"
}

main "$@"
