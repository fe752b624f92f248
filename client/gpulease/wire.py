"""Request bodies, and the nouns as JSON.

A body checks itself when it is made, so that the client refuses before it sends and the server before it decides.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import date, datetime
from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from gpulease import arrays
from gpulease.bounds import MEMORY, OVER_0, Bounds
from gpulease.launchers import objection
from gpulease.model import Demand, JobSpec, Launcher, Mask, Selection

MAX_COUNT = 4096
"""GPUs in one lease, at most."""
MAX_TEXT = 4096
"""Characters in a label or name, at most."""
MAX_RETRIES = 100
"""Restarts or retries of one job, at most."""
MAX_ENVIRONMENT_BYTES = 2**20
"""Size of a job's environment, at most; the kernel takes 2 MiB of arguments and environment together (execve(2))."""
MAX_ARRAY_BYTES = 64 * 2**20
"""Size of the environments of an array's jobs together, at most: each job keeps its own."""
MAX_WORD_BYTES = 2**17 - 1
"""Size of one variable or argument, at most: the kernel's MAX_ARG_STRLEN (execve(2))."""
ADDRESSABLE = re.compile(r"[!-+\-.0-~]{1,96}")
"""Printable ASCII without space, comma and slash."""
LIMITS = frozenset(
    (
        *("as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue"),
        *("nice", "nofile", "nproc", "rss", "rtprio", "rttime", "sigpending", "stack"),
    )
)
"""Names of resource limits, as in setrlimit(2)."""
LIGHTNING_FORMS = 'a count, -1, "auto", a list of indices or UUIDs, or the same as text ("2", "1, 3", "-1")'

T = TypeVar("T")
SoftHard = Annotated[list[Annotated[int, Bounds(minimum=-1, exclusiveMaximum=2**63)]], Bounds(minItems=2, maxItems=2)]
"""A resource limit."""


