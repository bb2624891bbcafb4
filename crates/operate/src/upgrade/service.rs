//! Keeps the node's address in the Service `kubernetes`.
//!
//! kube-apiserver's reconciler knows instances by their address, and the two of a node have one. So the node's
//! address goes out of the Service when either stops. With several control-plane nodes it does so when either starts too: each
//! first removes what it takes for its own leftover, and refuses only to remove the last address of all. The one
//! that serves puts it back at its next round, up to 10 s later.
//!
//! Here it is put back as soon as it is missing, while an instance of this node is in the group. Nothing is decided by
//! what step the upgrade is in: the objects are looked at all the time, and written only if the address is missing. Two
//! objects are meant, in the reconciler's own form: the EndpointSlice, which kube-proxy reads, and the Endpoints that
//! the reconciler makes it from. A stopping apiserver writes the slice last, so the slice tells.

use super::say::Say;
use berth_cluster::client::found;
use berth_cluster::service::{Family, SLICES, addresses};
use berth_cluster::{Client, Error};
use hyper::StatusCode;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

const SLICE: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";
const ENDPOINTS: &str = "/api/v1/namespaces/default/endpoints/kubernetes";
const ENDPOINTS_ALL: &str = "/api/v1/namespaces/default/endpoints";

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// Longest time between two while nobody answers: each dials.
const REST: Duration = Duration::from_secs(1);

/// Longest time that a question may take: then another instance is asked.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long other control-plane nodes may take the address out again: a round of their reconcilers, until the
/// instance that is left has renewed its lease, and a little.
const ROUND: Duration = Duration::from_secs(11);

/// What was done so far.
#[derive(Debug, Default, Clone)]
pub struct Kept {
    /// How often the address was missing.
    pub gaps: u32,
    /// The longest time for which it was seen missing.
    pub longest: Duration,
    /// When it was put back last.
    pub last: Option<Instant>,
    /// The Service names other control-plane nodes too.
    pub others: bool,
}

/// Keeps an address in the Service.
#[derive(Debug, Clone)]
pub struct Service {
    client: Client,
    address: SocketAddr,
    kept: Rc<RefCell<Kept>>,
    /// An instance of this node is in the group. Else it is right that the address goes: other nodes serve.
    served: Rc<Cell<bool>>,
}

impl Service {
    /// Of this address: what the node's instances advertise.
    #[must_use]
    pub fn new(client: &Client, address: SocketAddr) -> Self {
        Self { client: client.clone().with_patience(PATIENCE), address, kept: Rc::default(), served: Rc::default() }
    }

