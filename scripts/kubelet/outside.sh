# shellcheck shell=bash
# Part of scripts/kubelet.sh, outside of the node: what it needs.

# Whether all is there, and namespaces and cgroups can be made.
check_all() {
    need_node cc
    [[ -n ${ARCHIVE:-} ]] || "$root/scripts/image.sh" --check >/dev/null || exit
    check_node
}

# Everything that the node is made of, exported.
need_binaries() {
    need_versions
    need_image
    need_program BERTH berth debug
    need_clients
    export BERTH IMAGE ARCHIVE TLS_LOAD OLD NEW OLD_KUBE_APISERVER KUBE_APISERVER KUBECTL KUBEADM KUBELET ETCD
    export KUBERC=off
}
