"""Completion of what the daemon knows: `argument("job", shell_complete=id_completion.jobs)`.

A shell waits for the answer while someone types. So the daemon has `ANSWER_S`, and a failure is silent.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from gpulease_protocol import endpoints
from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.model import LeaseState

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gpulease.client import Client

ANSWER_S = 0.5
"""How long a shell waits for the daemon."""
MAX_JOBS = 100
"""How many jobs are offered, newest first."""
PLAIN_NAME = re.compile(r"[\w.@%+-]+")
"""Names that shells take as they are."""


def completion(
    ask: Callable[[Client], Iterable[tuple[str, str]]],
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """A `shell_complete`: offers those words that begin with what was typed.

    `ask` returns each word with a remark, which zsh and fish show beside it.
    """

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - only when a shell asks

        from gpulease.client import Client  # noqa: PLC0415

        found: list[tuple[str, str]] = []

        def answer() -> None:
            with suppress(GpuleaseError, OSError), Client(timeout_s=ANSWER_S, retry_s=0.0) as client:
                found.extend(ask(client))

        # In a thread: to find out that a host is gone takes longer than ANSWER_S.
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        return [CompletionItem(word, help=remark) for word, remark in list(found) if word.startswith(incomplete)]

    return complete


def _newest_jobs(client: Client) -> list[tuple[str, str]]:
    """Names of own jobs, then ids of all, of arrays too."""
    newest, user = client.send(endpoints.jobs((), limit=MAX_JOBS)).items, client.me().user
    own = [job for job in newest if job.user == user and PLAIN_NAME.fullmatch(job.name)]
    arrays = {job.array_id: f"array {job.name}".strip() for job in newest if job.array_id is not None}
    return [
        *{job.name: f"{job.state} {job.array_id or job.id}" for job in reversed(own)}.items(),
        *((job.id, f"{job.state} {job.name}".strip()) for job in newest),
        *arrays.items(),
    ]


def _live_leases(client: Client) -> list[tuple[str, str]]:
    live = client.leases((LeaseState.ACTIVE, LeaseState.QUEUED))
    return [(lease.id, f"{lease.state} {lease.holder.label}".strip()) for lease in live]


jobs = completion(_newest_jobs)
leases = completion(_live_leases)
gpus = completion(lambda client: [(f"{gpu.node}:{gpu.index}", gpu.state.value) for gpu in client.gpus()])
nodes = completion(lambda client: [(node.name, node.mode.value) for node in client.nodes()])