class Body:
    """Marks a request body: unknown fields are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest(Body):
    """Body of `POST /v1/leases`. Give `count` or `devices`; neither means one GPU."""

    count: Annotated[int | None, Bounds(minimum=1, maximum=MAX_COUNT)] = None
    """How many GPUs, 1 to 4096."""
    devices: int | str | list[int | str] | None = None
    """Any form that Lightning's Trainer takes: a count, -1, "auto", a list of indices or UUIDs, or the same as text."""
    queue: bool = True
    """Wait in the queue when the GPUs are not free; false: answer 409 instead."""
    ttl_s: Annotated[float, OVER_0] = 300.0
    """How long the lease lasts after its last renewal, over 0."""
    label: Annotated[str, Bounds(maxLength=MAX_TEXT)] = ""
    """Free text shown to whoever waits."""
    min_free_memory_bytes: Annotated[int | None, MEMORY] = None
    """Only GPUs with at least this much free memory."""
    gpu_model: str | None = None
    """Only GPUs whose product name contains this text, in any case."""
    node: str | None = None
    """Only GPUs of this node."""
    among: Annotated[list[str] | None, Bounds(maxItems=MAX_COUNT)] = None
    """Only GPUs of this list of UUIDs."""
    owner_pid: Annotated[int | None, Bounds(minimum=1, exclusiveMaximum=2**31)] = None
    """Process that owns the lease; the caller when null. One that the daemon can watch ends its lease by ending: it
    must run on the daemon's host as the caller's user, and be the caller, an ancestor of it (`$$` of a shell that runs
    curl on the Unix socket), or be named with its start time."""
    owner_start_ticks: Annotated[int | None, Bounds(minimum=0, exclusiveMaximum=2**63)] = None
    """Start time of that process in clock ticks since boot (field 22 of /proc/PID/stat), because a pid is used
    again."""

    def __post_init__(self) -> None:
        require(self.count is None or self.devices is None, "count", "give count or devices, not both")
        require(
            self.count is None or 1 <= self.count <= MAX_COUNT, "count", f"must be 1 to {MAX_COUNT}, not {self.count}"
        )
        require(math.isfinite(self.ttl_s) and self.ttl_s > 0, "ttl_s", f"must be over 0 seconds, not {self.ttl_s}")
        require(len(self.label) <= MAX_TEXT, "label", f"must be at most {MAX_TEXT} characters")
        require_memory(self.min_free_memory_bytes)
        require(self.among is None or len(self.among) <= MAX_COUNT, "among", f"must name at most {MAX_COUNT} GPUs")
        require(self.owner_pid is None or 0 < self.owner_pid < 2**31, "owner_pid", "must be a process id, over 0")
        require(
            self.owner_start_ticks is None or (self.owner_pid is not None and 0 <= self.owner_start_ticks < 2**63),
            "owner_start_ticks",
            "must be 0 or more clock ticks, and come with owner_pid",
        )
        self.demand()

    def demand(self) -> Demand:
        """The GPUs asked for. Raises ValueError for a form of `devices` that means nothing."""
        selection: dict[str, Any] = {"count": self.count or 1} if self.devices is None else parse_devices(self.devices)
        return Demand(
            node=self.node,
            gpu_model=self.gpu_model,
            min_free_memory_bytes=self.min_free_memory_bytes,
            among=None if self.among is None else tuple(spell_uuid(uuid) for uuid in self.among),
            **selection,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRequest(Body):
    """Makes many jobs of one request: one for each index, in this order."""

    indices: Annotated[str, Bounds(pattern=arrays.PATTERN)]
    """Numbers and ranges, as in "0-19", "1,4,9" or "0-100:10"; at most 1000."""
    at_most: Annotated[int | None, Bounds(minimum=1, maximum=arrays.MAX_JOBS)] = None
    """How many of them may run at once; null for no limit."""

    def __post_init__(self) -> None:
        arrays.indices(self.indices)
        require(
            self.at_most is None or 1 <= self.at_most <= arrays.MAX_JOBS,
            "at_most",
            f"must be 1 to {arrays.MAX_JOBS}, not {self.at_most}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest(Body):
    """Body of `POST /v1/jobs`."""

    command: Annotated[list[str], Bounds(minItems=1)]
    """Script and arguments; with launcher `plain`, the program and its arguments."""
    gpus: Annotated[int, Bounds(minimum=1, maximum=MAX_COUNT)] = 1
    """How many GPUs; a launcher that starts ranks starts one on each."""
    launcher: Literal["torchrun", "accelerate", "deepspeed", "lightning", "fabric", "horovodrun", "bagua", "plain"] = (
        "torchrun"
    )
    """What starts the ranks. With `lightning` and `fabric` the script does, and with `plain` nobody or the script."""
    environment: dict[str, str] = field(default_factory=dict)
    """The job's variables, at most 1 MiB; of the worker's it gets PATH, locale and library paths where these say
    nothing else."""
    working_directory: Annotated[str | None, Bounds(pattern="^/")] = None
    """Absolute path where the command runs; the job's own directory when null."""
    interpreter: str | None = None
    """Python that runs launcher and script; when null that of VIRTUAL_ENV in `environment`, else the worker's own."""
    name: Annotated[str, Bounds(maxLength=MAX_TEXT)] = ""
    """Free text of your own."""
    timeout_s: Annotated[float | None, OVER_0] = None
    """End the job after it has run for so long."""
    max_restarts: Annotated[int, Bounds(minimum=0, maximum=MAX_RETRIES)] = 0
    """How often `torchrun` or `accelerate` may start all ranks again, under the same lease; 0 to 100."""
    retries: Annotated[int, Bounds(minimum=0, maximum=MAX_RETRIES)] = 0
    """How often to start the job again after it has failed, after a pause and under a new lease; 0 to 100."""
    umask: Annotated[int | None, Bounds(minimum=0, maximum=0o777)] = None
    """File mode creation mask, 0 to 511 (0o777); the worker's when null."""
    limits: Annotated[dict[str, SoftHard], Bounds(propertyNames={"enum": sorted(LIMITS)})] = field(default_factory=dict)
    """Resource limits, `[soft, hard]` by name: `nofile` is RLIMIT_NOFILE of setrlimit(2). -1 is unlimited."""
    mask: Literal["uuids", "indices"] | None = None
    """How CUDA_VISIBLE_DEVICES names the GPUs: by UUID, or by CUDA's own numbers for programs that read nothing else.
    When null, `indices` for deepspeed and vLLM, and `uuids` for all others."""
    node: str | None = None
    """Only on this node."""
    gpu_model: str | None = None
    """Only GPUs whose product name contains this text, in any case."""
    min_free_memory_bytes: Annotated[int | None, MEMORY] = None
    """Only GPUs with at least this much free memory."""
    array: ArrayRequest | None = None
    """Submit one job for each index. Each finds GPULEASE_ARRAY_INDEX and GPULEASE_ARRAY_ID in its environment, and
    `{index}` in `command` becomes its index."""

    def __post_init__(self) -> None:
        require(bool(self.command) and bool(self.command[0]), "command", "must name a script or program")
        require(not any("\0" in word for word in self.command), "command", "must not contain NUL")
        wrong = objection(Launcher(self.launcher), self.command, self.max_restarts)
        if wrong is not None:
            raise ValueError(wrong)
        require(1 <= self.gpus <= MAX_COUNT, "gpus", f"must be 1 to {MAX_COUNT}, not {self.gpus}")
        require(
            self.timeout_s is None or self.timeout_s > 0, "timeout_s", f"must be over 0 seconds, not {self.timeout_s}"
        )
        require_memory(self.min_free_memory_bytes)
        require(len(self.name) <= MAX_TEXT, "name", f"must be at most {MAX_TEXT} characters")
        for name in ("max_restarts", "retries"):
            value = getattr(self, name)
            require(0 <= value <= MAX_RETRIES, name, f"must be 0 to {MAX_RETRIES}, not {value}")
        require(self.umask is None or 0 <= self.umask <= 0o777, "umask", f"must be 0 to 511 (0o777), not {self.umask}")
        require_environment(self.environment, self.command)
        require_limits(self.limits)
        if self.array is not None:
            count = len(arrays.indices(self.array.indices))
            # An index may have four digits more than the word that stands for it.
            size = _bytes_of(self.environment) + sum(len(word.encode()) + 4 * word.count("{") for word in self.command)
            require(
                count * size <= MAX_ARRAY_BYTES,
                "array",
                f"{count} commands and environments of {size} bytes are over {MAX_ARRAY_BYTES}; leave out what the jobs"
                " do not need",
            )
        require(
            self.working_directory is None or self.working_directory.startswith("/"),
            "working_directory",
            "must be absolute",
        )

    def demand(self) -> Demand:
        """The GPUs asked for."""
        return Demand(
            count=self.gpus, node=self.node, gpu_model=self.gpu_model, min_free_memory_bytes=self.min_free_memory_bytes
        )

    def spec(self) -> JobSpec:
        """What the worker is to run."""
        return JobSpec(
            command=tuple(self.command),
            gpus=self.gpus,
            launcher=Launcher(self.launcher),
            environment=dict(self.environment),
            working_directory=self.working_directory,
            interpreter=self.interpreter,
            timeout_s=self.timeout_s,
            max_restarts=self.max_restarts,
            retries=self.retries,
            umask=self.umask,
            limits={name: (soft, hard) for name, (soft, hard) in self.limits.items()},
            mask=None if self.mask is None else Mask(self.mask),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderProof(Body):
    """Body of renew and release: proof that the caller is the holder."""

    token: int | None = None
    """The lease's fencing token; null while it is queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest(Body):
    """Body of `POST /v1/jobs/{id}/cancel`; may be left out."""

    grace_s: Annotated[float, Bounds(minimum=0, maximum=3600)] = 35.0
    """Seconds between SIGTERM to the launcher and SIGKILL to everything, 0 to 3600."""

    def __post_init__(self) -> None:
        require(0 <= self.grace_s <= 3600, "grace_s", f"must be 0 to 3600 seconds, not {self.grace_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequest(Body):
    """Body of `POST /v1/nodes/{name}/pause`; may be left out."""

    force: bool = False
    """Pause although leases are active there: they stay, and nobody sees any more what happens on their GPUs."""


def require(condition: bool, name: str, rule: str) -> None:
    """Raise ValueError that names the field, unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: {rule}")


def require_memory(size_bytes: int | None) -> None:
    """Raise ValueError unless this can be the size of a memory."""
    require(size_bytes is None or 0 <= size_bytes < 2**62, "min_free_memory_bytes", "must be 0 to 2^62")


def _bytes_of(environment: dict[str, str]) -> int:
    return sum(len(f"{name}={value}".encode(errors="surrogatepass")) + 1 for name, value in environment.items())


def require_environment(environment: dict[str, str], command: list[str]) -> None:
    """Raise ValueError unless a process can be started with these variables and this command."""
    require(
        all(name and "=" not in name and "\0" not in name + value for name, value in environment.items()),
        "environment",
        "names must not be empty or contain '=', and nothing may contain NUL",
    )
    sizes = {name: len(f"{name}={value}".encode(errors="surrogatepass")) + 1 for name, value in environment.items()}
    long = max(sizes, key=sizes.__getitem__, default="")
    require(
        not sizes or sizes[long] <= MAX_WORD_BYTES,
        "environment",
        f"no variable may be over {MAX_WORD_BYTES} bytes, and {long!r} is {sizes.get(long)}; put it into a file",
    )
    size = sum(sizes.values())
    require(
        size <= MAX_ENVIRONMENT_BYTES,
        "environment",
        f"must be at most {MAX_ENVIRONMENT_BYTES} bytes (1 MiB), not {size}; leave out what the job does not need",
    )
    words = [len(word.encode(errors="surrogatepass")) + 1 for word in command]
    require(
        max(words) <= MAX_WORD_BYTES and sum(words) <= MAX_ENVIRONMENT_BYTES // 2,
        "command",
        f"no word may be over {MAX_WORD_BYTES} bytes, nor all over {MAX_ENVIRONMENT_BYTES // 2}; put them into a file",
    )


def require_limits(limits: dict[str, list[int]]) -> None:
    """Raise ValueError unless these can be resource limits."""
    for name, pair in limits.items():
        require(name in LIMITS, "limits", f"knows no {name!r}; there are {', '.join(sorted(LIMITS))}")
        require(
            len(pair) == 2
            and all(-1 <= value < 2**63 for value in pair)
            and (pair[1] == -1 or -1 < pair[0] <= pair[1]),
            "limits",
            f"{name} must be [soft, hard], each 0 to 2^63 or -1 for unlimited, and soft not over hard",
        )


def parse_devices(devices: int | str | list[int | str]) -> dict[str, Any]:
    """Members of a `Demand` for every form that Lightning's Trainer takes.

    An integer is a count, as is a text of one integer; a list, or a text with a comma, names GPUs; -1 is every GPU of a
    node; "auto" is every GPU that is free. Source: the table "devices" in Lightning's Trainer documentation.
    """
    if isinstance(devices, str):
        words = [word.strip() for word in devices.split(",")]
        if devices.strip().lower() == "auto":
            return {"selection": Selection.AUTO}
        if len(words) == 1 and re.fullmatch(r"-?\d{1,9}", words[0]):
            return parse_devices(int(words[0]))
        devices = [int(word) if re.fullmatch(r"\d{1,9}", word) else word for word in words if word]
    if isinstance(devices, int):
        if devices == -1:
            return {"selection": Selection.ALL}
        require(1 <= devices <= MAX_COUNT, "devices", f"a count must be -1 or 1 to {MAX_COUNT}, not {devices}")
        return {"count": devices}
    indices = tuple(item for item in devices if isinstance(item, int))
    uuids = tuple(spell_uuid(item) for item in devices if isinstance(item, str))
    require(bool(devices), "devices", f"must be {LIGHTNING_FORMS}")
    require(all(index >= 0 for index in indices), "devices", "an index must be 0 or more")
    require(all(uuid.startswith("GPU-") for uuid in uuids), "devices", f"must be {LIGHTNING_FORMS}, not {devices!r}")
    require(len(set(indices)) + len(set(uuids)) == len(devices), "devices", "names a GPU twice")
    require(len(devices) <= MAX_COUNT, "devices", f"must name at most {MAX_COUNT} GPUs")
    return {"selection": Selection.LISTED, "count": len(devices), "indices": indices, "uuids": uuids}


def spell_uuid(uuid: str) -> str:
    """A GPU UUID in the one spelling that CUDA takes: `GPU-` and lower-case hex."""
    return uuid.strip().lower().replace("gpu-", "GPU-", 1)


def addressable(uuid: str) -> bool:
    """True for a UUID that is spelled so, and that lists of GPUs and addresses can have in them."""
    return ADDRESSABLE.fullmatch(uuid) is not None and uuid == spell_uuid(uuid) and uuid.strip(".") != ""


def to_json(noun: Any) -> dict[str, Any]:
    """A noun or body as JSON-ready values: times in ISO 8601 with offset, days without, enums by value."""
    plain: dict[str, Any] = _plain(asdict(noun))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    return value.value if isinstance(value, Enum) else value


def from_json(kind: type[T], value: Any) -> T:
    """The noun for JSON values. Fields it does not know are passed over, so that an older client reads a newer daemon.

    Raises ValueError when a field is missing or of another shape.
    """
    try:
        read: T = _reader(typing.cast(Any, kind))(value)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error
    return read


@cache
def _types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def _as_it_is(value: Any) -> Any:
    return value


@cache
def _reader(kind: Any, item: Any = None) -> Callable[[Any], Any]:
    """What makes a `kind` of JSON; `item` is what the type variable of a page stands for. Made once for each type: a
    daemon reads tens of thousands of nouns when it starts."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, TypeVar):
        return _reader(item)
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not type(None)]
        one = _reader(inner[0]) if len(inner) == 1 else _as_it_is
        return one if one is _as_it_is else lambda value: None if value is None else one(value)
    if origin is tuple:
        entry = _reader(arguments[0], item)
        return tuple if entry is _as_it_is else lambda value: tuple(map(entry, value))
    if origin is dict:
        entry = _reader(arguments[1])
        return lambda value: {key: entry(found) for key, found in value.items()}
    if is_dataclass(origin or kind):
        return _noun_reader(origin or kind, *arguments[:1])
    if kind is datetime:
        return datetime.fromisoformat
    if kind is date:
        return date.fromisoformat
    return kind if isinstance(kind, type) and issubclass(kind, Enum) else _as_it_is


def _noun_reader(kind: Any, item: Any = None) -> Callable[[Any], Any]:
    readers = {name: _reader(hint, item) for name, hint in _types(kind).items()}
    special = [(name, reader) for name, reader in readers.items() if reader is not _as_it_is]

    def read(value: Any) -> Any:
        given = {name: value[name] for name in readers if name in value}
        for name, reader in special:
            if name in given:
                given[name] = reader(given[name])
        return kind(**given)

    return read
