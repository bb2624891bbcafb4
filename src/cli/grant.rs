//! `berth grant`.

use super::operate::AdminArgs;
use berth_options::place::ADDRESSES_HEADING;
use clap::Args;
use std::path::PathBuf;

/// Options of `berth grant`.
#[derive(Debug, Clone, Args)]
pub struct GrantArgs {
    #[command(flatten)]
    pub admin: AdminArgs,
    /// Path of the shim's new kubeconfig, in a directory with nothing else; the token is written
    /// into the same directory
    #[arg(long, value_name = "FILE", conflicts_with_all = ["revoke", "print"])]
    pub out: Option<PathBuf>,
    /// The node's name in the cluster; with --print or --revoke several names, separated by commas
    /// [default: the name that this machine's kubelet uses]
    #[arg(
        long,
        env = "BERTH_NODE_NAME",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub node: Vec<String>,
    /// The manifest with the shim's listen address and uid
    #[arg(
        long,
        env = "BERTH_GRANT_MANIFEST",
        default_value = "/etc/kubernetes/manifests/kube-apiserver.yaml",
        value_name = "FILE"
    )]
    pub manifest: PathBuf,
    /// The berth's address, where the shim reaches the API [default: the address in the manifest]
    #[arg(long, env = "BERTH_LISTEN", value_delimiter = ' ', value_name = "ADDR:PORT", help_heading = ADDRESSES_HEADING)]
    pub listen: Vec<String>,
    /// The shim's uid, which will own the files [default: the uid in the manifest]
    #[arg(long, env = "BERTH_UID", value_name = "UID")]
    pub uid: Option<String>,
    /// Delete the node's service account (and so the account's tokens), Role and RoleBindings
    #[arg(long, conflicts_with = "print")]
    pub revoke: bool,
    /// Print the objects as YAML, without a request to the cluster
    #[arg(long)]
    pub print: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
