//! A simulated cluster: clients with their loads, on the old or the new instance, and disturbances
//! of both. The simulation writes samples like those of pages of metrics.

use crate::histogram::Histogram;
use crate::signals::{Connections, Counts, Sample, Signal, Subject};
use fastrand::Rng;
use std::f64::consts::TAU;

/// Seconds between two samples.
pub(super) const INTERVAL: f64 = 2.0;

/// The kinds of requests: verb, resource, scope, share of all requests, and median time in seconds.
const REQUESTS: [(&str, &str, &str, f64, f64); 14] = [
    ("GET", "leases.coordination.k8s.io", "resource", 0.15, 0.003),
    ("PUT", "leases.coordination.k8s.io", "resource", 0.20, 0.008),
    ("LIST", "pods", "cluster", 0.03, 0.080),
    ("LIST", "pods", "namespace", 0.05, 0.010),
    ("GET", "pods", "resource", 0.09, 0.003),
    ("PATCH", "pods/status", "resource", 0.08, 0.012),
    ("POST", "events", "namespace", 0.08, 0.010),
    ("WATCH", "pods", "cluster", 0.04, 0.0),
    ("LIST", "configmaps", "namespace", 0.04, 0.020),
    ("GET", "configmaps", "resource", 0.08, 0.003),
    ("GET", "secrets", "resource", 0.05, 0.003),
    ("LIST", "widgets.example.com", "cluster", 0.03, 0.030),
    ("PATCH", "widgets.example.com", "resource", 0.05, 0.015),
    (
        "POST",
        "tokenreviews.authentication.k8s.io",
        "resource",
        0.03,
        0.005,
    ),
];
const BOUNDS: [f64; 12] = [
    0.005,
    0.025,
    0.05,
    0.1,
    0.2,
    0.4,
    0.8,
    1.5,
    3.0,
    6.0,
    15.0,
    f64::INFINITY,
];
const WEBHOOK: &str = "policy.example.com";
const LEVEL: &str = "workload-low";
const SIGMA: f64 = 0.7;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fault {
    None,
    /// The new instance answers every request with 500 (`Errors`), or only requests for config maps
    /// (`ErrorsOfOne`).
    Errors,
    ErrorsOfOne,
    /// The new instance takes ten times as long for lists.
    SlowLists,
    /// The new instance's calls of the webhook fail.
    Webhook,
    /// The new instance answers lists and watches of widgets with 404.
    NotFound,
    /// The new instance's memory grows by 50 MiB a second.
    Leak,
    /// The new instance accepts connections, and answers nothing, not even requests for metrics.
    Hang,
    /// The new instance answers requests for metrics, and no others.
    StandStill,
    /// The new instance answers 401 to seven of ten requests (`RefusesMost`) or to all
    /// (`RefusesAll`), or answers 403 to seven of ten (`Forbids`).
    RefusesMost,
    RefusesAll,
    Forbids,
    /// The new instance accepts connections, and does not read the requests on them.
    Swallows,
    /// The new instance answers 429 to nine of ten requests, since it has a hundredth of the old
    /// instance's seats.
    FewSeats,
    /// The new instance takes the node's CPU time, so both instances are slow.
    Starves,
    /// The new instance answers requests for metrics with 429.
    HidesMetrics,
    /// The new instance makes a webhook slow for both instances.
    SlowsWebhook,
    /// The new instance fails all writes of widgets. The clients of widgets all move to it as soon
    /// as they can.
    FailsMoved,
    /// The new instance fails requests for config maps. Nine of ten requests are for pods, and come
    /// from one tenant.
    FailsBesideTenant,
    /// The new instance fails all writes. The leaders of all controllers
    /// are connected to the new instance.
    FailsControllers,
}

#[derive(Debug)]
struct Client {
    request: usize,
    /// `rate` is the client's requests a second. `fails` is the share of them that fails on either
    /// instance.
    rate: f64,
    fails: f64,
    /// The client's requests take this many times as long as usual for their kind.
    factor: f64,
    /// The share of the client's requests that goes to the new instance.
    on_new: f64,
    /// Duration of the client's connections in seconds. 0 means a connection for each request.
    life: f64,
    /// True if the client moves to the new instance with the first step.
    moves: bool,
    /// The shares of requests that either instance answers with 401, and with 403.
    refused: [f64; 2],
}

