//! Reads the current context of a kubeconfig: the apiserver's address, and the credentials.
//!
//! The files are like kubeadm's `admin.conf`, with certificates and maybe a token. Programs that
//! fetch credentials (`exec`, `auth-provider`) are not run, and a server without a CA is not used.

use crate::yaml::{YamlNode, parse_documents};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use berth_os::file::read_open_small;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The path of the kubeconfig that kubeadm writes for an administrator.
pub const ADMIN_PATH: &str = "/etc/kubernetes/admin.conf";

/// Returns the given kubeconfig. If none is given, returns kubeadm's, if that file exists.
pub fn choose_kubeconfig(given: Option<&Path>) -> Option<&Path> {
    given.or_else(|| {
        Some(Path::new(ADMIN_PATH)).filter(|path| !is_started_by_a_test() && path.exists())
    })
}

/// True if a test started this debug build. Tests must not use the cluster of the machine on which
/// they run.
fn is_started_by_a_test() -> bool {
    cfg!(debug_assertions) && std::env::var_os("BERTH_TEST_WITHOUT_ADMIN").is_some()
}

/// An error in a kubeconfig, with the file's path.
#[derive(Debug, thiserror::Error)]
#[error("kubeconfig {}: {mistake}", path.display())]
pub struct KubeconfigError {
    path: PathBuf,
    mistake: Mistake,
}

/// An error in a field of a kubeconfig.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct Mistake {
    field: String,
    why: String,
}

impl Mistake {
    pub fn new(field: &str, why: &str) -> Self {
        Self {
            field: field.to_owned(),
            why: why.to_owned(),
        }
    }

    pub fn with_path(self, path: &Path) -> KubeconfigError {
        KubeconfigError {
            path: path.to_owned(),
            mistake: self,
        }
    }
}

/// The address of an apiserver, and the credentials.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Access {
    /// An https URL.
    pub server: String,
    /// The name that the apiserver's certificate must contain. `None` if the host in `server` is
    /// that name.
    pub server_name: Option<String>,
    /// The CAs that verify the apiserver's certificate, in PEM form.
    pub ca: Vec<u8>,
    /// The client's own certificate and key, in PEM form. `None` if the client has no certificate.
    pub client: Option<(Vec<u8>, Vec<u8>)>,
    pub token: Option<Token>,
}

/// A bearer token.
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    Text(String),
    /// A file with the token. Renewals replace the file, so each request reads the file again.
    File(PathBuf),
}

/// Omits secrets.
impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            server,
            server_name,
            client,
            token,
            ..
        } = self;
        let (client, token) = (client.is_some(), token.is_some());
        write!(
            f,
            "Access {{ server: {server:?}, server_name: {server_name:?}, client: {client}, token: {token} }}"
        )
    }
}

impl Access {
    /// Reads a kubeconfig, and the files named in the kubeconfig.
    ///
    /// # Errors
    /// A file cannot be read, or a field is not understood.
    pub fn read(path: &Path) -> Result<Self, KubeconfigError> {
        let read = |path: &Path| -> Result<Vec<u8>, String> {
            let failed = |error: io::Error| {
                let fix = if error.kind() == io::ErrorKind::PermissionDenied {
                    ": run berth as root"
                } else {
                    ""
                };
                format!("cannot read {}: {error}{fix}", path.display())
            };
            File::open(path).and_then(read_open_small).map_err(failed)
        };
        let text = read(path)
            .and_then(|bytes| String::from_utf8(bytes).map_err(|_| "the file is no text".into()));
        let text = text.map_err(|why| Mistake::new("file", &why).with_path(path))?;
        let directory = path.parent().unwrap_or(Path::new("")).to_owned();
        let mut access = Self::parse(&text, |file| read(&directory.join(file)))
            .map_err(|mistake| mistake.with_path(path))?;
        if let Some(Token::File(file)) = &mut access.token {
            *file = directory.join(&file);
        }
        Ok(access)
    }

    /// Returns access by the token and the CA that the kubelet mounts into the containers of a pod
    /// with a service account. The API is at `server`; the server's certificate must contain
    /// `name`.
    ///
    /// # Errors
    /// The files do not exist, because the pod has no service account, or this process is in no
    /// pod.
    pub fn in_cluster(server: SocketAddr, name: &str) -> Result<Self, KubeconfigError> {
        Self::service_account(
            Path::new("/var/run/secrets/kubernetes.io/serviceaccount"),
            server,
            name,
        )
    }

    fn service_account(
        directory: &Path,
        server: SocketAddr,
        name: &str,
    ) -> Result<Self, KubeconfigError> {
        let read = |name: &str| {
            let path = directory.join(name);
            let why = "the file cannot be read: in-cluster is for a pod with a service account, and a static pod has no service account";
            File::open(&path)
                .and_then(read_open_small)
                .map_err(|error| {
                    Mistake::new(name, &format!("{why}: {error}")).with_path(directory)
                })
        };
        let ca = read("ca.crt")?;
        read("token")?;
        Ok(Self {
            server: format!("https://{server}"),
            server_name: Some(name.to_owned()),
            ca,
            client: None,
            token: Some(Token::File(directory.join("token"))),
        })
    }

