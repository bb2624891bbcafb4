//! One run: `processes` are started, asked and stopped as the `script` says, and a `monitor` asks for more than
//! the load does. A `session` has the plan, the log and the progress of the run; `outcome` is what all runs came to.

mod monitor;
pub(crate) mod outcome;
pub(crate) mod processes;
pub(crate) mod script;
pub(crate) mod session;
