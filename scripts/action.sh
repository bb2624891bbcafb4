#!/usr/bin/env bash
# usage: scripts/action.sh [--build] [--workflow]
#
# Runs the steps of action.yml, the GitHub Action, as a runner does: the same shell, with the variables that GitHub sets, outputs in files,
# a workspace that is not this repository. Rehearses simulated kube-apiservers, and real ones where scripts/kube-apiserver.sh has built
# them; a curl of its own serves these as dl.k8s.io and GitHub do, so nothing is downloaded, and a sudo of its own changes no user.
#
#   --build      let the action build berth, for release, in Cargo's target directory
#   --workflow   run nothing: print the steps as a workflow, for actionlint, which reads no steps of an action
#
# Variables: BERTH, a berth with the command rehearse; built with cargo if not given
# Needs jq. Exit status 1: a step does not do what action.yml and docs/rehearse.md say.

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Of action.yml: defaults of inputs, values of outputs; the steps in order, with variables as NAME=VALUE lines, and scripts.
declare -A inputs=() outputs=() variables=() scripts=()
steps=()
# Of the last run: outputs of steps, by STEP.NAME, and those of the action.
declare -A results=() output=()
# A rehearsal as short as it can be.
readonly SHORT="--rate 20 --phase 1s --start-delay 1s --seed 1"

