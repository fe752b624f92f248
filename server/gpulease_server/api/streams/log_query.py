"""The part of a job's logs that a request asks for."""

from __future__ import annotations

import re
from dataclasses import replace

from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.host.log_reader import LAUNCHER, RANK_LOG, key_of
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Job
from gpulease_server.core.records import JobRecord

OF_FILES = r"(?:\d{1,4}|launcher):\d{1,18}(?:,(?:\d{1,4}|launcher):\d{1,18})*"
OF_NODE = rf"\d{{1,4}}/(?:{OF_FILES}|\d{{1,18}})"
OFFSET_FORMAT = re.compile(
    rf"(?:(?P<attempt>\d{{1,6}})@)?(?:(?P<offset>\d{{1,18}})|(?P<files>{OF_FILES})|(?P<nodes>{OF_NODE}(?:;{OF_NODE})*))"
)


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The part of a job's logs that a request asks for."""

    name: str | None
    """Name of the file; None for those of all ranks, merged."""
    node: str | None
    """Logs of this node; None: of the node of the rank, or of all."""
    attempt: int | None
    """The attempt that the offset belongs to; None for the last one."""
    offset: str
    """Where to begin: in a file, in several by `log_reader.key_of`, or in those of several nodes."""
    tail: int | None
    """Begin with this number of last lines of each file."""
    follow: bool
    """Continue until the job has ended."""
    only_attempt: int | None = None
    """The log of this attempt; None: of the last one."""

    @classmethod
    def parse(
        cls,
        rank: str | None,
        node: str | None,
        offset: str | None,
        tail: int | None,
        follow: bool,
        only_attempt: int | None = None,
    ) -> LogQuery:
        """The query parameters, checked. Raises InvalidRequest."""
        name = None if rank == "all" else LAUNCHER if rank is None else f"rank-{int(rank)}.log"
        if follow and only_attempt is not None:
            raise InvalidRequest("attempt: cannot be combined with follow.", remedy="Give one of them.")
        if offset is None:
            return cls(name, node, None, "0", tail, follow, only_attempt)
        if tail is not None:
            raise InvalidRequest("offset: cannot be combined with tail.", remedy="Give one of them.")
        match = OFFSET_FORMAT.fullmatch(offset)
        of_merged = match is not None and match["nodes"] is None and (match["files"] or match["offset"] == "0")
        of_one = match is not None and match["nodes"] is None and match["files"] is None
        of_nodes = match is not None and match["nodes"] is not None and RANK_LOG.fullmatch(name or "") is None
        if match is None or not (of_nodes or (of_merged if name is None else of_one)):
            of = "the logs of all ranks" if name is None else "one log"
            raise InvalidRequest(
                f"offset: {offset[:60]!r} is no offset in {of}.",
                remedy="Give a number of bytes, or the Gpulease-Log-Offset or `at` of an answer for the same rank.",
            )
        attempt = int(match["attempt"]) if match["attempt"] else None
        begin = match["offset"] or match["files"] or match["nodes"]
        return cls(name, node, attempt, begin, tail, follow, only_attempt)

    def begin(self, attempt: int, first: bool) -> tuple[str, int | None]:
        """Where to begin in an attempt's files, and with how many last lines; `first` is False if an earlier attempt
        was read before."""
        same_attempt = first and self.attempt in (None, attempt)
        return self.offset if same_attempt else "0", self.tail if first else None

    def member_rank(self, job: Job) -> int | None:
        """The part of a job on several nodes that is asked for, by the rank of its node; None for all of them, and -1
        where the job has no such part."""
        rank = None if self.name is None else RANK_LOG.fullmatch(self.name)
        if rank is not None:
            of_rank = int(rank[1]) // (len(job.gpus) // len(job.members))
            member = next((one for one in job.members if one.rank == of_rank), None)
            return -1 if member is None or self.node not in (None, member.node) else member.rank
        if self.node is None:
            return None
        return next((one.rank for one in job.members if one.node == self.node), -1)

    def check(self, job: Job) -> None:
        """Raise InvalidRequest for a node, a rank or an offset that the job does not have."""
        nodes = [one.node for one in job.members] or sorted({gpu.node for gpu in job.gpus})
        if self.node is not None and nodes and self.node not in nodes:
            raise InvalidRequest(
                f"node: job {job.id} is not on node {self.node!r}, but on {', '.join(nodes)}.",
                remedy="Name one of these, or none.",
            )
        if not job.members:
            if "/" in self.offset and job.gpus:
                raise InvalidRequest("offset: is one of a job on several nodes.", remedy="Give a number of bytes.")
            return
        if self.member_rank(job) == -1:
            each = len(job.gpus) // len(job.members)
            of_each = ", ".join(
                f"{each * one.rank} to {each * one.rank + each - 1} on {one.node}" for one in job.members
            )
            raise InvalidRequest(f"rank: job {job.id} has the ranks {of_each}.", remedy="Ask for one of these.")
        if self.offset != "0" and ("/" in self.offset) != (self.member_rank(job) is None):
            raise InvalidRequest(
                f"offset: {self.offset[:60]!r} is no offset in what is asked for of job {job.id}.",
                remedy="Give the Gpulease-Log-Offset or `at` of an answer for the same node and rank.",
            )


def record_of_attempt(record: JobRecord, number: int, node: str | None) -> JobRecord:
    """A job as it was in an attempt, as far as its logs are concerned. Of an earlier one on several nodes only the log
    of the first node is known. `node`: the one that is asked for. Raises NotFound, and InvalidRequest for another
    node."""
    job = record.job
    earlier = next((one for one in job.attempt_history if one.number == number), None)
    if earlier is None:
        if number == job.attempts:
            return record
        raise NotFound(
            f"There is no attempt {number} of job {job.id}, or it is not kept.",
            remedy=f"`GET /v1/jobs/{job.id}` shows which there were, and which of the earlier ones are kept.",
        )
    if node not in (None, earlier.node):
        raise InvalidRequest(
            f"node: of attempt {number} of job {job.id} the log on {earlier.node} is kept, and none on {node!r}.",
            remedy=f"Name {earlier.node}, or no node.",
        )
    shown = replace(job, attempts=number, gpus=(), members=())
    return replace(record, job=shown, log_directory=earlier.log_directory)


def by_file(name: str | None, offset: str) -> dict[str, int]:
    """An offset as where to begin in each file, by `log_reader.key_of`; `name` as `LogQuery.name`."""
    if ":" in offset:
        return {key: int(place) for key, _, place in (part.partition(":") for part in offset.split(","))}
    return {} if name is None or not offset.isdecimal() else {key_of(name): int(offset)}


def by_node(offset: str) -> dict[int, str]:
    """An offset as where to begin in the log of each node, by its rank."""
    return {int(rank): place for rank, slash, place in (part.partition("/") for part in offset.split(";")) if slash}