    /// Parses a kubeconfig. `file` reads a file named in the kubeconfig.
    ///
    /// # Errors
    /// The first field that is missing or not understood.
    pub fn parse(
        text: &str,
        file: impl Fn(&Path) -> Result<Vec<u8>, String>,
    ) -> Result<Self, Mistake> {
        let documents =
            parse_documents(text).map_err(|problem| Mistake::new("line", &problem.to_string()))?;
        let root = documents
            .first()
            .ok_or_else(|| Mistake::new("file", "it is empty"))?;
        let context = root.get_text("current-context");
        let context = context.ok_or_else(|| {
            Mistake::new("current-context", "the field is not set: set the field")
        })?;
        let context = find_named(root, "contexts", context, "context")?;
        let of = |key: &str| {
            let name = context.get_text(key);
            name.ok_or_else(|| Mistake::new("context", &format!("the context names no {key}")))
        };
        let cluster = find_named(root, "clusters", of("cluster")?, "cluster")?;
        let user = find_named(root, "users", of("user")?, "user")?;
        let text = |node: &YamlNode, key: &str| node.get_text(key).map(ToOwned::to_owned);
        let blob = |node: &YamlNode, key: &str| -> Result<Option<Vec<u8>>, Mistake> {
            let data = format!("{key}-data");
            if let Some(encoded) = text(node, &data) {
                let encoded: String = encoded.split_whitespace().collect();
                let decoded = STANDARD.decode(encoded);
                return decoded
                    .map(Some)
                    .map_err(|error| Mistake::new(&data, &format!("not valid base64: {error}")));
            }
            let path = text(node, key);
            path.map(|path| file(Path::new(&path)).map_err(|why| Mistake::new(key, &why)))
                .transpose()
        };
        for plugin in ["exec", "auth-provider", "username", "impersonate", "as"] {
            if user.get(plugin).is_some() {
                let why = "berth cannot log in that way: give a kubeconfig with a client certificate or a token, such as \
                           kubeadm's admin.conf";
                return Err(Mistake::new(plugin, why));
            }
        }
        if let Some(proxy) = cluster.get("proxy-url") {
            return Err(Mistake::new(
                "proxy-url",
                &format!(
                    "line {}: berth uses no proxy, it dials the server directly",
                    proxy.line
                ),
            ));
        }
        let ca = blob(cluster, "certificate-authority")?;
        let ca = ca.ok_or_else(|| {
            Mistake::new(
                "certificate-authority",
                "the field is missing, and berth cannot verify the server without a CA certificate: add the field",
            )
        })?;
        let client = blob(user, "client-certificate")?.zip(blob(user, "client-key")?);
        // If a user has both fields, the token's file wins, as in client-go.
        let token = match (text(user, "tokenFile"), text(user, "token")) {
            (Some(path), _) => {
                file(Path::new(&path)).map_err(|why| Mistake::new("tokenFile", &why))?;
                Some(Token::File(path.into()))
            }
            (None, Some(token)) => Some(Token::Text(token)),
            (None, None) => None,
        };
        if client.is_none() && token.is_none() {
            return Err(Mistake::new(
                "user",
                "the user has neither a client-certificate with client-key nor a token: add one of the two",
            ));
        }
        let server = text(cluster, "server")
            .ok_or_else(|| Mistake::new("server", "the field is missing: add the field"))?;
        ServerUrl::parse(&server)?;
        Ok(Self {
            server,
            server_name: text(cluster, "tls-server-name"),
            ca,
            client,
            token,
        })
    }
}

/// Returns the item with the given name in one of the kubeconfig's lists, for example `clusters`.
fn find_named<'a>(
    root: &'a YamlNode,
    list: &str,
    name: &str,
    what: &str,
) -> Result<&'a YamlNode, Mistake> {
    let found = root
        .get(list)
        .and_then(|list| list.find_named(name))
        .and_then(|(_, item)| item.get(what));
    found.ok_or_else(|| Mistake::new(list, &format!("there is no {what} named {name:?}")))
}

/// The parts of a server's URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerUrl {
    /// Host name or IP address, without the brackets of an IPv6 address.
    pub host: String,
    pub port: u16,
    /// The part of the server's URL after host and port, which goes before each request's path. Has
    /// no slash at its end.
    pub prefix: String,
}

