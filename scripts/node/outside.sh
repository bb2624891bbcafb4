# shellcheck shell=bash
# Part of scripts/kubelet.sh and scripts/cluster.sh, outside of the node: what it is made of, its namespaces and cgroups,
# and their removal.

# need_node TOOL…: tools and rights for a node, and these tools
need_node() {
    need_root "namespaces and cgroups"
    need_tools ip jq unshare setpriv containerd ctr runc "${CARGO:=cargo}" "$@"
}

# need_image: IMAGE and ARCHIVE, berth's image, as scripts/image.sh prints them
need_image() {
    local found
    [[ -z ${ARCHIVE:-} ]] || return 0
    found=$("$root/scripts/image.sh" --check 2>/dev/null) || found=$("$root/scripts/image.sh") || exit
    eval "$found"
}

# Whether the binaries are there, and namespaces and cgroups can be made.
check_node() {
    kubernetes_of "$(previous_version)" --check >/dev/null || exit
    "$root/scripts/kube-apiserver.sh" --check >/dev/null || exit
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