main() {
    local build=false workflow=false
    parse_options build workflow -- "$@"
    read_action
    if $workflow; then as_workflow && return; fi
    need_tools jq
    $build || need_program BERTH berth debug
    work=$(mktemp -d -t berth-action.XXXXXX)
    trap 'rm -rf -- "$work"' EXIT
    mkdir "$work"/{bin,workspace}
    printf '#!/bin/sh\nexec "$@"\n' >"$work/bin/sudo"
    printf '#!/usr/bin/env bash\nexec "%s/served" "$@"\n' "$work" >"$work/bin/curl"
    printf '#!/bin/sh\necho "curl: (6) Could not resolve host" >&2\nexit 6\n' >"$work/served"
    chmod +x "$work"/{bin/*,served}
    export CARGO_TARGET_DIR
    CARGO_TARGET_DIR=$(target_directory)
    clean_environment
    documents_agree
    simulated
    refused
    real
    say "all held"
}

# read_action: fails at a line that has another form than those of action.yml, so that no part is passed over
read_action() {
    local line section='' name='' step='' inside=''
    while IFS= read -r line; do
        if [[ $inside == run && ($line == '        '* || -z $line) ]]; then
            scripts[$step]+=${line#        }$'\n'
        elif [[ $line =~ ^(\#.*|name:\ .*|description:\ .*|\ \ using:\ composite|\ \ steps:)$ ]]; then
            :
        elif [[ $line =~ ^(inputs|outputs|runs):$ ]]; then
            section=${BASH_REMATCH[1]}
        elif [[ $section != runs && $line =~ ^\ \ ([a-z]+):$ ]]; then
            name=${BASH_REMATCH[1]}
        elif [[ $section != runs && $line =~ ^\ \ \ \ description:\ [^\"].*$ ]]; then
            :
        elif [[ $section == inputs && $line =~ ^\ \ \ \ default:\ (\"(.*)\"|([^\"].*))$ ]]; then
            inputs[$name]=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
        elif [[ $section == outputs && $line =~ ^\ \ \ \ value:\ (.*)$ ]]; then
            outputs[$name]=${BASH_REMATCH[1]}
        elif [[ $section == runs && $line =~ ^\ \ \ \ -\ id:\ ([a-z]+)$ ]]; then
            step=${BASH_REMATCH[1]} inside=''
            steps+=("$step")
        elif [[ $step && $line =~ ^\ \ \ \ \ \ (name:\ .*|shell:\ bash)$ ]]; then
            inside=''
        elif [[ $step && $line =~ ^\ \ \ \ \ \ (env:|run:\ \|)$ ]]; then
            inside=${line//[ :|]/}
        elif [[ $inside == env && $line =~ ^\ \ \ \ \ \ \ \ ([A-Z]+):\ (.*)$ ]]; then
            variables[$step]+="${BASH_REMATCH[1]}=${BASH_REMATCH[2]}"$'\n'
        else
            die 1 "action.yml has a line that this script cannot read: $line"
        fi
    done <"$root/action.yml"
    ((${#inputs[@]} && ${#outputs[@]} && ${#steps[@]} == ${#scripts[@]})) || die 1 "action.yml lacks inputs, outputs or steps"
}

as_workflow() {
    local name
    printf '%s\n' 'on:' '  workflow_call:' '    inputs:'
    for name in "${!inputs[@]}"; do printf '      %s: {type: string}\n' "$name"; done
    printf '%s\n' 'jobs:' '  action:' '    runs-on: ubuntu-24.04' '    outputs:'
    for name in "${!outputs[@]}"; do printf '      %s: %s\n' "$name" "${outputs[$name]}"; done
    awk '/^  steps:$/ { inside = 1; $0 = "  " $0 } inside' "$root/action.yml"
}

# expand VALUE: sets `expanded`, from the inputs in `given` and the outputs of steps in `results`
expand() {
    if [[ $1 != *\$\{\{* ]]; then
        expanded=$1
    elif [[ $1 =~ ^\$\{\{\ inputs\.([a-z]+)\ \}\}$ && ${inputs[${BASH_REMATCH[1]}]+there} ]]; then
        expanded=${given[${BASH_REMATCH[1]}]-${inputs[${BASH_REMATCH[1]}]}}
    elif [[ $1 =~ ^\$\{\{\ steps\.([a-z]+)\.outputs\.([a-z]+)\ \}\}$ && ${scripts[${BASH_REMATCH[1]}]+there} ]]; then
        expanded=${results[${BASH_REMATCH[1]}.${BASH_REMATCH[2]}]-}
    else
        die 1 "action.yml has an expression that this script cannot read: $1"
    fi
}

# act STATUS [INPUT=VALUE]…: runs the action, which has to end with this status; sets `results`, and `output` with the action's outputs
act() {
    local expected=$1 status=0 step line name pair environment expanded run
    local -A given=()
    shift
    say "the action with ${*:-nothing}"
    for pair; do
        [[ ${inputs[${pair%%=*}]+there} ]] || die 1 "action.yml has no input ${pair%%=*}"
        given[${pair%%=*}]=${pair#*=}
    done
    results=() output=()
    # A directory that needs quoting, empty as at the start of a job.
    run=$work/runner\'s\ temp
    rm -rf -- "$run"
    mkdir -- "$run"
    : >"$run/summary"
    for step in "${steps[@]}"; do
        environment=(HOME="${HOME:-/root}" PATH="$work/bin:$PATH" LANG=C.UTF-8 CI=true GITHUB_ACTIONS=true RUNNER_OS=Linux RUNNER_TEMP="$run"
            GITHUB_WORKSPACE="$work/workspace" GITHUB_ACTION_PATH="$root" GITHUB_OUTPUT="$run/output" GITHUB_STEP_SUMMARY="$run/summary"
            CARGO_TARGET_DIR="$CARGO_TARGET_DIR" ${CARGO_HOME:+CARGO_HOME="$CARGO_HOME"} ${RUSTUP_HOME:+RUSTUP_HOME="$RUSTUP_HOME"})
        while IFS= read -r line; do
            [[ $line ]] || continue
            expand "${line#*=}"
            environment+=("${line%%=*}=$expanded")
        done <<<"${variables[$step]-}"
        : >"$run/output"
        printf %s "${scripts[$step]}" >"$run/$step.sh"
        (cd "$work/workspace" && exec env -i "${environment[@]}" bash --noprofile --norc -e -o pipefail "$run/$step.sh") \
            </dev/null >"$work/log" 2>&1 || status=$?
        while IFS= read -r line; do
            [[ $line =~ ^[a-z]+=.* ]] || die 1 "step $step writes an output of another form: $line"
            results[$step.${line%%=*}]=${line#*=}
        done <"$run/output"
        ((!status)) || break
    done
    for name in "${!outputs[@]}"; do
        expand "${outputs[$name]}"
        output["$name"]=$expanded
    done
    ((status == expected)) || { cat "$work/log" >&2 && die 1 "step $step ended with $status, not $expected"; }
    ((!status)) || grep -q '^::error title=berth rehearse::' "$work/log" || die 1 "step $step failed without an annotation"
}

# expect OUTPUT VALUE
expect() { [[ ${output[$1]} == "$2" ]] || die 1 "the output $1 is '${output[$1]}', not '$2'"; }

# says TEXT: is it in what the last step printed?
says() { grep -qF -- "$1" "$work/log" || { cat "$work/log" >&2 && die 1 "the last step does not say: $1"; }; }

documents_agree() {
    local name row
    for name in "${!inputs[@]}" "${!outputs[@]}"; do
        row="| \`$name\` |"
        [[ ! ${inputs[$name]+there} ]] || row+=" ${inputs[$name]:+\`${inputs[$name]}\` }|"
        grep -qF "$row" "$root/docs/rehearse.md" || die 1 "docs/rehearse.md has no row '$row' for action.yml"
    done
    grep -q "etcd/server/v3 ${inputs[etcd]}\$" "$root/tests/kube-apiserver/etcd/go.mod" || die 1 "the default etcd is not that of tests/kube-apiserver"
}

simulated() {
    local berth=()
    $build || berth=(program="$BERTH")
    act 0 "${berth[@]}" compare=berth options="$SHORT"
    expect verdict held
    expect lost 0
    grep -q '^<!DOCTYPE html>' "${output[report]}" || die 1 "the report is no page"
    jq -e '.runs | length == 1' "${output[json]}" >/dev/null || die 1 "another comparison than asked for"
    grep -q '^| berth | held | 0 |$' "$work/runner's temp/summary" || die 1 "the summary of the job has no row of the run"
    # From here on with the berth that is there.
    BERTH=${results[berth.program]}
    # A fault, and as root.
    act 0 program="$BERTH" compare= faults="bad-flag, crash-after-ready" root=true options="$SHORT"
    expect lost 0
    jq -e '[.runs[].via] == ["none", "berth"] and (.runs[1].outcome.ran.promises | length == 2)' "${output[json]}" >/dev/null ||
        die 1 "not the control, and berth with two faults"
    # The control decides, by an option that is for tests: it loses what it always loses.
    act 1 program="$BERTH" compare=none options="$SHORT --via none"
    expect verdict lost
    [[ ${output[lost]} != 0 ]] || die 1 "the control lost nothing"
    says "::error title=berth rehearse::${output[lost]} lost"
}

# What fails before a rehearsal.
refused() {
    act 64 program="$BERTH" faults=no-such-fault
    expect lost ''
    act 1 program="$BERTH" options=--help
    says "nothing was rehearsed"
    act 1 program="$work/bin/sudo"
    says "has no command rehearse"
    act 1 program="$BERTH" old=v1.36 new=v1.36
    says "v1.36.3"
    act 1 program="$BERTH" old=1.35.4 new=v1.36.3
    says "no download of https://dl.k8s.io/release/v1.35.4/bin/linux/"
}

# Real kube-apiservers by their versions, as dl.k8s.io and GitHub serve them.
real() {
    local version
    for version in $(pinned_versions | tail -n 2); do
        "$root/scripts/kube-apiserver.sh" --check "$version" >/dev/null 2>&1 || {
            say "skipped: real: no kube-apiserver $version, which scripts/kube-apiserver.sh builds"
            return
        }
    done
    need_versions
    declare -px OLD NEW OLD_KUBE_APISERVER KUBE_APISERVER ETCD >"$work/real"
    cat >"$work/served" <<'SERVED'
#!/usr/bin/env bash
# curl OPTION… -o FILE URL
set -euo pipefail
. "${0%/*}/real"
file=${*: -2:1} url=${*: -1}
version=$(sed -nE 's|.*/(v[0-9.]+)/.*|\1|p' <<<"$url")
serve() { if [[ $url == *.sha256 ]]; then sha256sum <"$1" | cut -d ' ' -f 1 >"$file"; else cp -- "$1" "$file"; fi; }
case $url in
    "https://dl.k8s.io/release/$OLD/bin/linux/"*/kube-apiserver*) serve "$OLD_KUBE_APISERVER" ;;
    "https://dl.k8s.io/release/$NEW/bin/linux/"*/kube-apiserver*) serve "$KUBE_APISERVER" ;;
    https://github.com/etcd-io/etcd/releases/download/"$version"/*)
        name=etcd-$version-linux-$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/')
        tar -cf "$file" --transform "s|^|$name/|" -C "$(dirname "$ETCD")" etcd && gzip -n1 "$file" && mv "$file.gz" "$file"
        [[ $url != */SHA256SUMS ]] || { printf '%s  %s\n' "$(sha256sum <"$file" | cut -d ' ' -f 1)" "$name.tar.gz" >"$file.sums" && mv "$file.sums" "$file"; }
        ;;
    *) exit 22 ;;
esac
[[ ! -e ${0%/*}/damage || $url == *.sha256 ]] || echo damage >>"$file"
SERVED
    act 0 program="$BERTH" old="$OLD --v=2" new="${NEW#v}" compare=berth options="--rate 20"
    expect lost 0
    jq -e --arg old "$OLD" --arg new "$NEW" '[.runs[0].outcome.ran.instances[].version] | contains([$old, $new])' "${output[json]}" >/dev/null ||
        die 1 "other versions were rehearsed than $OLD and $NEW"
    : >"$work/damage"
    act 1 program="$BERTH" old="$OLD_KUBE_APISERVER" new="$NEW"
    says "has another checksum than https://dl.k8s.io/release/$NEW/bin/linux/"
}

main "$@"
