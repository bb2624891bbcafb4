//! The result of `berth grant`, with a real kube-apiserver that authorizes by RBAC. The written
//! kubeconfig allows every verb that a shim needs and no other, and revoking ends the token.

use crate::support::net::fresh_ip;
use crate::support::process::{Running, berth_command, output_of};
use berth_cluster::account::{account_name, token_path, token_request};
use berth_cluster::kubeconfig::Token;
use berth_cluster::lease::{ALL_LEASES, InstanceLease, lease_path};
use berth_cluster::service::{
    FIELD_MANAGER, Family, RECONCILED_SLICE, SERVICE_PATH, build_slice, slice_name, slice_path,
};
use berth_cluster::{Access, Client, Error};
use berth_testing::{create_ca, issue_certificate};
use berth_upgrade::lock;
use hyper::StatusCode;
use libtest_mimic::Failed;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use rcgen::KeyPair;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

const NODE: &str = "cp-1";

/// Longest start of an apiserver on a slow machine.
pub(crate) const UP: Duration = Duration::from_secs(90);

/// Longest time until a token is refused. kube-apiserver caches a valid token for 10 s.
const REVOKED: Duration = Duration::from_secs(20);

pub(crate) fn run_grant(apiserver: &str, etcd: &str) -> Result<(), Failed> {
    let temp = tempfile::tempdir()?;
    let cluster = Cluster::start(temp.path(), apiserver, etcd)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(cluster.ready())?;
    let file = temp.path().join("cluster/kubeconfig");
    // The first of the nodes is another node. The objects of this other node must stay when the
    // token of `NODE` is revoked.
    for node in ["cp-2", NODE, NODE] {
        let (status, out, err) = output_of(
            cluster
                .berth(&["grant", "--json", "--node", node])
                .arg("--out")
                .arg(&file),
        );
        if status != Some(0) {
            return Err(format!("grant {node}: {status:?}: {out}{err}").into());
        }
        let granted: Value = serde_json::from_str(&out)?;
        assert_eq!(
            (&granted["seconds"], granted["may"].as_array().map(Vec::len)),
            (&json!(2_592_000), Some(13)),
            "{out}"
        );
    }
    let admin = Client::from_kubeconfig(&cluster.admin).map_err(|error| error.to_string())?;
    let shim = Client::from_kubeconfig(&file).map_err(|error| error.to_string())?;
    runtime.block_on(needed_verbs_work(&shim))?;
    runtime.block_on(rules_are_these_and_no_others(&shim, &cluster.admin))?;
    cluster.revoke(&runtime, &shim, &admin)
}

/// Runs a test in a network namespace with loopback and the given addresses.
pub(crate) fn on_a_node(
    addresses: &[&str],
    run: impl FnOnce() -> Result<(), Failed> + Send,
) -> Result<(), Failed> {
    std::thread::scope(|scope| {
        let node = scope.spawn(|| -> Result<(), String> {
            unshare(CloneFlags::CLONE_NEWNET).map_err(|error| error.to_string())?;
            for command in ["link set lo up"].iter().chain(addresses) {
                let done = Command::new("ip").args(command.split(' ')).status();
                assert!(done.is_ok_and(|status| status.success()), "ip {command}");
            }
            run().map_err(|failed| format!("{failed:?}"))
        });
        node.join().unwrap_or_else(|_| Err("it panicked".into()))
    })?;
    Ok(())
}

/// etcd and a kube-apiserver on a fresh address. Dropping the value ends both.
pub(crate) struct Cluster {
    address: SocketAddr,
    pub(crate) admin: PathBuf,
    /// The apiserver's command line for a shell.
    pub(crate) command: String,
    apiserver: Option<Running>,
    etcd: Running,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("etcd: {}", self.etcd.log());
        }
    }
}

