# shellcheck shell=bash
# Part of scripts/cluster.sh, outside of the nodes: what they need, and one new cluster after another.

need_all() {
    need_tools nft openssl losetup cc "${CARGO:=cargo}"
    [[ -e /etc/protocols ]] || unavailable "missing: /etc/protocols (Debian: netbase)"
    [[ -x /usr/lib/cni/ptp ]] || unavailable "missing: /usr/lib/cni/ptp (Debian: containernetworking-plugins)"
}

# What all clusters share, in a directory that lasts as long as this script.
prepare() {
    local found target
    work=$(mktemp -d -t berth-cluster.XXXXXX)
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    PROGRAMS=$work/programs
    found=$("$root/scripts/kube-apiserver.sh") || exit
    NEW=$(link_programs "$found")
    found=$(apiserver_sh "$(previous_version)") || exit
    OLD=$(link_programs "$found")
    if [[ -z ${TLS_LOAD:-} ]]; then
        # A release: the clients are not to take the processors from the node.
        (cd "$root" && "$CARGO" build --release --locked --package berth-bench --bin tls-load)
        target=$(cd "$root" && "$CARGO" metadata --locked --no-deps --format-version 1 | jq -r .target_directory)
        TLS_LOAD=$target/release/tls-load
    fi
    unset "${!BERTH_@}" "${!ETCD_@}" "${!KUBE@}" {http,https,all,no}_proxy {HTTP,HTTPS,ALL,NO}_PROXY
    export OLD NEW PROGRAMS TLS_LOAD KUBERC=off
    pack_images
}

# link_programs FOUND: what scripts/kube-apiserver.sh has found, in a directory of the version, which is printed
link_programs() {
    local variable path version
    version=$(eval "$1" && "$KUBE_APISERVER" --version)
    version=${version#Kubernetes }
    mkdir -p "$PROGRAMS/$version"
    while IFS='=' read -r variable path; do
        variable=${variable,,}
        eval "ln -s $path \"\$PROGRAMS/\$version/\${variable//_/-}\""
    done <<<"$1"
    echo "$version"
}

clean_up() {
    local status=$?
    trap - EXIT
    trap '' INT TERM
    if [[ -n ${pid[cluster]:-} ]]; then
        kill -TERM "${pid[cluster]}" 2>/dev/null || :
        wait "${pid[cluster]}" 2>/dev/null || :
    fi
    rm -rf -- "$work"
    exit "$status"
}

# in_a_cluster ARGUMENTS…: this script, on the node of a new one
in_a_cluster() {
    local status=0
    ! $keep || set -- --keep "$@"
    (enter_node --rate "$rate" "$@") <&0 &
    pid[cluster]=$!
    wait "${pid[cluster]}" || status=$?
    unset 'pid[cluster]'
    return $status
}

each_scenario() {
    local scenario failed=()
    for scenario in "${scenarios[@]}"; do
        in_a_cluster "$scenario" || failed+=("$scenario")
        [[ -z $bridge ]] || in_a_cluster --bridge "$bridge" "$scenario" || failed+=("$scenario under berth bridge")
    done
    ((!${#failed[@]})) || {
        printf 'FAILED: %s\n' "${failed[@]}"
        exit 1
    }
}
