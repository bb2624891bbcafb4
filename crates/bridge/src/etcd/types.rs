//! Answers of an etcd's members, and what is known of all members together.
//!
//! In etcd's JSON, 64-bit numbers are strings, and a field with the default value is omitted.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A member of an etcd, as a member list describes it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Member {
    pub id: u64,
    /// Empty until the member has started.
    pub name: String,
    pub client_urls: Vec<String>,
    pub is_learner: bool,
}

impl Member {
    /// Text for people.
    pub fn describe(&self) -> String {
        let name = if self.name.is_empty() {
            "without a name"
        } else {
            &self.name
        };
        format!("member {name} ({:x})", self.id)
    }
}

/// The members of an etcd, as the answering member lists them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemberList {
    pub cluster: u64,
    /// ID of the answering member.
    pub by: u64,
    pub members: Vec<Member>,
}

impl MemberList {
    /// `None` if the answer is not a member list.
    pub fn parse(answer: &Value) -> Option<Self> {
        let member = |value: &Value| Member {
            id: parse_number(&value["ID"]),
            name: parse_text(&value["name"]),
            client_urls: as_list(&value["clientURLs"])
                .iter()
                .map(parse_text)
                .filter(|url| !url.is_empty())
                .collect(),
            is_learner: value["isLearner"] == true,
        };
        let [cluster, by] = parse_ids(answer)?;
        let members: Vec<_> = as_list(&answer["members"]).iter().map(member).collect();
        let ids: BTreeSet<_> = members.iter().map(|member| member.id).collect();
        let whole = !members.is_empty() && ids.len() == members.len() && !ids.contains(&0);
        whole.then_some(Self {
            cluster,
            by,
            members,
        })
    }
}

/// A member's own report of its state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    pub cluster: u64,
    pub member: u64,
    /// The last revision that the member has applied.
    pub revision: u64,
    /// 0 if the member knows no leader.
    pub leader: u64,
    /// Errors that the member reports about itself.
    pub errors: Vec<String>,
    pub version: String,
}

impl Status {
    /// `None` if the answer is not a status.
    pub fn parse(answer: &Value) -> Option<Self> {
        let [cluster, member] = parse_ids(answer)?;
        let (revision, leader) = (
            parse_number(&answer["header"]["revision"]),
            parse_number(&answer["leader"]),
        );
        let errors = as_list(&answer["errors"])
            .iter()
            .map(parse_text)
            .filter(|error| !error.is_empty())
            .collect();
        let version = parse_text(&answer["version"]);
        Some(Self {
            cluster,
            member,
            revision,
            leader,
            errors,
            version,
        })
    }
}

/// The members of an etcd and what each of them answered, at about one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Members known to this node's member.
    pub list: MemberList,
    /// 0 if this node's member knows no leader.
    pub leader: u64,
    /// Version of this node's member.
    pub version: String,
    /// IDs of members and kinds of alarm. Alarms cannot be read without a leader.
    pub alarms: Result<Vec<(u64, String)>, String>,
    /// Highest revision that any member had applied before the other members were asked.
    pub revision: u64,
    /// Answers of the other members, by ID.
    pub answers: BTreeMap<u64, Result<Answer, String>>,
}

/// A member's report of its state, and the URL that answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub url: String,
    pub status: Status,
}

/// The active alarms: IDs of members and kinds. `None` if the answer is not a list of alarms.
pub fn parse_alarms(answer: &Value) -> Option<Vec<(u64, String)>> {
    parse_ids(answer)?;
    let alarms = as_list(&answer["alarms"]).iter().map(|alarm| {
        (
            parse_number(&alarm["memberID"]),
            parse_text(&alarm["alarm"]),
        )
    });
    Some(
        alarms
            .filter(|(_, kind)| !kind.is_empty() && kind != "NONE")
            .collect(),
    )
}

/// The IDs of the cluster and of the answering member.
fn parse_ids(answer: &Value) -> Option<[u64; 2]> {
    let ids = ["cluster_id", "member_id"].map(|field| parse_number(&answer["header"][field]));
    (!ids.contains(&0)).then_some(ids)
}

fn parse_number(value: &Value) -> u64 {
    value
        .as_u64()
        .or_else(|| value.as_str()?.parse().ok())
        .unwrap_or_default()
}

/// A string without control characters, since the text may end up in a log or terminal.
fn parse_text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_default()
        .chars()
        .filter(|c| !c.is_control())
        .take(500)
        .collect()
}

fn as_list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

#[cfg(test)]
mod tests;
