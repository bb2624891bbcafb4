//! What the members of an etcd answer, and what is known of them together.
//!
//! In etcd's JSON, numbers of 64 bits are strings, and a field with its default value is left out.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// A member of an etcd.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Member {
    pub id: u64,
    /// Empty as long as it has not started.
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
    /// Who answered.
    pub by: u64,
    pub members: Vec<Member>,
}

impl MemberList {
    /// None if it is no such answer.
    pub fn parse(answer: &Value) -> Option<Self> {
        let member = |value: &Value| Member {
            id: number(&value["ID"]),
            name: text(&value["name"]),
            client_urls: list(&value["clientURLs"])
                .iter()
                .map(text)
                .filter(|url| !url.is_empty())
                .collect(),
            is_learner: value["isLearner"] == true,
        };
        let [cluster, by] = header(answer)?;
        let members: Vec<_> = list(&answer["members"]).iter().map(member).collect();
        let ids: BTreeSet<_> = members.iter().map(|member| member.id).collect();
        let whole = !members.is_empty() && ids.len() == members.len() && !ids.contains(&0);
        whole.then_some(Self {
            cluster,
            by,
            members,
        })
    }
}

/// The state of a member.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    pub cluster: u64,
    pub member: u64,
    /// What it has applied.
    pub revision: u64,
    /// 0: it knows none.
    pub leader: u64,
    /// Errors that the member reports about itself.
    pub errors: Vec<String>,
    pub version: String,
}

impl Status {
    /// None if it is no such answer.
    pub fn parse(answer: &Value) -> Option<Self> {
        let [cluster, member] = header(answer)?;
        let (revision, leader) = (
            number(&answer["header"]["revision"]),
            number(&answer["leader"]),
        );
        let errors = list(&answer["errors"])
            .iter()
            .map(text)
            .filter(|error| !error.is_empty())
            .collect();
        let version = text(&answer["version"]);
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

/// What was seen of an etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// As this node's own member knows them.
    pub list: MemberList,
    /// 0: it knows none.
    pub leader: u64,
    /// This node's own.
    pub version: String,
    /// Members and kinds; without a leader they cannot be read.
    pub alarms: Result<Vec<(u64, String)>, String>,
    /// What some member had applied before the others were asked.
    pub revision: u64,
    /// Of the others, by ID.
    pub answers: BTreeMap<u64, Result<Answer, String>>,
}

/// What a member answers, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub url: String,
    pub status: Status,
}

/// The alarms that are on: members and kinds. None if it is no such answer.
pub fn alarms(answer: &Value) -> Option<Vec<(u64, String)>> {
    header(answer)?;
    let alarms = list(&answer["alarms"])
        .iter()
        .map(|alarm| (number(&alarm["memberID"]), text(&alarm["alarm"])));
    Some(
        alarms
            .filter(|(_, kind)| !kind.is_empty() && kind != "NONE")
            .collect(),
    )
}

/// The IDs of the cluster and of the member that answers.
fn header(answer: &Value) -> Option<[u64; 2]> {
    let ids = ["cluster_id", "member_id"].map(|field| number(&answer["header"][field]));
    (!ids.contains(&0)).then_some(ids)
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .or_else(|| value.as_str()?.parse().ok())
        .unwrap_or_default()
}

/// It may end in a line of a log or of a terminal.
fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_default()
        .chars()
        .filter(|c| !c.is_control())
        .take(500)
        .collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

#[cfg(test)]
mod tests;
