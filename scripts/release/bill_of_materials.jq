# Of `cargo metadata`, and what scripts/release/pack.sh found: a bill of materials as CycloneDX has it.

def rows($text): $text | split("\n") | map(select(. != "") | split("\t"));
# Older crates write "MIT/Apache-2.0".
def spdx: gsub(" */ *"; " OR ");

(rows($checksums) | map({key: .[0], value: .[1]}) | from_entries) as $sha256
| (.packages | INDEX("\(.name)@\(.version)")) as $packages
| rows($edges) as $edges
| "berth@\($version)" as $berth
| ([$edges[][1]] | unique) as $crates
| def crate:
    $packages[.] as $package
    | {type: "library", "bom-ref": ., name: $package.name, version: $package.version}
    | if $package.license then .licenses = [{expression: ($package.license | spdx)}] else . end
    # berth's own crates are nowhere but here.
    | if $package.source then .purl = "pkg:cargo/\($package.name)@\($package.version)" else . end
    | if $sha256[.["bom-ref"]] then .hashes = [{alg: "SHA-256", content: $sha256[.["bom-ref"]]}] else . end
    | if $package.repository then .externalReferences = [{type: "vcs", url: $package.repository}] else . end;
{
    bomFormat: "CycloneDX",
    specVersion: "1.6",
    version: 1,
    metadata: {timestamp: $time, component: ($berth | crate | .type = "application")},
    components: (
        ($crates - [$berth] | map(crate))
        + (rows($linked) | map({
            type: "library", "bom-ref": .[3], name: .[0], version: .[1], licenses: [{expression: .[2]}], purl: .[3]
        }))
    ),
    dependencies: [
        $crates[] as $crate
        | {ref: $crate, dependsOn: (
            [$edges[] | select(.[0] == $crate) | .[1]] + (if $crate == $berth then [rows($linked)[][3]] else [] end) | unique
        )}
    ]
}
