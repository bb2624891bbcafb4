//! How a connection ended.

/// How a connection ended, as in the metric `berth_connections_total{outcome}` and the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Both ends closed it.
    Closed,
    /// The client reset it, or keepalive found it gone.
    ClientReset,
    /// The instance reset it, or keepalive found it gone.
    BackendReset,
    /// The client gave up while it was held.
    ClientLeft,
    /// No instance became ready within `--hold`.
    HoldExpired,
    /// No instance was ready, and too many clients were held already.
    HoldFull,
    /// Too many clients waited for their turn.
    GateFull,
    /// Its turn did not come for 15 s.
    GateExpired,
    /// The own instance could not serve it, or it was the sibling's by a share, and a sibling took it.
    Passed,
    /// Its socket was passed to an instance.
    Injected,
    /// It could not be taken over from the accept loop (no descriptor, no memory).
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
