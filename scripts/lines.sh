#!/usr/bin/env bash
# usage: scripts/lines.sh [--check]
#
# Prints the tokens of Rust of each crate: words, numbers, strings and single signs, without comments. No formatting changes
# this size. Tests are counted apart: files below directories tests/, testing/ and fuzz/, files tests.rs, and modules behind
# #[cfg(test)]. Then the lines of scripts and of documents.
#
#   --check   fail where a crate, their sum, the tests or the scripts exceed the budget in CONTRIBUTING.md

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# tokens: of the files whose names are on standard input, those that are no test and those that are. A string is one token.
# shellcheck disable=SC2016
tokens() {
    xargs awk '
        function count(text,    lines, n, i, kept, end) {
            while (i = index(text, "/*")) {
                end = index(substr(text, i + 2), "*/")
                if (!end) break
                text = substr(text, 1, i - 1) substr(text, i + 2 + end + 1)
            }
            n = split(text, lines, "\n")
            for (i = 1; i <= n; i++) if (lines[i] !~ /^[ \t]*\/\//) kept = kept lines[i] "\n"
            # A comma at the end of a list is the formatting.
            gsub(/,[ \t\n]+[])}]/, ")", kept)
            return gsub(/"([^"\\]|\\(.|\n))*"|\047([^\047\\]|\\[^\n])\047|[[:alnum:]_]+|[^[:alnum:]_[:space:]]/, "x", kept)
        }
        # What is between the brace before `text` and the one that closes it.
        function inside(text,    depth, at) {
            for (depth = 1; depth && match(substr(text, at + 1), /[{}]/);) {
                at += RSTART
                depth += substr(text, at, 1) == "{" ? 1 : -1
            }
            return at
        }
        function finish(    begin, end) {
            while (match(text, /\n[ \t]*#\[cfg\(test\)\][ \t\n]*\n[ \t]*(pub(\([a-z]+\))? )?mod [a-z_]+ \{/)) {
                begin = RSTART
                end = RSTART + RLENGTH - 1
                end += inside(substr(text, end + 1))
                tests += count(substr(text, begin, end - begin + 1))
                text = substr(text, 1, begin - 1) substr(text, end + 1)
            }
            if (file ~ /(^|\/)(tests|testing|benches|fuzz)\/|(^|[\/_])tests?\.rs$/) tests += count(text)
            else product += count(text)
        }
        FNR == 1 { if (NR > 1) finish(); text = ""; file = FILENAME }
        { text = text $0 "\n" }
        END { if (NR) finish(); print product + 0, tests + 0 }' | awk '{ product += $1; tests += $2 } END { print product + 0, tests + 0 }'
}

# within_budget: whether each size is at most what CONTRIBUTING.md allows it, and none is without a budget
within_budget() {
    local line name most over=0 known=0
    while IFS= read -r line; do
        [[ $line =~ ^\|\ ([a-z ]+)\ \|\ ([0-9,]+)\ \|$ && ${sizes[${BASH_REMATCH[1]}]-} ]] || continue
        name=${BASH_REMATCH[1]} most=${BASH_REMATCH[2]//,/}
        ((known += 1))
        ((sizes["$name"] <= most)) && continue
        say "$name has ${sizes[$name]}, and CONTRIBUTING.md allows $most: take out as much elsewhere, or raise the number in a commit of its own that says why"
        over=1
    done <"$root/CONTRIBUTING.md"
    ((known == ${#sizes[@]})) || die $EX_SOFTWARE "CONTRIBUTING.md has a budget for $known of ${#sizes[@]} parts"
    return $over
}

main() {
    local crate check=false name all=0 tests=0 more
    local -A sizes=()
    parse_options check -- "$@"
    cd "$root"
    for crate in src crates/*; do
        [[ $crate != crates/testing ]] || continue
        read -r sizes["${crate#crates/}"] more < <(git ls-files -- "$crate/*.rs" | tokens)
        ((all += sizes["${crate#crates/}"], tests += more, 1))
    done
    read -r _ more < <(git ls-files -- 'tests/*.rs' 'fuzz/*.rs' 'crates/testing/*.rs' | tokens)
    sizes+=(["in all"]=$all [tests]=$((tests + more)) [scripts]=$(git ls-files -- scripts | xargs cat | wc -l))
    for name in "${!sizes[@]}"; do printf '%-10s\t%7d\n' "$name" "${sizes[$name]}"; done | sort -t $'\t' -k 2 -n
    ! $check || within_budget
}

main "$@"
