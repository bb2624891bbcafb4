//! What can be known before the first switch, which ends the old apiserver before the new one is ready: whether the
//! shim's probe would be let in, and whether the images are on the node. It is asked in a second; found out by the
//! switch, it would be minutes without an API.

use berth_shim::backend::health::Observation;
use berth_shim::backend::probe::{Probe, ProbeConfig};
use std::io;
use std::net::SocketAddr;
use std::process::{Output, Stdio};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::process::Command;

/// How often an apiserver is asked that may only be slow.
const TIMES: u32 = 3;

/// Time between two of these questions.
const AGAIN: Duration = Duration::from_secs(1);

/// Longest time that a connect may take.
const DIAL: Duration = Duration::from_secs(2);

/// Longest time that a command of the container runtime may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Asks the running apiserver as the shim will ask the next one.
///
/// # Errors
/// What it answers, and what fixes it.
pub async fn probe(config: ProbeConfig, address: SocketAddr) -> Result<(), String> {
    let probe = Probe::new(config);
    let mut asked = 0;
    loop {
        let answer = probe.ready(address).await;
        asked += 1;
        let sure = matches!(answer.result, "config" | "tls" | "unauthorized" | "forbidden");
        if answer.seen == Observation::Pass {
            return Ok(());
        }
        if sure || asked == TIMES {
            return Err(answer.words);
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Those of some addresses that do not accept a connection now.
pub async fn unreached(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let mut unreached = Vec::new();
    for address in addresses {
        let dialled = tokio::time::timeout(DIAL, TcpStream::connect(address)).await;
        if !matches!(dialled, Ok(Ok(_))) {
            unreached.push(*address);
        }
    }
    unreached
}

/// What is known of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Images {
    /// All are on the node.
    There,
    /// These are not, each with the command that brings it.
    Missing(Vec<(String, String)>),
    /// It cannot be known, and why.
    Unknown(String),
}

/// Whether the node has images. `running` is the one of the apiserver that runs: a runtime that does not have it is
/// another one than the kubelet's.
pub async fn images(running: &str, images: &[String]) -> Images {
    let mut why = Vec::new();
    for runtime in [Runtime::Crictl, Runtime::Ctr] {
        match runtime.all(running, images).await {
            Ok(missing) if missing.is_empty() => return Images::There,
            Ok(missing) => return Images::Missing(missing),
            Err(error) => why.push(error),
        }
    }
    Images::Unknown(why.join("; "))
}

/// A command that knows the images of the kubelet's runtime.
#[derive(Debug, Clone, Copy)]
enum Runtime {
    Crictl,
    Ctr,
}

impl Runtime {
    /// The images that it does not have.
    async fn all(self, running: &str, images: &[String]) -> Result<Vec<(String, String)>, String> {
        if !self.has(running).await? {
            return Err(format!("{} does not know {running}, which runs", self.name()));
        }
        let mut missing = Vec::new();
        for image in images {
            if !self.has(image).await? {
                missing.push((image.clone(), self.pull(image)));
            }
        }
        Ok(missing)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Crictl => "crictl",
            Self::Ctr => "ctr",
        }
    }

    fn pull(self, image: &str) -> String {
        match self {
            Self::Crictl => format!("crictl pull {image}"),
            Self::Ctr => format!("ctr -n k8s.io images pull {}", reference(image)),
        }
    }

    async fn has(self, image: &str) -> Result<bool, String> {
        let name = self.name();
        let output = match self {
            Self::Crictl => run(name, &["inspecti", image]).await?,
            Self::Ctr => {
                let filter = format!("name=={}", reference(image));
                run(name, &["-n", "k8s.io", "images", "ls", "-q", &filter]).await?
            }
        };
        let said = String::from_utf8_lossy(&output.stderr);
        match self {
            Self::Crictl if output.status.success() => Ok(true),
            Self::Crictl if said.contains("no such image") => Ok(false),
            Self::Ctr if output.status.success() => Ok(!output.stdout.trim_ascii().is_empty()),
            _ => Err(format!("{name}: {}", said.trim().lines().last().unwrap_or("it fails without a word"))),
        }
    }
}

pub(crate) async fn run(program: &str, arguments: &[&str]) -> Result<Output, String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    match tokio::time::timeout(PATIENCE, output).await {
        Err(_) => Err(format!("{program} does not answer in {}", humantime::format_duration(PATIENCE))),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => Err(format!("{program} is not there")),
        Ok(output) => output.map_err(|error| format!("{program}: {error}")),
    }
}

/// An image's name as containerd keeps it: with its registry, and with a digest or a tag but not both.
fn reference(image: &str) -> String {
    let (name, digest) = match image.split_once('@') {
        Some((name, digest)) => (name, Some(digest)),
        None => (image, None),
    };
    let tagged = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    let name = match (digest, tagged) {
        (Some(digest), true) => format!("{}@{digest}", name.rsplit_once(':').map_or(name, |(name, _)| name)),
        (Some(digest), false) => format!("{name}@{digest}"),
        (None, true) => name.to_owned(),
        (None, false) => format!("{name}:latest"),
    };
    match name.split_once('/') {
        None => format!("docker.io/library/{name}"),
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => name,
        Some(_) => format!("docker.io/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_have_the_names_that_containerd_keeps() {
        for (image, kept) in [
            ("registry.k8s.io/kube-apiserver:v1.36.3", "registry.k8s.io/kube-apiserver:v1.36.3"),
            ("berth", "docker.io/library/berth:latest"),
            ("example/berth:v1", "docker.io/example/berth:v1"),
            ("localhost:5000/berth", "localhost:5000/berth:latest"),
            ("r.example/berth:v1@sha256:ab", "r.example/berth@sha256:ab"),
            ("r.example/berth@sha256:ab", "r.example/berth@sha256:ab"),
        ] {
            assert_eq!(reference(image), kept);
        }
    }
}
