"""Request bodies.

A body checks itself when it is made, so that the client refuses before it sends and the server before it decides.
"""

from __future__ import annotations

import re
from dataclasses import field, fields
from typing import Annotated, Any, ClassVar, Literal

from gpulease_protocol import job_arrays
from gpulease_protocol.bounds import MAX_PATH, MAX_UUID, MEMORY, NAME, OVER_0, TIME, Bounds, check_bounds, check_field
from gpulease_protocol.codec import wire_name
from gpulease_protocol.errors import shortened
from gpulease_protocol.gpu_uuid import canonical_uuid
from gpulease_protocol.job_checks import (
    NO_LIMIT,
    RESOURCE_LIMITS,
    check_environment,
    check_notify,
    check_resource_limits,
    environment_bytes,
)
from gpulease_protocol.launchers import choose_launcher, usage_error
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Demand, JobDependency, JobSpec, Launcher, Mask, Priority, Selection, TopologyMode

MAX_COUNT = 4096
"""GPUs in one lease, at most."""
MAX_NODES = 256
"""Nodes in one lease, at most."""
MAX_TEXT = 4096
"""Characters in a label or name, at most."""
REALM_PATTERN = r"^[0-9a-f-]{36}/pid:\[[0-9]{1,20}\]$"
"""A boot id and a pid namespace."""
MAX_RETRIES = 100
"""Restarts or retries of one job, at most."""
MAX_DEPENDENCIES = 100
"""Jobs and arrays that one job waits for, at most."""
MAX_ARRAY_BYTES = 64 * 2**20
"""Size of the environments of an array's jobs together, at most: each job keeps its own."""
NO_UUID = f"must name GPUs by UUIDs of at most {MAX_UUID} characters"
NO_COMMAND = "must name a script or program"
LIGHTNING_FORMS = 'a count, -1, "auto", a list of indices or UUIDs, or the same as text ("2", "1, 3", "-1")'

AGENT = Bounds(maxLength=100)
"""The name of a program or of its session."""
FENCE = Bounds(minimum=10, maximum=604800, rule="must be 10 to 604800 seconds (a week)")
"""How long a job may run without an answer of a daemon: longer than a worker waits for one."""
RECLAIM = Bounds(minimum=60, maximum=31622400, rule="must be 60 to 31622400 seconds (a year)")

GpuName = Annotated[str, Bounds(maxLength=MAX_UUID, rule=NO_UUID)]
"""A UUID, in any case."""
SoftHard = Annotated[list[Annotated[int, Bounds(minimum=-1, exclusiveMaximum=2**63)]], Bounds(minItems=2, maxItems=2)]
"""A resource limit."""


