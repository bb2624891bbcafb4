#!/bin/bash
# Puts a program of Kubernetes on this node, and starts nothing. On the node: /usr/local/sbin/install-kubernetes, which berth-upgrade
# calls. This is for Debian and Ubuntu with Kubernetes' packages of pkgs.k8s.io, and untested: replace it with what your images have.
#
#   install-kubernetes kubeadm|kubelet v1.MINOR.PATCH
set -euo pipefail

[[ $# == 2 && $1 =~ ^(kubeadm|kubelet)$ && $2 =~ ^v1\.([0-9]+)\.[0-9]+$ ]] || {
    echo "usage: install-kubernetes kubeadm|kubelet v1.MINOR.PATCH" >&2
    exit 64
}
minor=${BASH_REMATCH[1]}
packages=("$1=${2#v}-*")
[[ $1 == kubeadm ]] || packages+=("kubectl=${2#v}-*")
sed -i "s|/core:/stable:/v1\.[0-9]*/|/core:/stable:/v1.$minor/|" /etc/apt/sources.list.d/kubernetes.list
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --allow-change-held-packages "${packages[@]}"
