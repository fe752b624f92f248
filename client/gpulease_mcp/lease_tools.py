"""The tools that look at GPUs and lease them. Their docstrings are what the agent reads."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from pydantic import Field

from gpulease_mcp import answers
from gpulease_mcp.answers import ExplainAnswer, LeaseAnswer, StatusAnswer, WaitAnswer
from gpulease_mcp.session import TTL_S, AgentSession, SessionLease
from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.model import GpuState, LeaseState
from gpulease_protocol.requests import MAX_COUNT, LeaseRequest

MAX_WAIT_S = 25
"""Clients give up on a call after 10 to 60 s; a longer wait is several calls."""
LeaseId = Annotated[str, Field(pattern="^lease-[0-9a-f]+(r[0-9]+)?$", description="Id of a lease")]
Minutes = Annotated[
    float, Field(gt=0, le=7 * 24 * 60, description="For how long to hold it; cut to the server's longest time")
]
Seconds = Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="How long to wait, at most 25 s")]
Key = Annotated[
    str | None,
    Field(min_length=1, max_length=100, description="Repeat a call with the same key to not ask for it twice"),
]


class LeaseTools:
    """The tools for one session."""

    def __init__(self, session: AgentSession) -> None:
        self.session = session

    def gpu_status(self) -> StatusAnswer:
        """Show the GPUs: which are free, who holds the others and why; your leases; and what your budget has left."""
        session = self.session
        me, gpus = session.me(), session.client.gpus()
        mine = [session.refresh(held) for held in session.open_leases()]
        ids = {held.lease.id for held in mine}
        ordered = sorted(gpus, key=lambda gpu: (gpu.lease_id not in ids, gpu.state is not GpuState.FREE))
        return StatusAnswer(
            user=me.user,
            free=sum(gpu.state is GpuState.FREE for gpu in gpus),
            total=len(gpus),
            gpus=[answers.gpu_answer(gpu) for gpu in ordered[: answers.MAX_GPUS]],
            left_out=max(0, len(gpus) - answers.MAX_GPUS),
            my_leases=[answers.lease_answer(held) for held in mine],
            budget=answers.budget_answer(me),
        )

    def explain_wait(
        self, id: Annotated[str, Field(max_length=100, description="Id of a lease or a job")]
    ) -> ExplainAnswer:
        """Explain why a lease or a job waits: who is in the way, and whether it can ever be granted."""
        client = self.session.client
        why = client.explain(client.job(id).lease_id if id.startswith("job-") else id)
        never = why.verdict == "never"
        return ExplainAnswer(
            verdict=why.verdict,
            why=why.sentence[: answers.MAX_SENTENCE],
            position=why.position,
            next="Ask for something else: waiting is useless." if never else "Call wait with this id.",
        )

    def request_lease(
        self,
        ctx: Context[Any, Any],
        gpus: Annotated[int, Field(ge=1, le=MAX_COUNT, description="How many GPUs, all on one node")] = 1,
        hold_minutes: Minutes = 30,
        reason: Annotated[str, Field(max_length=200, description="What for; shown to others who wait")] = "",
        wait_seconds: Seconds = 0,
        idempotency_key: Key = None,
        gpu_model: Annotated[str | None, Field(max_length=MAX_NAME, description="Part of the model's name")] = None,
        node: Annotated[str | None, Field(max_length=MAX_NAME, description="Only on this node")] = None,
        min_free_memory_gib: Annotated[float | None, Field(gt=0, le=10_000)] = None,
    ) -> LeaseAnswer:
        """Ask for GPUs. Granted at once if they are free; otherwise queued, and `wait` tells of the grant.

        The lease is released after hold_minutes, unless renew_lease is called, and when this session ends."""
        session = self.session
        try:
            request = LeaseRequest(
                count=gpus,
                ttl_s=TTL_S,
                label=reason,
                agent=agent_name(session, ctx),
                session=session.session,
                gpu_model=gpu_model,
                node=node,
                min_free_memory_bytes=None if min_free_memory_gib is None else int(min_free_memory_gib * 2**30),
                **session.owner_fields(),  # type: ignore[arg-type]
            )
        except ValueError as error:
            raise GpuleaseError(str(error), remedy="Call it again with other arguments.") from error
        held = session.request(request, self._hold_s(hold_minutes), idempotency_key or secrets.token_hex(8))
        if held.lease.state is LeaseState.QUEUED and wait_seconds > 0:
            session.refresh(held, wait_seconds)
        return self._told(held)

    def wait(
        self,
        id: Annotated[str, Field(max_length=100, description="Id of a lease or job of yours")],
        seconds: Seconds = MAX_WAIT_S,
    ) -> WaitAnswer:
        """Wait until a queued lease is granted or a job ends, for at most 25 seconds. Call it again if it has not."""
        if id.startswith("job-"):
            self.session.own_job(id)
            job = self.session.client.wait_job(id, seconds)
            return WaitAnswer(done=job.ended, job=answers.job_answer(job))
        held = self.session.own(id)
        if held.lease.state is LeaseState.QUEUED:
            self.session.refresh(held, seconds)
        else:
            self.session.refresh(held)
        return WaitAnswer(done=held.lease.state is not LeaseState.QUEUED, lease=self._told(held))

    def renew_lease(self, lease_id: LeaseId, hold_minutes: Minutes = 30) -> LeaseAnswer:
        """Hold a lease of this session for hold_minutes from now on."""
        held = self.session.own(lease_id)
        return self._told(self.session.renew(held, self._hold_s(hold_minutes)))

    def release_lease(self, lease_id: LeaseId) -> LeaseAnswer:
        """Give the GPUs of a lease of this session back, or stop waiting for them. End your programs on them first."""
        return self._told(self.session.release(self.session.own(lease_id)))

    def _told(self, held: SessionLease) -> LeaseAnswer:
        queued = held.lease.state is LeaseState.QUEUED
        return answers.lease_answer(held, self.session.client.explain(held.lease.id) if queued else None)

    def _hold_s(self, minutes: float) -> float:
        return min(minutes * 60, self.session.max_hold_s)


def agent_name(session: AgentSession, ctx: Context[Any, Any]) -> str:
    """The name that the server was started with, else that of the client."""
    if session.agent is None:
        params = ctx.session.client_params
        session.agent = (params.client_info.name if params is not None else "mcp")[:100]
    return session.agent
