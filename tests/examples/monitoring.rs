//! Rules and dashboard: their metrics exist on a shim's page, and their alerts fire.

use crate::support::metrics::follow_conventions;
use crate::support::net::{Backend, client_hello, connect, echo, free_address, ping};
use crate::support::process::{Running, berth_command};
use crate::support::tls::Ca;
use crate::{find_tool, read_example, root};
use berth_testing::pages::expect_table;
use libtest_mimic::{Completion, Failed};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Families of metrics that the dashboard does not show. Each entry needs a reason.
const LEFT_OUT: [&str; 0] = [];

/// A metric that only a shim with a share of new connections has, so the shim of this test lacks
/// it. `crates/shim/src/share/tests.rs` checks the metric.
const OF_A_SHARE: &str = "berth_share_ratio";

/// Labels for which a page always has every value.
const WHOLE: [&str; 6] = ["outcome", "state", "health", "direction", "kind", "result"];

pub(crate) fn metrics_that_are_named_exist() -> Result<Completion, Failed> {
    let page = read_metrics();
    let families = list_families(&page);
    expect_table(
        "docs/reference.md",
        "| metric | type | labels | meaning |",
        &families
            .iter()
            .map(|(name, kind)| describe_family(&page, name, kind))
            .collect::<Vec<_>>(),
    );
    let all: BTreeSet<_> = families
        .iter()
        .flat_map(|(name, kind)| sample_names(name, kind))
        .collect();
    let (rules, dashboard) = (
        read_example("monitoring/rules.yaml"),
        read_example("monitoring/dashboard.json"),
    );
    let mut texts = vec![
        ("rules.yaml".to_owned(), rules.clone()),
        (
            "rules.test.yaml".to_owned(),
            read_example("monitoring/rules.test.yaml"),
        ),
        ("dashboard.json".to_owned(), dashboard.clone()),
    ];
    for name in [
        "README.md",
        "docs/reference.md",
        "docs/troubleshooting.md",
        "docs/migrate-from-haproxy.md",
    ] {
        texts.push((name.to_owned(), std::fs::read_to_string(root().join(name))?));
    }
    for (file, text) in &texts {
        let named = metrics_in(text);
        // The documents name a histogram by its family, without the suffixes of samples.
        let is = |name: &&&str| {
            **name == OF_A_SHARE
                || all.contains(**name)
                || families.iter().any(|family| family.0 == **name)
        };
        let wrong: Vec<_> = named.iter().filter(|name| !is(name)).collect();
        assert!(
            wrong.is_empty(),
            "{file} names {wrong:?}, which a shim does not have:\n{page}"
        );
        assert!(
            file.ends_with(".md") || named.len() > 8,
            "{file} names {named:?} only"
        );
    }
    // Conversely, every family is shown and documented.
    for (file, text) in [
        ("the dashboard", &dashboard),
        ("docs/reference.md", &texts[4].1),
    ] {
        let shown = metrics_in(text);
        for (name, kind) in families
            .iter()
            .filter(|(name, _)| !LEFT_OUT.contains(&name.as_str()))
        {
            let known = shown.contains(name.as_str())
                || sample_names(name, kind).any(|sample| shown.contains(&*sample));
            assert!(known, "{name} is not in {file}");
        }
    }
    for (file, text) in [("rules.yaml", &rules), ("dashboard.json", &dashboard)] {
        let text = text.replace("\\\"", "\"");
        for label in WHOLE {
            for value in selected_values(&text, label) {
                assert!(
                    page.contains(&format!("{label}=\"{value}\"")),
                    "{file} asks for {label}={value:?}"
                );
            }
        }
    }
    Ok(Completion::Completed)
}

pub(crate) fn metrics_follow_conventions() -> Result<Completion, Failed> {
    let page = read_metrics();
    follow_conventions(&page);
    let tests = read_example("monitoring/rules.test.yaml");
    let wrong: Vec<_> = selected_values(&tests, "le")
        .into_iter()
        .filter(|le| !page.contains(&format!("le=\"{le}\"")))
        .collect();
    assert!(
        wrong.is_empty(),
        "rules.test.yaml has buckets that a shim does not have: {wrong:?}"
    );
    let promtool = match find_promtool() {
        Ok(path) => path,
        Err(ignored) => return Ok(ignored),
    };
    let mut command = Command::new(promtool);
    let piped = command
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = piped.spawn()?;
    child.stdin.take().unwrap().write_all(page.as_bytes())?;
    let output = child.wait_with_output()?;
    // promtool reports bad style with status 3.
    assert!(
        output.status.success() && text_of(&output).is_empty(),
        "{}\n{page}",
        text_of(&output)
    );
    Ok(Completion::Completed)
}

