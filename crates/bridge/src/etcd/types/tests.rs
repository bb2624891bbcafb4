use super::*;

/// An answer of v3.5, with kubeadm's flags: 64-bit numbers are strings, and zero, empty or false
/// fields are omitted.
const LIST: &str = r#"{"header":{"cluster_id":"7895810959607866176","member_id":"9372538179322589801","raft_term":"10"},"members":[
    {"ID":"9372538179322589801","name":"cp-1","peerURLs":["https://10.0.0.5:2380"],"clientURLs":["https://10.0.0.5:2379"]},
    {"ID":"10501334649042878790","name":"cp-2","peerURLs":["https://10.0.0.6:2380"],"clientURLs":["https://10.0.0.6:2379"]},
    {"ID":"18249187646912138824","peerURLs":["https://10.0.0.7:2380"],"isLearner":true}]}"#;
const STATUS_3_5: &str = r#"{"header":{"cluster_id":"7895810959607866176","member_id":"10501334649042878790","revision":"42",
    "raft_term":"10"},"version":"3.5.24","dbSize":"20480","leader":"9372538179322589801","raftIndex":"60","raftTerm":"10",
    "raftAppliedIndex":"60","dbSizeInUse":"16384"}"#;
const STATUS_3_6: &str = r#"{"header":{"cluster_id":"7895810959607866176","member_id":"10501334649042878790","revision":"42",
    "raft_term":"10"},"version":"3.6.6","dbSize":"20480","leader":"0","raftIndex":"60","raftTerm":"10","raftAppliedIndex":"60",
    "errors":["etcdserver: no leader"],"dbSizeInUse":"16384","storageVersion":"3.6.0","dbSizeQuota":"2147483648",
    "downgradeInfo":{}}"#;

fn parse_json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn answers_of_both_versions_are_understood() {
    let list = MemberList::parse(&parse_json(LIST)).unwrap();
    assert_eq!(
        (list.cluster, list.by, list.members.len()),
        (7895810959607866176, 9372538179322589801, 3)
    );
    assert_eq!(list.members[1].client_urls, ["https://10.0.0.6:2379"]);
    assert_eq!(list.members[1].describe(), "member cp-2 (91bc3c398fb3c146)");
    let learner = Member {
        id: 18249187646912138824,
        is_learner: true,
        ..Member::default()
    };
    assert_eq!(list.members[2], learner);
    let old = Status::parse(&parse_json(STATUS_3_5)).unwrap();
    let status = Status {
        cluster: list.cluster,
        member: list.members[1].id,
        revision: 42,
        leader: list.by,
        errors: vec![],
        version: "3.5.24".into(),
    };
    assert_eq!(old, status);
    let new = Status::parse(&parse_json(STATUS_3_6)).unwrap();
    assert_eq!(
        new,
        Status {
            leader: 0,
            errors: vec!["etcdserver: no leader".into()],
            version: "3.6.6".into(),
            ..status
        }
    );
    let header = r#""header":{"cluster_id":"1","member_id":"2","revision":"42","raft_term":"10"}"#;
    assert_eq!(
        parse_alarms(&parse_json(&format!("{{{header}}}"))),
        Some(vec![])
    );
    let on = format!(
        r#"{{{header},"alarms":[{{"memberID":"7","alarm":"NOSPACE"}},{{"memberID":"8"}}]}}"#
    );
    assert_eq!(
        parse_alarms(&parse_json(&on)),
        Some(vec![(7, "NOSPACE".into())])
    );
}

#[test]
fn unexpected_answers_are_rejected() {
    for other in [
        "{}",
        "[]",
        r#"{"error":"etcdserver: no leader","code":14}"#,
        r#"{"header":{"cluster_id":"1"}}"#,
    ] {
        let other = parse_json(other);
        assert_eq!(
            (
                MemberList::parse(&other),
                Status::parse(&other),
                parse_alarms(&other)
            ),
            (None, None, None)
        );
    }
    let twice = LIST.replace("18249187646912138824", "10501334649042878790");
    let nameless = LIST.replace(r#""ID":"18249187646912138824","#, "");
    for wrong in [twice, nameless, LIST.replace("members", "member")] {
        assert_eq!(MemberList::parse(&parse_json(&wrong)), None, "{wrong}");
    }
}
