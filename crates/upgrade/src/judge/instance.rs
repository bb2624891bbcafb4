//! Two instances, each asked at its own address, past the shims.

use super::super::observer::InstanceDetails;
use berth_cluster::client::none_if_missing;
use berth_cluster::{Client, Error};
use berth_judge::metrics::find_samples;
use berth_judge::{Connections, Sample};
use berth_node::ipc;
use berth_node::ipc::wire::{Ask, Reply};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// The most used resources, up to this number, are requested by berth.
const RESOURCES: usize = 40;

/// Least and greatest time limit for an answer. A large cluster's metrics page takes seconds, so
/// the time limit is [`PATIENCE_FACTOR`] times the time that the old instance needed, within these
/// bounds.
const PATIENCE: Duration = Duration::from_secs(2);
pub const MOST_PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_FACTOR: u32 = 4;

/// The old and the new instance.
pub struct InstancePair {
    old: Instance,
    new: Instance,
    patience: Duration,
    /// Per API: false if the new instance lacks an API that the old one serves.
    served: BTreeMap<String, bool>,
}

impl InstancePair {
    /// Two instances, asked with the credentials of `client`.
    pub fn new(client: &Client) -> Self {
        let [old, new] = [client, client].map(Instance::new);
        Self {
            old,
            new,
            patience: MOST_PATIENCE,
            served: BTreeMap::new(),
        }
    }

    /// Samples the two instances at the same time.
    pub async fn sample(&mut self, [old, new]: [&InstanceDetails; 2]) -> [InstanceSample; 2] {
        let patience = self.patience;
        let (mut old, mut new) = tokio::join!(
            self.old.sample(old, patience),
            self.new.sample(new, patience)
        );
        if old.page.is_some() {
            self.patience = (old.took * PATIENCE_FACTOR).clamp(PATIENCE, MOST_PATIENCE);
        }
        if old.page.is_some() && new.page.is_some() {
            let used = old.sample.used_apis();
            // APIs that do not fit into the time are asked for with the next sample.
            let _ = timeout(patience, self.look_for_apis(&used)).await;
            let serves = used
                .iter()
                .filter(|api| self.served.get(*api) != Some(&false))
                .cloned()
                .collect();
            (old.sample, new.sample) = (old.sample.with_apis(used), new.sample.with_apis(serves));
        }
        [old, new]
    }

    /// Asks the new instance for each API once, and asks the old instance about APIs that the new
    /// one lacks.
    async fn look_for_apis(&mut self, apis: &BTreeSet<String>) {
        for api in apis
            .iter()
            .filter(|api| api.split('/').all(is_plain_path_part))
        {
            if self.served.contains_key(api) {
                continue;
            }
            // An API that neither instance serves is not missing.
            let served = match self.new.serves_api(api).await {
                Some(false) => self.old.serves_api(api).await.map(|old| !old),
                served => served,
            };
            if let Some(served) = served {
                self.served.insert(api.clone(), served);
            }
        }
    }

    /// Sends requests for the resources in the old instance's metrics page: to the new instance,
    /// and with `writes` to both.
    pub async fn send_requests(&self, page: &str, writes: bool) {
        let used = parse_used_resources(page);
        let of_old = async {
            if writes {
                self.old.send_requests(&used, true, self.patience).await;
            }
        };
        tokio::join!(of_old, self.new.send_requests(&used, writes, self.patience));
    }
}

pub struct Instance(Client);

/// A sample of an instance. The sample is silent if the instance has no address or does not answer
/// in time.
pub struct InstanceSample {
    pub sample: Sample,
    pub page: Option<String>,
    took: Duration,
}

impl Instance {
    pub fn new(client: &Client) -> Self {
        Self(client.clone())
    }