impl ServerUrl {
    /// Parses a URL.
    ///
    /// # Errors
    /// The text is not an https URL.
    pub fn parse(url: &str) -> Result<Self, Mistake> {
        let wrong = || {
            Mistake::new(
                "server",
                &format!("{url:?} is no URL such as https://10.0.0.5:6443"),
            )
        };
        let uri: hyper::Uri = url.parse().map_err(|_| wrong())?;
        let host = uri
            .host()
            .unwrap_or_default()
            .trim_matches(['[', ']'])
            .to_owned();
        let odd_port = uri.port_u16().is_none()
            && uri
                .authority()
                .is_some_and(|all| !all.as_str().ends_with(uri.host().unwrap_or_default()));
        if uri.scheme_str() != Some("https") || host.is_empty() || odd_port {
            return Err(wrong());
        }
        let prefix = uri.path().trim_end_matches('/').to_owned();
        Ok(Self {
            host,
            port: uri.port_u16().unwrap_or(443),
            prefix,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADMIN: &str = "apiVersion: v1\nkind: Config\ncurrent-context: admin@k\nclusters:\n- name: k\n  cluster:\n    \
                         server: https://10.0.0.5:6443\n    certificate-authority-data: Q0E=\ncontexts:\n- name: \
                         admin@k\n  context: {cluster: k, user: admin}\nusers:\n- name: admin\n  user:\n    \
                         client-certificate-data: Q0VSVA==\n    client-key: admin.key\n";

    fn parse_access(text: &str) -> Result<Access, String> {
        let file = |path: &Path| match path.to_str() {
            Some("admin.key") => Ok(b"KEY".to_vec()),
            Some("token") => Ok(b"secret\n".to_vec()),
            _ => Err(format!("cannot read {}", path.display())),
        };
        Access::parse(text, file).map_err(|mistake| mistake.to_string())
    }

    #[test]
    fn credentials_are_read_from_data_and_from_files() {
        let access = parse_access(ADMIN).unwrap();
        assert_eq!(access.server, "https://10.0.0.5:6443");
        assert_eq!(access.ca, b"CA");
        assert_eq!(access.client, Some((b"CERT".to_vec(), b"KEY".to_vec())));
        assert!(access.token.is_none());
        let token = ADMIN.replace("client-key: admin.key", "tokenFile: token");
        assert!(matches!(
            parse_access(&token).map(|access| (access.client, access.token)),
            Ok((None, Some(Token::File(_))))
        ));
        let token = ADMIN.replace("client-key: admin.key", "token: secret");
        assert!(
            matches!(parse_access(&token).unwrap().token, Some(Token::Text(token)) if token == "secret")
        );
        assert!(!format!("{:?}", parse_access(&token)).contains("secret"));
    }

    #[test]
    fn a_missing_or_unusable_field_is_named() {
        let error = |from: &str, to: &str| parse_access(&ADMIN.replace(from, to)).unwrap_err();
        assert!(
            error("admin@k\nclusters", "other\nclusters")
                .starts_with("contexts: there is no context named")
        );
        assert!(
            error("user: admin", "user: eve").starts_with("users: there is no user named \"eve\"")
        );
        assert!(error("https:", "http:").starts_with("server: \"http://10.0.0.5:6443\" is no URL"));
        assert!(error("Q0E=", "Q0E").starts_with("certificate-authority-data: not valid base64"));
        assert!(
            error("certificate-authority-data", "insecure")
                .starts_with("certificate-authority: the field is missing")
        );
        assert!(error("admin.key", "none.key").starts_with("client-key: cannot read none.key"));
        assert!(error("client-key:", "x:").starts_with("user: the user has neither"));
        assert!(
            error("client-key:", "exec: {command: aws}\n    x:")
                .starts_with("exec: berth cannot log in that way")
        );
        assert!(error("current-context", "x").starts_with("current-context: the field is not set"));
        assert!(
            parse_access("").is_err()
                && parse_access("[").is_err()
                && parse_access("a: b").is_err()
        );
    }

    #[test]
    fn a_service_accounts_files_are_credentials() {
        let temp = tempfile::tempdir().unwrap();
        let access =
            || Access::service_account(temp.path(), "10.0.0.5:6443".parse().unwrap(), "kubernetes");
        assert_eq!(access().unwrap_err().mistake.field, "ca.crt");
        std::fs::write(temp.path().join("ca.crt"), "CA").unwrap();
        assert_eq!(access().unwrap_err().mistake.field, "token");
        std::fs::write(temp.path().join("token"), "secret").unwrap();
        let access = access().unwrap();
        assert_eq!(
            (access.server.as_str(), access.ca.as_slice()),
            ("https://10.0.0.5:6443", &b"CA"[..])
        );
        assert!(
            matches!(access.token, Some(Token::File(path)) if path == temp.path().join("token"))
        );
    }

    #[test]
    fn a_server_is_a_host_a_port_and_a_prefix() {
        let place = |url| {
            ServerUrl::parse(url)
                .map(|place| (place.host, place.port, place.prefix))
                .ok()
        };
        assert_eq!(
            place("https://[fd00::5]:6443"),
            Some(("fd00::5".into(), 6443, String::new()))
        );
        assert_eq!(
            place("https://api.example/k/"),
            Some(("api.example".into(), 443, "/k".into()))
        );
        for wrong in ["", "10.0.0.5:6443", "https://", "ftp://a", "https://a:b"] {
            assert_eq!(place(wrong), None, "{wrong}");
        }
    }
}
