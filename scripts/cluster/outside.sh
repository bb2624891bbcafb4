# shellcheck shell=bash
# Part of scripts/cluster.sh, outside of the nodes: what they need, one new cluster after another, their namespaces and cgroups, and
# the removal of these.

need_all() {
    need_root "namespaces and cgroups"
    need_tools ip jq unshare setpriv containerd ctr runc nft openssl losetup killall cc "${CARGO:=cargo}"
    ((nodes == 1)) || need_tools haproxy nsenter
    [[ -e /etc/protocols ]] || unavailable "missing: /etc/protocols (Debian: netbase)"
    [[ -x /usr/lib/cni/ptp ]] || unavailable "missing: /usr/lib/cni/ptp (Debian: containernetworking-plugins)"
}

# What all clusters share, in a directory that lasts as long as this script.
prepare() {
    work=$(mktemp -d -t berth-cluster.XXXXXX)
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    PROGRAMS=$work/programs
    need_versions
    mkdir -p "$PROGRAMS"/{"$OLD","$NEW"}
    ln -s "$(dirname "$OLD_KUBE_APISERVER")"/* "$ETCD" "$PROGRAMS/$OLD"
    ln -s "$(dirname "$KUBE_APISERVER")"/* "$ETCD" "$PROGRAMS/$NEW"
    ! needs_handler || {
        go_command=(test -c)
        need_module "$root/examples/cluster-api/handler" cluster-api handler.test
        export CAPI_TEST=$built/handler.test
        go_command=()
    }
    need_clients
    export OLD NEW PROGRAMS TLS_LOAD KUBERC=off
    pack_images
    ! needs_tests || need_kubernetes --tests
    export E2E_TEST
    needs_berth || return 0
    # What berth puts into the manifest.
    need_image
    need_program BERTH berth debug
    cp -- "$ARCHIVE" "$IMAGES/berth.tar"
    export BERTH IMAGE
}

# needs_berth: does one of the scenarios?
needs_berth() { ((!${#command[@]})) && [[ " ${scenarios[*]} " =~ \ ((in|e)ject|behind|judged|interrupted|dead)\  ]]; }
needs_handler() { ((!${#command[@]})) && [[ " ${scenarios[*]} " == *" cluster-api "* ]]; }
needs_tests() { ((!${#command[@]})) && [[ " ${scenarios[*]} " == *" conformance "* ]]; }

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

# Whether the binaries are there, and namespaces and cgroups can be made.
check_node() {
    "$root/scripts/kube-apiserver.sh" --check "$(previous_version)" >/dev/null || exit
    "$root/scripts/kube-apiserver.sh" --check >/dev/null || exit
    ! needs_tests || "$root/scripts/kube-apiserver.sh" --check --tests >/dev/null || exit
    unshare --net --mount --pid --uts --fork --mount-proc true || unavailable "no namespaces can be made here"
    cgroup=berth-$program.check-$$
    trap remove_cgroups EXIT
    make_cgroups
}

# enter_node ARGUMENTS…: runs this script again, as the first process of the node's namespaces; all others in them end with it.
enter_node() {
    local status=0
    work=$(mktemp -d -t "berth-$program.XXXXXX")
    trap leave_node EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    cgroup=$(basename "$work")
    make_cgroups
    export BERTH_NODE_FOLDER=$work BERTH_NODE_CGROUP=$cgroup
    # In the background, so that traps run at once.
    setpriv --pdeathsig KILL unshare --net --mount --pid --uts --fork --kill-child --mount-proc \
        "$root/scripts/$program.sh" "$@" <&0 &
    pid[node]=$!
    wait "${pid[node]}" || status=$?
    unset 'pid[node]'
    exit $status
}

leave_node() {
    local status=$? directory
    trap - EXIT
    trap '' INT TERM
    if [[ -n ${pid[node]:-} ]]; then
        kill -KILL "${pid[node]}" 2>/dev/null || :
        wait "${pid[node]}" 2>/dev/null || :
        # The shell of scripts/try.sh leaves the terminal raw.
        [[ -z ${TRY_TERMINAL:-} ]] || stty "$TRY_TERMINAL" || :
    fi
    remove_cgroups || say "cgroups are left: $cgroup"
    # The logs of all containers.
    for directory in "$work" "$work"/{cp,w}-*; do
        mv -- "$directory/node/var/log/pods" "$directory" 2>/dev/null || :
        rm -rf -- "$directory"/{node,never}
    done
    if $keep || { ((status)) && ((!${#command[@]})); }; then
        say "logs: $work"
    else
        rm -rf -- "$work"
    fi
    exit "$status"
}

# One in each hierarchy, for the kubelet to make its own in.
make_cgroups() {
    local hierarchy
    while read -r hierarchy; do
        mkdir "$hierarchy/$cgroup" || unavailable "no cgroup can be made in $hierarchy"
    done < <(cgroup_hierarchies)
}

remove_cgroups() {
    local hierarchy tries=0 left
    while :; do
        left=()
        while read -r hierarchy; do
            [[ ! -d $hierarchy/$cgroup ]] || find "$hierarchy/$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null ||
                left+=("$hierarchy")
        done < <(cgroup_hierarchies)
        ((${#left[@]})) || return 0
        # Processes that were killed a moment ago may still be in them.
        ((tries++ < 50)) || return 1
        sleep 0.1
    done
}

cgroup_hierarchies() { awk '$3 == "cgroup" || $3 == "cgroup2" { print $2 }' /proc/self/mounts; }
