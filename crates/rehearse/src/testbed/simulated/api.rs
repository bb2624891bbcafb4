//! Answers requests.

use super::body::{Body, Payload};
use super::connection::Connection;
use super::objects::{self, ObjectKind, failure_response};
use super::request::{Query, Resource};
use super::server::Server;
use super::store_client::unexpected_reply;
use super::watch::{self, WatchEnding, WatchFilter};
use crate::testbed::store::wire::{Call, Reason, Reply};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Version};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Size limit of a request body, as in kube-apiserver.
const MAX_BODY: usize = 3 << 20;

/// Answers a request. Never fails: an error is answered with a `Status` object.
pub(super) async fn handle_request(
    server: &Server,
    connection: Arc<Connection>,
    request: Request<Incoming>,
) -> Response<Body> {
    connection.note_request(request.headers());
    let resource = Resource::parse(request.uri().path());
    let query = Query::parse(request.uri());
    let watch = query.as_ref().is_ok_and(|q| q.watch) && resource.is_list();
    let (is_head, version) = (request.method() == Method::HEAD, request.version());

    // A shutdown neither waits for watches and health checks nor rejects them, as in
    // kube-apiserver.
    let under_way = if watch || resource.is_probe() {
        None
    } else {
        server.life.begin_request()
    };
    let rejected = under_way.is_none() && !watch && !resource.is_probe();
    let mut response = if rejected {
        connection.close_after_rejected_request();
        reject_request(server, version)
    } else {
        ReceivedRequest {
            server,
            connection: &connection,
            resource,
            query,
        }
        .answer(request)
        .await
    };
    if is_head {
        *response.body_mut() = Payload::Whole(hyper::body::Bytes::new());
    }
    response.map(|payload| Body::new(payload, connection, under_way))
}

/// The answer during a shutdown, as in kube-apiserver: 429 while the server still listens
/// (`--shutdown-send-retry-after`), otherwise 503 on the remaining connections.
fn reject_request(server: &Server, version: Version) -> Response<Payload> {
    let (status, reason, after) = if server.flags.shutdown_send_retry_after {
        (StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", "5")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", "1")
    };
    let mut response = failure_response(status, reason, "apiserver is shutting down", "");
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, HeaderValue::from_static(after));
    if version < Version::HTTP_2 {
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// A parsed request, with everything that is needed to answer it.
struct ReceivedRequest<'a> {
    server: &'a Server,
    connection: &'a Arc<Connection>,
    resource: Resource,
    query: Result<Query, String>,
}

impl ReceivedRequest<'_> {
    async fn answer(self, request: Request<Incoming>) -> Response<Payload> {
        let server = self.server;
        let flags = &server.flags;
        if !flags.anonymous_auth && !self.connection.known {
            return failure_response(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized", "");
        }
        if !server.has_rbac_roles() && !self.resource.is_probe() {
            return failure_response(
                StatusCode::FORBIDDEN,
                "Forbidden",
                "forbidden: RBAC: clusterroles not found",
                "",
            );
        }
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        let fixed = match &self.resource {
            Resource::Unknown => {
                return failure_response(
                    StatusCode::NOT_FOUND,
                    "NotFound",
                    "the server could not find the requested resource",
                    "",
                );
            }
            Resource::List { .. } | Resource::Map { .. } => {
                return self.answer_configmaps(request).await;
            }
            _ if !reads => return not_allowed(),
            Resource::Live => return objects::text_response(StatusCode::OK, "ok"),
            Resource::Ready if server.life.is_ready() => {
                return objects::text_response(StatusCode::OK, "ok");
            }
            Resource::Ready => {
                let text = if server.life.terminating.is_cancelled() {
                    "[-]shutdown failed: reason withheld\nreadyz check failed\n"
                } else {
                    "[-]poststarthook/rbac/bootstrap-roles failed: reason withheld\nreadyz check failed\n"
                };
                return objects::text_response(StatusCode::INTERNAL_SERVER_ERROR, text);
            }
            Resource::Version => objects::version_object(&flags.version),
            Resource::ApiV1 => objects::api_resources(),
        };
        objects::json_response(StatusCode::OK, &fixed)
    }

    async fn answer_configmaps(self, request: Request<Incoming>) -> Response<Payload> {
        let name = match &self.resource {
            Resource::Map { name, .. } => name.clone(),
            _ => String::new(),
        };
        let result = match (request.method().as_str(), self.resource, self.query) {
            (_, _, Err(message)) => {
                return failure_response(StatusCode::BAD_REQUEST, "BadRequest", &message, "");
            }
            ("GET" | "HEAD", Resource::List { kind, namespace }, Ok(query)) => {
                list_or_watch(
                    self.server,
                    self.connection,
                    WatchFilter { kind, namespace },
                    &query,
                )
                .await
            }
            ("GET" | "HEAD", Resource::Map { namespace, name }, _) => self
                .server
                .store
                .call(Call::Get { namespace, name })
                .await
                .map(|r| object_answer(r, StatusCode::OK, "")),
            (
                "POST",
                Resource::List {
                    kind: ObjectKind::ConfigMap,
                    namespace: Some(namespace),
                },
                _,
            ) => create_object(self.server, request, &namespace).await,
            ("DELETE", Resource::Map { namespace, name }, _) => self
                .server
                .store
                .call(Call::Delete { namespace, name })
                .await
                .map(delete_answer),
            _ => return not_allowed(),
        };
        match result {
            Ok(response) if response.status() == StatusCode::NOT_FOUND => {
                let message = format!("configmaps {name:?} not found");
                failure_response(StatusCode::NOT_FOUND, "NotFound", &message, &name)
            }
            Ok(response) => response,
            Err(error) => internal_error(&format!("the store does not answer: {error}")),
        }
    }
}

