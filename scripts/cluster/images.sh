# shellcheck shell=bash
# Part of scripts/cluster.sh: the images of both versions, packed once, outside, from the binaries; there is no registry.

# pack_images: into $work/images, whose archives the nodes import
pack_images() {
    local version name image libraries
    IMAGES=$work/images
    mkdir "$IMAGES"
    make_pause
    readarray -t libraries < <(ldd "$(type -P nft)" | grep -o '/[^ ]*')
    for version in "$OLD" "$NEW"; do
        while read -r image; do
            name=${image##*/} name=${name%:*}
            case $name in
                # Without the file nft prints numbers for tcp and udp, and a kube-proxy that starts again takes its own rules for
                # somebody else's and removes them.
                kube-proxy) set -- /etc/protocols "$(type -P nft)" "${libraries[@]}" ;;
                coredns) continue ;;
                *) set -- ;;
            esac
            image "$image" "$PROGRAMS/$version/$name" "$@" >"$IMAGES/$name-$version.tar"
        done < <(images_of "$version")
    done
    image "$TOOL_IMAGE" "$PROGRAMS/$NEW/pause" >"$IMAGES/tool.tar"
    export IMAGES
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

# images_of VERSION, image_of NAME VERSION: as kubeadm of this version calls them
images_of() { "$PROGRAMS/$1/kubeadm" config images list --kubernetes-version "$1" 2>>"$work/images.log"; }
image_of() { images_of "$2" | grep "/$1:"; }

import_images() {
    local archive
    for archive in "$IMAGES"/*.tar; do
        ctr --namespace k8s.io images import "$archive" >>"$work/images.log" 2>&1 || fail "ctr images import $archive" images.log
    done
}

# A pause as Kubernetes' own, which knows -v: kubeadm upgrade runs that in a Job to see whether the cluster runs any. And what
# the pods of the test do.
make_pause() {
    cc -static -O2 -x c -o "$PROGRAMS/$OLD/pause" - <<'TEXT'
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* A line every 100 ms. */
static void tick(void) {
    for (unsigned long i = 0;; i++) {
        if (printf("%lu\n", i) < 0 || fflush(stdout)) _exit(1);
        usleep(100000);
    }
}

/* Gives back what it gets. */
static int echo(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 128)) return 1;
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
        char bytes[4096];
        ssize_t got;
        int client = accept(listener, 0, 0);
        if (client < 0) continue;
        if (fork() == 0) {
            while ((got = read(client, bytes, sizeof bytes)) > 0)
                if (write(client, bytes, got) != got) break;
            _exit(0);
        }
        close(client);
    }
}

int main(int count, char **arguments) {
    signal(SIGTERM, _exit);
    signal(SIGINT, _exit);
    if (count > 1 && !strcmp(arguments[1], "-v")) return puts("pause of scripts/cluster.sh") < 0;
    if (count > 1 && !strcmp(arguments[1], "tick")) tick();
    if (count > 1 && !strcmp(arguments[1], "serve")) {
        if (fork() == 0) return echo(8080);
        tick();
    }
    for (;;) pause();
}
TEXT
    ln -s "../$OLD/pause" "$PROGRAMS/$NEW/pause"
}