    async fn sample(&mut self, details: &InstanceDetails, patience: Duration) -> InstanceSample {
        let began = Instant::now();
        let page = async {
            match details.address {
                Some(address) => self
                    .fetch_metrics_page(address, patience)
                    .await
                    .map_err(|error| error.status().is_some()),
                None => Err(false),
            }
        };
        let (page, connections) = tokio::join!(page, ask_connections(details));
        let took = began.elapsed();
        let mut sample = match &page {
            Ok(page) => Sample::new(Some(page)),
            // An instance that answers 429 or 403 refuses its metrics, and does not count as
            // silent.
            Err(true) => Sample::with_refused_metrics(),
            Err(false) => Sample::new(None),
        };
        if let Some(connections) = connections {
            sample = sample.with_connections(connections);
        }
        InstanceSample {
            sample,
            page: page.ok(),
            took,
        }
    }

    /// Gets the metrics page.
    ///
    /// # Errors
    /// The page cannot be fetched.
    pub async fn fetch_metrics_page(
        &mut self,
        address: SocketAddr,
        patience: Duration,
    ) -> Result<String, Error> {
        self.0 = self
            .0
            .clone()
            .with_addresses([address])
            .with_patience(patience);
        self.0.get_text("/metrics").await
    }

    /// True if the instance serves an API. `None` if it does not answer.
    async fn serves_api(&self, api: &str) -> Option<bool> {
        let prefix = if api.contains('/') { "/apis" } else { "/api" };
        none_if_missing(self.0.get(&format!("{prefix}/{api}")).await)
            .ok()
            .map(|list| list.is_some())
    }

    /// Lists one object of each resource. With `writes`, also writes the object back unchanged and
    /// without effect (`dryRun=All`).
    async fn send_requests(&self, resources: &[String], writes: bool, patience: Duration) {
        let asks = async {
            for path in resources {
                let Ok(list) = self.0.get(&format!("{path}?limit=1")).await else {
                    continue;
                };
                if let Some((path, object)) =
                    writes.then(|| parse_first_object(path, &list)).flatten()
                {
                    let _ = self.0.put(&format!("{path}?dryRun=All"), &object).await;
                }
            }
        };
        // Resources that do not fit into the time are skipped.
        let _ = timeout(patience, asks).await;
    }
}

/// The shim's counts of its clients. `None` if the shim does not answer or is too old.
async fn ask_connections(details: &InstanceDetails) -> Option<Connections> {
    let asked = ipc::ask_shim(details.socket.as_deref()?, Ask::Metrics, ipc::PATIENCE).await;
    if let Ok(Reply::Metrics(page)) = asked {
        parse_connections(&page)
    } else {
        None
    }
}

fn parse_connections(page: &str) -> Option<Connections> {
    let mut counted = Connections::default();
    let mut known = false;
    for line in find_samples(page, |name| {
        name.starts_with("berth_first_byte_seconds_") || name == "berth_empty_attempts_total"
    }) {
        match line.name {
            "berth_empty_attempts_total" => {
                (counted.empty, known) = (line.value, true);
                counted.all += line.value;
            }
            "berth_first_byte_seconds_count" => counted.all += line.value,
            "berth_first_byte_seconds_bucket" => {
                let bound = line.label("le").parse();
                bound
                    .into_iter()
                    .for_each(|bound| counted.first_byte.add(bound, line.value));
            }
            _ => {}
        }
    }
    known.then_some(counted)
}

/// The first object of a list, ready to be written, and its path.
fn parse_first_object(resource: &str, list: &Value) -> Option<(String, Value)> {
    let mut object = list["items"].get(0)?.clone();
    object["apiVersion"] = list["apiVersion"].clone();
    object["kind"] = list["kind"].as_str()?.strip_suffix("List")?.into();
    let (before, plural) = resource.rsplit_once('/')?;
    let name = object["metadata"]["name"]
        .as_str()
        .filter(|name| is_plain_path_part(name))?;
    let namespace = match object["metadata"]["namespace"].as_str() {
        Some(namespace) if is_plain_path_part(namespace) => format!("namespaces/{namespace}/"),
        Some(_) => return None,
        None => String::new(),
    };
    Some((format!("{before}/{namespace}{plural}/{name}"), object))
}