class RequestBody:
    """Marks a request body: unknown fields are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "allow_inf_nan": False,
        "alias_generator": wire_name,
        "defer_build": True,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest(RequestBody):
    """Body of `POST /v1/leases`. Give `count` or `devices`; neither means one GPU."""

    count: Annotated[int | None, Bounds(minimum=1, maximum=MAX_COUNT)] = None
    """How many GPUs, 1 to 4096. With `nodes`, on each of them."""
    nodes: Annotated[int, Bounds(minimum=1, maximum=MAX_NODES)] = 1
    """On how many nodes, 1 to 256: `count` GPUs on each of them, all or none, and all of one model."""
    devices: int | str | list[int | str] | None = None
    """Any form that Lightning's Trainer takes: a count, -1, "auto", a list of indices or UUIDs, or the same as text. A
    list is granted in its order: with [3, 1], GPU 3 is the first that CUDA shows."""
    queue: bool = True
    """Wait in the queue when the GPUs are not free; false: answer 409 instead."""
    ttl_s: Annotated[float, OVER_0] = 300.0
    """How long the lease lasts after its last renewal, over 0."""
    time_s: Annotated[float | None, TIME] = None
    """End the lease after it has held its GPUs for this long, at most a year, however often it is renewed."""
    label: Annotated[str, Bounds(maxLength=MAX_TEXT)] = ""
    """Free text shown to users who wait."""
    agent: Annotated[str, AGENT] = ""
    """The program that asks on your behalf, such as a coding agent."""
    session: Annotated[str, AGENT] = ""
    """The session of that program."""
    min_free_memory_bytes: Annotated[int | None, MEMORY] = None
    """Only GPUs with at least this much free memory."""
    gpu_model: Annotated[str | None, NAME] = None
    """Only GPUs with this text in their product name; case does not matter."""
    node: Annotated[str | None, NAME] = None
    """Only GPUs of this node."""
    among: Annotated[list[GpuName] | None, Bounds(maxItems=MAX_COUNT, rule=f"must name at most {MAX_COUNT} GPUs")] = (
        None
    )
    """Only GPUs of this list of UUIDs."""
    topology: Literal["required", "preferred", "any"] = "preferred"
    """`preferred`: of the GPUs that are free on a node, those that are connected best. It never waits for others.
    `required`: only GPUs that are all connected to each other by NVLink, on each node; it waits for them, and is
    refused where no node could ever have them. `any`: the first ones that are free."""
    priority: Literal["interactive", "normal", "scavenge"] = "normal"
    """Requests of a higher priority go first. Of `interactive` ones a user may have few GPUs at a time, and each ends
    after a time that the administrator sets, 4 hours unless told otherwise."""
    preemptible: bool | None = None
    """Whether it may end, after a notice, for the first request that waits, where the administrator has switched that
    on; nothing ends for it then. Null: only with priority `scavenge`, for which it cannot be false."""
    reclaim_idle_after_s: Annotated[float | None, RECLAIM] = None
    """Take the GPUs back once none has worked for so long, and others wait for them; told at least 5 minutes ahead."""
    owner_pid: Annotated[int | None, Bounds(minimum=1, exclusiveMaximum=2**31, rule="must be a process id, over 0")] = (
        None
    )
    """Process that owns the lease; the caller when null. One that the daemon can watch ends its lease by ending: it
    must run on the daemon's host as the caller's user, and be the caller, an ancestor of it (`$$` of a shell that runs
    curl on the Unix socket), or be named with its start time. On another host with a worker it must run as the caller's
    user, and be named with its start time and realm."""
    owner_start_ticks: Annotated[
        int | None, Bounds(minimum=0, exclusiveMaximum=2**63, rule="must be 0 or more clock ticks")
    ] = None
    """Start time of that process in clock ticks since boot (field 22 of /proc/PID/stat), because a pid is used
    again."""
    watch_owner: bool = True
    """Whether the lease ends with that process where it can be watched; false: those who use the GPUs renew it."""
    adopt: bool = False
    """Lease the GPUs that `owner_pid` and the processes below it use already, until it ends: all of them, and only if
    no one else's process is on them. It must be the caller's own, or the caller an administrator. Never queues."""
    owner_realm: Annotated[
        str | None, Bounds(pattern=REALM_PATTERN, rule="must be a boot id, a slash, and pid:[N]")
    ] = None
    """Where that pid counts, for a caller on another host than the daemon's: `BOOT/NAMESPACE`, the content of
    /proc/sys/kernel/random/boot_id and the target of the link /proc/self/ns/pid."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_field(self.count is None or self.devices is None, "count", "give count or devices, not both")
        check_field(
            self.owner_start_ticks is None or self.owner_pid is not None,
            "owner_start_ticks",
            "must come with owner_pid",
        )
        selection = {} if self.devices is None else parse_devices(self.devices)
        check_gang(self.nodes, selection.get("count", self.count or 1), self.node)
        check_field(
            self.nodes == 1 or "selection" not in selection,
            "devices",
            "with nodes over 1 must be a count: give how many GPUs to lease on each node",
        )
        check_field(
            self.topology != "required" or selection.get("selection") is not Selection.AUTO,
            "topology",
            'cannot be required with devices "auto", which takes what is free: give a count',
        )
        may_end(self.priority, self.preemptible)
        if self.adopt:
            check_field(not self.preemptible, "adopt", "takes a process that runs, so leave out preemptible")
            check_field(self.owner_pid is not None, "adopt", "must come with owner_pid, the process")
            chosen = [name for name in CHOICE_FIELDS if getattr(self, name) is not None]
            chosen += ["topology"] if self.topology != "preferred" else []
            check_field(self.nodes == 1, "adopt", "takes the GPUs that the process uses, so leave out nodes")
            check_field(not chosen, "adopt", f"takes the GPUs that the process uses, so leave out {', '.join(chosen)}")
            check_field(self.watch_owner, "adopt", "needs watch_owner")

    def demand(self) -> Demand:
        """The GPUs asked for. Raises ValueError for a form of `devices` that means nothing."""
        selection: dict[str, Any] = {"count": self.count or 1} if self.devices is None else parse_devices(self.devices)
        return Demand(
            nodes=self.nodes,
            node=self.node,
            gpu_model=self.gpu_model,
            min_free_memory_bytes=self.min_free_memory_bytes,
            among=None if self.among is None else tuple(canonical_uuid(uuid) for uuid in self.among),
            time_s=self.time_s,
            topology=TopologyMode(self.topology),
            priority=Priority(self.priority),
            preemptible=may_end(self.priority, self.preemptible),
            reclaim_idle_after_s=self.reclaim_idle_after_s,
            **selection,
        )


