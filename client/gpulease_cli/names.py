"""Finds what a user means: jobs, arrays and leases by id, by the beginning of an id, or by the name of an own job.
Administrators may name the jobs of another user too, where no one else has a job of that name.

A full id costs no request. Anything else costs at most five, however many records there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpulease.client import Client
from gpulease_protocol import endpoints
from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Gpu, Job
from gpulease_protocol.status_table import job_label, printable
from gpulease_protocol.tokens import Role

FULL_ID = re.compile(r"(job|array|lease)-[0-9a-f]{16}(r[0-9]+)?")
BEGINNING = re.compile(r"(?:(job|array|lease)-)?([0-9a-f]{1,16})")
MEMBER = re.compile(r"(.+)\[([0-9]{1,10})\]")
"""A job of an array, as `gpulease jobs` shows it: `sweep[3]`."""
MIN_DIGITS = 4
"""Fewest digits of an id without its kind, and of a UUID: a shorter word is more likely something else."""
MAX_LISTED = 8
"""Candidates in an error, at most."""
MAX_LOOKED_AT = 1000
"""Jobs of a name, or with the beginning of an id, that are looked at: the newest."""
JOBS_AND_ARRAYS = ("job", "array")
LEASES_TOO = ("job", "array", "lease")


@dataclass(frozen=True, slots=True)
class Match:
    """What a name means."""

    kind: str
    """`job`, `array` or `lease`."""
    id: str
    name: str = ""
    """What people call it, where that is not its id."""

    def __str__(self) -> str:
        return f"{self.id} ({printable(self.name)})" if self.name else self.id


def find(client: Client, word: str, kinds: Sequence[str] = JOBS_AND_ARRAYS, *, single: bool = False) -> Match:
    """The job, array or lease that `word` means. Raises NotFound, or InvalidRequest if it means several.

    Of several own jobs with this name it is the newest, one that has not ended before one that has. With `single`,
    for what ends them, several that have not ended are too many.
    """
    if not word:  # else it would be the name of every job that has none
        raise InvalidRequest(
            "An empty word names no job and no lease.", remedy="Was a variable to be here, and is unset?"
        )
    if any("\ud800" <= character <= "\udfff" for character in word):
        raise InvalidRequest(f"{word!a} is not UTF-8 text, so nothing has this name.")
    if whole := FULL_ID.fullmatch(word):
        return Match(whole[1], word)
    if member := MEMBER.fullmatch(word):
        return _member(find(client, member[1], ("array",)), client, int(member[2]), word)
    found = _by_beginning(client, word, kinds)
    if len(found) > 1:
        raise _ambiguous(word, found, "Give more of the id.")
    return found[0] if found else _by_name(client, word, single)


def is_array(word: str) -> bool:
    """True for the id of an array, or its beginning."""
    return word.startswith("array-") and not word.endswith("]")


def find_job(client: Client, word: str) -> Job:
    """The job that `word` means; for the id of a lease the job that runs under it. Raises NotFound, InvalidRequest."""
    match = find(client, word, LEASES_TOO)
    if match.kind == "array":
        raise InvalidRequest(
            f"{match} is an array of jobs, and this command takes one job.",
            remedy=f"Name one: {match.name or match.id}[INDEX]. `gpulease jobs --array {match.id}` lists them.",
        )
    if match.kind == "lease":
        job_id = client.lease_by_id(match.id).job_id
        if job_id is None:
            raise NotFound(f"No job runs under {match.id}.", remedy="`gpulease jobs` lists the jobs.")
        return client.job(job_id)
    return client.job(match.id)


def find_jobs(client: Client, word: str, *, single: bool = False) -> tuple[Job, ...]:
    """The job, or all jobs of the array, that `word` means; an array by index. Raises NotFound, InvalidRequest."""
    match = find(client, word, single=single)
    return members(client, match.id) if match.kind == "array" else (client.job(match.id),)


def members(client: Client, array_id: str) -> tuple[Job, ...]:
    """The jobs of an array, by index. Raises NotFound."""
    jobs = client.jobs(array=array_id)
    if not jobs:
        raise NotFound(f"There is no array {array_id}.", remedy="`gpulease jobs` shows arrays as NAME[INDEX].")
    return tuple(sorted(jobs, key=lambda job: job.array_index or 0))


def find_lease(client: Client, word: str) -> tuple[str, Job | None]:
    """The id of the lease that `word` means; or of the lease of the job that it means, with that job. Raises NotFound,
    InvalidRequest."""
    match = find(client, word, LEASES_TOO)
    if match.kind == "lease":
        return match.id, None
    job = find_job(client, match.id)
    return job.lease_id, job


def find_gpu(client: Client, word: str) -> Gpu:
    """The GPU of this UUID, beginning of a UUID, NODE:INDEX, or INDEX where there is one node. Raises NotFound, and
    InvalidRequest if several match."""
    gpu = look_for_gpu(client.gpus(), word)
    if gpu is None:
        raise NotFound(f"There is no GPU {word}.", remedy="`gpulease gpu list` shows nodes, indices and UUIDs.")
    return gpu


def look_for_gpu(gpus: Sequence[Gpu], word: str) -> Gpu | None:
    """As `find_gpu`; None if there is none. Raises InvalidRequest if several match."""
    prefix = word.lower().removeprefix("gpu-")
    matches = [gpu for gpu in gpus if word in (gpu.uuid, f"{gpu.node}:{gpu.index}")]
    if not matches and len({gpu.node for gpu in gpus}) == 1:
        matches = [gpu for gpu in gpus if word == str(gpu.index)]
    if not matches and len(prefix) >= MIN_DIGITS:
        matches = [gpu for gpu in gpus if gpu.uuid.lower().removeprefix("gpu-").startswith(prefix)]
    if len(matches) < 2:
        return matches[0] if matches else None
    raise _ambiguous(word, [f"{gpu.uuid} ({gpu.node}:{gpu.index})" for gpu in matches], "Give more of the UUID.")


def _by_beginning(client: Client, word: str, kinds: Sequence[str]) -> list[Match]:
    """Everything with an id that begins like this; of a lease's attempts the newest."""
    beginning = BEGINNING.fullmatch(word)
    if beginning is None or (beginning[1] is None and len(beginning[2]) < MIN_DIGITS):
        return []
    found: dict[str, Match] = {}
    for kind in kinds if beginning[1] is None else (beginning[1],):
        prefix = f"{kind}-{beginning[2]}"
        if kind == "lease":
            leases = client.send(endpoints.leases(id_prefix=prefix)).items
            found = {(one.job_id or one.id): Match(kind, one.id, one.holder.label) for one in leases[::-1]} | found
        else:
            limit = MAX_LOOKED_AT if kind == "array" else MAX_LISTED + 1
            jobs = client.send(endpoints.jobs((), None, limit, id_prefix=prefix)).items
            found |= {match.id: match for match in (_of_job(job, kind) for job in jobs)}
    return list(found.values())


