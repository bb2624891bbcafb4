# The image of scripts/image.sh, for those who have Docker:
#
#   docker build --tag registry.example/berth:v0.1.0 --build-arg REVISION="$(git rev-parse HEAD)" \
#     --build-arg CREATED="$(git log -1 --format=%cI)" .
FROM docker.io/library/rust:1.95.0-slim-bookworm AS build
WORKDIR /src
COPY . .
ARG REVISION
ENV BERTH_REVISION=$REVISION
RUN directory=$(scripts/static.sh) && install -D "$directory/berth" /image/berth

FROM scratch
ARG CREATED
ARG REVISION
LABEL org.opencontainers.image.title="berth" \
      org.opencontainers.image.description="Two kube-apiservers share one node and one secure port, so that a control plane upgrade loses nothing" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.created="$CREATED" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /image/berth /berth
ENTRYPOINT ["/berth"]