/// Conditions of an upgrade that are no fault of the new instance.
#[derive(Debug, Clone, Copy)]
struct Scene {
    /// `widgets_move` moves all clients of widgets to the new instance with the first step, and
    /// `controllers_move` all clients that write.
    widgets_move: bool,
    controllers_move: bool,
    /// True if one tenant makes nine of ten requests.
    tenant: bool,
}

impl Scene {
    /// Marks the clients that move, and adds the tenant. `clients` together send `rate` requests a
    /// second.
    fn apply_to_clients(self, clients: &mut Vec<Client>, rate: f64) {
        for client in &mut *clients {
            let (verb, resource, ..) = REQUESTS[client.request];
            client.moves = self.widgets_move && resource == "widgets.example.com"
                || self.controllers_move && matches!(verb, "PUT" | "PATCH");
        }
        if self.tenant {
            let request = REQUESTS
                .iter()
                .position(|(verb, resource, ..)| (*verb, *resource) == ("GET", "pods"));
            clients.push(Client {
                life: 30.0,
                ..Client::new(request.expect("is there"), 9.0 * rate)
            });
        }
    }
}

impl Client {
    /// A client with a connection for each request.
    fn new(request: usize, rate: f64) -> Self {
        Self {
            request,
            rate,
            fails: 0.0,
            factor: 1.0,
            on_new: 0.0,
            life: 0.0,
            moves: false,
            refused: [0.0; 2],
        }
    }
}

#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) rng: Rng,
    clients: Vec<Client>,
    samples: [Sample; 2],
    connections: [Connections; 2],
    pub(super) fault: Fault,
    noisy: bool,
    /// Two disturbances, which end by themselves. A burst makes one kind of request fail, and a
    /// stall makes requests of all kinds slow. Each has the number of intervals that remain, and
    /// the affected share of requests on each side.
    burst: (usize, u32, [f64; 2]),
    stall: (u32, [f64; 2]),
    /// Remaining intervals of two more disturbances: the webhook is slow, or one of the instances
    /// refuses its metrics.
    slow_webhook: u32,
    refuses: [u32; 2],
    /// Number of intervals in which the new instance has had clients.
    age: u32,
    errors: [f64; REQUESTS.len()],
    /// `met` is the number of requests that met the fault, and `all` is the number of all requests.
    pub(super) met: f64,
    pub(super) all: f64,
}

impl Cluster {
    /// A cluster without disturbances. Every request has a connection of its own.
    pub(super) fn calm(seed: u64, rate: f64, fault: Fault) -> Self {
        let clients =
            (0..REQUESTS.len()).map(|request| Client::new(request, rate * REQUESTS[request].3));
        let mut clients = clients.collect();
        let scene = Scene {
            widgets_move: fault == Fault::FailsMoved,
            controllers_move: fault == Fault::FailsControllers,
            tenant: fault == Fault::FailsBesideTenant,
        };
        scene.apply_to_clients(&mut clients, rate);
        Self::new(Rng::with_seed(seed), clients, fault, false)
    }

    /// A cluster with disturbances. Its clients are of all sizes, and their connections of all
    /// lengths. Some clients have requests that fail on both instances, or that take long on both.
    pub(super) fn noisy(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let rate = 30.0 * 50_f64.powf(rng.f64());
        let mut clients = Vec::new();
        for (request, (_, _, _, share, _)) in REQUESTS.into_iter().enumerate() {
            let count = 3 + rng.usize(..20);
            let sizes: Vec<f64> = (0..count).map(|_| (rng.f64() + 0.02).powf(-1.2)).collect();
            let all: f64 = sizes.iter().sum();
            clients.extend(sizes.into_iter().map(|size| Client {
                fails: if rng.f64() < 0.02 { rng.f64() } else { 0.0 },
                factor: if rng.f64() < 0.05 {
                    3.0 + 7.0 * rng.f64()
                } else {
                    1.0
                },
                life: 3.0 * 200_f64.powf(rng.f64()),
                refused: [(); 2].map(|()| if rng.f64() < 0.01 { rng.f64() } else { 0.0 }),
                ..Client::new(request, rate * share * size / all)
            }));
        }
        let [widgets_move, controllers_move, tenant] = [(); 3].map(|()| rng.f64() < 0.1);
        Scene {
            widgets_move,
            controllers_move,
            tenant,
        }
        .apply_to_clients(&mut clients, rate);
        Self::new(rng, clients, Fault::None, true)
    }