    /// Whether the Service names the node. If not, that may be the gap of a stop a moment ago: the reconciler
    /// gets a round's time, and so does who does not answer at once.
    ///
    /// # Errors
    /// It cannot be asked.
    pub async fn names_node(&self) -> Result<bool, Error> {
        let began = Instant::now();
        loop {
            let looked = found(self.client.get(SLICE).await);
            let named = looked.map(|slice| slice.is_some_and(|slice| in_slice(&slice, self.address)));
            let may_change = match &named {
                Ok(named) => !named,
                Err(error) => error.status().is_none(),
            };
            if !may_change || began.elapsed() >= ROUND {
                return named;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Whether an instance of this node serves now. Until that is said, nothing is put back.
    pub fn serving(&self, served: bool) {
        self.served.set(served);
    }

    /// What was done so far.
    #[must_use]
    pub fn kept(&self) -> Kept {
        self.kept.borrow().clone()
    }

    /// Looks and puts back until it is dropped.
    pub async fn keep(self, say: Rc<Say>) {
        let mut missing: Option<Instant> = None;
        let mut trouble = String::new();
        let mut pause = LOOK;
        loop {
            let looked = found(self.client.get(SLICE).await);
            if let Ok(Some(slice)) = &looked {
                self.see(slice);
            }
            let kept = match looked {
                Ok(Some(slice)) if in_slice(&slice, self.address) => Ok(()),
                Ok(_) if !self.served.get() => {
                    missing = None;
                    Ok(())
                }
                Ok(slice) => {
                    missing.get_or_insert_with(Instant::now);
                    self.put_back(slice).await
                }
                Err(error) => Err(error),
            };
            pause = next_pause(pause, &kept);
            match kept {
                Ok(()) => {
                    trouble.clear();
                    // The slice first: it is what kube-proxy reads, and with it the gap is over.
                    if let Some(since) = missing.take() {
                        self.note(since.elapsed(), &say);
                        if let Err(error) = self.put_back_endpoints().await
                            && error.status() != Some(StatusCode::CONFLICT)
                        {
                            tell(&mut trouble, &error, &say);
                        }
                    }
                }
                // Another wrote it in between: look again.
                Err(error) if error.status() == Some(StatusCode::CONFLICT) => {}
                Err(error) => tell(&mut trouble, &error, &say),
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Waits until nobody takes the address out any more.
    pub async fn linger(&self) {
        let Kept { last, others, .. } = self.kept();
        if let (Some(last), true) = (last, others) {
            tokio::time::sleep_until((last + ROUND).into()).await;
        }
    }

    fn note(&self, gap: Duration, say: &Say) {
        let mut kept = self.kept.borrow_mut();
        kept.gaps += 1;
        kept.longest = kept.longest.max(gap);
        kept.last = Some(Instant::now());
        let ms = gap.as_millis();
        say.line(&format!(
            "     Service kubernetes: {} was missing, it is back (seen missing for {ms} ms)",
            self.address.ip()
        ));
    }

    fn see(&self, slice: &Value) {
        self.kept.borrow_mut().others |= addresses(slice).any(|ip| ip != self.address.ip());
    }

    /// The slice that was read gets the address.
    async fn put_back(&self, slice: Option<Value>) -> Result<(), Error> {
        match slice {
            None => self.client.post(SLICES, &new_slice(self.address)).await?,
            // The reconciler makes an empty one IPv4's, and the type cannot be changed. One that names other nodes is theirs.
            Some(slice)
                if slice["addressType"] != Family::of(self.address.ip()).as_str()
                    && addresses(&slice).next().is_none() =>
            {
                self.client.delete_read(SLICE, &slice).await?;
                self.client.post(SLICES, &new_slice(self.address)).await?
            }
            Some(slice) => self.client.put(SLICE, &with_slice(slice, self.address)).await?,
        };
        Ok(())
    }

    /// So does what the reconciler makes the slice from, if it lacks it.
    async fn put_back_endpoints(&self) -> Result<(), Error> {
        match found(self.client.get(ENDPOINTS).await)? {
            None => self.client.post(ENDPOINTS_ALL, &new_endpoints(self.address)).await?,
            Some(endpoints) if in_endpoints(&endpoints, self.address) => return Ok(()),
            Some(endpoints) => self.client.put(ENDPOINTS, &with_endpoints(endpoints, self.address)).await?,
        };
        Ok(())
    }
}

/// The time until the next look, after this one. That another wrote in between is no failure.
fn next_pause(pause: Duration, kept: &Result<(), Error>) -> Duration {
    match kept {
        Err(error) if error.status() != Some(StatusCode::CONFLICT) => (pause * 2).min(REST),
        _ => LOOK,
    }
}

/// Tells each kind of trouble once.
fn tell(told: &mut String, error: &Error, say: &Say) {
    let what = error.to_string();
    if *told != what {
        say.line(&format!("     Service kubernetes cannot be looked after: {what}"));
        *told = what;
    }
}

fn endpoint(address: SocketAddr) -> Value {
    json!({"addresses": [address.ip()], "conditions": {"ready": true}})
}

/// The port in the form of both objects.
fn ports(address: SocketAddr) -> Value {
    json!([{"name": "https", "port": address.port(), "protocol": "TCP"}])
}

fn in_slice(slice: &Value, address: SocketAddr) -> bool {
    addresses(slice).any(|ip| ip == address.ip())
}

/// With the address; the ports too, which an empty one has lost.
fn with_slice(mut slice: Value, address: SocketAddr) -> Value {
    let mut endpoints = slice["endpoints"].as_array().cloned().unwrap_or_default();
    endpoints.push(endpoint(address));
    slice["endpoints"] = endpoints.into();
    if slice["ports"].as_array().is_none_or(Vec::is_empty) {
        slice["ports"] = ports(address);
    }
    slice
}

fn new_slice(address: SocketAddr) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "namespace": "default", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": Family::of(address.ip()).as_str(),
        "endpoints": [endpoint(address)],
        "ports": ports(address),
    })
}

fn in_endpoints(endpoints: &Value, address: SocketAddr) -> bool {
    let subsets = endpoints["subsets"].as_array().into_iter().flatten();
    let mut all = subsets.flat_map(|one| one["addresses"].as_array().into_iter().flatten());
    all.any(|one| one["ip"].as_str().and_then(|ip| ip.parse().ok()) == Some(address.ip()))
}

/// With the address, in the one subset that the reconciler knows.
fn with_endpoints(mut endpoints: Value, address: SocketAddr) -> Value {
    let added = json!({"ip": address.ip()});
    match endpoints["subsets"].as_array_mut().and_then(|subsets| subsets.first_mut()) {
        Some(subset) => match subset["addresses"].as_array_mut() {
            Some(addresses) => addresses.push(added),
            None => subset["addresses"] = json!([added]),
        },
        None => endpoints["subsets"] = json!([{"addresses": [added], "ports": ports(address)}]),
    }
    endpoints
}

fn new_endpoints(address: SocketAddr) -> Value {
    let labels = json!({"endpointslice.kubernetes.io/skip-mirror": "true"});
    let empty = json!({
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {"name": "kubernetes", "namespace": "default", "labels": labels},
    });
    with_endpoints(empty, address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::{answer, serve, serve_with};

    fn address() -> SocketAddr {
        "10.0.0.5:6443".parse().unwrap()
    }

    /// The other control-plane nodes take out the address of one that is dead, and it must not come back.
    #[tokio::test]
    async fn a_node_that_serves_nothing_is_not_put_back() {
        let slice = r#"{"addressType":"IPv4","endpoints":[{"addresses":["10.0.0.6"]}]}"#;
        let mut server = serve(answer("200 OK", slice)).await;
        let service = Service::new(&Client::new(&server.access).unwrap(), address());
        let look = async {
            for _ in 0..3 {
                let (asked, _) = server.asked.recv().await.unwrap();
                assert!(asked.starts_with("GET "), "{asked}");
            }
            service.serving(true);
            while !server.asked.recv().await.unwrap().0.starts_with("PUT ") {}
            service.serving(false);
            // What was under way.
            while server.asked.recv().await.unwrap().0.contains("endpoints/kubernetes ") {}
        };
        tokio::select! {
            () = service.clone().keep(Rc::default()) => {}
            () = look => {}
        }
    }

    /// An apiserver of the other family may have named itself there, now or since it was read.
    #[tokio::test]
    async fn a_slice_of_the_other_family_goes_only_if_it_is_empty_and_as_it_was_read() {
        let six: SocketAddr = "[fd00::5]:6443".parse().unwrap();
        let slice = |addresses: Value| json!({"metadata": {"uid": "u", "resourceVersion": "7"}, "addressType": "IPv4", "endpoints": addresses});
        for (endpoints, wanted) in [(json!([{"addresses": ["10.0.0.6"]}]), "PUT "), (json!(null), "DELETE ")] {
            let mut server = serve(answer("200 OK", "{}")).await;
            let service = Service::new(&Client::new(&server.access).unwrap(), six);
            service.put_back(Some(slice(endpoints))).await.unwrap();
            let (asked, _) = server.asked.recv().await.unwrap();
            assert!(asked.starts_with(wanted) && asked.contains(r#""resourceVersion":"7""#), "{asked}");
        }
    }

    #[tokio::test]
    async fn who_does_not_answer_is_asked_again_and_who_refuses_is_not() {
        let slice = json!({"addressType": "IPv4", "endpoints": [{"addresses": [address().ip()]}]}).to_string();
        let mut answers = vec![answer("403 Forbidden", "{}"), answer("200 OK", &slice), "no HTTP\r\n\r\n".into()];
        let server = serve_with(move |_| answers.pop().unwrap()).await;
        let service = Service::new(&Client::new(&server.access).unwrap(), address());
        assert!(service.names_node().await.unwrap());
        assert_eq!(service.names_node().await.unwrap_err().status(), Some(StatusCode::FORBIDDEN));
    }

    #[test]
    fn who_does_not_answer_is_asked_less_and_less_often() {
        let failed = |status| {
            let (server, path, message) = ("s".into(), "/x".into(), "no".into());
            Err(Error::Status { server, status, method: hyper::Method::GET, path, message })
        };
        let silent = || Err(Error::Unreachable { server: "s".into(), why: "no answer".into() });
        let mut now = LOOK;
        let mut pause = |kept: Result<(), Error>| {
            now = next_pause(now, &kept);
            now.as_millis()
        };
        assert_eq!([(); 5].map(|()| pause(silent())), [200, 400, 800, 1000, 1000]);
        // As soon as somebody answers, a gap is seen as early as ever.
        assert_eq!([Ok(()), failed(StatusCode::FORBIDDEN), failed(StatusCode::CONFLICT)].map(pause), [100, 200, 100]);
    }

    #[test]
    fn an_empty_slice_gets_address_and_ports_and_keeps_the_rest() {
        let empty =
            json!({"metadata": {"resourceVersion": "7"}, "addressType": "IPv4", "endpoints": null, "ports": null});
        assert!(!in_slice(&empty, address()));
        let slice = with_slice(empty, address());
        assert!(in_slice(&slice, address()));
        assert_eq!(slice["metadata"]["resourceVersion"], "7");
        assert_eq!(slice["ports"], json!([{"name": "https", "port": 6443, "protocol": "TCP"}]));
        let slice = with_slice(slice, "10.0.0.6:6443".parse().unwrap());
        assert_eq!(slice["endpoints"].as_array().map(Vec::len), Some(2));
        assert_eq!(slice["ports"].as_array().map(Vec::len), Some(1));
        assert_eq!(new_slice("[fd00::5]:6443".parse().unwrap())["addressType"], "IPv6");
    }

    #[test]
    fn endpoints_have_one_subset() {
        let made = new_endpoints(address());
        assert!(in_endpoints(&made, address()));
        let more = with_endpoints(made, "10.0.0.6:6443".parse().unwrap());
        assert_eq!(more["subsets"][0]["addresses"], json!([{"ip": "10.0.0.5"}, {"ip": "10.0.0.6"}]));
        let bare = with_endpoints(json!({"subsets": [{"ports": []}]}), address());
        assert!(in_endpoints(&bare, address()) && !in_endpoints(&json!({}), address()));
    }
}
