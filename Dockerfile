# One image for daemon and worker: `gpulease serve`, `gpulease worker`.
# The worker launches jobs with an interpreter of its own choosing, so no torch is installed here; build with
# --build-arg EXTRAS=server,torch to run training runs with the image's own Python.
FROM python:3.11-slim AS build
WORKDIR /src
# The build fetches the libraries of the dashboard, unless the checkout has them; npm_config_registry names another registry.
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY protocol protocol
COPY client client
COPY worker worker
COPY server server
COPY migrations migrations
COPY deploy/systemd deploy/systemd
ARG EXTRAS=server
ARG npm_config_registry
RUN python -m venv /opt/gpulease \
 && /opt/gpulease/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

FROM python:3.11-slim
LABEL org.opencontainers.image.title="gpulease" \
      org.opencontainers.image.description="GPU leases on shared machines: daemon and worker" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
COPY --from=build /opt/gpulease /opt/gpulease
ENV PATH=/opt/gpulease/bin:$PATH \
    PYTHONUNBUFFERED=1
# Daemon and worker of a host share this where they run as root to serve several users: the database, the socket, the jobs.
VOLUME /var/lib/gpulease
# By itself the image needs no privileges, as in `docker run --network host gpulease serve --simulate 4`. Without the host's
# network no one reaches it: it listens on loopback, because it identifies callers there by their user. docker-compose.yml
# says which privileges a daemon and a worker of all users need.
RUN useradd --create-home --uid 1000 gpulease
USER 1000
WORKDIR /home/gpulease
STOPSIGNAL SIGTERM
# It asks over the daemon's socket, whatever its port and with or without TLS. Where --data-dir or --socket is given, say where
# the socket is: GPULEASE_URL=unix:///path/gpulease.sock.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import gpulease; gpulease.Client(timeout_s=3, retry_s=0).alive()"]
ENTRYPOINT ["gpulease"]
CMD ["serve"]
