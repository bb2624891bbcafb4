//! `berth upgrade --judge` has the new release emulate the old one, so that all can go back. With real kube-apiservers of both on one etcd, and
//! clients that write what is new: what one of them stores, the other reads and writes as it was. Without the emulation, which is the control,
//! it does not.

use crate::Binaries;
use crate::grant::Cluster;
use crate::support::net::fresh_ip;
use crate::support::process::Running;
use berth_cluster::{Client, Error};
use libtest_mimic::Failed;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::Command;

/// What clients of the new release can write: where, the object, and its status, if it has one that is new.
struct Written {
    path: &'static str,
    object: Value,
    status: Option<Value>,
}

/// Every field and kind that OpenAPI has in 1.36 and not in 1.35, but for those of requests and lists; and some of what 1.35 has behind feature gates
/// that are on since 1.36.
fn written() -> Vec<Written> {
    let pod = json!({"restartPolicy": "Never", "automountServiceAccountToken": false, "containers": [{"name": "a", "image": "a"}]});
    let with = |field: &str, value: Value| {
        let mut pod = pod.clone();
        pod[field] = value;
        pod
    };
    let slice = |field: &str, value: Value| {
        let mut spec = json!({"driver": "a.example", "allNodes": true,
            "pool": {"name": "a", "generation": 1, "resourceSliceCount": 2}});
        spec[field] = value;
        spec
    };
    let device = |field: &str, value: Value| slice("devices", json!([{"name": "a", field: value}]));
    let (pods, slices) = ("/api/v1/namespaces/default/pods", "/apis/resource.k8s.io/v1/resourceslices");
    let policies = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies";
    let mutation = json!({"patchType": "JSONPatch", "jsonPatch": {"expression": "[JSONPatch{op: \"test\", path: \"/a\", value: \"a\"}]"}});
    let rules =
        json!([{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}]);
    let policy =
        json!({"matchConstraints": {"resourceRules": rules}, "mutations": [mutation], "reinvocationPolicy": "Never"});
    let mut claims = with("resourceClaims", json!([{"name": "a", "resourceClaimName": "a"}]));
    claims["containers"][0]["resources"] = json!({"claims": [{"name": "a"}]});
    let on_exit = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [1]}}]);
    let health = json!({"resourceID": "a", "health": "Unhealthy", "message": "too hot"});
    let container = json!({"name": "a", "image": "a", "imageID": "", "ready": false, "restartCount": 0, "state": {},
        "allocatedResourcesStatus": [{"name": "claim:a", "resources": [health]}],
        "volumeMounts": [{"name": "a", "mountPath": "/a", "volumeStatus": {"image": {"imageRef": "a"}}}]});
    let spec = |path, spec| Written { path, object: json!({ "spec": spec }), status: None };
    let status = |path, spec, status| Written { path, object: json!({ "spec": spec }), status: Some(status) };
    vec![
        spec("/api/v1/namespaces/default/services", json!({"ports": [{"port": 80}]})),
        status(pods, claims, json!({"containerStatuses": [container]})),
        status(pods, pod.clone(), json!({"nodeAllocatableResourceClaimStatuses": [{"resourceClaimName": "a"}]})),
        spec(pods, with("schedulingGroup", json!({"podGroupName": "a"}))),
        spec(
            pods,
            with(
                "containers",
                json!([{"name": "a", "image": "a", "restartPolicy": "Never", "restartPolicyRules": on_exit}]),
            ),
        ),
        status("/api/v1/nodes", json!({}), json!({"declaredFeatures": ["A"]})),
        spec(policies, policy),
        spec("/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings", json!({"policyName": "a"})),
        spec(slices, slice("sharedCounters", json!([{"name": "a", "counters": {"a": {"value": "1"}}}]))),
        spec(slices, device("consumesCounters", json!([{"counterSet": "a", "counters": {"a": {"value": "1"}}}]))),
        spec(slices, device("taints", json!([{"key": "a", "effect": "NoSchedule"}]))),
        spec(slices, device("allowMultipleAllocations", json!(true))),
        spec(slices, device("bindsToNode", json!(true))),
        spec(slices, device("nodeAllocatableResourceMappings", json!({"cpu": {"allocationMultiplier": "1"}}))),
        spec(slices, device("attributes", json!({"a": {"ints": [1]}, "b": {"bools": [true]}}))),
        spec(slices, device("attributes", json!({"a": {"strings": ["a"]}, "b": {"versions": ["1.0.0"]}}))),
        spec("/apis/storage.k8s.io/v1/csidrivers", json!({"preventPodSchedulingIfMissing": true})),
        spec("/apis/resource.k8s.io/v1beta2/devicetaintrules", json!({"taint": {"key": "a", "effect": "NoSchedule"}})),
        spec("/apis/resource.k8s.io/v1alpha3/resourcepoolstatusrequests", json!({"driver": "a.example"})),
        spec(
            "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups",
            json!({"schedulingPolicy": {"basic": {}}}),
        ),
        spec("/apis/scheduling.k8s.io/v1alpha2/namespaces/default/workloads", json!({"podGroupTemplates": []})),
        spec(
            "/apis/certificates.k8s.io/v1beta1/namespaces/default/podcertificaterequests",
            json!({"stubPKCS10Request": "YQ=="}),
        ),
    ]
}

