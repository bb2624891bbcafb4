#!/usr/bin/env bash
# Builds the real kube-apiserver, kubectl, kubeadm, kubelet and etcd of the tests, once, into a
# cache outside the repository, and prints where they are. What is built is pinned in
# tests/kube-apiserver/: one Go module per Kubernetes minor version, and one for etcd.
set -euo pipefail

readonly EX_USAGE=64 EX_UNAVAILABLE=69 EX_SOFTWARE=70

usage() {
    cat <<'TEXT'
usage: scripts/kube-apiserver.sh [--check] [VERSION]

Prints KUBE_APISERVER=, KUBECTL=, KUBEADM=, KUBELET= and ETCD= with the paths of binaries, for a
shell's eval; KUBEADM= and KUBELET= only for a version whose module has them. Takes what these
variables already name, and builds the rest with Go, once; the first build takes some minutes.

  VERSION   a directory of tests/kube-apiserver, such as v1.36; the newest if not given
  --check   build nothing: print the paths if all is there, else exit with 69
  --help    this text

Variables:
  KUBE_APISERVER, KUBECTL, KUBEADM, KUBELET
                     binaries of the same minor version as VERSION, instead of built ones
  ETCD               an etcd 3.x, instead of the built one
  GO                 the go command, if not the one on PATH
  GOFLAGS            as Go reads it, for example -p=2
  BERTH_TEST_CACHE   where built binaries are kept (~/.cache/berth-e2e)

Exit status: 0 all are there; 64 a wrong argument or variable; 69 something is missing and
cannot be built; 70 a build failed or came out as another version.
TEXT
}

main() {
    local check=false version=
    while (($#)); do
        case $1 in
            --check) check=true ;;
            -h | --help) usage && exit 0 ;;
            -*) die $EX_USAGE "unknown option $1; see --help" ;;
            *)
                [[ -z $version ]] || die $EX_USAGE "one VERSION only: $version or $1?"
                version=$1
                ;;
        esac
        shift
    done

    pins=$(cd "$(dirname "${BASH_SOURCE[0]}")/../tests/kube-apiserver" && pwd)
    version=${version:-$(newest_version)}
    [[ $version =~ ^v1\.[0-9]+$ && -f $pins/$version/go.mod ]] ||
        die $EX_USAGE "no version $version in tests/kube-apiserver; there are: $(versions | xargs)"
    cache=$(cache_dir)

    kubernetes_module=$pins/$version
    etcd_module=$pins/etcd
    kubernetes_version=$(pinned "$kubernetes_module" k8s.io/kubernetes)
    etcd_version=$(pinned "$etcd_module" go.etcd.io/etcd/server/v3)
    kubernetes_cache=$cache/kubernetes-$kubernetes_version-$(inputs_hash "$kubernetes_module")
    etcd_cache=$cache/etcd-$etcd_version-$(inputs_hash "$etcd_module")

    # A variable that is set wins. Any patch version will do for it, since the point of setting
    # one may be to test another patch version.
    given KUBE_APISERVER kube-apiserver "$version."
    given KUBECTL kubectl "$version."
    given KUBEADM kubeadm "$version."
    given KUBELET kubelet "$version."
    given ETCD etcd v3.
    KUBE_APISERVER=${KUBE_APISERVER:-$kubernetes_cache/kube-apiserver}
    KUBECTL=${KUBECTL:-$kubernetes_cache/kubectl}
    ! has_tool kubeadm || KUBEADM=${KUBEADM:-$kubernetes_cache/kubeadm}
    ! has_tool kubelet || KUBELET=${KUBELET:-$kubernetes_cache/kubelet}
    ETCD=${ETCD:-$etcd_cache/etcd}

    if [[ -n $(missing) ]]; then
        $check && die_missing "run scripts/kube-apiserver.sh $version, which builds with Go"
        need_go
        build_missing
    fi
    printf '%s=%q\n' KUBE_APISERVER "$KUBE_APISERVER" KUBECTL "$KUBECTL" ETCD "$ETCD"
    [[ -z ${KUBEADM:-} ]] || printf '%s=%q\n' KUBEADM "$KUBEADM"
    [[ -z ${KUBELET:-} ]] || printf '%s=%q\n' KUBELET "$KUBELET"
}

say() { printf 'kube-apiserver.sh: %s\n' "$*" >&2; }

die() {
    local status=$1
    shift
    say "$@"
    exit "$status"
}

die_missing() {
    say "missing: $(missing | paste -sd, | sed 's/,/, /g')"
    say "$1, or set $(missing_variables | paste -sd, | sed 's/,/, /g') to what you have"
    exit $EX_UNAVAILABLE
}

versions() { find "$pins" -maxdepth 1 -name 'v1.*' -printf '%f\n' | sort -V; }
newest_version() { versions | tail -n 1; }

cache_dir() {
    local dir=${BERTH_TEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/berth-e2e}
    [[ -n ${BERTH_TEST_CACHE:-}${XDG_CACHE_HOME:-}${HOME:-} ]] ||
        die $EX_USAGE "no place for built binaries: set BERTH_TEST_CACHE"
    realpath -m -- "$dir"
}

# pinned MODULE_DIR MODULE: the version that go.mod requires
pinned() { sed -nE "s@^(require)?[[:space:]]*$2 (v[^[:space:]]+).*@\2@p" "$1/go.mod" | head -n 1; }

# has_tool NAME: does this version's module have it? Only one needs to, for those that write or run manifests.
has_tool() { grep -q "^[[:space:]]k8s.io/kubernetes/cmd/$1\$" "$kubernetes_module/go.mod"; }