    fn new(mut rng: Rng, clients: Vec<Client>, fault: Fault, noisy: bool) -> Self {
        let errors = REQUESTS.map(|_| {
            if noisy {
                10_f64.powf(-4.0 + 2.0 * rng.f64())
            } else {
                0.0005
            }
        });
        let mut samples = [Sample::new(Some("")), Sample::new(Some(""))];
        for (sample, memory) in samples.iter_mut().zip([1000.0, 700.0]) {
            sample.memory = Some(memory * f64::from(1 << 20));
            sample.metrics = Signal::COMPARED_SIGNALS.map(Signal::metric).into();
        }
        let connections = [Connections::default(), Connections::default()];
        let (burst, stall) = ((0, 0, [0.0; 2]), (0, [0.0; 2]));
        let mut cluster = Self {
            rng,
            clients,
            samples,
            connections,
            fault: Fault::None,
            noisy: false,
            burst,
            stall,
            slow_webhook: 0,
            refuses: [0; 2],
            age: 0,
            errors,
            met: 0.0,
            all: 0.0,
        };
        // The old instance served for 20 intervals before the judge starts.
        (0..20).for_each(|_| drop(cluster.simulate_interval(0.0)));
        Self {
            fault,
            noisy,
            all: 0.0,
            ..cluster
        }
    }

    /// Simulates an interval and returns a sample of each instance. `share` is the new instance's
    /// share of new connections.
    pub(super) fn simulate_interval(&mut self, share: f64) -> [Sample; 2] {
        self.age += u32::from(share > 0.0);
        self.update_disturbances();
        for at in 0..self.clients.len() {
            self.simulate_client(at, share);
        }
        let leak = if self.fault == Fault::Leak && share > 0.0 {
            50.0
        } else {
            2.0 * self.rng.f64()
        };
        *self.samples[1].memory.get_or_insert_default() += leak * INTERVAL * f64::from(1 << 20);
        let hangs = self.fault == Fault::Hang && share > 0.0;
        // Each instance gets a probe a second from berth, and one request for metrics in each
        // interval.
        for sample in &mut self.samples {
            sample.add_counts(
                Signal::Authentication,
                Subject::default(),
                0.0,
                INTERVAL + 1.0,
            );
        }
        let mut samples = self.samples.clone();
        if hangs {
            samples[1] = Sample::new(None);
        }
        if self.fault == Fault::HidesMetrics && share > 0.0 {
            samples[1] = Sample::with_refused_metrics();
        }
        for (sample, _) in samples
            .iter_mut()
            .zip(self.refuses)
            .filter(|(_, left)| *left > 0)
        {
            *sample = Sample::with_refused_metrics();
        }
        let mut connections = self.connections.clone().into_iter();
        samples.map(|sample| sample.with_connections(connections.next().expect("one each")))
    }

    fn update_disturbances(&mut self) {
        self.burst.1 = self.burst.1.saturating_sub(1);
        self.stall.0 = self.stall.0.saturating_sub(1);
        self.slow_webhook = self.slow_webhook.saturating_sub(1);
        self.refuses = self.refuses.map(|left| left.saturating_sub(1));
        if self.age > 0 && self.fault == Fault::Starves {
            self.stall = (1, [0.9; 2]);
        }
        if self.age > 0 && self.fault == Fault::SlowsWebhook {
            self.slow_webhook = 1;
        }
        if !self.noisy {
            return;
        }
        if self.rng.f64() < 1.0 / 200.0 {
            self.slow_webhook = 1 + self.rng.u32(..10);
        }
        if self.rng.f64() < 1.0 / 200.0 {
            self.refuses[self.rng.usize(..2)] = 1 + self.rng.u32(..10);
        }
        if self.burst.1 == 0 && self.rng.f64() < 1.0 / 40.0 {
            self.burst = (
                self.rng.usize(..REQUESTS.len()),
                1 + self.rng.u32(..5),
                [self.rng.f64(), self.rng.f64()],
            );
        }
        if self.stall.0 == 0 && self.rng.f64() < 1.0 / 40.0 {
            self.stall = (
                1 + self.rng.u32(..4),
                [0.2 + 0.8 * self.rng.f64(), 0.2 + 0.8 * self.rng.f64()],
            );
            // By chance, a stall spares one of the instances.
            self.stall.1[self.rng.usize(..2)] *= f64::from(self.rng.u32(..2));
        }
    }