pub(crate) fn goes_back(binaries: &Binaries) -> Result<(), Failed> {
    let temp = tempfile::tempdir()?;
    let cluster = Cluster::start(temp.path(), &binaries.old.path, &binaries.etcd)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let release = binaries.old.version.trim_start_matches('v').rsplit_once('.').ok_or("no version")?.0;
    runtime.block_on(async {
        cluster.ready().await?;
        let old = Client::from_kubeconfig(&cluster.admin)?;
        old.post("/api/v1/namespaces/default/serviceaccounts", &json!({"metadata": {"name": "default"}})).await?;
        let (mut apiserver, emulating) = beside(&cluster, binaries, &[format!("--emulated-version={release}")]).await?;
        let mut refused = 0;
        for (n, written) in written().iter().enumerate() {
            let [by_old, by_new] =
                [written.by(&old, &format!("{n}-old")).await, written.by(&emulating, &format!("{n}-new")).await];
            match (by_old, by_new) {
                (Ok(by_old), Ok(by_new)) => {
                    assert_eq!(essence(&by_old), essence(&by_new), "{}", written.path);
                    written.is_kept(by_old, [&old, &emulating]).await?;
                    written.is_kept(by_new, [&emulating, &old]).await?;
                }
                (Err(by_old), Err(by_new)) => {
                    assert_eq!(by_old.status(), by_new.status(), "{by_old}; {by_new}");
                    println!("refused by both: {by_old}");
                    refused += 1;
                }
                (by_old, by_new) => return Err(format!("{}: {by_old:?}, emulated: {by_new:?}", written.path).into()),
            }
        }
        println!("{refused} of {} are refused by both, the others are read and written by both", written().len());
        apiserver.signal(nix::sys::signal::Signal::SIGTERM);
        apiserver.ended();

        let (_apiserver, new) = beside(&cluster, binaries, &[]).await?;
        let (mut kept, mut changed) = (0, 0);
        for (n, written) in written().iter().enumerate() {
            match written.by(&new, &format!("{n}-control")).await {
                Err(refused) => println!("refused without emulation: {refused}"),
                Ok(by_new) => match written.is_kept(by_new, [&new, &old]).await {
                    Ok(()) => kept += 1,
                    Err(why) => {
                        println!("without emulation: {why}");
                        changed += 1;
                    }
                },
            }
        }
        println!("without emulation {changed} of {} are not as the new one stored them", changed + kept);
        assert!(changed > 0, "the control lost nothing");
        Ok(())
    })
}

/// The new release on the same etcd.
async fn beside(cluster: &Cluster, binaries: &Binaries, flags: &[String]) -> Result<(Running, Client), Failed> {
    let ip = fresh_ip();
    let kept = cluster.command.split(' ').skip(1).filter(|word| !word.starts_with("--bind-address="));
    let apiserver =
        Running::start(Command::new(&binaries.new.path).args(kept).arg(format!("--bind-address={ip}")).args(flags));
    let client = Client::from_kubeconfig(&cluster.admin)?.at([SocketAddr::from((ip, 6443))]);
    let began = std::time::Instant::now();
    while !client.ready().await {
        if began.elapsed() > crate::grant::UP {
            return Err(format!("not ready: {}", apiserver.log()).into());
        }
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    Ok((apiserver, client))
}

impl Written {
    fn one(&self, object: &Value) -> String {
        format!("{}/{}", self.path, object["metadata"]["name"].as_str().unwrap_or_default())
    }

    /// Creates it, its status too.
    async fn by(&self, client: &Client, name: &str) -> Result<Value, Error> {
        let mut object = self.object.clone();
        object["metadata"] = json!({ "name": name });
        let mut stored = client.post(self.path, &object).await?;
        if let Some(status) = &self.status {
            stored["status"] = status.clone();
            stored = client.put(&format!("{}/status", self.one(&stored)), &stored).await?;
        }
        Ok(stored)
    }

    /// What one stored, the other reads; and what that writes then, the first one reads.
    async fn is_kept(&self, stored: Value, [by, other]: [&Client; 2]) -> Result<(), String> {
        let one = self.one(&stored);
        let read = async |client: &Client| client.get(&one).await.map_err(|error| error.to_string());
        let mut found = read(other).await?;
        if found != stored {
            return Err(format!("{one} is read as {found}, and was stored as {stored}"));
        }
        found["metadata"]["labels"] = json!({"read-by": "other"});
        let written = other.put(&one, &found).await.map_err(|error| error.to_string())?;
        let found = read(by).await?;
        if essence(&found) != essence(&stored) || found != written {
            return Err(format!(
                "{one} is read as {found} after the other wrote {written}, and was stored as {stored}"
            ));
        }
        Ok(())
    }
}

/// But for its name and the like.
fn essence(object: &Value) -> [&Value; 2] {
    ["spec", "status"].map(|part| &object[part])
}
