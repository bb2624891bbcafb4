use super::objects::{admissions, aggregated, conversions, stored, unready};
use super::*;
use berth_cluster::Access;
use berth_testing::{Objects, answer, authority, serve_as, serve_with};
use serde_json::json;
use std::fs;

/// Of kube-apiserver v1.35.4, but for some labels.
const METRICS: &str = r#"# HELP apiserver_requested_deprecated_apis [STABLE] Gauge of deprecated APIs that have been requested, broken out by API group, version, resource, subresource, and removed_release.
# TYPE apiserver_requested_deprecated_apis gauge
apiserver_requested_deprecated_apis{group="",removed_release="",resource="endpoints",subresource="",version="v1"} 1
apiserver_requested_deprecated_apis{group="flowcontrol.apiserver.k8s.io",removed_release="1.36",resource="flowschemas",subresource="status",version="v1beta3"} 1
apiserver_requested_deprecated_apis{group="batch",removed_release="1.37",resource="cronjobs",subresource="",version="v1beta1"} 1
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",component="apiserver",dry_run="",group="flowcontrol.apiserver.k8s.io",resource="flowschemas",scope="resource",subresource="status",verb="APPLY",version="v1beta3"} 7
apiserver_request_total{code="404",component="apiserver",dry_run="",group="flowcontrol.apiserver.k8s.io",resource="flowschemas",scope="resource",subresource="status",verb="GET",version="v1beta3"} 2
apiserver_request_total{code="200",component="apiserver",dry_run="",group="flowcontrol.apiserver.k8s.io",resource="flowschemas",scope="resource",subresource="",verb="GET",version="v1beta3"} 900
"#;

fn release(text: &str) -> Release {
    text.parse().unwrap()
}

fn seen(findings: impl IntoIterator<Item = Finding>) -> Vec<(&'static str, Severity)> {
    findings.into_iter().map(|finding| (finding.id, finding.severity)).collect()
}

fn node(name: &str, kubelet: &str, runtime: &str) -> Value {
    json!({"metadata": {"name": name}, "status": {"nodeInfo": {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}}})
}

fn pod(component: &str, image: &str) -> Value {
    json!({"metadata": {"name": format!("{component}-cp-1"), "labels": {"component": component}}, "spec": {"containers": [{"image": image}]}})
}

