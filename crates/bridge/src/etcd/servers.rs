//! The etcds that a kube-apiserver's arguments name. Pure.

use berth_exec::args;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

pub(super) const SERVERS_FLAG: &str = "--etcd-servers";
const OVERRIDES_FLAG: &str = "--etcd-servers-overrides";

/// The URLs of an etcd, in the order of the arguments.
pub type Urls = Vec<String>;

/// Each etcd that the arguments name: by `--etcd-servers` for all resources, and by
/// `--etcd-servers-overrides` for some.
pub fn find_etcds(argv: &[OsString]) -> BTreeSet<Urls> {
    let overridden = list_items(argv, OVERRIDES_FLAG);
    let overridden = overridden
        .iter()
        .filter_map(|item| item.split_once('#'))
        .map(|(_, servers)| split_list(servers, ';'));
    let all = overridden.chain([list_items(argv, SERVERS_FLAG)]);
    all.filter(|urls| !urls.is_empty()).collect()
}

/// The URLs of the etcd for all resources, from `--etcd-servers`.
pub fn main_servers(argv: &[OsString]) -> Urls {
    list_items(argv, SERVERS_FLAG)
}

/// Replaces the URLs of each etcd in a kube-apiserver's arguments, if `instead` has other URLs for
/// that etcd.
pub fn replace_urls(argv: &mut Vec<OsString>, instead: &BTreeMap<Urls, Urls>) {
    if let Some(others) = instead.get(&list_items(argv, SERVERS_FLAG)) {
        args::set_flag(argv, SERVERS_FLAG, others.join(",").as_ref());
    }
    let before = list_items(argv, OVERRIDES_FLAG);
    let replaced = |item: &String| {
        let (resource, servers) = item.split_once('#')?;
        Some(format!(
            "{resource}#{}",
            instead.get(&split_list(servers, ';'))?.join(";")
        ))
    };
    let after: Vec<_> = before
        .iter()
        .map(|item| replaced(item).unwrap_or_else(|| item.clone()))
        .collect();
    if after != before {
        args::set_flag(argv, OVERRIDES_FLAG, after.join(",").as_ref());
    }
}

/// The items of a flag that takes a list. A flag that occurs twice has the items of both
/// occurrences.
fn list_items(argv: &[OsString], flag: &str) -> Vec<String> {
    args::flag_values(argv, flag)
        .flat_map(|value| split_list(&value.to_string_lossy(), ','))
        .collect()
}

fn split_list(list: &str, separator: char) -> Vec<String> {
    list.split(separator)
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(ToOwned::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_argv(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn parse_urls(text: &str) -> Urls {
        split_list(text, ' ')
    }

    #[test]
    fn each_etcd_is_named_once() {
        let given = "k --etcd-servers=https://a:1,https://b:1 --etcd-servers https://c:1 \
                     --etcd-servers-overrides=/events#https://e:1;https://f:1,apps/x#https://e:1;https://f:1";
        let all = [
            parse_urls("https://a:1 https://b:1 https://c:1"),
            parse_urls("https://e:1 https://f:1"),
        ];
        assert_eq!(find_etcds(&parse_argv(given)), BTreeSet::from(all));
        for none in [
            "k",
            "k --etcd-servers=",
            "k --etcd-servers=, --etcd-servers-overrides=/events",
        ] {
            assert_eq!(find_etcds(&parse_argv(none)), BTreeSet::new(), "{none}");
        }
    }

    #[test]
    fn only_an_etcd_with_other_members_is_replaced() {
        let instead = BTreeMap::from([(
            parse_urls("https://own:1"),
            parse_urls("https://b:1 https://c:1"),
        )]);
        let replaced = |text: &str| {
            let mut argv = parse_argv(text);
            replace_urls(&mut argv, &instead);
            argv.join("".as_ref())
                .into_string()
                .unwrap()
                .replace("--", " --")
        };
        assert_eq!(
            replaced("k --etcd-servers https://own:1 --v=2"),
            "k --v=2 --etcd-servers=https://b:1,https://c:1"
        );
        assert_eq!(
            replaced(
                "k --etcd-servers=https://x:1 --etcd-servers-overrides=/events#https://own:1,/leases#https://e:1"
            ),
            "k --etcd-servers=https://x:1 --etcd-servers-overrides=/events#https://b:1;https://c:1,/leases#https://e:1"
        );
        for same in [
            "k",
            "k --etcd-servers=https://own:2 --etcd-servers-overrides=/events#https://own:2,x",
        ] {
            assert_eq!(replaced(same), same);
        }
    }
}