    fn simulate_client(&mut self, at: usize, share: f64) {
        let Client {
            request,
            rate,
            life,
            ..
        } = self.clients[at];
        let (verb, resource, scope, ..) = REQUESTS[request];
        if self.clients[at].moves {
            self.clients[at].on_new = f64::from(u8::from(share > 0.0));
        } else if life == 0.0 {
            self.clients[at].on_new = share;
        } else if self.rng.f64() < INTERVAL / life {
            self.clients[at].on_new = f64::from(u8::from(self.rng.f64() < share));
            // A client that moves to another instance lists its resources again.
            let list = REQUESTS
                .iter()
                .position(|other| other.0 == "LIST" && other.1 == resource && other.2 == scope);
            if let Some(list) = list {
                self.add_requests(list, at, usize::from(self.clients[at].on_new > 0.0), 2.0);
            }
        }
        let noise = if self.noisy {
            (0.5 * self.draw_normal()).exp()
        } else {
            1.0
        };
        let count = self.draw_poisson(rate * INTERVAL * noise);
        let new = self.draw_binomial(count, self.clients[at].on_new);
        self.add_requests(request, at, 0, count - new);
        self.add_requests(request, at, 1, new);
        if matches!(verb, "POST" | "PATCH") {
            for (side, count) in [count - new, new].into_iter().enumerate() {
                let fails = side == 1 && self.fault == Fault::Webhook && share > 0.0;
                let bad = if fails {
                    count
                } else {
                    self.draw_binomial(count, 0.0002)
                };
                self.samples[side].add_counts(
                    Signal::WebhookErrors,
                    Subject::of_resource(WEBHOOK),
                    bad,
                    count,
                );
            }
        }
    }

    fn add_requests(&mut self, request: usize, client: usize, side: usize, count: f64) {
        if count == 0.0 {
            return;
        }
        let (verb, resource, scope, _, median) = REQUESTS[request];
        let subject = Subject {
            verb: verb.into(),
            resource: resource.into(),
            scope: scope.into(),
        };
        let on = |fault: Fault, is: bool| side == 1 && self.fault == fault && is;
        let fails = on(Fault::Errors, true)
            || on(Fault::ErrorsOfOne, resource == "configmaps")
            || on(Fault::FailsBesideTenant, resource == "configmaps")
            || on(
                Fault::FailsMoved,
                verb == "PATCH" && resource == "widgets.example.com",
            )
            || on(Fault::FailsControllers, matches!(verb, "PUT" | "PATCH"))
            || on(Fault::Webhook, matches!(verb, "POST" | "PATCH"));
        let missing = on(
            Fault::NotFound,
            resource == "widgets.example.com" && matches!(verb, "LIST" | "WATCH"),
        );
        let slow = on(Fault::SlowLists, verb == "LIST");
        let hangs = on(Fault::Hang, true) || on(Fault::StandStill, true);
        let swallows = on(Fault::Swallows, true);
        self.all += count;
        let fresh = self.draw_binomial(count, 0.2);
        self.connections[side].all += fresh;
        if hangs {
            self.met += count;
            self.connections[side].empty += fresh;
            return;
        }
        if swallows {
            self.met += count;
            return;
        }
        let count = self.pass_filters(client, side, count);
        self.met += if fails || missing || slow { count } else { 0.0 };
        let stalls = if self.stall.0 > 0 {
            self.stall.1[side]
        } else {
            0.0
        };
        let mut errors = self.errors[request].max(self.clients[client].fails) + 0.1 * stalls;
        if self.burst.1 > 0 && self.burst.0 == request {
            errors = errors.max(self.burst.2[side]);
        }
        let bad = self.draw_binomial(count, if fails { 1.0 } else { errors.min(1.0) });
        if verb != "WATCH" {
            let new = if side == 1 && self.noisy { 1.2 } else { 1.0 };
            let cold = if side == 1 && self.noisy && self.age <= 3 {
                4.0
            } else {
                1.0
            };
            let waits = self.slow_webhook > 0 && matches!(verb, "POST" | "PATCH");
            let fault = match (slow, waits) {
                (true, _) => 10.0,
                (false, true) => 50.0,
                (false, false) => 1.0,
            };
            let factor = new * cold * fault * self.clients[client].factor;
            let stalled = self.draw_binomial(count, stalls);
            let histogram = self.draw_times(count - stalled, median * factor);
            let more = self.draw_times(stalled, 2.0);
            let all = self.samples[side]
                .histograms
                .entry((Signal::Latency, subject.clone()))
                .or_default();
            all.merge(&histogram);
            all.merge(&more);
        }
        let sample = &mut self.samples[side];
        if matches!(verb, "LIST" | "WATCH") {
            sample.add_counts(
                Signal::NotFound,
                subject.clone(),
                if missing { count } else { 0.0 },
                count,
            );
        }
        sample.add_counts(
            Signal::EtcdErrors,
            Subject::of_verb("get"),
            if stalls > 0.0 { bad } else { 0.0 },
            count,
        );
        sample.add_counts(Signal::Aborts, subject.clone(), 0.0, count);
        sample.add_counts(Signal::Errors, subject, bad, count);
    }

