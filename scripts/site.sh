#!/usr/bin/env bash
# Builds a site of docs/ with mdBook: search, light and dark, and a directory for each version. Then follows each link within the site.
#
# usage: scripts/site.sh [--output DIR]
#
# --output is target/site unless given. DIR/VERSION has the pages, and what is in DIR of other versions stays; DIR/index.html leads to the
# newest version. mdBook is that on PATH, if it has the version below, or is built by cargo, once.
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

readonly MDBOOK=0.5.4
output=$root/target/site
parse_options 'output=.' -- "$@"

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
repository=$(sed -n 's/^repository = "\(.*\)"/\1/p' "$root/Cargo.toml")

# find_mdbook: sets `mdbook`
find_mdbook() {
    local cache=${BERTH_TEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/berth-e2e}/mdbook-$MDBOOK
    mdbook=$(type -P mdbook || true)
    [[ -z $mdbook || $("$mdbook" --version) != "mdbook v$MDBOOK" ]] || return 0
    mdbook=$cache/bin/mdbook
    [[ -x $mdbook ]] || {
        need_cargo
        "$CARGO" install --locked --root "$cache" "mdbook@$MDBOOK" >&2 || die $EX_SOFTWARE "mdBook $MDBOOK cannot be built"
    }
}

# make_source: $work/src, from docs/ and the links of docs/index.md. Links to files outside of docs/ lead to the repository.
make_source() {
    local page
    mkdir -p "$work/src"
    cp -- "$root"/docs/* "$work/src"
    sed -i -E "s,\]\(\.\./([^)#]*),](${repository//,/\\,}/blob/v$version/\1,g" "$work/src"/*.md
    {
        printf '# Summary\n\n[berth](index.md)\n\n'
        grep -oE '\]\([a-z-]+\.md\)' "$root/docs/index.md" | sed -E 's/\]\((.*)\)/\1/' | awk '!seen[$0]++' | while read -r page; do
            printf -- '- [%s](%s)\n' "$(sed -n 's/^# //p;T;q' "$root/docs/$page")" "$page"
        done
    } >"$work/src/SUMMARY.md"
    cat >"$work/book.toml" <<EOF
[book]
title = "berth $version"
language = "en"

[output.html]
git-repository-url = "$repository"
default-theme = "light"
preferred-dark-theme = "navy"
no-section-label = true
EOF
}

# check_links DIRECTORY: each file and heading of this site that a page links to exists
check_links() {
    local page link file anchor broken=0 seen=0
    for page in "$1"/*.html; do
        [[ ${page##*/} != print.html && ${page##*/} != toc.html ]] || continue
        while IFS= read -r link; do
            [[ $link != *:* && -n $link ]] || continue
            seen=$((seen + 1)) file=${link%%#*} anchor=
            [[ $link != *'#'* ]] || anchor=${link#*#}
            file=${file:-${page##*/}}
            if [[ ! -e $1/${file%%\?*} ]] || { [[ -n $anchor ]] && ! grep -qF "id=\"$anchor\"" "$1/$file"; }; then
                say "${page##*/}: $link leads nowhere"
                broken=$((broken + 1))
            fi
        done < <(sed -n '/<main>/,/<\/main>/p' "$page" | grep -oE '(href|src)="[^"]*"' | sed -E 's/^[a-z]+="(.*)"$/\1/')
    done
    ((seen)) || die 1 "no page has a link"
    ((!broken)) || die 1 "$broken of $seen links lead nowhere"
    say "$seen links lead somewhere"
}

find_mdbook
work=$(mktemp -d -t berth-site.XXXXXX)
trap 'rm -rf -- "$work"' EXIT
make_source
"$mdbook" build --dest-dir "$work/book" "$work" >&2 || die $EX_SOFTWARE "mdBook failed; its reason is above"
check_links "$work/book"
mkdir -p -- "$output"
rm -rf -- "${output:?}/$version"
mv -- "$work/book" "$output/$version"
readarray -t versions < <(find "$output" -mindepth 1 -maxdepth 1 -type d -name '[0-9]*' -printf '%f\n' | sort -rV)
newest=${versions[0]}
cat >"$output/index.html" <<EOF
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url=$newest/">
<title>berth</title>
<a href="$newest/">berth $newest</a>
$(printf '%s\n' "${versions[@]}" | sed 's,.*,<a href="&/">&</a>,')
</html>
EOF
say "$output/$version"