/// The paths of the resources that clients list, from a metrics page, most used first.
fn parse_used_resources(page: &str) -> Vec<String> {
    let mut counts: BTreeMap<String, f64> = BTreeMap::new();
    for line in find_samples(page, |name| name == "apiserver_request_total") {
        let [group, version, resource] =
            ["group", "version", "resource"].map(|name| line.label(name));
        let is_list = line.label("verb") == "LIST"
            && line.label("code") == "200"
            && line.label("subresource").is_empty();
        if is_list
            && [version, resource]
                .iter()
                .all(|part| is_plain_path_part(part))
            && (group.is_empty() || is_plain_path_part(group))
        {
            let prefix = if group.is_empty() {
                "/api".to_owned()
            } else {
                format!("/apis/{group}")
            };
            *counts
                .entry(format!("{prefix}/{version}/{resource}"))
                .or_default() += line.value;
        }
    }
    let mut used: Vec<_> = counts.into_iter().collect();
    used.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    used.into_iter()
        .take(RESOURCES)
        .map(|(path, _)| path)
        .collect()
}

/// True if a name can be a part of a path unchanged. Some RBAC names have a colon.
fn is_plain_path_part(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b':' | b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_judge::Judge;
    use berth_testing::{Server, create_ca, format_answer, serve_at};
    use serde_json::json;

    #[test]
    fn resources_that_clients_list_are_requested() {
        let line = |labels: &str, count: u32| {
            format!("apiserver_request_total{{{labels},subresource=\"\"}} {count}\n")
        };
        let page = [
            line(
                r#"verb="LIST",code="200",group="",version="v1",resource="pods",scope="cluster""#,
                3,
            ),
            line(
                r#"verb="LIST",code="200",group="",version="v1",resource="pods",scope="namespace""#,
                3,
            ),
            line(
                r#"verb="LIST",code="200",group="apps",version="v1",resource="deployments""#,
                9,
            ),
            line(
                r#"verb="LIST",code="200",group="",version="v1",resource="../x""#,
                99,
            ),
            line(
                r#"verb="LIST",code="404",group="a.b",version="v1",resource="gone""#,
                99,
            ),
            line(
                r#"verb="GET",code="200",group="",version="v1",resource="secrets""#,
                99,
            ),
        ];
        assert_eq!(
            parse_used_resources(&page.concat()),
            ["/apis/apps/v1/deployments", "/api/v1/pods"]
        );
    }

    #[test]
    fn a_shim_counts_the_clients_of_its_instance() {
        let page = "berth_first_byte_seconds_bucket{le=\"0.1\",shim=\"a\"} 5\nberth_first_byte_seconds_bucket{le=\"+Inf\",shim=\"a\"} 7\n\
                    berth_first_byte_seconds_count{shim=\"a\"} 7\n";
        assert!(parse_connections(page).is_none(), "an older shim");
        let Connections {
            all,
            empty,
            first_byte,
        } = parse_connections(&format!(
            "{page}berth_empty_attempts_total{{shim=\"a\"}} 3\n# EOF\n"
        ))
        .unwrap();
        assert_eq!((all, empty, first_byte.total()), (10.0, 3.0, 7.0));
    }

    /// A busy instance answers 429 to a request for metrics. An instance that is gone answers
    /// nothing.
    #[tokio::test]
    async fn a_refusal_of_metrics_is_no_silence() {
        let ca = create_ca();
        let page = format_answer("200 OK", "process_start_time_seconds 1\n");
        let old = serve_at(&ca, ([127, 0, 0, 1], 0).into(), "127.0.0.1", move |_| {
            page.clone()
        })
        .await;
        let busy = format_answer("429 Too Many Requests", "{}");
        let busy = serve_at(&ca, ([127, 0, 0, 1], 0).into(), "127.0.0.1", move |_| {
            busy.clone()
        })
        .await;
        let silent = serve_at(&ca, ([127, 0, 0, 1], 0).into(), "127.0.0.1", |_| {
            "no HTTP\r\n\r\n".into()
        })
        .await;
        let at = |server: &Server| InstanceDetails {
            address: server
                .access
                .server
                .strip_prefix("https://")
                .map(|address| address.parse().unwrap()),
            ..InstanceDetails::default()
        };
        for (new, is_bad) in [(busy, false), (silent, true)] {
            let mut both = InstancePair::new(&Client::new(&old.access).unwrap());
            let mut judge = Judge::new([]);
            judge.begin_step();
            for second in 0..6 {
                let [old, new] = both.sample([&at(&old), &at(&new)]).await;
                judge.observe(Duration::from_secs(2 * second), old.sample, new.sample);
            }
            assert_eq!(judge.is_bad(), is_bad, "{:?}", judge.verdict());
        }
    }

    /// An instance with a metrics page, and lists at these paths.
    async fn start_instance(page: String, lists: &'static [(&str, &str)]) -> Server {
        let (ca, at) = (create_ca(), ([127, 0, 0, 1], 0).into());
        serve_at(&ca, at, "127.0.0.1", move |request| {
            let path = request.split(' ').nth(1).unwrap_or_default();
            let list = lists.iter().find(|(known, _)| path == *known);
            match list.map(|(_, list)| *list) {
                _ if path == "/metrics" => format_answer("200 OK", &page),
                Some(list) => format_answer("200 OK", list),
                None => format_answer("404 Not Found", "{}"),
            }
        })
        .await
    }

    fn details_of(server: &Server) -> InstanceDetails {
        let address = server.access.server.strip_prefix("https://").unwrap();
        InstanceDetails {
            address: address.parse().ok(),
            ..InstanceDetails::default()
        }
    }

    /// The old and the new instance, each with access to its own server. A busy machine has time.
    fn pair_of(old: &Server, new: &Server) -> InstancePair {
        let [old, new] = [old, new].map(|server| Instance(Client::new(&server.access).unwrap()));
        InstancePair {
            old,
            new,
            patience: Duration::from_secs(60),
            served: BTreeMap::new(),
        }
    }

    #[tokio::test]
    async fn an_api_that_only_the_old_instance_serves_is_missing() {
        let line = |group: &str| {
            format!(
                "apiserver_request_total{{verb=\"LIST\",code=\"200\",group=\"{group}\",version=\"v1\",resource=\"a\"}} 3\n"
            )
        };
        let page = ["", "apps", "gone", "none", "?"].map(line).concat();
        let old = start_instance(page.clone(), &[("/api/v1", "{}"), ("/apis/gone/v1", "{}")]).await;
        let new = start_instance(page.clone(), &[("/api/v1", "{}"), ("/apis/apps/v1", "{}")]).await;
        let mut both = pair_of(&old, &new);
        let samples = both.sample([&details_of(&old), &details_of(&new)]).await;
        let served = [
            ("v1", true),
            ("apps/v1", true),
            ("gone/v1", false),
            ("none/v1", true),
        ];
        let served = served.map(|(api, served)| (api.to_owned(), served));
        assert_eq!(both.served, BTreeMap::from(served));
        let with = |apis: &[&str]| {
            let apis = apis.iter().map(|api| (*api).to_owned()).collect();
            format!("{:?}", Sample::new(Some(&page)).with_apis(apis))
        };
        let all = ["v1", "apps/v1", "gone/v1", "none/v1", "?/v1"];
        let without = ["v1", "apps/v1", "none/v1", "?/v1"];
        assert_eq!(
            samples.map(|of| format!("{:?}", of.sample)),
            [with(&all), with(&without)]
        );
        // An instance without metrics tells nothing about APIs.
        both.patience = Duration::from_secs(60);
        let [of_old, _] = both
            .sample([&details_of(&old), &InstanceDetails::default()])
            .await;
        assert_eq!(
            format!("{:?}", of_old.sample),
            format!("{:?}", Sample::new(Some(&page)))
        );
        // An instance that does not answer is not known to lack the API.
        let silent = Client::new(&old.access)
            .unwrap()
            .with_addresses([([127, 0, 0, 1], 1).into()]);
        assert_eq!(Instance(silent).serves_api("v1").await, None);
    }

    #[tokio::test]
    async fn requests_of_its_own_go_to_the_new_instance_and_writes_to_both() {
        const LIST: &str =
            r#"{"kind": "PodList", "apiVersion": "v1", "items": [{"metadata": {"name": "a"}}]}"#;
        const LISTS: [(&str, &str); 1] = [("/api/v1/pods?limit=1", LIST)];
        let page = r#"apiserver_request_total{verb="LIST",code="200",group="",version="v1",resource="pods"} 1"#;
        for (writes, of_old, of_new) in [
            (false, &[][..], &["GET /api/v1/pods?limit=1"][..]),
            (true, &BOTH, &BOTH),
        ] {
            let mut old = start_instance(String::new(), &LISTS).await;
            let mut new = start_instance(String::new(), &LISTS).await;
            pair_of(&old, &new).send_requests(page, writes).await;
            for (server, expected) in [(&mut old, of_old), (&mut new, of_new)] {
                let asked = std::iter::from_fn(|| server.asked.try_recv().ok());
                let first = |request: &str| request.split(" HTTP").next().unwrap().to_owned();
                let asked: Vec<_> = asked.map(|(request, _)| first(&request)).collect();
                assert_eq!(asked, expected);
            }
        }
    }

    const BOTH: [&str; 2] = ["GET /api/v1/pods?limit=1", "PUT /api/v1/pods/a?dryRun=All"];

    #[tokio::test]
    async fn a_shim_is_asked_for_its_clients() {
        let temp = tempfile::tempdir().unwrap();
        let socket = temp.path().join("a.sock");
        let page = Reply::Metrics("berth_empty_attempts_total 3\n".into());
        let page = std::sync::Arc::new(page);
        tokio::spawn(ipc::Server::bind(&socket).unwrap().serve(move |request| {
            let page = page.clone();
            async move { drop(request.reply(&page).await) }
        }));
        let details = InstanceDetails {
            socket: Some(socket),
            ..InstanceDetails::default()
        };
        let asked = async {
            loop {
                // A shim may answer too late on a busy machine.
                if let Some(connections) = ask_connections(&details).await {
                    return connections;
                }
                tokio::task::yield_now().await;
            }
        };
        let asked = timeout(Duration::from_secs(60), asked).await.unwrap();
        assert_eq!((asked.empty, asked.all), (3.0, 3.0));
    }

    #[test]
    fn an_object_is_written_back_unchanged() {
        let list = |meta: Value| json!({"apiVersion": "v1", "kind": "PodList", "items": [{"metadata": meta, "spec": 1}]});
        let (path, object) = parse_first_object(
            "/api/v1/pods",
            &list(json!({"name": "a", "namespace": "b"})),
        )
        .unwrap();
        assert_eq!(path, "/api/v1/namespaces/b/pods/a");
        let metadata = json!({"name": "a", "namespace": "b"});
        assert_eq!(
            object,
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": 1})
        );
        assert_eq!(
            parse_first_object("/api/v1/nodes", &list(json!({"name": "a"})))
                .unwrap()
                .0,
            "/api/v1/nodes/a"
        );
        for none in [
            json!({}),
            list(json!({"name": "a/b"})),
            list(json!({"name": "a", "namespace": "?"})),
        ] {
            assert_eq!(parse_first_object("/api/v1/pods", &none), None);
        }
    }
}
