#!/usr/bin/env bash
# usage: scripts/kube-apiserver.sh [--check] [VERSION]
#
# Prints KUBE_APISERVER=, KUBE_CONTROLLER_MANAGER=, KUBE_SCHEDULER=, KUBE_PROXY=, KUBELET=, KUBEADM=,
# KUBECTL= and ETCD= with the paths of binaries, for a shell's eval. Takes what these variables already
# name, and builds the rest with Go, once; the first build takes some minutes. What is built is pinned in
# tests/kube-apiserver: a Go module for each minor version of Kubernetes, and one for etcd.
#
#   VERSION   a directory of tests/kube-apiserver, such as v1.36; the newest if not given
#   --check   build nothing: print the paths if all is there, else exit with 69
#   --help    this text
#
# Variables:
#   KUBE_APISERVER and so on
#                      binaries of the same minor version as VERSION, instead of built ones
#   ETCD               an etcd 3.x, instead of the built one
#   GO                 the go command, if not the one on PATH
#   GOFLAGS            as Go reads it, for example -p=2
#   BERTH_TEST_CACHE   where built binaries are kept (~/.cache/berth-e2e)
#
# Exit status: 0 all are there; 64 a wrong argument or variable; 69 something is missing and
# cannot be built; 70 a build failed or came out as another version.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Of k8s.io/kubernetes.
readonly PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubeadm kubectl)

main() {
    local check=false version versions
    pins=$root/tests/kube-apiserver
    readarray -t versions < <(pinned_versions)
    parse_options check "ARGUMENT=$(one_of "${versions[@]}")" -- "$@"
    ((${#arguments[@]} < 2)) || wrong_usage "one VERSION only: ${arguments[*]}"
    version=${arguments[0]:-${versions[-1]}}
    cache=$(cache_dir)

    kubernetes_module=$pins/$version
    etcd_module=$pins/etcd
    kubernetes_version=$(pinned "$kubernetes_module" k8s.io/kubernetes)
    etcd_version=$(pinned "$etcd_module" go.etcd.io/etcd/server/v3)
    kubernetes_cache=$cache/kubernetes-$kubernetes_version-$(inputs_hash "$kubernetes_module")
    etcd_cache=$cache/etcd-$etcd_version-$(inputs_hash "$etcd_module")

    # A variable that is set wins. Any patch version will do for it, since the point of setting
    # one may be to test another patch version.
    local name
    for name in "${PROGRAMS[@]}"; do
        locate "$name" "$version." "$kubernetes_cache/$name"
    done
    locate etcd v3. "$etcd_cache/etcd"

    if [[ -n $(missing) ]]; then
        $check && die_missing "run scripts/kube-apiserver.sh $version, which builds with Go"
        need_go
        build_missing
    fi
    for name in "${PROGRAMS[@]}" etcd; do
        printf '%s=%q\n' "$(variable "$name")" "$(path_of "$name")"
    done
}

die_missing() {
    local name names=() variables=()
    for name in $(missing); do
        if [[ $name == etcd ]]; then names+=("etcd $etcd_version"); else names+=("$name $kubernetes_version"); fi
        variables+=("$(variable "$name")")
    done
    say "missing: $(listed "${names[@]}")"
    say "$1, or set $(listed "${variables[@]}") to what you have"
    exit $EX_UNAVAILABLE
}

listed() { printf '%s\n' "$@" | paste -sd, | sed 's/,/, /g'; }

cache_dir() {
    local dir=${BERTH_TEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/berth-e2e}
    [[ -n ${BERTH_TEST_CACHE:-}${XDG_CACHE_HOME:-}${HOME:-} ]] ||
        die $EX_USAGE "no place for built binaries: set BERTH_TEST_CACHE"
    realpath -m -- "$dir"
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

# variable NAME: the variable that has the program's path
variable() {
    local name=${1^^}
    echo "${name//-/_}"
}

path_of() {
    local variable
    variable=$(variable "$1")
    echo "${!variable:-}"
}

# locate NAME VERSION_PREFIX PATH: the program is at PATH, or where its variable is set to; that must be the right program and version
locate() {
    local name=$1 prefix=$2 variable path found
    variable=$(variable "$name") path=$(path_of "$name")
    if [[ -z $path ]]; then
        printf -v "$variable" %s "$3"
        return
    fi
    [[ -f $path && -x $path ]] || die $EX_USAGE "$variable=$path is no program"
    found=$(version_of "$name" "$path") || found=
    [[ -n $found ]] || die $EX_USAGE "$variable=$path does not tell the version of a $name"
    [[ $found == "$prefix"* ]] ||
        die $EX_USAGE "$variable=$path is $name $found, not ${prefix}x: unset it, or ask for another VERSION"
    printf -v "$variable" %s "$(realpath -s -- "$path")"
}

# version_of NAME PATH: its version, always with a leading v
version_of() {
    case $1 in
        kube-* | kubelet) "$2" --version | sed -nE 's/^Kubernetes (v.+)$/\1/p' ;;
        kubeadm) "$2" version --output=short ;;
        kubectl) KUBERC=off "$2" version --client | sed -nE 's/^Client Version: (v.+)$/\1/p' ;;
        etcd) "$2" --version | sed -nE 's/^etcd Version: (.+)$/v\1/p' ;;
    esac
}

# Names of programs that are not there.
missing() {
    local name
    for name in "${PROGRAMS[@]}" etcd; do
        [[ -x $(path_of "$name") ]] || echo "$name"
    done
}

need_go() {
    local dirs=() dir needed why
    ! missing | grep -vx etcd >/dev/null || dirs+=("$kubernetes_module")
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
    # In the cache, so that the rename at the end stays within one file system. The lock is held until this process ends, so what
    # is there was left by a killed build.
    scratch=$cache/.build
    trap 'rm -rf -- "$scratch"' EXIT
    rm -rf -- "$scratch"
    mkdir -- "$scratch"

    # Asked again now that the lock is held: the other build may have made it all.
    local names=()
    readarray -t names < <(missing | grep -vx etcd)
    [[ -x $ETCD ]] || build_programs "$etcd_module" "$etcd_version" . etcd
    ((!${#names[@]})) || build_programs "$kubernetes_module" "$kubernetes_version" k8s.io/kubernetes/cmd/ "${names[@]}"
}

# build_programs MODULE_DIR VERSION PACKAGES NAME…: in one go, so that one is linked while others compile. PACKAGES is a prefix of
# packages, or the one package.
build_programs() {
    local dir=$1 version=$2 packages=$3 name flags found target
    shift 3
    say "building $(listed "$@") $version"
    readarray -t flags < <(build_flags "$1" "$version")
    [[ $packages == . ]] || packages=("${@/#/$packages}")
    # Without the lock's descriptor: what Go leaves running must not keep others waiting.
    env -u GOOS -u GOARCH CGO_ENABLED=0 GOWORK=off \
        "$go" -C "$dir" build "${flags[@]}" -o "$scratch/" "${packages[@]}" >&2 9>&- ||
        die $EX_SOFTWARE "$(listed "$@") $version: no build; Go's reason is above"
    for name in "$@"; do
        found=$(version_of "$name" "$scratch/$name") || found=
        [[ $found == "$version" ]] || die $EX_SOFTWARE "built $name has version '$found', not $version"
        target=$(path_of "$name")
        mkdir -p "$(dirname "$target")"
        mv -T -- "$scratch/$name" "$target"
    done
    say "built $(listed "$@") $version after ${SECONDS}s"
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
