"""`gpulease policy replay`: what another policy would have done with the requests of an installation, or of a trace."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import click

from gpulease_cli import output
from gpulease_cli.command_groups import CommandGroup
from gpulease_cli.installed_commands import needs_extra
from gpulease_cli.option_types import MOMENT
from gpulease_cli.options import JSON
from gpulease_cli.parameters import option
from gpulease_cli.setting_options import setting_option
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host.addresses import default_data_dir
from gpulease_protocol.host.settings import DATA_DIR, declarations
from gpulease_protocol.model import Priority
from gpulease_server.database_settings import DATABASE_URL, default_database_url
from gpulease_server.settings import LIMITS, QUEUE, ServeSettings

NOT_REPLAYED = frozenset(
    (
        *("max_observation_age_s", "max_rps_per_user", "max_queue_bytes_per_user"),
        *("preemption", "preempt_after_s", "preempt_notice_s"),
        *("reclaim_idle_interactive_after_s", "idle_command", "idle_after_s", "max_keep_s"),
    )
)
"""Settings of these headings that a replay has no use for, as it ends no lease for another one."""
RULES = {
    name: declaration
    for name, declaration in declarations(ServeSettings).items()
    if declaration.group in (QUEUE, LIMITS) and name not in NOT_REPLAYED
}
"""The settings of `serve` that may be tried."""
EVERYONE = "*"

policy = CommandGroup("policy", "Try another order of the queue on recorded requests.")


def takes_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for each rule."""
    kinds, defaults = (
        get_type_hints(ServeSettings),
        {one.name: one.default for one in dataclasses.fields(ServeSettings)},
    )
    for name, declaration in reversed(RULES.items()):
        function = setting_option(name, declaration, kinds[name], defaults[name])(function)
    return function


class NodesOfGpus(click.ParamType):  # type: ignore[type-arg]
    """`4x8`: four nodes of eight GPUs each."""

    name = "nodes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """(nodes, GPUs of each). Fails for anything else."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,3})", value)
        nodes, gpus = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= nodes <= 10_000 or not 1 <= gpus <= 128:
            self.fail(f"{value!r} is not NODESxGPUS; write 4x8 for four nodes of eight GPUs", param, ctx)
        return nodes, gpus


class UserPriority(click.ParamType):  # type: ignore[type-arg]
    """`ada=scavenge`: a user, or `*` for all others, and a priority."""

    name = "priority"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Priority]:
        """(user, priority). Fails for anything else."""
        if isinstance(value, tuple):
            return value
        user, _, word = value.rpartition("=")
        if not user or word not in set(Priority):
            self.fail(f"{value!r} is not USER=PRIORITY; write it like ada=scavenge, or *=normal", param, ctx)
        return user, Priority(word)


@policy.command(
    section="serve",
    examples=(
        "gpulease policy replay --fair-share",
        "gpulease policy replay --since 30d --plot --fair-share --usage-half-life-days 3",
        "gpulease policy replay --as ada=scavenge --json",
        "gpulease policy replay --limits limits.json",
        "gpulease policy replay --trace trace.csv --gpus 4x8 --fair-share",
    ),
)
@option("--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Replay this trace (CSV) instead of the recorded requests; with --gpus.")  # fmt: skip
@option("--gpus", type=NodesOfGpus(), metavar="NODESxGPUS", show_default="those of the database",
        help="Replay on so many nodes of so many GPUs each, such as 4x8.")  # fmt: skip
@option("--since", type=MOMENT, metavar="TIME", default="30d", show_default=True,
        help="Start of the period, such as 2026-11-23T18:00 or 03:00, or how long ago.")  # fmt: skip
@option("--until", type=MOMENT, metavar="TIME", show_default="now", help="End of the period.")
@option("--as", "priorities", type=UserPriority(), multiple=True, metavar="USER=PRIORITY",
        help="Try it as if this user, or * for all others, had asked with this priority. Repeatable.")  # fmt: skip
