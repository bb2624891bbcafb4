# shellcheck shell=bash
# Part of scripts/kubelet.sh and scripts/cluster.sh, on the node: its processes, mounts and images.

# make_mounts DIRECTORY…: directories that are written to are the node's own, and only in this mount namespace. Of the
# given ones it sees what the machine has, and what it writes there is its own, too.
make_mounts() {
    local directory setting value
    for directory in "$@"; do
        mkdir "$work/node/upper-${directory//\//-}" "$work/node/overlay-${directory//\//-}"
        mount -t overlay overlay "/$directory" -o \
            "lowerdir=/$directory,upperdir=$work/node/upper-${directory//\//-},workdir=$work/node/overlay-${directory//\//-}"
    done
    mkdir -p /etc/kubernetes
    for directory in run var/log var/lib etc/kubernetes; do
        mkdir -p "$work/node/$directory"
        mount --bind "$work/node/$directory" "/$directory"
    done
    # The kubelet would set these for the whole machine; so it finds them set.
    while read -r setting value; do
        echo "$value" >"$work/node/${setting//\//.}"
        mount --bind "$work/node/${setting//\//.}" "/proc/sys/$setting"
    done <<'TEXT'
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
TEXT
}

# image NAME BINARY [FILE…]: as an archive to standard output, an image that holds one program, where Kubernetes' own
# images have it, and files where they are here
image() {
    local dir binary layer
    dir=$(mktemp -d "$work/image.XXXXXX") binary=$(realpath -- "$2")
    tar -C / --transform 's|.*/|usr/local/bin/|' -cf "$dir/layer.tar" "${binary#/}"
    (($# < 3)) || tar -C / --dereference -rf "$dir/layer.tar" "${@:3}" 2>/dev/null
    layer=$(sha256sum "$dir/layer.tar" | cut -d' ' -f1)
    jq -n --arg layer "sha256:$layer" --arg program "/usr/local/bin/$(basename "$binary")" --arg machine "$(uname -m)" '{
        os: "linux", architecture: ({x86_64: "amd64", aarch64: "arm64"}[$machine] // $machine),
        config: {Env: ["PATH=/usr/local/bin:/usr/sbin"], Entrypoint: [$program]},
        rootfs: {type: "layers", diff_ids: [$layer]}}' >"$dir/config.json"
    jq -n --arg name "$1" '[{Config: "config.json", RepoTags: [$name], Layers: ["layer.tar"]}]' >"$dir/manifest.json"
    tar -C "$dir" -cf - manifest.json config.json layer.tar
    rm -r "$dir"
}

# What a kubelet of a test has in its configuration.
kubelet_settings() {
    cat <<'TEXT'
cgroupDriver: cgroupfs
# Where the machine has it.
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
localStorageCapacityIsolation: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 1Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%}
volumePluginDir: /var/lib/kubelet/volume-plugins
TEXT
}