CHOICE_FIELDS = ("count", "devices", "min_free_memory_bytes", "gpu_model", "node", "among")
"""What a client says of the GPUs that it asks for."""
OWNER_FIELDS = frozenset(item.name for item in fields(LeaseRequest) if "owner" in item.name)
"""What a client says of itself, and not of what it asks for. Without it the holder renews."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRequest(RequestBody):
    """Makes many jobs of one request: one for each index, in this order."""

    indices: Annotated[str, Bounds(pattern=job_arrays.PATTERN)]
    """Numbers and ranges, as in "0-19", "1,4,9" or "0-100:10"; at most 1000."""
    at_most: Annotated[int | None, Bounds(minimum=1, maximum=job_arrays.MAX_JOBS)] = None
    """How many of them may run at once; null for no limit."""

    def __post_init__(self) -> None:
        job_arrays.parse_indices(self.indices)
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest(RequestBody):
    """Body of `POST /v1/jobs`."""

    command: Annotated[list[str], Bounds(minItems=1, rule=NO_COMMAND)]
    """Script and arguments; with launcher `plain`, the program and its arguments."""
    gpus: Annotated[int, Bounds(minimum=1, maximum=MAX_COUNT)] = 1
    """How many GPUs; a launcher that starts ranks starts one on each. With `nodes`, on each of them."""
    nodes: Annotated[int, Bounds(minimum=1, maximum=MAX_NODES)] = 1
    """On how many nodes, 1 to 256: a launcher starts on each of them, all or none."""
    max_nodes: Annotated[int | None, Bounds(minimum=2, maximum=MAX_NODES)] = None
    """Makes it an elastic job, with `torchrun`: it starts on as many nodes as are free, from `nodes` to this, 2 to 256.
    It goes on with the others when one is lost, and with one more when that comes back; each time all ranks start
    again, from the checkpoint that the script has written."""
    launcher: (
        Literal["torchrun", "accelerate", "deepspeed", "lightning", "fabric", "horovodrun", "bagua", "plain"] | None
    ) = None
    """What starts the ranks. With `lightning` and `fabric` the script does, and with `plain` no one or the script. When
    null, `torchrun` for a command that begins with a Python script (`train.py`) or `-m MODULE`, and `plain` for any
    other."""
    environment: dict[str, str] = field(default_factory=dict)
    """The job's variables, at most 4096 and 1 MiB. PATH, locale and library paths are the worker's where these do not
    set them."""
    working_directory: Annotated[
        str | None,
        Bounds(pattern="^/", maxLength=MAX_PATH, rule=f"must be absolute, and at most {MAX_PATH} characters"),
    ] = None
    """Absolute path where the command runs; the job's own directory when null."""
    interpreter: Annotated[str | None, Bounds(maxLength=MAX_PATH)] = None
    """Python that runs launcher and script; when null that of VIRTUAL_ENV in `environment`, else the worker's own."""
    name: Annotated[str, Bounds(maxLength=MAX_TEXT)] = ""
    """Free text of your own."""
    agent: Annotated[str, AGENT] = ""
    """The program that asks on your behalf, such as a coding agent."""
    session: Annotated[str, AGENT] = ""
    """The session of that program."""
    timeout_s: Annotated[float | None, TIME] = None
    """End the job after it has run for this long, at most a year."""
    max_restarts: Annotated[int, Bounds(minimum=0, maximum=MAX_RETRIES)] = 0
    """How many times `torchrun` or `accelerate` may start all ranks again, under the same lease; 0 to 100."""
    retries: Annotated[int, Bounds(minimum=0, maximum=MAX_RETRIES)] = 0
    """How many times to start the job again after it has failed, after a pause and under a new lease; 0 to 100."""
    umask: Annotated[int | None, Bounds(minimum=0, maximum=0o777, rule="must be 0 to 511 (0o777)")] = None
    """File mode creation mask, 0 to 511 (0o777); when null 0o022 under a root worker, else the worker's."""
    limits: Annotated[dict[str, SoftHard], Bounds(propertyNames={"enum": sorted(RESOURCE_LIMITS)}, rule=NO_LIMIT)] = (
        field(default_factory=dict)
    )
    """Resource limits, `[soft, hard]` by name: `nofile` is RLIMIT_NOFILE of setrlimit(2). -1 is unlimited."""
    mask: Literal["uuids", "indices"] | None = None
    """How CUDA_VISIBLE_DEVICES names the GPUs: by UUID, or by CUDA's own numbers for programs that read nothing else.
    When null, `indices` for deepspeed and vLLM, and `uuids` for all others."""
    node: Annotated[str | None, NAME] = None
    """Only on this node."""
    gpu_model: Annotated[str | None, NAME] = None
    """Only GPUs with this text in their product name; case does not matter."""
    min_free_memory_bytes: Annotated[int | None, MEMORY] = None
    """Only GPUs with at least this much free memory."""
    topology: Literal["required", "preferred", "any"] = "preferred"
    """`preferred`: of the GPUs that are free on a node, those that are connected best. It never waits for others.
    `required`: only GPUs that are all connected to each other by NVLink, on each node; it waits for them, and is
    refused where no node could ever have them. `any`: the first ones that are free."""
    priority: Literal["interactive", "normal", "scavenge"] = "normal"
    """Requests of a higher priority go first. Of `interactive` ones a user may have few GPUs at a time, and each ends
    after a time that the administrator sets, 4 hours unless told otherwise."""
    preemptible: bool | None = None
    """Whether it may end, after a notice, for the first request that waits, where the administrator has switched that
    on; nothing ends for it then. Null: only with priority `scavenge`, for which it cannot be false."""
    reclaim_idle_after_s: Annotated[float | None, RECLAIM] = None
    """Take the GPUs back once none has worked for so long, and others wait for them; told at least 5 minutes ahead."""
    after: Annotated[
        list[JobDependency], Bounds(maxItems=MAX_DEPENDENCIES, rule=f"must name at most {MAX_DEPENDENCIES} jobs")
    ] = field(default_factory=list)
    """Jobs and arrays that must end before this job joins the queue."""
    notify: Annotated[str | None, Bounds(minLength=1, maxLength=MAX_TEXT)] = None
    """Tells of the job's end: an http or https URL gets the job as JSON by POST; anything else is a command for
    /bin/sh. Both as the job's user, on its node."""
    fence_s: Annotated[float | None, FENCE] = None
    """What it means for the job if its node cannot reach the daemon. When null, it goes on for as long as that takes.
    Else its node ends it after so many seconds, 10 to 604800; the daemon counts it as lost 30 s later (and 0.2 %), and
    starts its next attempt elsewhere if `retries` leaves one. Two attempts never run at once."""
    array: ArrayRequest | None = None
    """Submit one job for each index. Each finds GPULEASE_ARRAY_INDEX and GPULEASE_ARRAY_ID in its environment, and
    `{index}` in `command` becomes its index."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_gang(self.nodes, self.gpus, self.node)
        may_end(self.priority, self.preemptible)
        check_field(bool(self.command[0]), "command", NO_COMMAND)
        check_field(not any("\0" in word for word in self.command), "command", "must not contain NUL")
        wrong = usage_error(self.effective_launcher, self.command, self.max_restarts, self.nodes)
        if wrong is not None:
            raise ValueError(wrong)
        check_elastic(self.nodes, self.max_nodes, self.gpus, self.effective_launcher)
        check_environment(self.environment, self.command)
        check_resource_limits(self.limits)
        check_notify(self.notify)
        for dependency in self.after:
            check_bounds(dependency)
        check_field(len({one.job for one in self.after}) == len(self.after), "after", "names a job twice")
        if self.array is not None:
            count = len(job_arrays.parse_indices(self.array.indices))
            # An index may have four digits more than the word that stands for it.
            words = (len(word.encode(errors="surrogatepass")) + 4 * word.count("{") for word in self.command)
            size = environment_bytes(self.environment) + sum(words)
            check_field(
                count * size <= MAX_ARRAY_BYTES,
                "array",
                f"{count} commands and environments of {size} bytes are over {MAX_ARRAY_BYTES}; leave out what the jobs"
                " do not need",
            )

    def demand(self) -> Demand:
        """The GPUs asked for."""
        return Demand(
            count=self.gpus,
            nodes=self.nodes,
            max_nodes=self.max_nodes,
            node=self.node,
            gpu_model=self.gpu_model,
            min_free_memory_bytes=self.min_free_memory_bytes,
            time_s=self.timeout_s,
            topology=TopologyMode(self.topology),
            priority=Priority(self.priority),
            preemptible=may_end(self.priority, self.preemptible),
            reclaim_idle_after_s=self.reclaim_idle_after_s,
        )

    @property
    def effective_launcher(self) -> Launcher:
        """The launcher that was asked for, or that follows from the command."""
        return choose_launcher(self.command) if self.launcher is None else Launcher(self.launcher)

    def spec(self) -> JobSpec:
        """What the worker is to run."""
        return JobSpec(
            command=tuple(self.command),
            gpus=self.gpus,
            nodes=self.nodes,
            max_nodes=self.max_nodes,
            launcher=self.effective_launcher,
            environment=dict(self.environment),
            working_directory=self.working_directory,
            interpreter=self.interpreter,
            timeout_s=self.timeout_s,
            max_restarts=self.max_restarts,
            retries=self.retries,
            umask=self.umask,
            limits={name: (soft, hard) for name, (soft, hard) in self.limits.items()},
            mask=None if self.mask is None else Mask(self.mask),
            notify=self.notify,
            fence_s=self.fence_s,
            priority=Priority(self.priority),
            preemptible=may_end(self.priority, self.preemptible),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderProof(RequestBody):
    """Body of renew and release: proof that the caller is the holder."""

    fencing_token: int | None = None
    """The fencing token that the lease's grant showed; null or absent while it is queued. It is no bearer token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest(RequestBody):
    """Body of `POST /v1/jobs/{id}/cancel`; may be left out."""

    grace_s: Annotated[float, Bounds(minimum=0, maximum=3600)] = 35.0
    """Seconds between SIGTERM to the launcher and SIGKILL to everything, 0 to 3600."""

    def __post_init__(self) -> None:
        check_bounds(self)


