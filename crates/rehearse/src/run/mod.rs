//! A run. The `script` starts, queries and stops the `processes`. A `monitor` sends requests in
//! addition to the load. The `session` has the plan, the log and the progress of a run. `outcome`
//! has the results of all runs.

mod monitor;
pub(crate) mod outcome;
pub(crate) mod processes;
pub(crate) mod script;
pub(crate) mod session;
