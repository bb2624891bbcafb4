# shellcheck shell=bash
# Part of scripts/kubelet.sh, outside of the node: what it needs.

# Whether all is there, and namespaces and cgroups can be made.
check_all() {
    need_tools cc "${CARGO:=cargo}"
    [[ -n ${ARCHIVE:-} ]] || "$root/scripts/image.sh" --check >/dev/null || exit
    check_node
}

# Everything that the node is made of, exported.
need_binaries() {
    local found
    found=$(apiserver_sh "$(previous_version)") || exit
    OLD_KUBE_APISERVER=$(eval "$found" && echo "$KUBE_APISERVER")
    found=$("$root/scripts/kube-apiserver.sh") || exit
    eval "$found"
    OLD=$("$OLD_KUBE_APISERVER" --version) NEW=$("$KUBE_APISERVER" --version)
    OLD=${OLD#Kubernetes } NEW=${NEW#Kubernetes }
    if [[ -z ${ARCHIVE:-} ]]; then
        found=$("$root/scripts/image.sh" --check 2>/dev/null) || found=$("$root/scripts/image.sh") || exit
        eval "$found"
    fi
    build_berth
    export BERTH IMAGE ARCHIVE TLS_LOAD OLD NEW OLD_KUBE_APISERVER KUBE_APISERVER KUBECTL KUBEADM KUBELET ETCD
    export KUBERC=off
}
