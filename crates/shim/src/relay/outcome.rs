//! The outcomes of connections.

/// How a connection ended, as in the metric `berth_connections_total{outcome}` and the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Both ends closed the connection.
    Closed,
    /// The client reset the connection, or keepalive found the client gone.
    ClientReset,
    /// The instance reset the connection, or keepalive found the instance gone.
    BackendReset,
    /// The client gave up while it was held.
    ClientLeft,
    /// No instance became ready within `--hold`.
    HoldExpired,
    /// No instance was ready, and too many clients were held already.
    HoldFull,
    /// Too many clients waited for their turn.
    GateFull,
    /// The client's turn did not come for 15 s.
    GateExpired,
    /// A sibling took the connection. The own instance could not serve the client, or a share gave
    /// the client to the sibling.
    Passed,
    /// The client's socket was passed to an instance.
    Injected,
    /// The connection could not be taken over from the accept loop (no descriptor, no memory).
    Failed,
}

impl Outcome {
    /// Every outcome, in the order of the counters.
    pub const ALL: [Self; 11] = [
        Self::Closed,
        Self::ClientReset,
        Self::BackendReset,
        Self::ClientLeft,
        Self::HoldExpired,
        Self::HoldFull,
        Self::GateFull,
        Self::GateExpired,
        Self::Passed,
        Self::Injected,
        Self::Failed,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::ClientReset => "client_reset",
            Self::BackendReset => "backend_reset",
            Self::ClientLeft => "client_left",
            Self::HoldExpired => "hold_expired",
            Self::HoldFull => "hold_full",
            Self::GateFull => "gate_full",
            Self::GateExpired => "gate_expired",
            Self::Passed => "passed",
            Self::Injected => "injected",
            Self::Failed => "failed",
        }
    }
}
