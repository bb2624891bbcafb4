# shellcheck shell=bash
# Part of scripts/release.sh: the files of a release. Everything is sorted, belongs to root and has the time
# of the commit.

# Debian's packages that are linked into a static berth, in addition to crates and Rust's library.
readonly -A LINKED=([libc.a]=LGPL-2.1-or-later [libgcc_eh.a]="GPL-3.0-or-later WITH GCC-exception-3.1")

# bill_of_materials: the crates that are linked, and which needs which, as Cargo resolves them for scripts/static.sh;
# Rust's library and Debian's; as CycloneDX
bill_of_materials() {
    "$CARGO" metadata --manifest-path "$root/Cargo.toml" --locked --format-version 1 --filter-platform "$triple" \
        >"$scratch/metadata.json"
    # A dependency of build scripts and macros is in no binary.
    "$CARGO" tree --manifest-path "$root/Cargo.toml" --locked "${BERTH[@]}" --target "$triple" \
        --edges normal,no-proc-macro --prefix depth --no-dedupe --format ' {p}' |
        awk '{ id = $2 "@" substr($3, 2); path[$1] = id; print ($1 ? path[$1 - 1] : "") "\t" id }' |
        sort -u >"$scratch/edges"
    awk -F'"' '/^name/ { name = $2 } /^version/ { version = $2 } /^checksum/ { print name "@" version "\t" $2 }' \
        "$root/Cargo.lock" >"$scratch/checksums"
    linked >"$scratch/linked"
    jq --sort-keys --arg version "$version" --arg time "$(iso "$time")" \
        --rawfile edges "$scratch/edges" --rawfile checksums "$scratch/checksums" --rawfile linked "$scratch/linked" \
        -f "$root/scripts/release/bill_of_materials.jq" "$scratch/metadata.json"
}

# linked: name, version, licence and purl of each library that is no crate
linked() {
    local file owner version package_arch rust
    rust=$("${RUSTC:-rustc}" -vV | sed -n 's/^release: //p')
    printf '%s\t%s\t%s\t%s\n' rust-std "$rust" "MIT OR Apache-2.0" "pkg:generic/rust-std@$rust"
    for file in $(printf '%s\n' "${!LINKED[@]}" | sort); do
        owner=$(owner "$file")
        # What is for another architecture's compiler is of architecture "all".
        read -r version package_arch < <(dpkg-query -W -f '${Version} ${Architecture}\n' "$owner")
        printf '%s\t%s\t%s\t%s\n' "${owner%%:*}" "$version" "${LINKED[$file]}" \
            "pkg:deb/debian/${owner%%:*}@${version//+/%2B}?arch=$package_arch"
    done
}

# owner FILE: the Debian package that has this static library
owner() {
    local path
    path=$(realpath -- "$("$compiler" -print-file-name="$1")")
    dpkg-query -S "$path" 2>/dev/null | sed 's|: /.*||' | grep . ||
        die $EX_UNAVAILABLE "no Debian package has $path, which is linked into berth"
}

