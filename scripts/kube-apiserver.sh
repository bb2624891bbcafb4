#!/usr/bin/env bash
# usage: scripts/kube-apiserver.sh [--check] [--tests] [VERSION]
#
# Prints KUBE_APISERVER=, KUBE_CONTROLLER_MANAGER=, KUBE_SCHEDULER=, KUBE_PROXY=, KUBELET=, KUBEADM=,
# KUBECTL= and ETCD= with the paths of binaries, for a shell's eval. What is not there is built with Go, once, in some
# minutes, as tests/kube-apiserver pins it: a Go module for each minor version of Kubernetes, and one for etcd.
#
#   VERSION   a directory of tests/kube-apiserver, such as v1.36; the newest if not given
#   --tests   print E2E_TEST= instead, Kubernetes' own end-to-end tests, of the version before the newest
#   --check   build nothing: print the paths if all is there, else exit with 69
#
# Variables: GO, the go command, if not the one on PATH; GOFLAGS, as Go reads it, for example -p=2; BERTH_TEST_CACHE, where built
# binaries are kept (~/.cache/berth-e2e)

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Of k8s.io/kubernetes.
readonly PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubeadm kubectl)

main() {
    local check=false tests=false name version versions kubernetes etcd flags pins=$root/tests/kube-apiserver
    readarray -t versions < <(pinned_versions)
    parse_options check tests "ARGUMENT=$(one_of "${versions[@]}")" -- "$@"
    ((${#arguments[@]} < 2)) || wrong_usage "one VERSION only: ${arguments[*]}"
    version=${arguments[0]:-${versions[-1]}}
    ! $tests || build_e2e "$pins/$(previous_version)/e2e"
    kubernetes=kubernetes-$(pinned "$pins/$version" k8s.io/kubernetes)
    etcd=etcd-$(pinned "$pins/etcd" go.etcd.io/etcd/server/v3)
    readarray -t flags < <(build_flags etcd)
    go_build "$etcd-$(inputs_hash "$pins/etcd")" "$pins/etcd" etcd "${flags[@]}" .
    etcd=$built
    readarray -t flags < <(build_flags kubernetes "${kubernetes#*-}")
    go_build "$kubernetes-$(inputs_hash "$pins/$version")" "$pins/$version" "" "${flags[@]}" "${PROGRAMS[@]/#/k8s.io/kubernetes/cmd/}"
    for name in "${PROGRAMS[@]}"; do
        version=${name^^}
        printf '%s=%q\n' "${version//-/_}" "$built/$name"
    done
    printf 'ETCD=%q\n' "$etcd/etcd"
}

# build_e2e MODULE_DIR: builds and prints it, and ends this script
build_e2e() {
    local version flags
    version=$(pinned "$1" k8s.io/kubernetes)
    readarray -t flags < <(build_flags kubernetes "$version")
    go_command=(test -c)
    go_build "e2e-$version-$(inputs_hash "$1")" "$1" e2e.test "${flags[@]}" k8s.io/kubernetes/test/e2e
    printf 'E2E_TEST=%q\n' "$built/e2e.test"
    exit
}

# pinned MODULE_DIR MODULE: the version that go.mod requires
pinned() { sed -nE "s@^(require)?[[:space:]]*$2 (v[^[:space:]]+).*@\2@p" "$1/go.mod" | head -n 1; }

inputs_hash() {
    {
        uname -sm
        declare -f build_flags kubernetes_ldflags
        find "$1" -maxdepth 1 \( -name go.mod -o -name go.sum -o -name '*.go' \) -print0 |
            LC_ALL=C sort -z | xargs -0 cat
    } | sha256sum | cut -c 1-12
}

# build_flags NAME VERSION: one a line. The tags are those of released Kubernetes binaries.
build_flags() {
    local ldflags="-s -w"
    [[ $1 == etcd ]] || ldflags+=" $(kubernetes_ldflags "$2")"
    printf '%s\n' -trimpath -buildvcs=false -mod=readonly -tags=grpcnotrace,notest,selinux "-ldflags=$ldflags"
}

# kubernetes_ldflags VERSION: what a release's build sets, less what would differ in each build
kubernetes_ldflags() {
    local package major minor _
    IFS=. read -r major minor _ <<<"${1#v}"
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        printf -- '-X %s.gitVersion=%s -X %s.gitMajor=%s -X %s.gitMinor=%s -X %s.gitTreeState=archive -X %s.gitCommit= ' \
            "$package" "$1" "$package" "$major" "$package" "$minor" "$package" "$package"
    done
}

main "$@"