inputs_hash() {
    {
        uname -sm
        declare -f build_flags kubernetes_ldflags
        find "$1" -maxdepth 1 \( -name go.mod -o -name go.sum -o -name '*.go' \) -print0 |
            LC_ALL=C sort -z | xargs -0 cat
    } | sha256sum | cut -c 1-12
}

# given VARIABLE NAME VERSION_PREFIX: is what the variable names the program that it should be?
given() {
    local path=${!1:-} name=$2 prefix=$3 found
    [[ -n $path ]] || return 0
    [[ -f $path && -x $path ]] || die $EX_USAGE "$1=$path is no program"
    found=$(version_of "$name" "$path") || found=
    [[ -n $found ]] || die $EX_USAGE "$1=$path does not tell the version of a $name"
    [[ $found == "$prefix"* ]] ||
        die $EX_USAGE "$1=$path is $name $found, not ${prefix}x: unset it, or ask for another VERSION"
    printf -v "$1" %s "$(realpath -s -- "$path")"
}

# version_of NAME PATH: its version, always with a leading v
version_of() {
    case $1 in
        kube-apiserver | kubelet) "$2" --version | sed -nE 's/^Kubernetes (v.+)$/\1/p' ;;
        kubeadm) "$2" version --output=short ;;
        kubectl) KUBERC=off "$2" version --client | sed -nE 's/^Client Version: (v.+)$/\1/p' ;;
        etcd) "$2" --version | sed -nE 's/^etcd Version: (.+)$/v\1/p' ;;
    esac
}

missing() {
    [[ -x $KUBE_APISERVER ]] || echo "kube-apiserver $kubernetes_version"
    [[ -x $KUBECTL ]] || echo "kubectl $kubernetes_version"
    [[ -z ${KUBEADM:-} || -x $KUBEADM ]] || echo "kubeadm $kubernetes_version"
    [[ -z ${KUBELET:-} || -x $KUBELET ]] || echo "kubelet $kubernetes_version"
    [[ -x $ETCD ]] || echo "etcd $etcd_version"
}

missing_variables() {
    [[ -x $KUBE_APISERVER ]] || echo KUBE_APISERVER
    [[ -x $KUBECTL ]] || echo KUBECTL
    [[ -z ${KUBEADM:-} || -x $KUBEADM ]] || echo KUBEADM
    [[ -z ${KUBELET:-} || -x $KUBELET ]] || echo KUBELET
    [[ -x $ETCD ]] || echo ETCD
}

need_go() {
    local dirs=() dir needed why
    ! missing | grep -v '^etcd ' >/dev/null || dirs+=("$kubernetes_module")
    [[ -x $ETCD ]] || dirs+=("$etcd_module")
    needed=$(for dir in "${dirs[@]}"; do sed -nE 's/^go ([0-9.]+)$/\1/p' "$dir/go.mod"; done | sort -V | tail -n 1)
    go=$(command -v -- "${GO:-go}") ||
        die_missing "no Go here: put Go $needed or newer on PATH and run this again"
    for dir in "${dirs[@]}"; do
        # Reads go.mod and nothing else, so all that can fail is an old Go.
        why=$(GOWORK=off "$go" -C "$dir" list -m 2>&1) ||
            die_missing "$go cannot build it ($why): put Go $needed or newer on PATH and run this again"
    done
}

build_missing() {
    mkdir -p "$cache"
    exec 9>"$cache/.lock"
    flock --nonblock 9 || { say "waiting for another build in $cache" && flock 9; }
    # In the cache, so that the rename at the end stays within one file system; what a killed build
    # left there is nobody's while the lock is held, which is until this process ends.
    scratch=$cache/.build
    trap 'rm -rf -- "$scratch"' EXIT
    rm -rf -- "$scratch"
    mkdir -- "$scratch"

    # Asked again now that the lock is held: the other build may have made it all.
    [[ -x $ETCD ]] || build "$etcd_module" "$ETCD" etcd "$etcd_version" .
    [[ -x $KUBECTL ]] ||
        build "$kubernetes_module" "$KUBECTL" kubectl "$kubernetes_version" k8s.io/kubernetes/cmd/kubectl
    [[ -z ${KUBEADM:-} || -x $KUBEADM ]] ||
        build "$kubernetes_module" "$KUBEADM" kubeadm "$kubernetes_version" k8s.io/kubernetes/cmd/kubeadm
    [[ -x $KUBE_APISERVER ]] ||
        build "$kubernetes_module" "$KUBE_APISERVER" kube-apiserver "$kubernetes_version" \
            k8s.io/kubernetes/cmd/kube-apiserver
    [[ -z ${KUBELET:-} || -x $KUBELET ]] ||
        build "$kubernetes_module" "$KUBELET" kubelet "$kubernetes_version" k8s.io/kubernetes/cmd/kubelet
}

# build MODULE_DIR TARGET NAME VERSION PACKAGE
build() {
    local dir=$1 target=$2 name=$3 version=$4 package=$5 flags found
    say "building $name $version"
    readarray -t flags < <(build_flags "$name" "$version")
    # Without the lock's descriptor: what Go leaves running must not keep others waiting.
    env -u GOOS -u GOARCH CGO_ENABLED=0 GOWORK=off \
        "$go" -C "$dir" build "${flags[@]}" -o "$scratch/$name" "$package" >&2 9>&- ||
        die $EX_SOFTWARE "$name $version does not build; Go's reason is above"
    found=$(version_of "$name" "$scratch/$name") || found=
    [[ $found == "$version" ]] || die $EX_SOFTWARE "built $name says '$found', not $version"
    mkdir -p "$(dirname "$target")"
    mv -T -- "$scratch/$name" "$target"
    say "built $name $version after ${SECONDS}s"
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