/// Returns the metrics of a shim that has joined and relayed.
fn read_metrics() -> String {
    let (dir, admin, listen) = (tempfile::tempdir().unwrap(), free_address(), free_address());
    let backend = Backend::new().serve(echo);
    // No cluster answers at this address, so that results of failed requests are counted, too.
    let (kubeconfig, ca) = (dir.path().join("kubeconfig"), Ca::new());
    std::fs::write(dir.path().join("ca.crt"), ca.pem()).unwrap();
    std::fs::write(dir.path().join("token"), "t").unwrap();
    let cluster = "current-context: a\nclusters: [{name: a, cluster: {server: 'https://127.0.0.1:1', certificate-authority: ca.crt}}]\n\
                   contexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {tokenFile: token}}]\n";
    std::fs::write(&kubeconfig, cluster).unwrap();
    let mut command = berth_command(["serve", "--probe=tcp", "--instance=a", "--lease=300ms"]);
    command.args([
        "--listen",
        &listen.to_string(),
        "--backend",
        &backend.to_string(),
        "--admin",
        &admin.to_string(),
    ]);
    command
        .args(["--node-name", "a", "--cluster"])
        .arg(kubeconfig);
    let shim = Running::start(command.arg("--run-dir").arg(dir.path().join("run")));
    shim.logs("joined");
    ping(&mut connect(listen), &client_hello(64));
    crate::support::eventually("a page with a lease's renewal", || {
        let mut stream = TcpStream::connect(admin).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let parts = [
            "berth_lease_renewals_total{shim=\"a\",result=\"ok\"} 1",
            "result=\"unreachable\"",
        ];
        let (head, page) = page.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("text/plain; version=0.0.4"), "{head}");
        parts
            .iter()
            .all(|part| page.contains(part))
            .then(|| page.to_owned())
    })
}

/// Returns names and types of the families of a page.
fn list_families(page: &str) -> Vec<(String, String)> {
    let types = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types
        .map(|(name, kind)| (name.to_owned(), kind.trim().to_owned()))
        .collect()
}

/// Returns the row of a family for docs/reference.md. Each family has the label `shim`.
fn describe_family(page: &str, name: &str, kind: &str) -> String {
    let help = format!("# HELP {name} ");
    let help = page.lines().find_map(|line| line.strip_prefix(&help));
    let samples = page
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.split_once('{'))
        .filter(|(end, _)| ["", "_bucket"].contains(end));
    let labels: BTreeSet<_> = samples
        .flat_map(|(_, sample)| sample.split("=\"").map(str::to_owned))
        .filter_map(|part| part.rsplit(['{', ',', '"']).next().map(str::to_owned))
        .filter(|label| {
            label
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        })
        .filter(|label| !["shim", "le", ""].contains(&&**label))
        .map(|label| format!("`{label}`"))
        .collect();
    let labels: Vec<_> = labels.into_iter().collect();
    let help = help.unwrap_or_default().trim().trim_end_matches('.');
    format!(
        "| `{name}` | {} | {} | {help} |",
        kind.trim(),
        labels.join(", ")
    )
}

/// Returns the names of a family's samples.
fn sample_names(name: &str, kind: &str) -> impl Iterator<Item = String> {
    let ends: &[&str] = match kind {
        "histogram" => &["_bucket", "_count", "_sum"],
        _ => &[""],
    };
    ends.iter().map(move |end| format!("{name}{end}"))
}

/// Returns the metrics in a text.
fn metrics_in(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    // A package's file name begins with `berth_`, too, followed by a version.
    let name = |word: &str| {
        word.strip_prefix("berth_")
            .or(word.strip_prefix("process_"))?
            .chars()
            .next()
    };
    let of_shims = |word: &&str| name(word).is_some_and(|c| c.is_ascii_lowercase());
    words.filter(of_shims).collect()
}

/// Returns the values of a label that expressions select.
fn selected_values<'a>(text: &'a str, label: &str) -> Vec<&'a str> {
    let mut values = Vec::new();
    for operator in ["=\"", "=~\"", "!=\""] {
        let key = format!("{label}{operator}");
        for (at, _) in text.match_indices(&key) {
            values.extend(
                text[at + key.len()..]
                    .split('"')
                    .next()
                    .unwrap_or_default()
                    .split('|'),
            );
        }
    }
    values
}

fn find_promtool() -> Result<PathBuf, Completion> {
    std::env::var_os("PROMTOOL").map_or_else(|| find_tool("promtool"), |path| Ok(path.into()))
}

/// Returns the output and errors of a program.
fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