def _by_name(client: Client, word: str, single: bool) -> Match:
    """The newest of the caller's jobs with this name, or its array; else, for administrators, of another user's."""
    me = client.me()
    jobs = client.send(endpoints.jobs((), None, MAX_LOOKED_AT, user=me.user, name=word)).items
    if not jobs and me.role is Role.ADMIN:
        jobs = client.send(endpoints.jobs((), None, MAX_LOOKED_AT, name=word)).items
    live = [job for job in jobs if not job.ended]
    found = list(dict.fromkeys(_of_job(job, "array" if job.array_id else "job") for job in live or jobs))
    if not found:
        raise NotFound(
            f"No id begins with {printable(word)!r}, and {me.user} has no job of this name.",
            remedy="`gpulease jobs --mine --all` lists your jobs, `gpulease leases` leases.",
        )
    users = {job.user for job in live or jobs}
    if len(users) > 1:
        raise _ambiguous(word, found, "Give an id.")
    if single and live and len(found) > 1:
        raise _ambiguous(word, found, "Give an id, or `--name` for all of them.")
    return found[0]


def _of_job(job: Job, kind: str) -> Match:
    if kind == "array":
        return Match("array", job.array_id or "", job.name)
    return Match("job", job.id, (job_label(job) or "") if job.name else "")


def _member(array: Match, client: Client, index: int, word: str) -> Match:
    for job in client.jobs(array=array.id):
        if job.array_index == index:
            return _of_job(job, "job")
    raise NotFound(f"There is no {word}.", remedy=f"`gpulease jobs --array {array.id}` lists the jobs of the array.")


def _ambiguous(word: str, found: Sequence[Any], remedy: str) -> InvalidRequest:
    several = ", ".join(map(str, found[:MAX_LISTED])) + (", ..." if len(found) > MAX_LISTED else "")
    return InvalidRequest(f"{printable(word)} may be any of {several}.", remedy=remedy)
