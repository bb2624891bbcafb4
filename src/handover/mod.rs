//! handover

pub mod machine;