#[test]
fn a_release_is_read_as_it_is_written() {
    for text in ["v1.36", "1.36", "v1.36.3", "v1.36.0-rc.1", "v1.36.3+k3s1", "v1.36.1-gke.100"] {
        assert_eq!(text.parse(), Ok(Release::v1(36)), "{text}");
    }
    for wrong in ["", "v", "1", "v1.", "v1.x", "1.36.3.4", "vv1.36", "v1.36 ", "-1.2", "1.99999999999999999999"] {
        assert!(wrong.parse::<Release>().unwrap_err().contains("give one such as v1.36"), "{wrong}");
    }
    let named = |line: &str| Release::named(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
    assert_eq!(named("kubeadm upgrade apply v1.36.3 --yes"), Some(Release::v1(36)));
    assert_eq!(named("vi 1.36"), None);
}

#[test]
fn requests_of_all_instances_count_for_what_is_removed() {
    let mut uses = Uses::default();
    let idle = METRICS.replace("\"} 1\n", "\"} 0\n");
    uses.count(&[METRICS.to_owned(), idle, String::new()]);
    let found = uses.examine(release("1.36"));
    assert_eq!(found.len(), 1, "{found:?}");
    let Finding { place, cause, .. } = &found[0];
    assert_eq!(place, "flowcontrol.apiserver.k8s.io/v1beta3/flowschemas/status");
    assert!(cause.starts_with("v1.36 removes this API") && cause.contains("(18 requests that ended since"), "{cause}");
    assert_eq!(uses.examine(release("1.35")).len(), 0);
    assert_eq!(uses.examine(release("9.9")).len(), 2);
}

#[test]
fn the_audit_log_names_who_asks() {
    let temp = tempfile::tempdir().unwrap();
    let event = |user: &str, agent: &str| {
        json!({"kind": "Event", "stage": "ResponseComplete", "user": {"username": user}, "userAgent": agent,
            "objectRef": {"resource": "podsecuritypolicies", "apiGroup": "policy", "apiVersion": "v1beta1"},
            "annotations": {"k8s.io/deprecated": "true", "k8s.io/removed-release": "1.25"}})
        .to_string()
    };
    let other = json!({"user": {"username": "x"}, "annotations": {"authorization.k8s.io/decision": "allow"}});
    let half = &event("cut", "off")[..200];
    fs::write(
        temp.path().join("audit-a.log"),
        format!("{half}\n{}\n{other}\n{}", event("ann", "kubectl/v1.30"), event("ann", "kubectl/v1.30")),
    )
    .unwrap();
    fs::write(temp.path().join("audit-b-2026-01-01.log"), event("bob", "") + "\n" + half).unwrap();
    fs::write(temp.path().join("audit-c.log.gz"), event("zip", "")).unwrap();
    let mut uses = Uses::default();
    uses.read(&temp.path().join("audit-{instance}.log")).unwrap();
    let found = uses.examine(release("1.25"));
    assert_eq!((found.len(), &*found[0].place), (1, "policy/v1beta1/podsecuritypolicies"), "{found:?}");
    assert!(found[0].cause.contains("of this node ann (kubectl/v1.30): 2, bob (): 1)"), "{}", found[0].cause);
    let before = uses.clone();
    uses.read(&temp.path().join("other.log")).unwrap();
    assert_eq!(uses, before);
    assert!(uses.read(Path::new("/nonexistent/audit.log")).is_err());
}

#[test]
fn components_may_be_as_far_apart_as_kubernetes_allows() {
    let to = release("1.36");
    let running = |version: &str| seen(skew::apiservers(to, &[(release(version), "10.0.0.5:6443".into())]));
    assert_eq!((running("1.35"), running("1.37"), running("1.36").len()), (vec![], vec![], 0));
    assert_eq!(
        (running("1.34"), running("2.36")),
        (vec![("component-skew", Severity::Error); 1], vec![("component-skew", Severity::Error)])
    );

    let kubelets = |versions: &[&str]| {
        let nodes: Vec<_> = versions.iter().map(|version| node(version, version, "")).collect();
        skew::kubelets(to, release("1.35"), &nodes)
    };
    assert_eq!(kubelets(&["v1.35.4", "v1.33.0", "?"]), []);
    let old = kubelets(&["v1.32.1", "v1.32.2", "v1.32.3", "v1.32.4", "v1.31.0"]);
    assert_eq!((old.len(), &*old[1].place), (2, "nodes v1.32.1, v1.32.2, v1.32.3 and 1 more"));
    assert!(old[1].fix.ends_with("to v1.33 or newer"), "{old:?}");
    assert!(kubelets(&["v1.36.0"])[0].cause.contains("newer than a kube-apiserver, and one is v1.35"));

    let manager = |component: &str, tag: &str| skew::managers(to, &[pod(component, &format!("r:5000/x:{tag}"))]).len();
    assert_eq!(
        ["v1.36.3", "v1.35.0", "v1.34.9", "v1.37.0", "latest"].map(|tag| manager("kube-scheduler", tag)),
        [0, 0, 1, 1, 0]
    );
    assert_eq!((manager("kube-controller-manager", "v1.34.0"), manager("etcd", "3.5.1-0")), (1, 0));
    // No version makes it overflow.
    let most = u64::MAX.to_string();
    assert_eq!(manager("kube-scheduler", &format!("v1.{most}.0")), 1);
    assert_eq!(kubelets(&[&format!("v1.{most}.0"), "v0.1.0"]).len(), 2);
    assert_eq!(skew::kubelets(release("2.1"), release("2.1"), &[node("a", "v1.36.0", "")]).len(), 1);
}

#[test]
fn what_is_known_of_runtimes_and_cgroups_depends_on_the_release() {
    let nodes = [
        node("old", "v1.34.1", "containerd://1.7.27"),
        node("new", "v1.35.0", "containerd://2.1.4"),
        node("crio", "v1.35.0", "cri-o://1.35.0"),
    ];
    let severity = |to: &str| skew::runtimes(release(to), &nodes).map(|finding| finding.severity);
    assert_eq!(
        ["1.35", "1.36", "1.37", "1.38", "1.99"].map(severity),
        [None, Some(Severity::Warning), Some(Severity::Warning), Some(Severity::Error), Some(Severity::Error)]
    );
    assert!(skew::runtimes(release("1.36"), &nodes[1..]).is_none());

    let on = |nodes: &[&Value]| skew::cgroups(nodes).map(|finding| (finding.severity, finding.place));
    assert_eq!(on(&[]), None);
    assert_eq!(on(&[&nodes[0], &nodes[1]]), Some((Severity::Error, "nodes old, new".into())));
    // It runs there: its configuration allows it.
    assert_eq!(on(&[&nodes[1]]), Some((Severity::Warning, "nodes new".into())));
}

#[test]
fn defects_of_etcd_count_where_there_are_several_members() {
    let severity = |to: &str, version: &str, count: usize| {
        let member = pod("etcd", &format!("registry.k8s.io/etcd:{version}"));
        let found = skew::learners(release(to), &vec![&member; count]);
        assert!(found.is_empty() || found.len() == count);
        found.first().map(|finding| finding.severity)
    };
    for (version, before, after) in [
        ("3.5.0", None, None),
        ("3.5.1", None, Some(Severity::Error)),
        ("v3.5.19", None, Some(Severity::Error)),
        ("3.5.20-0", None, Some(Severity::Warning)),
        ("3.5.23", None, Some(Severity::Warning)),
        ("3.5.24-0", None, None),
        ("3.6.0", Some(Severity::Warning), Some(Severity::Warning)),
        ("3.6.3-0", Some(Severity::Warning), Some(Severity::Warning)),
        ("3.6.4-0", None, None),
        ("3.7.0", None, None),
        ("latest", None, None),
    ] {
        assert_eq!((severity("1.33", version, 3), severity("1.34", version, 3)), (before, after), "{version}");
        assert_eq!(severity("1.36", version, 1), None, "{version}");
    }
}

fn crd(name: &str, stored: &Value, service: Option<&str>) -> Value {
    let conversion = service.map(|service| json!({"strategy": "Webhook", "webhook": {"clientConfig": {"service": {"namespace": "n", "name": service}}}}));
    json!({"metadata": {"name": name}, "status": {"storedVersions": stored},
        "spec": {"versions": [{"name": "v1", "served": true}, {"name": "v1beta1", "served": false}], "conversion": conversion}})
}

#[tokio::test]
async fn services_without_a_ready_endpoint_are_named_with_who_calls_them() {
    let crds = [crd("a", &json!(["v1", "v1beta1", "v1alpha1"]), Some("gone")), crd("b", &json!(["v1"]), Some("ready"))];
    let lost: Vec<_> = stored(&crds).map(|finding| finding.cause).collect();
    assert_eq!(lost.len(), 1);
    assert!(lost[0].starts_with("its objects may be stored as v1beta1, v1alpha1,"), "{lost:?}");

    let webhook = |policy: &str, service: &str| json!({"name": "w.example", "failurePolicy": policy, "clientConfig": {"service": {"namespace": "n", "name": service}}});
    let by_url = json!({"name": "u.example", "failurePolicy": "Fail", "clientConfig": {"url": "https://192.0.2.1"}});
    let configuration = json!({"metadata": {"name": "c"}, "webhooks": [webhook("Fail", "unready"), webhook("Ignore", "unready"), by_url, webhook("Fail", "external")]});
    let apis = [
        json!({"metadata": {"name": "v1.apps"}, "spec": {}}),
        json!({"metadata": {"name": "v1.m"}, "spec": {"service": {"namespace": "n", "name": "unready"}}}),
    ];
    let called: Vec<_> =
        conversions(&crds).chain(admissions("Kind", &[configuration])).chain(aggregated(&apis)).collect();

    let endpoint =
        |ready: bool| json!({"items": [{"endpoints": [{"addresses": ["10.0.0.9"], "conditions": {"ready": ready}}]}]});
    let slices = move |request: &str| {
        let path = request.split(' ').nth(1).unwrap_or_default();
        let (kind, name) = match path.split_once("service-name%3D") {
            Some((_, name)) => ("slices", name.split('&').next().unwrap_or_default()),
            None => ("service", path.rsplit('/').next().unwrap_or_default()),
        };
        match (kind, name) {
            ("slices", "ready") => answer("200 OK", &endpoint(true).to_string()),
            ("slices", "unready") => answer("200 OK", &endpoint(false).to_string()),
            ("slices", _) => answer("200 OK", "{}"),
            (_, "external") => answer("200 OK", r#"{"spec": {"type": "ExternalName"}}"#),
            (_, "unready") => answer("200 OK", r#"{"spec": {"type": "ClusterIP"}}"#),
            _ => answer("404 Not Found", "{}"),
        }
    };
    let server = serve_with(slices).await;
    let found = unready(&Client::new(&server.access).unwrap(), called).await.unwrap();
    let found: Vec<_> = found.into_iter().map(|finding| (finding.id, finding.place, finding.cause)).collect();
    let told = [
        ("conversion-webhook", "CustomResourceDefinition a", "the Service n/gone is not there: "),
        ("admission-webhook", "Kind c", "the Service n/unready has no ready endpoint: "),
        ("api-service", "APIService v1.m", "the Service n/unready has no ready endpoint: "),
    ];
    assert_eq!(found.len(), told.len(), "{found:?}");
    for ((id, place, cause), told) in found.iter().zip(told) {
        assert!((*id, &**place) == (told.0, told.1) && cause.starts_with(told.2), "{id} {place} {cause}");
    }
}

/// Each answers for itself, and one with a certificate for another name than the kubeconfig's server.
#[tokio::test]
async fn every_instance_is_asked() {
    let ca = authority();
    let objects = Objects::default();
    let start = async |name: &str, version: &str| {
        let (objects, version) = (objects.clone(), json!({"gitVersion": version}).to_string());
        let answers = move |request: &str| match request.split(' ').nth(1) {
            Some("/version") => answer("200 OK", &version),
            Some("/metrics") => answer("200 OK", METRICS),
            _ => objects.answer(request),
        };
        serve_as(&ca, ([127, 0, 0, 1], 0).into(), name, answers).await
    };
    let (first, second) = (start("127.0.0.1", "v1.35.4").await, start(NAME, "v1.36.0").await);
    let address = |server: &str| server.strip_prefix("https://").unwrap().parse::<SocketAddr>().unwrap();
    let addresses = [address(&first.access.server), address(&second.access.server), ([127, 0, 0, 1], 1).into()];
    let client = Client::new(&Access { ..first.access.clone() }).unwrap();
    // Without a Service, the one of the kubeconfig.
    let alone = instances(&client).await;
    assert_eq!((alone.len(), &alone[0].0), (1, &first.access.server));

    let slices = addresses
        .map(|address| json!({"endpoints": [{"addresses": [address.ip()]}], "ports": [{"port": address.port()}]}));
    objects.set(OF_SERVICE.split('?').next().unwrap(), Some(json!({"items": slices})));
    let mut versions: Vec<_> =
        instances(&client).await.into_iter().map(|(_, answer)| answer.map(|(version, _)| version).ok()).collect();
    versions.sort();
    assert_eq!(versions, [None, Some("v1.35.4".into()), Some("v1.36.0".into())]);
}