    /// Counts the requests that authentication or authorization refuses, and returns the number of
    /// the others. Requests that priority and fairness rejects are among the others.
    fn pass_filters(&mut self, client: usize, side: usize, count: f64) -> f64 {
        let [unknown, denied] = match self.fault {
            Fault::RefusesMost if side == 1 => [0.7, 0.0],
            Fault::RefusesAll if side == 1 => [1.0, 0.0],
            Fault::Forbids if side == 1 => [0.0, 0.7],
            _ => self.clients[client].refused,
        };
        let unknown = self.draw_binomial(count, unknown);
        let denied = self.draw_binomial(count - unknown, denied);
        let left = count - unknown - denied;
        let few = side == 1 && self.fault == Fault::FewSeats;
        let rejected = self.draw_binomial(left, if few { 0.9 } else { 0.0 });
        let seats = if few {
            Counts { bad: 6.0, all: 6.0 }
        } else {
            Counts {
                bad: 20.0,
                all: 600.0,
            }
        };
        self.met += unknown + denied + rejected;
        let sample = &mut self.samples[side];
        sample.add_counts(Signal::Authentication, Subject::default(), unknown, count);
        sample.add_counts(
            Signal::Authorization,
            Subject::default(),
            denied,
            count - unknown,
        );
        sample.add_counts(
            Signal::Rejections,
            Subject::of_resource(LEVEL),
            rejected,
            left,
        );
        sample.seats.insert(LEVEL.to_owned(), seats);
        left
    }

    /// Makes a histogram of `count` requests. Their times are distributed lognormally around
    /// `median`.
    fn draw_times(&mut self, count: f64, median: f64) -> Histogram {
        let mut histogram = Histogram::default();
        let (mut left, mut before, mut sum) = (count, 0.0, 0.0);
        for bound in BOUNDS {
            let below = if bound.is_finite() {
                normal_share_below((bound / median).ln() / SIGMA)
            } else {
                1.0
            };
            let inside = if below < 1.0 {
                self.draw_binomial(left, (below - before) / (1.0 - before))
            } else {
                left
            };
            (left, before, sum) = (left - inside, below, sum + inside);
            histogram.add(bound, sum);
        }
        histogram
    }

    fn draw_normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.rng.f64()).ln()).sqrt() * (TAU * self.rng.f64()).cos()
    }

    fn draw_poisson(&mut self, mean: f64) -> f64 {
        if mean > 30.0 {
            return (mean + mean.sqrt() * self.draw_normal()).round().max(0.0);
        }
        let (limit, mut product, mut count) = ((-mean).exp(), self.rng.f64(), 0.0);
        while product > limit {
            product *= self.rng.f64();
            count += 1.0;
        }
        count
    }

    fn draw_binomial(&mut self, count: f64, share: f64) -> f64 {
        if share <= 0.0 || count == 0.0 {
            return 0.0;
        }
        if share >= 1.0 {
            return count;
        }
        if share > 0.5 {
            return count - self.draw_binomial(count, 1.0 - share);
        }
        let mean = count * share;
        if mean > 30.0 {
            return (mean + (mean * (1.0 - share)).sqrt() * self.draw_normal())
                .round()
                .clamp(0.0, count);
        }
        // Draws the random gaps between bad requests until all requests are used up.
        let (mut at, mut bad) = (0.0, 0.0);
        loop {
            at += 1.0 + ((1.0 - self.rng.f64()).ln() / (-share).ln_1p()).floor();
            if at > count {
                return bad;
            }
            bad += 1.0;
        }
    }
}

/// Cumulative normal distribution, to four digits (Zelen and Severo, 1964).
fn normal_share_below(value: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.33267 * value.abs());
    let tail = (-value * value / 2.0).exp() / TAU.sqrt()
        * t
        * (0.4361836 + t * (-0.1201676 + t * 0.9372980));
    if value > 0.0 { 1.0 - tail } else { tail }
}
