"""The tables. `migrations/` creates the same schema; a test compares the two."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time. SQLite stores no offset, so UTC is added when reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To the database."""
        return value if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """From the database."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


lease = Table(
    "lease",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False, unique=True),
    Column("place", BigInteger),
    Column("state", String(16), nullable=False),
    Column("end_reason", String(16)),
    Column("holder", JSON, nullable=False),
    Column("demand", JSON, nullable=False),
    Column("gpus", JSON, nullable=False),
    Column("members", JSON(none_as_null=True)),
    Column("env", JSON, nullable=False),
    Column("port", Integer),
    Column("token", BigInteger, unique=True),
    Column("ttl_s", Float, nullable=False),
    Column("liveness", String(16), nullable=False),
    Column("watched_by", String(255)),
    Column("owner_realm", String(128)),
    Column("owner_pid", Integer),
    Column("owner_start_ticks", BigInteger),
    Column("owner_user", String(255)),
    Column("job_id", String(64), index=True),
    Column("cause", String(128), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("granted_at", UtcDateTime),
    Column("renewed_at", UtcDateTime),
    Column("ended_at", UtcDateTime),
    Column("kept", JSON(none_as_null=True)),
    Index("ix_lease_state", "state", "number"),
    Index("ix_lease_ended_at", "ended_at", "number"),
)

job = Table(
    "job",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text),
    Column("lease_id", String(64), nullable=False),
    Column("user_name", String(255)),
    Column("spec", JSON, nullable=False),
    Column("gpus", JSON, nullable=False),
    Column("members", JSON(none_as_null=True)),
    Column("grace_s", Float, nullable=False),
    Column("cancelled_at", UtcDateTime),
    Column("go_at", UtcDateTime),
    Column("parts_stopped_at", UtcDateTime),
    Column("regroups", Integer, nullable=False, server_default="0"),
    Column("grows_at", UtcDateTime),
    Column("preempt_at", UtcDateTime),
    Column("preempted", Integer, nullable=False, server_default="0"),
    Column("stuck_on", JSON(none_as_null=True)),
    Column("log_directory", Text),
    Column("exit_code", Integer),
    Column("traceback", Text),
    Column("uid", BigInteger),
    Column("gid", BigInteger),
    Column("fenced", Boolean, nullable=False, server_default=false()),
    Column("attempts", Integer, nullable=False),
    Column("attempt_history", JSON(none_as_null=True)),
    Column("after", JSON(none_as_null=True)),
    Column("array_id", String(64), index=True),
    Column("array_index", BigInteger),
    Column("array_at_most", Integer),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("ended_at", UtcDateTime),
    Index("ix_job_state", "state", "number"),
    Index("ix_job_ended_at", "ended_at", "number"),
)

gpu_metrics = Table(
    "gpu_metrics",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("gpu_uuid", String(96)),
    Column("width_s", Integer),
    Column("start_s", BigInteger),
    Column("series", LargeBinary, nullable=False),
    Index("ix_gpu_metrics_gpu_uuid", "gpu_uuid", "width_s", "start_s"),
    Index("ix_gpu_metrics_width_s", "width_s", "start_s"),
)

gpu = Table(
    "gpu",
    metadata,
    Column("uuid", String(96), primary_key=True),
    Column("device", JSON, nullable=False),
    Column("lease_id", String(64)),
    Column("draining", Boolean, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("baseline_bytes", BigInteger),
    Column("cordoned", Boolean, nullable=False, server_default=false()),
)

node = Table(
    "node",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("host", String(255), nullable=False),
    Column("driver_version", String(64)),
    Column("simulated", Boolean, nullable=False),
    Column("mode", String(16), nullable=False, server_default="active"),
    Column("mode_reason", String(255)),
    Column("mode_by", String(255)),
    Column("seen_at", UtcDateTime),
    Column("realm", String(128)),
)

STATE_EVENTS = text(
    "kind IN ('gpu.unhealthy', 'gpu.recovered', 'gpu.foreign', 'gpu.foreign_over', 'gpu.cordoned', 'gpu.uncordoned',"
    " 'gpu.gone', 'node.unknown', 'node.ready', 'node.drained', 'node.paused', 'node.resumed', 'node.forgotten')"
)
"""The events that tell of the state of GPUs outside leases, which are few. A query that is to use their index says just
these words."""

event = Table(
    "event",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", UtcDateTime, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("cause", String(128), nullable=False),
    Column("lease_id", String(64)),
    Column("job_id", String(64)),
    Column("node", String(255)),
    Column("gpus", JSON, nullable=False),
    Column("token", BigInteger),
    Column("reason", Text),
    Index("ix_event_lease_id", "lease_id"),
    Index("ix_event_at", "at", "seq"),
    Index("ix_event_state", "seq", sqlite_where=STATE_EVENTS),
)

pruned = Table(
    "pruned",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
    Column("leases_ended_at", UtcDateTime),
)
"""One row, of id 1: events up to this `seq` are pruned, and leases that had ended by this time. See
`store.retention`."""

idempotency_key = Table(
    "idempotency_key",
    metadata,
    Column("key", String(255), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("made", String(64), nullable=False),
    Column("at", UtcDateTime, nullable=False),
)

bearer_token = Table(
    "bearer_token",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("hash", String(64), nullable=False),
    Column("user_name", String(64), nullable=False),
    Column("uid", BigInteger),
    Column("gid", BigInteger),
    Column("role", String(16), nullable=False),
    Column("node", String(255)),
    Column("note", String(255), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("created_by", String(255)),
    Column("expires_at", UtcDateTime),
    Column("last_used_on", Date),
    Column("max_gpus", Integer),
    Column("max_lease_s", Float),
    Column("gpu_hours_per_day", Float),
)
"""One row for each token that was not revoked. `hash` is SHA-256 of the whole token, which has 256 random bits: nothing
slower would make it harder to guess. See `store.bearer_tokens`."""

token_budget = Table(
    "token_budget",
    metadata,
    Column("token_id", String(64), primary_key=True),
    Column("budget", JSON, nullable=False),
    Column("day", Date, nullable=False),
    Column("used_s", Float, nullable=False),
    Column("counted_at", UtcDateTime, nullable=False),
)
"""One row for each token with a budget that was used in the last days. See `core.token_budgets`."""

user_usage = Table(
    "user_usage",
    metadata,
    Column("user_name", String(255), primary_key=True),
    Column("used_s", Float, nullable=False),
    Column("held", Float, nullable=False),
    Column("entry_s", Float, nullable=False),
    Column("counted_at", UtcDateTime, nullable=False),
)
"""One row for each user who has used GPUs lately. See `core.fair_share`."""
usage_limit = Table(
    "usage_limit",
    metadata,
    Column("id", String(320), primary_key=True),
    Column("limits", JSON, nullable=False),
    Column("members", JSON, nullable=False),
    Column("set_at", UtcDateTime, nullable=False),
    Column("set_by", String(255)),
)
"""One row for each user, group and token with limits; the id is its kind, a space and its name. See
`core.limit_index`."""

gpu_time = Table(
    "gpu_time",
    metadata,
    Column("id", String(320), primary_key=True),
    Column("width_s", Float, nullable=False),
    Column("parts", JSON, nullable=False),
    Column("counted_at", UtcDateTime, nullable=False),
)
"""One row for each limit of GPU-hours, with the same id. See `core.gpu_time`."""

reservation = Table(
    "reservation",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("gpus", JSON, nullable=False),
    Column("from_at", UtcDateTime, nullable=False),
    Column("to_at", UtcDateTime, nullable=False),
    Column("user_name", String(255)),
    Column("group_name", String(255)),
    Column("reason", Text),
    Column("made_at", UtcDateTime, nullable=False),
    Column("made_by", String(255)),
)
"""One row for each reservation that has not ended, see `core.calendar`. The events tell of those that have."""

preemption = Table(
    "preemption",
    metadata,
    Column("lease_id", String(64), primary_key=True),
    Column("victims", JSON, nullable=False),
    Column("gpus", JSON, nullable=False),
    Column("noticed_at", UtcDateTime, nullable=False),
    Column("preempt_at", UtcDateTime, nullable=False),
)
"""One row for each request in the queue for which others end, see `core.preemption`."""

counter = Table(
    "counter",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

writer = Table(
    "writer",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("term", BigInteger, nullable=False),
    Column("first_term", BigInteger, nullable=False),
    Column("name", String(255), nullable=False),
    Column("since", UtcDateTime, nullable=False),
    Column("job_token_key", String(64)),
    Column("database_id", String(16)),
)
"""One row, of id 1: the daemon that may write. `first_term` is its term at the takeover. See `store.fencing`.
`job_token_key` is the key of `runtime.job_tokens`; null until a daemon needs one. `database_id` is given at the first
takeover, and new to each backup: by it a worker knows whether the jobs that it runs were ordered from here."""


def complete_for_postgresql() -> None:
    """Declare what only PostgreSQL is told. Above, it would import that dialect for SQLite too."""
    index = next(one for one in event.indexes if one.name == "ix_event_state")
    index.dialect_options["postgresql"]["where"] = STATE_EVENTS
