//! Answers of etcd's JSON gateway, or of another process at its port: a list of members, then
//! alarms and statuses, one answer per line.
#![no_main]

use berth_bridge::etcd::members::MemberChoice;
use berth_bridge::etcd::types::{Answer, MemberList, Sample, Status, parse_alarms};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use std::collections::BTreeMap;

fuzz_target!(|text: &str| {
    let mut lines = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let Some(list) = lines.next().as_ref().and_then(MemberList::parse) else {
        return;
    };
    let mut sample = Sample {
        list,
        version: String::new(),
        leader: 0,
        alarms: Ok(Vec::new()),
        revision: 0,
        answers: BTreeMap::new(),
    };
    for line in lines {
        if let (Some(more), Ok(all)) = (parse_alarms(&line), &mut sample.alarms) {
            all.extend(more);
        }
        if let Some(status) = Status::parse(&line) {
            sample.leader = status.leader;
            sample.answers.insert(
                status.member,
                Ok(Answer {
                    url: "https://10.0.0.6:2379".into(),
                    status,
                }),
            );
        }
    }
    let voters = sample
        .list
        .members
        .iter()
        .filter(|member| !member.is_learner)
        .count();
    match sample.choose_members() {
        Ok(MemberChoice::Alone) => assert!(
            sample
                .list
                .members
                .iter()
                .all(|member| member.id == sample.list.by)
        ),
        Ok(MemberChoice::Others(others)) => {
            assert!(
                sample.leader != 0
                    && sample.alarms == Ok(Vec::new())
                    && 2 * others.members.len() > voters
            );
            assert!(
                others
                    .members
                    .iter()
                    .all(|(member, _)| member.id != sample.list.by && !member.is_learner)
            );
        }
        Err(why) => assert!(why.iter().all(|line| !line.contains(char::is_control))),
    }
});
