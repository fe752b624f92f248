# One image for daemon and worker: `gpulease serve`, `gpulease worker`.
# The worker launches jobs with an interpreter of its own choosing, so no torch is installed here; build with
# --build-arg EXTRAS=server,torch to run trainings with the image's own Python.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protocol protocol
COPY client client
COPY worker worker
COPY server server
COPY migrations migrations
ARG EXTRAS=server
RUN python -m venv /opt/gpulease \
 && /opt/gpulease/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

FROM python:3.11-slim
COPY --from=build /opt/gpulease /opt/gpulease
ENV PATH=/opt/gpulease/bin:$PATH \
    PYTHONUNBUFFERED=1
# Daemon and worker of a host share this where they run as root to serve several users: the database, the socket, the jobs.
VOLUME /var/lib/gpulease
# By itself the image needs no privileges, as in `docker run gpulease serve --simulate 4`. docker-compose.yml says who needs which.
RUN useradd --create-home --uid 1000 gpulease
USER 1000
WORKDIR /home/gpulease
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8750/healthz', timeout=3)"]
ENTRYPOINT ["gpulease"]
CMD ["serve"]
