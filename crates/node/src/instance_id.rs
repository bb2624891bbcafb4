//! The name of a kube-apiserver in a berth. [`crate::registry`] has the records of instances.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Maximum length of an ID, in bytes. A pod's UID (36) and a DNS label (63) fit. A file name may
/// have 255 bytes, so there is room for a suffix.
const MAX_LENGTH: usize = 63;

/// Name of an instance in its berth: 1 to 63 of `A-Z a-z 0-9 . _ -`, not beginning with a dot or a
/// dash, because the name becomes a file name. Cheap to clone: each connection has an ID.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InstanceId(Arc<str>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InstanceIdError(String);

impl InstanceId {
    /// Parses an ID.
    ///
    /// # Errors
    /// The text breaks a rule of [`InstanceId`]. The error names the first such rule.
    pub fn parse(text: &str) -> Result<Self, InstanceIdError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        Err(InstanceIdError(
            match (text.chars().next(), text.chars().find(|c| !allowed(*c))) {
                (None, _) => {
                    format!("an instance ID is empty: give 1 to {MAX_LENGTH} of A-Z a-z 0-9 . _ -")
                }
                _ if text.len() > MAX_LENGTH => {
                    format!(
                        "the instance ID is {} bytes long, and at most {MAX_LENGTH} bytes fit: shorten the ID",
                        text.len()
                    )
                }
                // With this first character, the file would be hidden, or look like an option.
                (Some(first @ ('.' | '-')), _) => {
                    format!(
                        "the instance ID {text:?} begins with {first:?}: begin the ID with a letter, a digit or an underscore"
                    )
                }
                (_, Some(bad)) => {
                    format!("the instance ID {text:?} has a {bad:?}: use only A-Z a-z 0-9 . _ -")
                }
                (Some(_), None) => return Ok(Self(text.into())),
            },
        ))
    }

    /// Returns an ID of eight random hexadecimal digits.
    pub fn random() -> Result<Self, InstanceIdError> {
        match getrandom::u32() {
            Ok(drawn) => Ok(Self(format!("{drawn:08x}").into())),
            Err(error) => Err(InstanceIdError(format!(
                "the system has no random bytes for an instance ID: {error}: give an ID with --instance"
            ))),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for InstanceId {
    type Err = InstanceIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl TryFrom<String> for InstanceId {
    type Error = InstanceIdError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text)
    }
}

impl From<InstanceId> for String {
    fn from(id: InstanceId) -> Self {
        id.0.as_ref().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_uids_and_names_are_accepted() {
        for good in [
            "a",
            "_",
            "0f2c6e3a-8f4e-4c7e-9a57-1f2d3c4b5a69",
            "v1.34_b",
            &"x".repeat(63),
        ] {
            assert_eq!(InstanceId::parse(good).unwrap().to_string(), good);
        }
        assert_eq!(InstanceId::random().unwrap().as_str().len(), 8);
    }

    #[test]
    fn names_that_are_not_plain_file_names_are_refused() {
        for bad in [
            "",
            ".",
            "..",
            ".hidden",
            "-a",
            "a/b",
            "a b",
            "ä",
            "a\0",
            "a\n",
            &"x".repeat(64),
        ] {
            assert!(InstanceId::parse(bad).is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<InstanceId>("\"../a\"").is_err());
        assert_eq!(
            serde_json::to_string(&InstanceId::parse("a").unwrap()).unwrap(),
            "\"a\""
        );
    }
}
