"""Who is in the way of a request, for people: the obstacles of an explanation, grouped by who has the GPUs.

    GPUs 0, 1: bob (resnet) for 2h 10m
    GPUs 4-7: ada (job job-82c4b92c) for 5m 00s, until 16:20
    GPU 2: in use without a lease by pid 4242 of eve

The library's errors and its announcements of a wait are made of it, and the progress line of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from gpulease_protocol.explanation import Explanation, Obstacle
from gpulease_protocol.status_table import format_duration, printable

UNFIT = frozenset({"other_node", "other_model", "not_listed"})
"""Codes of GPUs that were not asked for, and so are not in the way."""
MAX_REASON = 400
"""Characters of the reason of one group: the end of it may be what the user can do, as with a reservation."""
MAX_GROUPS = 8
"""Groups that are told: no one reads a longer sentence to its end."""


def obstacle_groups(obstacles: Iterable[Obstacle], now: datetime | None = None) -> list[str]:
    """One phrase for each holder in the way, those of the first GPUs first; at most `MAX_GROUPS` and how many more."""
    now = datetime.now(UTC) if now is None else now
    relevant = [obstacle for obstacle in obstacles if obstacle.code not in UNFIT]
    several_nodes = len({obstacle.node for obstacle in relevant}) > 1
    groups: dict[tuple[str, str], list[int]] = {}
    whole: dict[str, None] = {}
    for obstacle in relevant:
        why = _why(obstacle, now)
        if why is None:  # a sentence about the node or the user
            whole[obstacle.sentence.rstrip(".")] = None
        else:
            groups.setdefault((obstacle.node if several_nodes else "", why), []).append(obstacle.index)
    phrases = [f"{gpu_ranges(indices, node)}: {why}" for (node, why), indices in groups.items()]
    phrases += whole
    more = len(phrases) - MAX_GROUPS
    return phrases if more <= 0 else [*phrases[:MAX_GROUPS], f"and {more} more"]


def obstacle_lines(obstacles: Iterable[Obstacle]) -> list[str]:
    """The sentence of each obstacle, and one line for all GPUs of a node of which the same is said."""
    groups: dict[tuple[str, str], list[Obstacle]] = {}
    for obstacle in obstacles:
        said = obstacle.sentence.removeprefix(f"GPU {obstacle.index} of {obstacle.node} ")
        groups.setdefault((obstacle.node, said), []).append(obstacle)
    lines: dict[str, None] = {}
    for (node, said), alike in groups.items():
        if len(alike) == 1 or said == alike[0].sentence:  # of one GPU, or of its node or user
            lines[alike[0].sentence] = None
        else:
            lines[f"{gpu_ranges([one.index for one in alike], node)}: {said.removeprefix('is ')}"] = None
    return list(lines)


def _why(obstacle: Obstacle, now: datetime) -> str | None:
    """Why one GPU is not free, without its name; None for a sentence that does not begin with it."""
    if obstacle.code == "leased" and obstacle.holder is not None:
        return _holder(obstacle) + _times(obstacle, now)
    name = f"GPU {obstacle.index} of {obstacle.node} "
    if not obstacle.sentence.startswith(name):
        return None
    return printable(obstacle.sentence.removeprefix(name).removeprefix("is ").rstrip("."), MAX_REASON)


def _holder(obstacle: Obstacle) -> str:
    """Who holds the lease in the way, by the name that says most."""
    holder = obstacle.holder
    assert holder is not None
    if holder.label:
        what = holder.label
    elif obstacle.job_id:
        what = f"job {obstacle.job_id}"
    elif holder.owner_pid and (_is_watched(obstacle) or _has_last_moment(obstacle)):
        what = f"pid {holder.owner_pid}"
    else:
        what = obstacle.lease_id or ""
    who = holder.user or holder.host or "someone"
    return f"{printable(who, 40)} ({printable(what, 40)})" if what else printable(who, 40)


def _is_watched(obstacle: Obstacle) -> bool:
    """True if the lease lasts as long as its owner's process: then the daemon names no time in its sentence."""
    return " until " not in obstacle.sentence


def _has_last_moment(obstacle: Obstacle) -> bool:
    """True if the lease ends at `until` however often it is renewed."""
    return " at the latest" in obstacle.sentence


def _times(obstacle: Obstacle, now: datetime) -> str:
    """Since when, and until when where that is known, by the clock of this host."""
    since = f" for {format_duration((now - obstacle.since).total_seconds())}" if obstacle.since else ""
    if obstacle.until is None or _is_watched(obstacle):
        return since
    local = obstacle.until.astimezone()
    unless = "" if obstacle.job_id or _has_last_moment(obstacle) else " unless renewed"
    day = "" if local.date() == now.astimezone().date() else f"{local:%b %d} "
    return f"{since}, until {day}{local:%H:%M}{unless}"


def describe_wait(explanation: Explanation) -> str:
    """`, 2nd in the queue: ` and who is in the way."""
    place = f", {ordinal(explanation.position)} in the queue" if explanation.position else ""
    unlisted = [f"and {explanation.unlisted_gpus} more GPUs"] if explanation.unlisted_gpus else []
    why = "; ".join([*groups, *unlisted]) if (groups := obstacle_groups(explanation.obstacles)) else ""
    return f"{place}: {why or _without_place(explanation)}"


def _without_place(explanation: Explanation) -> str:
    """The sentence of an explanation, without the place in the queue that `describe_wait` puts in front."""
    sentence = explanation.sentence.removeprefix("Not now: ").rstrip(".")
    place = rf"; number {explanation.position} in the queue(, and |, )?"
    return re.sub(place, lambda found: "; " if found[1] else "", sentence, count=1)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st."""
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def gpu_ranges(indices: Sequence[int], node: str = "") -> str:
    """`GPU 0`, `GPUs 0, 1`, `GPUs 0-2, 5 of gpubox`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(names)}{f' of {node}' if node else ''}"