# third_party BILL: each library's licence, and each text of a licence once
third_party() {
    local libc id directory file sum
    local -A seen=()
    cat <<'TEXT'
berth is linked with what stands here, each under its own licence. The texts follow.

TEXT
    jq -r '.components[] | select(.name | startswith("berth-") | not) |
        "\(.name) \(.version): \(.licenses[0].expression)"' "$1"
    while IFS=$'\t' read -r id directory; do
        for file in "$directory"/{LICEN[CS]E,COPY,NOTICE,UNLICENSE}*; do
            [[ -f $file ]] || continue
            sum=$(sha256sum <"$file")
            if [[ -n ${seen[$sum]:-} ]]; then
                printf '\n==== %s: %s, as of %s\n' "$id" "${file##*/}" "${seen[$sum]}"
                continue
            fi
            seen[$sum]=$id
            printf '\n==== %s: %s\n\n' "$id" "${file##*/}"
            cat -- "$file"
        done
    done < <(jq -r --slurpfile bill "$1" '
        ([$bill[].components[]["bom-ref"]] | INDEX(.)) as $in |
        [.packages[] | select(.source) | {id: "\(.name)@\(.version)", path: .manifest_path[:-11]} | select($in[.id])] |
        sort_by(.id)[] | "\(.id)\t\(.path)"' "$scratch/metadata.json")
    libc=$(owner libc.a)
    printf '\n==== %s\n\n' "${libc%%:*}"
    cat "/usr/share/doc/${libc%%:*}/copyright" /usr/share/common-licenses/LGPL-2.1
}

# gather BINARY BILL NATIVE: into the directory that becomes the tarball; NATIVE is a berth that runs here
gather() {
    local directory=$scratch/$name
    mkdir -p -- "$directory"/{completions,man,systemd}
    install -m 0755 -- "$1" "$directory/berth"
    (cd "$root" && install -m 0644 LICENSE README.md CHANGELOG.md "$directory" &&
        find examples -name '*.service' -exec install -m 0644 -t "$directory/systemd" {} +)
    third_party "$2" >"$directory/THIRD-PARTY"
    "$CARGO" run --manifest-path "$root/Cargo.toml" --locked --quiet "${BERTH[@]}" --features man --example man -- "$directory/man"
    # Without the builder's variables for berth.
    env -i "$3" completions bash >"$directory/completions/berth.bash"
    env -i "$3" completions fish >"$directory/completions/berth.fish"
    env -i "$3" completions zsh >"$directory/completions/_berth"
}

# tarball DIRECTORY NAME FILE: of what is called so there
tarball() {
    tar -C "$1" --sort=name --mtime="@$time" --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w -cf - "$2" |
        gzip -9n >"$3"
}

# package FILE: what tarball packs, where Debian has it
package() {
    local from=$scratch/$name tree=$scratch/package-$arch
    local doc=$tree/usr/share/doc/berth units=$tree/usr/lib/systemd/system
    mkdir -p -- "$tree/DEBIAN" "$units" "$tree/usr/share/man"
    install -D -m 0755 -- "$from/berth" "$tree/usr/bin/berth"
    cp -r -- "$from/man" "$tree/usr/share/man/man1"
    install -D -m 0644 -- "$from/completions/berth.bash" "$tree/usr/share/bash-completion/completions/berth"
    install -D -m 0644 -- "$from/completions/berth.fish" "$tree/usr/share/fish/vendor_completions.d/berth.fish"
    install -D -m 0644 -- "$from/completions/_berth" "$tree/usr/share/zsh/vendor-completions/_berth"
    # A node shim's versions stand side by side and are not the package's. No unit is enabled.
    install -m 0644 -- "$from"/systemd/* "$units"
    sed -i 's|/usr/local/bin/berth|/usr/bin/berth|' "$units"/*
    mkdir -p -- "$doc"
    install -m 0644 -- "$from"/{README,CHANGELOG}.md "$doc"
    { cat "$from/LICENSE" && printf '\n' && cat "$from/THIRD-PARTY"; } >"$doc/copyright"
    gzip -9n "$doc/CHANGELOG.md" "$tree"/usr/share/man/man1/*
    control "$tree" >"$tree/DEBIAN/control"
    (cd "$tree" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$tree/DEBIAN/md5sums"
    find "$tree" -exec touch -d "@$time" {} +
    SOURCE_DATE_EPOCH=$time dpkg-deb --root-owner-group -Zxz --build "$tree" "$1" >/dev/null
}

# control TREE: no Depends, since berth is static
control() {
    local size description
    description=$(about description)
    size=$(find "$1/usr" -type f -printf '%s\n' | awk '{ all += int(($1 + 1023) / 1024) } END { print all }')
    cat <<TEXT
Package: berth
Version: ${version/-/\~}
Architecture: $arch
Maintainer: $(git -C "$root" log -1 --format='%cn <%ce>')
Installed-Size: $size
Section: admin
Priority: optional
Description: ${description%%,*}
$(fold -s -w 78 <<<"$description." | sed 's/^/ /; s/ $//')
TEXT
}

# rpm_package FILE: what package packs, where Fedora has it. rpmbuild changes no file, and looks for no dependencies.
rpm_package() {
    cat >"$scratch/berth.spec" <<SPEC
%global __os_install_post %{nil}
%global _build_id_links none
%global _binary_payload w6.xzdio
%global _buildhost reproducible
%global use_source_date_epoch_as_buildtime 1
Name: berth
Version: ${version/-/\~}
Release: 1
Summary: $(about description | cut -d, -f 1)
License: $(about license)
URL: $(about repository)
AutoReqProv: no
%description
$(fmt <<<"$(about description).")
%install
cp -a "$scratch/package-$arch/usr" %{buildroot}
cd %{buildroot}/usr/share
mkdir -p licenses/berth
mv doc/berth/copyright licenses/berth/LICENSE
mv zsh/vendor-completions zsh/site-functions
find %{buildroot} -exec touch -d @$time {} +
%files
%license /usr/share/licenses/berth
%doc /usr/share/doc/berth
/usr/bin/berth
/usr/lib/systemd/system/*
/usr/share/man/man1/*
/usr/share/{bash-completion/completions,fish/vendor_completions.d,zsh/site-functions}/*
SPEC
    # Without the builder's ~/.rpmmacros.
    env -i HOME="$scratch" PATH="$PATH" SOURCE_DATE_EPOCH="$time" rpmbuild -bb --quiet --target "${triple%%-*}-linux" \
        --define "_rpmdir $PWD" --define "_rpmfilename $1" "$scratch/berth.spec" >/dev/null
}
