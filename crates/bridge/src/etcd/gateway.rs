//! Calls of etcd's JSON gateway (v3.5 and v3.6), over HTTPS with the client certificate of a
//! kube-apiserver.

use super::types::{Answer, Member, MemberList, Sample, Status, parse_alarms};
use berth_cluster::{Access, Client, tls};
use rustls::ClientConfig;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// Longest time for an answer. A call that moves the leadership may take `TRANSFER_TIMEOUT`: etcd
/// itself gives up after 7 s.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait until the other members have applied the highest revision that any member had
/// applied; and time between two checks of their revisions.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(5);
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// A client of all members of an etcd.
#[derive(Debug, Clone)]
pub struct Gateway(Arc<Access>);

impl Gateway {
    /// Creates a client from the CA of the members' certificates, and a client certificate with its
    /// key, all in PEM form.
    pub fn new(ca: Vec<u8>, client: Option<(Vec<u8>, Vec<u8>)>) -> Self {
        Self(Arc::new(Access {
            ca,
            client,
            ..Access::default()
        }))
    }

    /// Checks the members' certificates for the given name, whichever address is dialled.
    #[must_use]
    pub fn with_server_name(&self, name: &str) -> Self {
        Self(Arc::new(Access {
            server_name: Some(name.to_owned()),
            ..(*self.0).clone()
        }))
    }

    /// TLS configuration with the client certificate, if any. `checked` is true to verify the
    /// members' certificates.
    ///
    /// # Errors
    /// A certificate cannot be parsed.
    pub fn build_tls_config(&self, checked: bool) -> Result<Arc<ClientConfig>, String> {
        let client = self
            .0
            .client
            .as_ref()
            .map(|(certificate, key)| (certificate.as_slice(), key.as_slice()));
        let config = tls::from_pem(checked.then_some(self.0.ca.as_slice()), client);
        config
            .map(Arc::new)
            .map_err(|error| format!("kube-apiserver's client certificate for etcd: {error:?}"))
    }

    /// # Errors
    /// There is no answer, or an unexpected one. The message names the URL.
    pub async fn fetch_members(&self, url: &str) -> Result<MemberList, String> {
        // A member answers this call from its own list, even while there is no leader.
        self.ask_and_parse(
            url,
            "/v3/cluster/member/list",
            &json!({}),
            MemberList::parse,
        )
        .await
    }

    /// # Errors
    /// As [`Self::fetch_members`].
    pub async fn fetch_status(&self, url: &str) -> Result<Status, String> {
        self.ask_and_parse(url, "/v3/maintenance/status", &json!({}), Status::parse)
            .await
    }

    /// Moves the leadership away from the member at this URL.
    ///
    /// # Errors
    /// As [`Self::fetch_members`].
    pub async fn transfer_leadership(&self, url: &str, to: u64) -> Result<(), String> {
        let asks = json!({"targetID": to.to_string()});
        self.ask(
            url,
            "/v3/maintenance/transfer-leadership",
            &asks,
            TRANSFER_TIMEOUT,
        )
        .await
        .map(drop)
    }

    /// Observes an etcd before the member at this URL goes away. Takes some seconds if a member
    /// does not answer or lags behind.
    ///
    /// # Errors
    /// As [`Self::fetch_members`].
    pub async fn fetch_sample(&self, own: &str) -> Result<Sample, String> {
        let list = self.fetch_members(own).await?;
        let status = self.fetch_status(own).await?;
        let asks = json!({"action": "GET"});
        let alarms = self
            .ask_and_parse(own, "/v3/maintenance/alarm", &asks, parse_alarms)
            .await;
        let others: Vec<_> = list
            .members
            .iter()
            .filter(|member| member.id != list.by)
            .cloned()
            .collect();
        let first = self.fetch_answers(&others).await;
        let applied = first
            .values()
            .flatten()
            .map(|answer| answer.status.revision)
            .chain([status.revision]);
        let revision = applied.max().unwrap_or_default();
        let began = Instant::now();
        let answers = loop {
            let answers = self.fetch_answers(&others).await;
            let have_caught_up = answers
                .values()
                .flatten()
                .all(|answer| answer.status.revision >= revision);
            if have_caught_up || began.elapsed() >= CATCH_UP_TIMEOUT {
                break answers;
            }
            sleep(CHECK_INTERVAL).await;
        };
        Ok(Sample {
            list,
            leader: status.leader,
            version: status.version,
            alarms,
            revision,
            answers,
        })
    }

    /// Asks each member for its status at its URLs in turn, until that member answers. Returns the
    /// answer or the error of each member, by the member's ID.
    pub async fn fetch_answers(&self, members: &[Member]) -> BTreeMap<u64, Result<Answer, String>> {
        let mut asking = JoinSet::new();
        for member in members {
            let (gateway, member) = (self.clone(), member.clone());
            asking.spawn(async move { (member.id, gateway.fetch_answer(&member).await) });
        }
        let mut answers = BTreeMap::new();
        while let Some(answered) = asking.join_next().await {
            answers.extend(answered);
        }
        answers
    }

    async fn fetch_answer(&self, member: &Member) -> Result<Answer, String> {
        let mut tried = Vec::new();
        for url in &member.client_urls {
            match self.fetch_status(url).await {
                Ok(status) if status.member == member.id => {
                    return Ok(Answer {
                        url: url.clone(),
                        status,
                    });
                }
                Ok(status) => {
                    tried.push(format!("{url}: member {:x} answers there", status.member));
                }
                Err(why) => tried.push(why),
            }
        }
        Err(tried.join("; "))
    }

    async fn ask_and_parse<T>(
        &self,
        url: &str,
        path: &str,
        asks: &Value,
        parse: impl Fn(&Value) -> Option<T>,
    ) -> Result<T, String> {
        let answer = self.ask(url, path, asks, ANSWER_TIMEOUT).await?;
        parse(&answer).ok_or_else(|| {
            format!("{url}: unexpected reply to {path}: is it an etcd v3.5 or newer?")
        })
    }

    async fn ask(
        &self,
        url: &str,
        path: &str,
        asks: &Value,
        patience: Duration,
    ) -> Result<Value, String> {
        let access = Access {
            server: url.to_owned(),
            ..(*self.0).clone()
        };
        let client = Client::new(&access).map_err(|mistake| format!("{url}: {mistake}"))?;
        client
            .with_patience(patience)
            .post(path, asks)
            .await
            .map_err(|error| error.to_string())
    }
}
