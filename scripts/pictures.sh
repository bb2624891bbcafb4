#!/usr/bin/env bash
# usage: scripts/pictures.sh [NAME...]
#
# Runs what each NAME says and draws what it printed into docs/NAME.svg, if it ended well; else exits with its status.
#
#   rehearse   berth rehearse, with simulated apiservers; less than a minute
#   bridge     berth bridge -- kubeadm upgrade apply, on a node of scripts/cluster.sh; some ten minutes. The middle of what
#              kubeadm prints is left out, and a line says so
#   status     berth status on such a node that is behind berth, while both instances of a berth upgrade serve; some six minutes
#   all of them if none is given
#
# Variables: BERTH, built for release if not given; IMAGE, ARCHIVE, TLS_LOAD and CARGO, as scripts/cluster.sh takes them

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Lengths are counted in characters, not in bytes.
export LC_ALL=C.UTF-8
readonly NAMES=(rehearse bridge status)
# In pixels: a column of the font, a line, the margin, and the bar above the text.
readonly COLUMN=7.2 LINE=18 MARGIN=16 BAR=28
# The lines that are less than the others: the phases, by their seconds; what is not berth's; the heading.
readonly -A MUTED=([rehearse]='^ *[0-9.]+ s  ' [bridge]='^($|[^ ]| +\[)' [status]='^BERTH ')

main() {
    local name status
    parse_options "ARGUMENT=$(one_of "${NAMES[@]}")" -- "$@"
    need_program BERTH berth
    export BERTH PRINTED WIDTH
    cd "$root"
    work=$(mktemp -d -t berth-pictures.XXXXXX)
    trap 'rm -rf -- "$work"' EXIT
    for name in "${arguments[@]:-${NAMES[@]}}"; do
        PRINTED=$work/$name WIDTH=120 status=0
        "print_$name" || status=$?
        ((!status)) || {
            cat "$PRINTED" >&2 || :
            exit $status
        }
        draw "${MUTED[$name]}" <"$PRINTED" >"$work/$name.svg"
        cp -- "$work/$name.svg" "docs/$name.svg"
        printf '%s: %s lines\n' "docs/$name.svg" "$(wc -l <"$PRINTED")"
    done
}

print_rehearse() {
    # Not a terminal, so there are no live counters.
    { echo "\$ cargo run --release -- rehearse" && "$BERTH" rehearse; } >"$PRINTED" 2>&1
}

print_bridge() {
    need_tools script
    on_a_node bridge_there && leave_out 3
}

print_status() {
    need_image
    export IMAGE ARCHIVE
    # A row is longer than the usual terminal.
    WIDTH=140
    on_a_node status_there both_serve
}

# on_a_node FUNCTION…: calls the first one on the node of a new cluster
on_a_node() { "$root/scripts/cluster.sh" -- bash -euo pipefail -c "$(declare -f "$@")"$'\n'"$1" </dev/null; }

# shellcheck disable=SC2317
bridge_there() {
    local shown="berth bridge -- kubeadm upgrade apply $NEW --yes"
    install "$BERTH" /usr/bin/berth
    printf '#!/bin/sh\nexec %s "$@" --ignore-preflight-errors all\n' "$PROGRAMS/$NEW/kubeadm" >/usr/bin/kubeadm
    # As long as it takes anybody.
    unset BERTH_SETTLE
    { echo "\$ $shown" && script --quiet --return --command "stty columns $WIDTH && $shown" /dev/null | sed $'s/\e\\[[0-9;]*m//g; s/\r//'; } >"$PRINTED"
}

# shellcheck disable=SC2317
status_there() {
    local manifest=/etc/kubernetes/manifests/kube-apiserver.yaml upgrade
    ctr --namespace k8s.io images import "$ARCHIVE"
    "$BERTH" inject --image "$IMAGE" --write --bridge
    sed "s/kube-apiserver:$OLD/kube-apiserver:$NEW/" $manifest >/etc/kubernetes/next.yaml
    "$BERTH" upgrade /etc/kubernetes/next.yaml &
    upgrade=$!
    until both_serve; do
        kill -0 $upgrade
        sleep 0.2
    done
    wait $upgrade
}
# Joined, ready, and with connections, which kubectl makes.
# shellcheck disable=SC2317
both_serve() {
    kubectl version >/dev/null 2>&1 && { echo "\$ berth status" && "$BERTH" status; } >"$PRINTED" &&
        (($(grep -cE ' joined +ready +[^ ]+ +v[^ ]+ +[0-9]+ +[1-9]' "$PRINTED") == 2))
}

# leave_out ENDS: the lines that are not berth's, but for so many at the beginning and at the end
leave_out() {
    awk -v ends="$1" -v muted="${MUTED[bridge]}" '
        NR == FNR { all += $0 ~ muted; next }
        $0 !~ muted || ++n <= ends || n > all - ends { print; next }
        n == ends + 1 { print "… (" all - 2 * ends " lines of kubeadm are left out)" }' "$PRINTED" "$PRINTED" >"$PRINTED.shown"
    mv -- "$PRINTED.shown" "$PRINTED"
}

# draw MUTED: a terminal with standard input, a command and its output
draw() {
    local line part class shown='' body='' y=$((BAR + MARGIN + 4)) width height
    while IFS= read -r line; do
        class='' line=${line//$'\t'/        }
        if [[ $line == '$ '* ]]; then
            class='command' shown=${line#\$ }
        elif [[ $line =~ ^('verdict: nothing '|.*' s  done: ') ]]; then
            class=verdict
        elif [[ $line =~ $1 ]]; then
            class=muted
        fi
        # As a terminal wraps it, and with the same width in every font.
        while
            part=${line:0:WIDTH} line=${line:WIDTH}
            [[ -z $part ]] || printf -v body '%s  <text x="%s" y="%s" textLength="%s"%s xml:space="preserve">%s</text>\n' "$body" \
                $MARGIN $y "$(awk "BEGIN { print ${#part} * $COLUMN }")" "${class:+ class=\"$class\"}" "$(escape "$part")"
            y=$((y + LINE))
            [[ $line ]]
        do :; done
    done
    width=$(awk "BEGIN { print int($WIDTH * $COLUMN + 2 * $MARGIN + 0.5) }")
    height=$((y + 4))
    cat <<TEXT
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" role="img" aria-labelledby="title">
  <title id="title">What $shown prints</title>
  <style>
    svg { color-scheme: light dark; }
    text { font: 12px ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; white-space: pre; }
    .page { fill: #f6f8fa; stroke: #d1d9e0; }
    .button { fill: #d1d9e0; }
    .muted { fill: #59636e; }
    .command, .verdict { font-weight: 600; }
    .verdict { fill: #116329; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .page { fill: #0d1117; stroke: #3d444d; }
      .button { fill: #3d444d; }
      .muted { fill: #9198a1; }
      .verdict { fill: #56d364; }
    }
  </style>
  <rect class="page" x="0.5" y="0.5" width="$((width - 1))" height="$((height - 1))" rx="8"/>
  <circle class="button" cx="20" cy="18" r="5"/><circle class="button" cx="38" cy="18" r="5"/><circle class="button" cx="56" cy="18" r="5"/>
$body</svg>
TEXT
}

escape() { sed 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g' <<<"$1"; }

main "$@"
