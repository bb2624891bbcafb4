use super::*;
use crate::etcd::types::Status;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn make_member(id: u64) -> Member {
    Member {
        id,
        name: format!("cp-{id}"),
        client_urls: vec![format!("https://10.0.0.{id}:2379")],
        is_learner: false,
    }
}

fn make_answer(id: u64) -> Answer {
    let status = Status {
        cluster: 77,
        member: id,
        revision: 100,
        leader: 1,
        ..Status::default()
    };
    Answer {
        url: format!("https://10.0.0.{id}:2379"),
        status,
    }
}

/// An etcd with the given number of healthy members, as observed from the first member.
fn make_sample(members: u64) -> Sample {
    Sample {
        list: MemberList {
            cluster: 77,
            by: 1,
            members: (1..=members).map(make_member).collect(),
        },
        leader: 1,
        version: "3.6.16".into(),
        alarms: Ok(Vec::new()),
        revision: 100,
        answers: (2..=members).map(|id| (id, Ok(make_answer(id)))).collect(),
    }
}

#[test]
fn all_problems_are_named_at_once() {
    let broken: [fn(&mut Sample); 9] = [
        |it| it.list.members[2].name.clear(),
        |it| it.list.members[2].is_learner = true,
        |it| drop(it.answers.insert(3, Err("TLS handshake failed".into()))),
        |it| drop(it.answers.insert(3, Err(String::new()))),
        |it| change_status(it, |status| status.cluster = 78),
        |it| change_status(it, |status| status.errors.push("memory".into())),
        |it| change_status(it, |status| status.leader = 0),
        |it| change_status(it, |status| status.revision = 99),
        |it| it.alarms = Ok(vec![(3, "NOSPACE".into())]),
    ];
    fn change_status(sample: &mut Sample, change: fn(&mut Status)) {
        change(&mut sample.answers.get_mut(&3).unwrap().as_mut().unwrap().status);
    }
    // Each mistake has a text of its own.
    let mut told = BTreeSet::new();
    for change in broken {
        let mut three = make_sample(3);
        change(&mut three);
        let all = three.choose_members().unwrap_err();
        // With an alarm, enough members serve all the same.
        let count = 1 + usize::from(three.alarms == Ok(Vec::new()));
        assert!(all.len() == count && all[0].contains(" (3) "), "{all:?}");
        assert!(told.insert(all[0].clone()), "{all:?}");
    }
    let mut three = make_sample(3);
    three.answers.clear();
    assert_eq!(three.choose_members().unwrap_err().len(), 3);
    for (leader, why) in [
        (1, "the alarms of etcd cannot be read: no answer in 2s"),
        (0, "this node's member knows no leader"),
    ] {
        let three = Sample {
            leader,
            alarms: Err("no answer in 2s".into()),
            ..make_sample(3)
        };
        let all = three.choose_members().unwrap_err();
        assert!(all.len() == 1 && all[0].starts_with(why), "{all:?}");
        assert_eq!(
            Sample {
                list: make_sample(1).list,
                ..three
            }
            .choose_members(),
            Ok(MemberChoice::Alone)
        );
    }
    // The member of an alarm may have left the list. The message then has the member's ID.
    let mut three = make_sample(3);
    three.alarms = Ok(vec![(255, "CORRUPT".into())]);
    assert!(three.choose_members().unwrap_err()[0].starts_with("member ff has the alarm CORRUPT"));
}

/// Draws the number of a defect in a member's answer. The most frequent number, 7, is no defect.
fn any_defect() -> impl Strategy<Value = u8> {
    prop_oneof![2 => Just(7), 1 => 0..9u8]
}

fn any_revision() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(100), 1 => 98..102u64]
}

prop_compose! {
    fn any_sample()(
        members in prop::collection::btree_map(1u64..9, (any::<bool>(), any::<bool>(), any_defect(), any_revision()), 0..8),
        alarms in prop::collection::vec((1u64..9, "[A-Z]{1,8}".prop_map(String::from)), 0..2),
        by in 1u64..9,
    ) -> Sample {
        let mut sample = Sample { alarms: Ok(alarms), ..make_sample(0) };
        sample.list.by = by;
        for (id, (learner, started, odd, revision)) in members {
            let mut member = make_member(id);
            member.is_learner = learner && odd > 3;
            if !started && odd > 4 {
                member.name.clear();
            }
            sample.list.members.push(member);
            let mut answer = make_answer(id);
            answer.status.revision = revision;
            match odd {
                0 => answer.status.cluster = 1,
                1 => answer.status.leader = 0,
                2 => answer.status.errors.push("x".into()),
                3 => answer.status.member = 1,
                _ => {}
            }
            sample.answers.insert(id, if odd == 8 { Err("silent".into()) } else { Ok(answer) });
        }
        sample
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(berth_testing::case_count(2000)))]

    /// A temporary kube-apiserver gets only members that serve and are a majority of all voters,
    /// and never this node's member. A refusal has a cause in each other member, or an alarm.
    #[test]
    fn only_a_majority_that_serves_is_used(sample in any_sample()) {
        let list = &sample.list;
        let voters = list.members.iter().filter(|member| !member.is_learner).count();
        let serves = |member: &Member| {
            let Some(Ok(answer)) = sample.answers.get(&member.id) else { return false };
            let Status { cluster, member: id, revision, leader, errors, .. } = &answer.status;
            member.id != list.by && !member.is_learner && !member.name.is_empty() && (*cluster, *id) == (77, member.id)
                && *revision >= 100 && *leader != 0 && errors.is_empty()
        };
        let all: Vec<_> = list.members.iter().filter(|member| serves(member)).map(|member| member.id).collect();
        let others = list.members.iter().filter(|member| member.id != list.by).count();
        let no_alarm = sample.alarms == Ok(Vec::new());
        match sample.choose_members() {
            Ok(MemberChoice::Alone) => prop_assert_eq!(others, 0),
            Ok(MemberChoice::Others(chosen)) => {
                let ids: Vec<_> = chosen.members.iter().map(|(member, _)| member.id).collect();
                prop_assert!(no_alarm && 2 * ids.len() > voters);
                prop_assert_eq!((&ids, ids.len() + chosen.left_out.len()), (&all, others));
            }
            Err(why) => {
                let is_minority = 2 * all.len() <= voters;
                prop_assert!(!no_alarm || is_minority);
                let alarms = sample.alarms.as_ref().map_or(0, Vec::len);
                prop_assert_eq!(why.len(), alarms + others - all.len() + usize::from(is_minority));
            }
        }
    }
}