fn internal_error(why: &str) -> Response<Payload> {
    failure_response(
        StatusCode::INTERNAL_SERVER_ERROR,
        "InternalError",
        &format!("Internal error occurred: {why}"),
        "",
    )
}

async fn list_or_watch(
    server: &Server,
    connection: &Arc<Connection>,
    wanted: WatchFilter,
    query: &Query,
) -> io::Result<Response<Payload>> {
    if !query.watch {
        let (revision, mut items) = server.store.list(wanted.namespace.clone()).await?;
        items.retain(|object| wanted.matches(object));
        return Ok(objects::json_response(
            StatusCode::OK,
            &objects::list_object(wanted.kind, revision, &items),
        ));
    }
    let grace = server.flags.shutdown_watch_termination_grace_period;
    // kube-apiserver ends watches at a limited rate over the grace period. A random point in the
    // period for each watch gives the same rate.
    let share = if grace.is_zero() {
        0.0
    } else {
        f64::from(getrandom::u32().unwrap_or(0)) / f64::from(u32::MAX)
    };
    let ending = WatchEnding {
        life: server.life.clone(),
        after: grace.mul_f64(share),
        connection: Arc::clone(connection),
    };
    let lines = watch::start_watch(server, wanted, query, ending).await?;
    let mut response = Response::new(Payload::Lines(lines));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    Ok(response)
}

async fn create_object(
    server: &Server,
    request: Request<Incoming>,
    namespace: &str,
) -> io::Result<Response<Payload>> {
    let kind = request
        .headers()
        .get(header::CONTENT_TYPE)
        .map_or(Ok("application/json"), HeaderValue::to_str);
    if kind.unwrap_or_default().split(';').next().map(str::trim) != Some("application/json") {
        let message = "the body must be JSON";
        return Ok(failure_response(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "UnsupportedMediaType",
            message,
            "",
        ));
    }
    let body = tokio::time::timeout(
        Duration::from_secs(60),
        Limited::new(request.into_body(), MAX_BODY).collect(),
    )
    .await;
    let body = match body {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            let message = format!("the body is larger than {MAX_BODY} bytes");
            return Ok(failure_response(
                StatusCode::PAYLOAD_TOO_LARGE,
                "RequestEntityTooLarge",
                &message,
                "",
            ));
        }
        Ok(Err(error)) => {
            return Ok(failure_response(
                StatusCode::BAD_REQUEST,
                "BadRequest",
                &error.to_string(),
                "",
            ));
        }
        Err(_) => {
            return Ok(failure_response(
                StatusCode::GATEWAY_TIMEOUT,
                "Timeout",
                "the body did not come",
                "",
            ));
        }
    };
    let object = serde_json::from_slice(&body).unwrap_or_default();
    let (object, name) = match objects::admit_object(object, namespace) {
        Ok(admitted) => admitted,
        Err((status, reason, message)) => {
            return Ok(failure_response(status, reason, &message, ""));
        }
    };
    Ok(object_answer(
        server.store.call(Call::Create { object }).await?,
        StatusCode::CREATED,
        &name,
    ))
}

/// Turns the store's reply into an answer: the object with the status `good`, or an error.
fn object_answer(reply: Reply, good: StatusCode, name: &str) -> Response<Payload> {
    match reply {
        Reply::Object { object } => objects::json_response(good, &object),
        Reply::Failed {
            reason: Reason::NotFound,
        } => failure_response(StatusCode::NOT_FOUND, "NotFound", "", ""),
        Reply::Failed {
            reason: Reason::Exists,
        } => {
            let message = format!("configmaps {name:?} already exists");
            failure_response(StatusCode::CONFLICT, "AlreadyExists", &message, name)
        }
        other => failure_response(
            StatusCode::INTERNAL_SERVER_ERROR,
            "InternalError",
            &unexpected_reply(&other).to_string(),
            "",
        ),
    }
}

/// The answer to a DELETE: a `Status` instead of the object, because nothing (such as a finalizer)
/// delays the deletion.
fn delete_answer(reply: Reply) -> Response<Payload> {
    match reply {
        Reply::Object { object } => {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            objects::json_response(StatusCode::OK, &objects::success_status(name))
        }
        other => object_answer(other, StatusCode::OK, ""),
    }
}

fn not_allowed() -> Response<Payload> {
    let message = "the server does not allow this method on the requested resource";
    failure_response(
        StatusCode::METHOD_NOT_ALLOWED,
        "MethodNotAllowed",
        message,
        "",
    )
}
