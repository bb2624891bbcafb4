#!/usr/bin/env bash
# usage: scripts/rehearse-svg.sh [--help]
#
# Rehearses an upgrade of simulated apiservers, without berth and through it, and draws what it prints into docs/rehearse.svg, if
# nothing was lost through berth. Takes 40 seconds.
#
# Variables:
#   BERTH   the berth to run; built for release with cargo if not given
#
# Exit status: 0 written; 64 a wrong argument; 69 BERTH is no program; 70 the build failed; else that of the rehearsal.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Widths are counted in characters, not in bytes.
export LC_ALL=C.UTF-8
readonly PICTURE=docs/rehearse.svg SHOWN='cargo run --release -- rehearse'
# In pixels: a column of the font, a line, the margin, and the bar above the text.
readonly COLUMN=7.2 LINE=18 MARGIN=16 BAR=28

main() {
    local printed
    parse_options -- "$@"
    need_program BERTH berth
    cd "$root"
    # Not a terminal, so there are no live counters.
    printed=$("$BERTH" rehearse 2>&1) || { printf '%s\n' "$printed" >&2 && exit 1; }
    draw "$printed" >"$PICTURE.new"
    mv -- "$PICTURE.new" "$PICTURE"
    printf '%s: %s lines\n' "$PICTURE" "$(wc -l <<<"$printed")"
}

# draw TEXT: a terminal with the command and its output.
draw() {
    local lines line columns=0 y=$((BAR + MARGIN + 4)) width height class
    readarray -t lines <<<"\$ $SHOWN"$'\n'"$1"
    for line in "${lines[@]}"; do ((${#line} <= columns)) || columns=${#line}; done
    width=$(awk "BEGIN { print int($columns * $COLUMN + 2 * $MARGIN + 0.5) }")
    height=$((BAR + ${#lines[@]} * LINE + MARGIN + 8))
    cat <<TEXT
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" role="img" aria-labelledby="title">
  <title id="title">What $SHOWN prints</title>
  <style>
    svg { color-scheme: light dark; }
    text { font: 12px ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; white-space: pre; }
    .page { fill: #f6f8fa; stroke: #d1d9e0; }
    .button { fill: #d1d9e0; }
    .progress { fill: #59636e; }
    .command, .verdict { font-weight: 600; }
    .verdict { fill: #116329; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .page { fill: #0d1117; stroke: #3d444d; }
      .button { fill: #3d444d; }
      .progress { fill: #9198a1; }
      .verdict { fill: #56d364; }
    }
  </style>
  <rect class="page" x="0.5" y="0.5" width="$((width - 1))" height="$((height - 1))" rx="8"/>
  <circle class="button" cx="20" cy="18" r="5"/><circle class="button" cx="38" cy="18" r="5"/><circle class="button" cx="56" cy="18" r="5"/>
TEXT
    for line in "${lines[@]}"; do
        class=
        case $line in
            '$ '*) class='command' ;;
            'verdict: nothing '*) class='verdict' ;;
            # The phases, by their seconds: standard error's.
            *[0-9]' s  '*) class='progress' ;;
        esac
        # The same width in every font.
        [[ -z $line ]] || printf '  <text x="%s" y="%s" textLength="%s"%s xml:space="preserve">%s</text>\n' "$MARGIN" "$y" \
            "$(awk "BEGIN { print ${#line} * $COLUMN }")" "${class:+ class=\"$class\"}" "$(escape "$line")"
        y=$((y + LINE))
    done
    echo '</svg>'
}

escape() { sed 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g' <<<"$1"; }

main "$@"
