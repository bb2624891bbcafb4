//! Objects of the cluster that a new kube-apiserver depends on: versions of custom resources, and Services that it calls.

use super::super::Finding;
use super::super::checks::{ADMISSION_WEBHOOK, API_SERVICE, CONVERSION_WEBHOOK, CRD_STORED_VERSION};
use berth_cluster::client::found;
use berth_cluster::service::addresses;
use berth_cluster::{Client, Error};
use serde_json::Value;
use std::collections::BTreeMap;

pub(super) const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
pub(super) const API_SERVICES: &str = "/apis/apiregistration.k8s.io/v1/apiservices";
/// Kinds of configurations of admission webhooks, and where they are.
pub(super) const WEBHOOKS: [(&str, &str); 2] = [
    ("MutatingWebhookConfiguration", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"),
    ("ValidatingWebhookConfiguration", "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"),
];

/// A Service that kube-apiserver calls, by namespace and name, and what is found if it has no ready endpoint.
type Called = (String, String, Finding);

fn called(service: &Value, finding: Finding) -> Option<Called> {
    let field = |name: &str| service[name].as_str().map(ToOwned::to_owned);
    Some((field("namespace")?, field("name")?, finding))
}

/// Why each Service that has no ready endpoint has none, and what calls it.
///
/// # Errors
/// They cannot be asked for.
pub(super) async fn unready(client: &Client, called: Vec<Called>) -> Result<Vec<Finding>, Error> {
    let (mut known, mut findings) = (BTreeMap::new(), Vec::new());
    for (namespace, name, finding) in called {
        let key = (namespace, name);
        if !known.contains_key(&key) {
            known.insert(key.clone(), why_unready(client, &key.0, &key.1).await?);
        }
        if let Some(why) = known[&key] {
            let cause = format!("the Service {}/{} {why}: {}", key.0, key.1, finding.cause);
            findings.push(Finding { cause, ..finding });
        }
    }
    Ok(findings)
}

/// None: it has a ready endpoint, or needs none.
async fn why_unready(client: &Client, namespace: &str, name: &str) -> Result<Option<&'static str>, Error> {
    let slices = format!(
        "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io/service-name%3D{name}"
    );
    if client.list(&slices).await?.iter().any(|slice| addresses(slice).next().is_some()) {
        return Ok(None);
    }
    let service = found(client.get(&format!("/api/v1/namespaces/{namespace}/services/{name}")).await)?;
    Ok(match service {
        None => Some("is not there"),
        Some(service) if service["spec"]["type"] == "ExternalName" => None,
        Some(_) => Some("has no ready endpoint"),
    })
}

/// CRDs that have stored objects in a version that they do not serve.
pub(super) fn stored(crds: &[Value]) -> impl Iterator<Item = Finding> {
    crds.iter().filter_map(|crd| {
        let served = items(&crd["spec"]["versions"]).filter(|version| version["served"] == true);
        let served: Vec<_> = served.map(|version| &version["name"]).collect();
        let lost = items(&crd["status"]["storedVersions"]).filter(|stored| !served.contains(stored));
        let lost: Vec<_> = lost.filter_map(Value::as_str).collect();
        (!lost.is_empty()).then(|| {
            CRD_STORED_VERSION.at(
                format!("CustomResourceDefinition {}", name(crd)),
                format!("its objects may be stored as {}, which it does not serve (status.storedVersions)", lost.join(", ")),
                "write all its objects again (kubectl get NAME -A -o json | kubectl replace -f -), and take the version out of \
                 status.storedVersions, before it is taken out of the CRD",
            )
        })
    })
}

/// Services of CRDs' conversion webhooks.
pub(super) fn conversions(crds: &[Value]) -> impl Iterator<Item = Called> {
    let webhooks = crds.iter().filter(|crd| crd["spec"]["conversion"]["strategy"] == "Webhook");
    webhooks.filter_map(|crd| {
        let place = format!("CustomResourceDefinition {}", name(crd));
        let effect =
            "its objects cannot be converted, so a kube-apiserver that starts cannot read those of another version";
        let fix = "bring the conversion webhook's pods up before the upgrade";
        let service = &crd["spec"]["conversion"]["webhook"]["clientConfig"]["service"];
        called(service, CONVERSION_WEBHOOK.at(place, effect, fix))
    })
}

/// Services of admission webhooks without which requests are refused.
pub(super) fn admissions(kind: &str, configurations: &[Value]) -> impl Iterator<Item = Called> {
    let all = configurations
        .iter()
        .flat_map(|configuration| items(&configuration["webhooks"]).map(move |webhook| (configuration, webhook)));
    all.filter(|(_, webhook)| webhook["failurePolicy"] == "Fail").filter_map(move |(configuration, webhook)| {
        let (place, webhook_name) = (format!("{kind} {}", name(configuration)), webhook["name"].as_str().unwrap_or_default());
        let effect = format!(
            "with failurePolicy: Fail, what the webhook {webhook_name} is asked about is refused, also what a kube-apiserver writes \
             when it starts"
        );
        let fix = "bring the webhook's pods up before the upgrade, or remove its configuration if it is not needed any more";
        called(&webhook["clientConfig"]["service"], ADMISSION_WEBHOOK.at(place, effect, fix))
    })
}

/// Services of aggregated APIs.
pub(super) fn aggregated(api_services: &[Value]) -> impl Iterator<Item = Called> {
    api_services.iter().filter_map(|api| {
        let effect =
            "requests for this API get 503, and clients that list all APIs, such as the garbage collector, see errors";
        let fix = "bring its pods up before the upgrade, or delete the APIService if nothing serves it any more";
        called(&api["spec"]["service"], API_SERVICE.at(format!("APIService {}", name(api)), effect, fix))
    })
}

pub(super) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

pub(super) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}
