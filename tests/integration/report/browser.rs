//! A headless Chromium, spoken to in its DevTools protocol over pipes: JSON, a NUL after each message.

use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Far beyond what an answer takes, on a busy machine too.
const BOUND: Duration = Duration::from_secs(60);

pub(crate) struct Browser {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    events: VecDeque<Value>,
    session: Option<String>,
    number: u64,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// None: there is none in PATH.
    pub(crate) fn start() -> Option<Self> {
        let program = ["chromium", "chromium-browser", "google-chrome"].into_iter().find_map(in_path)?;
        let profile = tempfile::tempdir().unwrap();
        let mut child = Command::new("sh")
            // It reads from descriptor 3 and writes to 4.
            .args(["-c", r#"exec 3<&0 4>&1 </dev/null >/dev/null; exec "$0" "$@""#])
            .arg(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args(["--remote-debugging-pipe", "about:blank"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (to, out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, from) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(out).split(0).map_while(Result::ok) {
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    return;
                }
            }
        });
        let events = VecDeque::new();
        let mut browser = Self { child, to, from, events, session: None, number: 0, _profile: profile };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attach)["sessionId"].as_str().unwrap().to_owned();
        browser.session = Some(session);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Shows a file; all events until it was loaded.
    pub(crate) fn open(&mut self, file: &Path) -> Vec<Value> {
        self.events.clear();
        self.call("Page.navigate", json!({"url": format!("file://{}", file.display())}));
        let mut seen = Vec::new();
        loop {
            let event = self.events.pop_front().unwrap_or_else(|| self.from.recv_timeout(BOUND).unwrap());
            let loaded = event["method"] == "Page.loadEventFired";
            seen.push(event);
            if loaded {
                return seen;
            }
        }
    }

    /// Width in CSS pixels, and `light` or `dark`.
    pub(crate) fn emulate(&mut self, width: u32, scheme: &str) {
        let metrics = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// The value of an expression in the page.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let answer = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
        self.number += 1;
        let mut message = json!({"id": self.number, "method": method});
        message["params"] = params;
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.to.write_all(&bytes).unwrap();
        loop {
            let message = self.from.recv_timeout(BOUND).unwrap_or_else(|e| panic!("{method}: {e}"));
            if message["id"] == self.number {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.events.push_back(message);
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|program| program.is_file())
}
