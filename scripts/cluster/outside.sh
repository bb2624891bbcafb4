# shellcheck shell=bash
# Part of scripts/cluster.sh, outside of the nodes: what they need, and one new cluster after another.

need_all() {
    need_node nft openssl losetup cc
    ((nodes == 1)) || need_tools haproxy nsenter killall curl
    [[ -e /etc/protocols ]] || unavailable "missing: /etc/protocols (Debian: netbase)"
    [[ -x /usr/lib/cni/ptp ]] || unavailable "missing: /usr/lib/cni/ptp (Debian: containernetworking-plugins)"
}

# What all clusters share, in a directory that lasts as long as this script.
prepare() {
    local found
    work=$(mktemp -d -t berth-cluster.XXXXXX)
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    PROGRAMS=$work/programs
    found=$("$root/scripts/kube-apiserver.sh") || exit
    NEW=$(link_programs "$found")
    found=$(kubernetes_of "$(previous_version)") || exit
    OLD=$(link_programs "$found")
    need_clients
    unset "${!KUBE@}"
    export OLD NEW PROGRAMS TLS_LOAD KUBERC=off
    pack_images
    ! needs_berth || have_image
}

# link_programs FOUND: what scripts/kube-apiserver.sh has found, in a directory of the version, which is printed
link_programs() {
    local variable path version
    version=$(eval "$1" && kubernetes_version "$KUBE_APISERVER")
    mkdir -p "$PROGRAMS/$version"
    while IFS='=' read -r variable path; do
        variable=${variable,,}
        eval "ln -s $path \"\$PROGRAMS/\$version/\${variable//_/-}\""
    done <<<"$1"
    echo "$version"
}

# needs_berth: does one of the scenarios?
needs_berth() { ((!${#command[@]})) && [[ " ${scenarios[*]} " =~ \ ((in|e)ject|behind|judged|dead)\  ]]; }

# What berth puts into the manifest.
have_image() {
    need_image
    need_program BERTH berth debug
    cp -- "$ARCHIVE" "$IMAGES/berth.tar"
    export BERTH IMAGE
}

clean_up() {
    local status=$? half
    trap - EXIT
    trap '' INT TERM
    for half in "${!pid[@]}"; do kill -TERM "${pid[$half]}" 2>/dev/null || :; done
    for half in "${!pid[@]}"; do wait "${pid[$half]}" 2>/dev/null || :; done
    rm -rf -- "$work"
    exit "$status"
}

# begin_half NAME ARGUMENTS…: this script, on the node of a new cluster
begin_half() {
    local name=$1
    shift
    ! $keep || set -- --keep "$@"
    ! $vip || set -- --vip "$@"
    (enter_node --nodes "$nodes" --rate "$rate" "$@") <&0 &
    pid[$name]=$!
}

# end_half NAME: with its exit status
end_half() {
    local status=0
    wait "${pid[$1]}" || status=$?
    unset "pid[$1]"
    return $status
}

each_scenario() {
    local scenario failed=()
    for scenario in "${scenarios[@]}"; do
        begin_half control "$scenario"
        if [[ $bridge ]] && $together; then
            begin_half bridge --bridge "$bridge" "$scenario" >"$work/bridge.said" 2>&1
        fi
        end_half control || failed+=("$scenario")
        [[ $bridge ]] || continue
        $together || begin_half bridge --bridge "$bridge" "$scenario"
        end_half bridge || failed+=("$scenario under berth bridge")
        ! $together || cat "$work/bridge.said"
    done
    ((!${#failed[@]})) || {
        printf 'FAILED: %s\n' "${failed[@]}"
        exit 1
    }
}