@option("--limits", "limits_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        show_default="those that are set",
        help="Try these limits of users, groups and tokens: JSON, as from `gpulease limits list --json`.")  # fmt: skip
@option("--plot", "as_plot", is_flag=True, help="Plot how many requests waited over time.")
@takes_rules
@setting_option("database_url", DATABASE_URL, str)
@setting_option("data_dir", DATA_DIR, Path)
@JSON
@click.pass_context
def replay(context: click.Context, /, **chosen: Any) -> int:
    """Replay recorded requests under another policy, and compare it with the present one.

    Reads the daemon's database, writes nothing, and may run beside the daemon. The present policy is that of the
    configuration file and the environment; options say what to try instead. See docs/policy-replay.md.
    """
    with needs_extra("server"):
        from gpulease_server.commands import policy_report  # noqa: PLC0415 - an extra
        from gpulease_server.policy_settings import policy_of  # noqa: PLC0415
        from gpulease_server.replay.comparison import Rules, compare  # noqa: PLC0415
        from gpulease_server.replay.limits_file import read_limits  # noqa: PLC0415
        from gpulease_server.replay.recorded_requests import with_priorities  # noqa: PLC0415
    present, tried = _present(context), {name: _plain(chosen[name]) for name in RULES}
    changes = {name: value for name, value in tried.items() if value != present[name]}
    recording, file = _recording(chosen), chosen["limits_file"]
    requests = with_priorities(recording.requests, dict(chosen["priorities"]))
    limits = recording.limits if file is None else read_limits(file)
    now = policy_of(ServeSettings(**present))
    is_tried = changes or chosen["priorities"] or file is not None
    other = Rules(policy_of(ServeSettings(**tried)), requests, limits) if is_tried else None
    with _progress() as on_progress:
        found = compare(recording, now, other, on_progress)
    if chosen["json"]:
        output.print_json(found)
        return output.DONE
    words = [f"--as {user}={priority}" for user, priority in chosen["priorities"]]
    words += [] if file is None else [f"--limits {file}"]
    words += [policy_report.option_words(name, RULES[name], value) for name, value in changes.items()]
    policy_report.print_report(found, " ".join(words), as_plot=chosen["as_plot"])
    return output.DONE


def _recording(chosen: dict[str, Any]) -> Any:
    from gpulease_server.replay.database_recording import read_database  # noqa: PLC0415 - an extra
    from gpulease_server.replay.recorded_requests import on_nodes, uniform_nodes  # noqa: PLC0415
    from gpulease_server.replay.trace_file import read_trace  # noqa: PLC0415

    nodes = None if chosen["gpus"] is None else uniform_nodes(*chosen["gpus"])
    if chosen["trace"] is not None:
        if nodes is None:
            raise InvalidRequest("--trace: a trace does not say which GPUs there are.", remedy="Add --gpus, as in 4x8.")
        return read_trace(chosen["trace"], nodes)
    now = datetime.now(UTC)
    since, until = chosen["since"], min(chosen["until"] or now, now)
    if since >= until:
        raise InvalidRequest("--since: must be before now and before --until.", remedy="Write it like 12h, 7d or 30d.")
    url = chosen["database_url"] or default_database_url(chosen["data_dir"] or default_data_dir())
    recording = read_database(url, since, until)
    return recording if nodes is None else on_nodes(recording, nodes)


def _present(context: click.Context) -> dict[str, Any]:
    """The rules as they are without the options of this call."""
    found = {}
    for parameter in context.command.params:
        if parameter.name in RULES:
            value, _ = parameter.consume_value(context, {})
            found[parameter.name] = _plain(parameter.type_cast_value(context, value))
    return found


def _plain(value: Any) -> Any:
    """A value as a field of the settings has it."""
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else value


@contextmanager
def _progress() -> Iterator[Callable[[float], None] | None]:
    """Shows on a terminal how much is done."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield lambda share: click.echo(f"\rreplaying: {share:4.0%}", err=True, nl=False)
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)
