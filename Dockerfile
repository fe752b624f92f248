# One image for daemon and worker: `gpulease serve`, `gpulease worker`.
# The worker launches jobs with an interpreter of its own choosing, so no torch is installed here; build with
# --build-arg EXTRAS=server,torch to run trainings with the image's own Python.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY client client
COPY server server
COPY migrations migrations
ARG EXTRAS=server
RUN python -m venv /opt/gpulease \
 && /opt/gpulease/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

FROM python:3.11-slim
COPY --from=build /opt/gpulease /opt/gpulease
ENV PATH=/opt/gpulease/bin:$PATH \
    PYTHONUNBUFFERED=1
# Both share it: the database, the socket, the jobs with their logs.
VOLUME /var/lib/gpulease
STOPSIGNAL SIGTERM
ENTRYPOINT ["gpulease"]
CMD ["serve", "--data-dir", "/var/lib/gpulease"]