impl Cluster {
    pub(crate) fn start(dir: &Path, apiserver: &str, etcd: &str) -> Result<Self, Failed> {
        let ip = fresh_ip();
        // The advertised address may not be a loopback address. No node has an address of this
        // block (RFC 5737).
        let advertise = "--advertise-address=192.0.2.2".into();
        let flags = [
            format!("--bind-address={ip}"),
            advertise,
            "--service-cluster-ip-range=10.96.0.0/24".into(),
        ];
        Self::start_on(dir, apiserver, etcd, ip, &flags)
    }

    /// Starts etcd and the apiserver, both reached at a loopback address. `flags` set the
    /// apiserver's addresses.
    pub(crate) fn start_on(
        dir: &Path,
        apiserver: &str,
        etcd: &str,
        ip: Ipv4Addr,
        flags: &[String],
    ) -> Result<Self, Failed> {
        let address = SocketAddr::from((ip, 6443));
        let (store, peers) = (format!("https://{ip}:2379"), format!("http://{ip}:2380"));
        let file = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).map(|()| path)
        };
        let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let (issuer, signing) = (create_ca(), KeyPair::generate()?);
        let ca = file("ca.crt", &issuer.pem())?;
        let issued = |server: &str, name: &str| -> std::io::Result<_> {
            let (certificate, key) = issue_certificate(&issuer, &[name]);
            Ok((
                file(&format!("{server}.crt"), &certificate)?,
                file(&format!("{server}.key"), &key)?,
            ))
        };
        let (certificate, key) = issued("server", "kubernetes")?;
        let (etcd_certificate, etcd_key) = issued("etcd", &ip.to_string())?;
        let etcd = Running::start(Command::new(etcd).args([
            "--name=grant".into(),
            flag("data-dir", &dir.join("etcd")),
            format!("--listen-client-urls={store}"),
            format!("--advertise-client-urls={store}"),
            format!("--listen-peer-urls={peers}"),
            format!("--initial-advertise-peer-urls={peers}"),
            format!("--initial-cluster=grant={peers}"),
            flag("cert-file", &etcd_certificate),
            flag("key-file", &etcd_key),
            flag("trusted-ca-file", &ca),
            "--client-cert-auth".into(),
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
        ]));
        let own = [
            apiserver.to_owned(),
            format!("--etcd-servers={store}"),
            flag("etcd-cafile", &ca),
            flag("etcd-certfile", &etcd_certificate),
            flag("etcd-keyfile", &etcd_key),
            "--secure-port=6443".into(),
            "--authorization-mode=RBAC".into(),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            flag("cert-dir", &dir.join("certs")),
            flag("tls-cert-file", &certificate),
            flag("tls-private-key-file", &key),
            flag(
                "token-auth-file",
                &file("tokens", "admin,admin,admin,\"system:masters\"\n")?,
            ),
            flag(
                "service-account-key-file",
                &file("sa.pub", &signing.public_key_pem())?,
            ),
            flag(
                "service-account-signing-key-file",
                &file("sa.key", &signing.serialize_pem())?,
            ),
        ];
        let command = [&own[..], flags].concat().join(" ");
        let admin = format!(
            "current-context: a\nclusters: [{{name: a, cluster: {{server: 'https://{address}', tls-server-name: kubernetes, \
             certificate-authority: '{}'}}}}]\ncontexts: [{{name: a, context: {{cluster: a, user: a}}}}]\nusers: [{{name: a, user: \
             {{token: admin}}}}]\n",
            ca.display()
        );
        let admin = file("admin.conf", &admin)?;
        let mut cluster = Self {
            address,
            admin,
            command,
            apiserver: None,
            etcd,
        };
        cluster.start_apiserver();
        Ok(cluster)
    }

    pub(crate) fn start_apiserver(&mut self) {
        let words: Vec<_> = self.command.split(' ').collect();
        self.apiserver = Some(Running::start(Command::new(words[0]).args(&words[1..])));
    }

    /// Stops the apiserver as the kubelet does.
    pub(crate) fn stop_apiserver(&mut self) {
        let Some(mut apiserver) = self.apiserver.take() else {
            return;
        };
        let _ = kill(apiserver.pid(), Signal::SIGTERM);
        apiserver.ended();
    }

    /// Waits for the objects that a new cluster creates by itself.
    pub(crate) async fn ready(&self) -> Result<(), Failed> {
        let client = Client::from_kubeconfig(&self.admin).map_err(|error| error.to_string())?;
        let began = Instant::now();
        loop {
            let slice = client.get(RECONCILED_SLICE).await;
            if client.is_ready().await && client.get(SERVICE_PATH).await.is_ok() && slice.is_ok() {
                return Ok(());
            }
            if began.elapsed() > UP {
                return Err(format!(
                    "not ready: {slice:?}\n{:?}",
                    self.apiserver.as_ref().map(Running::log)
                )
                .into());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    pub(crate) fn berth(&self, args: &[&str]) -> Command {
        let mut command = berth_command(args);
        command.arg("--kubeconfig").arg(&self.admin);
        if args.contains(&"grant") && !args.contains(&"--revoke") {
            let uid = nix::unistd::geteuid().to_string();
            command.args(["--listen", &self.address.to_string(), "--uid", &uid]);
        }
        command
    }

    /// Checks the effects of a revocation: the token ends, and other objects stay.
    fn revoke(
        &self,
        runtime: &tokio::runtime::Runtime,
        shim: &Client,
        admin: &Client,
    ) -> Result<(), Failed> {
        let (status, out, err) =
            output_of(&mut self.berth(&["grant", "--revoke", "--json", "--node", NODE]));
        let revoked: Value = serde_json::from_str(&out)?;
        assert_eq!(
            (status, revoked["deleted"].as_array().map(Vec::len)),
            (Some(0), Some(4)),
            "{out}{err}"
        );
        let began = Instant::now();
        while status_of(&runtime.block_on(shim.get(ALL_LEASES))) != Some(StatusCode::UNAUTHORIZED) {
            assert!(began.elapsed() < REVOKED, "the token is good still");
            std::thread::sleep(Duration::from_millis(200));
        }
        println!(
            "revoked: the token was refused after {:.1} s",
            began.elapsed().as_secs_f64()
        );
        let role = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles/berth";
        let role = runtime
            .block_on(admin.get(role))
            .map_err(|error| error.to_string())?
            .to_string();
        for slice in ["berth-cp-1-ipv4", "berth-cp-2-ipv6"] {
            assert!(role.contains(slice), "{role}");
        }
        let (status, out, _) = output_of(&mut self.berth(&["grant", "--revoke", "--node", NODE]));
        assert_eq!(
            (status, out.as_str()),
            (Some(0), "cp-1: there was nothing to delete\n")
        );
        Ok(())
    }
}

fn status_of(answer: &Result<Value, Error>) -> Option<StatusCode> {
    answer.as_ref().err().and_then(Error::status)
}

fn own_slice(node: &str) -> Value {
    build_slice(node, "192.0.2.2:6443".parse().unwrap(), "https")
}

fn own_lease(instance: &str) -> InstanceLease {
    let now = SystemTime::now();
    InstanceLease {
        node: NODE.into(),
        instance: instance.into(),
        holder: "cp-1_1".into(),
        address: "192.0.2.2:6443".parse().unwrap(),
        version: None,
        state: "joined".into(),
        acquired: now,
        renewed: now,
        transitions: 0,
    }
}

/// Uses each verb like the keeper, which creates objects by applying them.
async fn needed_verbs_work(shim: &Client) -> Result<(), Failed> {
    let own = slice_path(&slice_name(NODE, Family::V4));
    let lease = lease_path(&own_lease("a").name());
    let steps = [
        ("get the Service", shim.get(SERVICE_PATH).await),
        ("get the slice kubernetes", shim.get(RECONCILED_SLICE).await),
        (
            "create its slice",
            shim.apply(&own, FIELD_MANAGER, &own_slice(NODE)).await,
        ),
        (
            "apply its slice again",
            shim.apply(&own, FIELD_MANAGER, &own_slice(NODE)).await,
        ),
        ("delete its slice", shim.delete(&own).await),
        // A keeper also deletes the slice of another node that is gone.
        (
            "create another node's slice",
            shim.apply(
                &slice_path("berth-cp-2-ipv4"),
                FIELD_MANAGER,
                &own_slice("cp-2"),
            )
            .await,
        ),
        (
            "delete another node's slice",
            shim.delete(&slice_path("berth-cp-2-ipv4")).await,
        ),
        (
            "create a Lease",
            shim.apply(&lease, FIELD_MANAGER, &own_lease("a").object())
                .await,
        ),
        (
            "apply a Lease again",
            shim.apply(&lease, FIELD_MANAGER, &own_lease("a").object())
                .await,
        ),
        ("list Leases", shim.get(ALL_LEASES).await),
        ("delete a Lease", shim.delete(&lease).await),
        (
            "renew its token",
            shim.post(&token_path(&account_name(NODE)), &token_request())
                .await,
        ),
    ];
    let failed: Vec<_> = steps
        .iter()
        .filter_map(|(what, answer)| Some((what, answer.as_ref().err()?.to_string())))
        .collect();
    if failed.is_empty() {
        Ok(())
    } else {
        Err(format!("{failed:#?}").into())
    }
}

/// Compares all rules that RBAC lists for the token, except the rules that every service account
/// has. So no verb is overlooked.
async fn rules_are_these_and_no_others(shim: &Client, admin: &Path) -> Result<(), Failed> {
    let told = |error: Error| error.to_string();
    let mut access = Access::read(admin).map_err(|error| error.to_string())?;
    let admin = Client::new(&access).map_err(|error| error.to_string())?;
    let accounts = "/api/v1/namespaces/kube-system/serviceaccounts";
    let anybody =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "anybody"}});
    admin.post(accounts, &anybody).await.map_err(told)?;
    let answer = admin
        .post(&format!("{accounts}/anybody/token"), &token_request())
        .await
        .map_err(told)?;
    access.token = Some(Token::Text(
        answer["status"]["token"]
            .as_str()
            .ok_or("no token")?
            .to_owned(),
    ));
    let anybody = Client::new(&access).map_err(|error| error.to_string())?;
    let mut said = Vec::new();
    for namespace in ["default", "berth-system", lock::NAMESPACE, "kube-system"] {
        let (own, anybodys) = (
            list_rules(shim, namespace).await?,
            list_rules(&anybody, namespace).await?,
        );
        said.extend(
            own.difference(&anybodys)
                .map(|rule| format!("{namespace}: {rule}")),
        );
    }
    let expected = [
        "default: create,delete,patch discovery.k8s.io/endpointslices berth-cp-1-ipv4,berth-cp-1-ipv6,berth-cp-2-ipv4,berth-cp-2-ipv6",
        "default: get /services kubernetes",
        "default: get discovery.k8s.io/endpointslices kubernetes",
        "berth-system: create /serviceaccounts/token berth-cp-1",
        "berth-system: create,delete,list,patch coordination.k8s.io/leases ",
    ];
    if said == expected {
        Ok(())
    } else {
        Err(format!("{said:#?}").into())
    }
}

async fn list_rules(client: &Client, namespace: &str) -> Result<BTreeSet<String>, Failed> {
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}});
    let path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews";
    let answer = client
        .post(path, &review)
        .await
        .map_err(|error| error.to_string())?;
    if answer["status"]["incomplete"] == true {
        return Err("the list of rules is incomplete".into());
    }
    let rule = |rule: &Value| {
        let list = |name: &str| {
            let list = rule[name]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str);
            list.collect::<BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>()
                .join(",")
        };
        format!(
            "{} {}/{} {}",
            list("verbs"),
            list("apiGroups"),
            list("resources"),
            list("resourceNames")
        )
    };
    Ok(answer["status"]["resourceRules"]
        .as_array()
        .ok_or("no rules")?
        .iter()
        .map(rule)
        .collect())
}