pub(crate) fn the_dashboard_is_whole() -> Result<Completion, Failed> {
    let dashboard: Value = serde_json::from_str(&read_example("monitoring/dashboard.json"))?;
    // The schema of Grafana 11. Later versions convert it.
    assert!(dashboard["schemaVersion"].as_u64() >= Some(39));
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert!(
        variables
            .iter()
            .any(|variable| variable["type"] == "datasource" && variable["name"] == "datasource")
    );
    let mut ids = BTreeSet::new();
    let mut cells = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = &panel["title"];
        assert!(
            ids.insert(panel["id"].as_u64().unwrap()),
            "two panels have the ID of {title}"
        );
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        for cell in (at("y")..at("y") + at("h"))
            .flat_map(|y| (at("x")..at("x") + at("w")).map(move |x| (x, y)))
        {
            assert!(
                cell.0 < 24 && cells.insert(cell),
                "{title} lies on another panel at {cell:?}"
            );
        }
        if panel["type"] == "row" {
            continue;
        }
        assert!(
            panel["description"]
                .as_str()
                .is_some_and(|text| text.len() > 20),
            "{title} is not described"
        );
        assert!(
            !panel["targets"].as_array().unwrap().is_empty(),
            "{title} shows nothing"
        );
        for source in panel["targets"].as_array().unwrap().iter().chain([panel]) {
            assert_eq!(source["datasource"]["uid"], "${datasource}", "{title}");
        }
    }
    Ok(Completion::Completed)
}

pub(crate) fn alerts_fire_when_they_should() -> Result<Completion, Failed> {
    let promtool = match find_promtool() {
        Ok(path) => path,
        Err(ignored) => return Ok(ignored),
    };
    let directory = root().join("examples/monitoring");
    let run = |directory: &Path, arguments: &[&str]| -> Result<Output, Failed> {
        Ok(Command::new(&promtool)
            .args(arguments)
            .current_dir(directory)
            .output()?)
    };
    for arguments in [
        &["check", "config", "scrape.yaml"][..],
        &["test", "rules", "rules.test.yaml"],
    ] {
        let output = run(&directory, arguments)?;
        assert!(
            output.status.success(),
            "promtool {arguments:?}: {}",
            text_of(&output)
        );
    }

    // Each alert fires in a test. If an alert never fired, the test would fail.
    let (rules, tests) = (
        read_example("monitoring/rules.yaml"),
        read_example("monitoring/rules.test.yaml"),
    );
    let alerts: Vec<_> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    assert!(alerts.len() > 8, "{alerts:?}");
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("rules.test.yaml"), &tests)?;
    let pages = std::fs::read_to_string(root().join("docs/monitoring.md"))?;
    for alert in alerts {
        let url = format!("runbook_url: docs/monitoring.md#{}\n", alert.to_lowercase());
        assert!(
            pages.contains(&format!("\n## {alert}\n")) && rules.contains(&url),
            "{alert} has no section or no URL"
        );
        let fires = format!("alertname: {alert}\n        exp_alerts:");
        let silent = format!("alertname: {alert} }}");
        assert!(
            tests.contains(&fires) && tests.contains(&silent),
            "{alert} is not tested both ways"
        );
        // The expression is the next line.
        let (before, after) = rules.split_once(&format!("- alert: {alert}\n")).unwrap();
        let (expression, rest) = after.split_once('\n').unwrap();
        let broken = format!("{before}- alert: {alert}\n{expression} and vector(1) == 2\n{rest}");
        std::fs::write(dir.path().join("rules.yaml"), broken)?;
        let output = run(dir.path(), &["test", "rules", "rules.test.yaml"])?;
        assert!(
            !output.status.success() && text_of(&output).contains(&format!("alertname: {alert}")),
            "{alert}"
        );
    }

    // The dashboard's expressions are PromQL.
    let dashboard: Value = serde_json::from_str(&read_example("monitoring/dashboard.json"))?;
    let targets = dashboard["panels"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|panel| panel["targets"].as_array());
    let mut asked = "groups:\n- name: dashboard\n  rules:\n".to_owned();
    for (number, target) in targets.flatten().enumerate() {
        let expression = target["expr"].as_str().unwrap();
        let expression = expression
            .replace("$__rate_interval", "5m")
            .replace("$__range", "1h")
            .replace("$node", ".*");
        asked += &format!(
            "  - record: panel{number}\n    expr: {}\n",
            Value::from(expression)
        );
    }
    std::fs::write(dir.path().join("dashboard.yaml"), asked)?;
    let output = run(dir.path(), &["check", "rules", "dashboard.yaml"])?;
    assert!(output.status.success(), "{}", text_of(&output));
    Ok(Completion::Completed)
}