def may_end(priority: str, preemptible: bool | None) -> bool:
    """Whether a request of this priority may end for others. Raises ValueError where it says no, and must."""
    is_scavenge = priority == Priority.SCAVENGE
    check_field(
        not is_scavenge or preemptible is not False,
        "preemptible",
        "cannot be false with priority scavenge, which ends for others; ask with priority normal",
    )
    return is_scavenge or bool(preemptible)


def check_gang(nodes: int, count: int, node: str | None) -> None:
    """Raise ValueError unless so many GPUs can be leased on each of so many nodes."""
    check_field(nodes == 1 or node is None, "nodes", "cannot be over 1 with node, which names a single one")
    total = nodes * count
    check_field(
        total <= MAX_COUNT, "nodes", f"{nodes} nodes with {count} GPUs each are over {MAX_COUNT}, the most GPUs"
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
        check_field(1 <= devices <= MAX_COUNT, "devices", f"a count must be -1 or 1 to {MAX_COUNT}, not {devices}")
        return {"count": devices}
    forms = f"must be {LIGHTNING_FORMS}, not {shortened(repr(devices))}"
    is_list = isinstance(devices, list | tuple)
    check_field(is_list and all(isinstance(item, int | str) for item in devices), "devices", forms)
    indices = tuple(item for item in devices if isinstance(item, int))
    check_field(all(len(item) <= MAX_UUID for item in devices if isinstance(item, str)), "devices", NO_UUID)
    uuids = tuple(canonical_uuid(item) for item in devices if isinstance(item, str))
    check_field(bool(devices), "devices", f"must be {LIGHTNING_FORMS}")
    check_field(all(index >= 0 for index in indices), "devices", "an index must be 0 or more")
    check_field(all(uuid.startswith("GPU-") for uuid in uuids), "devices", forms)
    check_field(len(set(indices)) + len(set(uuids)) == len(devices), "devices", "names a GPU twice")
    check_field(len(devices) <= MAX_COUNT, "devices", f"must name at most {MAX_COUNT} GPUs")
    return {"selection": Selection.LISTED, "count": len(devices), "indices": indices, "uuids": uuids}


def check_elastic(nodes: int, max_nodes: int | None, gpus: int, launcher: Launcher) -> None:
    """Raise ValueError unless a job may run on `nodes` to `max_nodes` nodes."""
    if max_nodes is None:
        return
    check_field(nodes >= 2, "nodes", "must be 2 or more with max_nodes: an elastic job runs on several nodes")
    check_field(max_nodes >= nodes, "max_nodes", f"must be at least nodes, which is {nodes}")
    check_field(
        launcher is Launcher.TORCHRUN,
        "max_nodes",
        f"only torchrun can run on a number of nodes that changes, not {launcher}; leave max_nodes out",
    )
    total = max_nodes * gpus
    check_field(total <= MAX_COUNT, "max_nodes", f"{max_nodes} nodes with {gpus} GPUs each are over {MAX_COUNT}")
