//! The members of an etcd that a kube-apiserver can use while this node's member is away. Pure.
//!
//! The other members must be a majority of all voters: otherwise nothing can be written, and no
//! read of the latest state is answered.

use super::types::{Answer, Member, MemberList, Sample};

/// A hint for the operator: the option for a bridge that leaves etcd alone, and the cost of such a
/// bridge.
pub const OWN_HINT: &str = "or give --etcd own: the temporary kube-apiserver then uses this node's member, and \
     requests that need etcd time out while COMMAND restarts this member (for some 47 s in kubeadm's own upgrade of etcd)";

/// The members that serve while this node's member is away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemberChoice {
    /// This node has the only member.
    Alone,
    Others(OtherMembers),
}

/// Members that are a majority without this node's member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherMembers {
    /// Each member with the URL that answers.
    pub members: Vec<(Member, String)>,
    /// The other members that are not used, with reasons.
    pub left_out: Vec<String>,
}

impl Sample {
    /// # Errors
    /// Everything that is missing, with a fix.
    pub fn choose_members(&self) -> Result<MemberChoice, Vec<String>> {
        let MemberList { by, members, .. } = &self.list;
        let others: Vec<_> = members.iter().filter(|member| member.id != *by).collect();
        if others.is_empty() {
            return Ok(MemberChoice::Alone);
        }
        let (mut usable, mut left_out) = (Vec::new(), Vec::new());
        for member in others {
            match self.usable_url(member) {
                Ok(url) => usable.push((member.clone(), url.to_owned())),
                Err(why) => left_out.push(format!("{} {why}", member.describe())),
            }
        }
        let voters = members.iter().filter(|member| !member.is_learner).count();
        let needed = voters / 2 + 1;
        let can = usable.len();
        let mut why = self.list_cluster_problems();
        if why.is_empty() && can >= needed {
            return Ok(MemberChoice::Others(OtherMembers {
                members: usable,
                left_out,
            }));
        }
        why.extend(left_out);
        if can < needed {
            why.push(format!(
                "{needed} of {voters} voters must serve while this node's member is away, and only {can} of the other \
                 voters can: wait until more of them can serve, {OWN_HINT}; no node's kube-apiserver has etcd then"
            ));
        }
        Err(why)
    }

    /// Problems that concern no single member: there is no leader, an alarm is active, or the
    /// alarms cannot be read.
    fn list_cluster_problems(&self) -> Vec<String> {
        if self.leader == 0 {
            return vec!["this node's member knows no leader: check that this member reaches the peer URLs of the other members".into()];
        }
        let find = |id: u64| self.list.members.iter().find(|member| member.id == id);
        let alarm = |(id, kind): &(u64, String)| {
            let member = find(*id).map_or_else(|| format!("member {id:x}"), Member::describe);
            format!("{member} has the alarm {kind}: remove its cause, then `etcdctl alarm disarm`")
        };
        match &self.alarms {
            Ok(alarms) => alarms.iter().map(alarm).collect(),
            Err(why) => vec![format!(
                "the alarms of etcd cannot be read: {why}: see the log of this node's etcd"
            )],
        }
    }

    /// The URL at which a member answers. The error says why the member cannot be used.
    fn usable_url(&self, member: &Member) -> Result<&str, String> {
        if member.name.is_empty() {
            return Err(format!(
                "has not started: start its etcd, or `etcdctl member remove {:x}`",
                member.id
            ));
        }
        if member.is_learner {
            return Err(format!(
                "is no voter yet: `etcdctl member promote {:x}`",
                member.id
            ));
        }
        let Answer { url, status } = match self.answers.get(&member.id) {
            Some(Ok(answer)) => answer,
            Some(Err(why)) if !why.is_empty() => {
                return Err(format!(
                    "cannot be used: {why}: see the member's log, and check that the member's certificate is valid for the address"
                ));
            }
            _ => return Err("has no client URL: give its etcd --advertise-client-urls".into()),
        };
        let wrong = |what: String| Err(format!("at {url} {what}"));
        if status.cluster != self.list.cluster || status.member != member.id {
            return wrong("answers for another etcd: correct its --advertise-client-urls".into());
        }
        if !status.errors.is_empty() {
            return wrong(format!(
                "reports {}: see its etcd's log",
                status.errors.join(", ")
            ));
        }
        if status.leader == 0 {
            return wrong(
                "knows no leader: check that this member reaches the peer URLs of the other members".into(),
            );
        }
        if status.revision < self.revision {
            let (its, all) = (status.revision, self.revision);
            return wrong(format!(
                "is at revision {its}, and other members are at {all}: wait until this member has caught up"
            ));
        }
        Ok(url)
    }
}

#[cfg(test)]
mod tests;
