//! The names by which both instances are told apart.

/// What a kube-apiserver's process is called (comm): the node's own, before and after COMMAND.
pub const OWN: &str = "kube-apiserver";

/// And the temporary one's, so that what stops the node's own by its name (`killall kube-apiserver`) does not stop that. It needs no
/// exemption: it dials itself at its own 127.x address, on another port.
pub const TEMPORARY: &str = "berth-temporary";

#[cfg(test)]
mod tests {
    use super::*;

    /// killall and pidof go by the whole name, pkill by a part of it, and the kernel cuts names.
    #[test]
    fn the_two_names_cannot_be_mistaken_for_one_another() {
        assert!(!TEMPORARY.contains(OWN) && !OWN.contains(TEMPORARY));
        assert!([OWN, TEMPORARY].iter().all(|name| name.len() <= 15));
    }
}
