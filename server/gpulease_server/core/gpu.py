"""What a GPU can be used for: its state, from the ledger and the last reading."""

from __future__ import annotations

from gpulease_protocol.model import Activity, Demand, GpuReading, GpuState, NodeMode, Process, ProcessType
from gpulease_protocol.node_protocol import PAUSED
from gpulease_server.core import gpu_state
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu_state import occupants, state_by_report
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import MPS_SERVER, Policy
from gpulease_server.core.records import GpuRecord, Instant, NodeObservation


def node_problem(ledger: Ledger, node: str, now: Instant, policy: Policy) -> str | None:
    """Why nothing is known of a node's GPUs at this moment; None when its last reading counts."""
    observation = ledger.node_observations.get(node)
    if node_mode(ledger, node) is NodeMode.PAUSED:
        closed = observation is not None and observation.problem == PAUSED
        return PAUSED if closed else f"{PAUSED}; its worker has not closed NVML yet"
    if observation is None:
        return f"node {node} has not reported yet"
    if is_silent(observation, now, policy):
        return f"node {node} has been silent for over {silence_limit_s(observation, policy):g} s"
    return observation.problem


def node_mode(ledger: Ledger, node: str) -> NodeMode:
    """What an administrator has made of a node."""
    record = ledger.nodes.get(node)
    return NodeMode.ACTIVE if record is None else record.mode


def is_cordoned(ledger: Ledger, gpu: GpuRecord) -> bool:
    """True when an administrator has taken the GPU, or its whole node, out of use, or the node leaves."""
    return gpu_state.is_cordoned(gpu, ledger.nodes.get(gpu.device.node)) or is_leaving(ledger, gpu.device.node)


def is_leaving(ledger: Ledger, node: str) -> bool:
    """True when the worker of a node has said that the node is about to go."""
    observation = ledger.node_observations.get(node)
    return observation is not None and observation.leaving


def ends_too_soon(ledger: Ledger, demand: Demand, node: str, now: Instant) -> bool:
    """True when a node goes before what was asked for must have ended. False where no time was declared."""
    observation = ledger.node_observations.get(node)
    until_s = None if observation is None else observation.available_until_s
    return until_s is not None and demand.time_s is not None and now.mono_s + demand.time_s > until_s


def reading_of(ledger: Ledger, gpu: GpuRecord) -> GpuReading | None:
    """The last reading of a GPU, of whatever age."""
    observation = ledger.node_observations.get(gpu.device.node)
    return observation.readings.get(gpu.device.uuid) if observation else None


def claimed_elsewhere(ledger: Ledger, gpu: GpuRecord) -> str | None:
    """Why a GPU that its node has is in the ledger of another daemon; None when it is not."""
    observation = ledger.node_observations.get(gpu.device.node)
    return observation.claimed_elsewhere.get(gpu.device.uuid) if observation else None


def mark_bystanders(reading: GpuReading, policy: Policy) -> GpuReading:
    """The reading with every bystander marked: a desktop's processes, an MPS server, and monitors that only have the
    device open. One without processes is returned as it is: most are, and copies are what a report costs."""
    if not reading.processes and not reading.opened_by:
        return reading
    processes = tuple(
        replace(
            process,
            bystander=process.lease_id is None and (_is_desktop(process, policy) or _is_mps_server(process, policy)),
        )
        for process in reading.processes
    )
    if reading.opened_by is None:
        return replace(reading, processes=processes)
    bystanders = {process.pid for process in processes if process.bystander}
    known = policy.monitor_names | policy.desktop_names
    opened_by = tuple(
        replace(process, bystander=process.pid in bystanders or not known.isdisjoint(_programs(process)))
        for process in reading.opened_by
    )
    return replace(reading, processes=processes, opened_by=opened_by)


def _is_desktop(process: Process, policy: Policy) -> bool:
    """Graphics and the right name; or one of both, with little memory. Memory that the driver does not tell passes."""
    graphics = process.type is ProcessType.GRAPHICS
    named = not policy.desktop_names.isdisjoint(_programs(process, 1))
    little = process.memory_bytes is None or process.memory_bytes <= policy.desktop_memory_bytes
    return (graphics and named) or ((graphics or named) and little)


def _is_mps_server(process: Process, policy: Policy) -> bool:
    """An MPS server without memory of clients. Those are listed beside it, and count."""
    little = process.memory_bytes is None or process.memory_bytes <= policy.mps_server_bytes
    return process.type is ProcessType.COMPUTE and MPS_SERVER in _programs(process, 1) and little


def _programs(process: Process, words: int = 2) -> set[str]:
    """What a command line runs: its first word, and for an interpreter's sake the next that is no option (`python -m
    nvitop`). Each without directories, and with some, so that a name that says nothing by itself can be told."""
    first, *others = (process.command or "").split(" ")
    paths = [first, *(word for word in others if not word.startswith("-"))][:words]
    return {"/".join(parts[at:]) for path in paths for parts in [path.split("/")] for at in range(len(parts))}


def silence_limit_s(observation: NodeObservation | None, policy: Policy) -> float:
    """For how long a node may report nothing before nothing is known of it any more. Seconds."""
    return policy.silence_s if observation is None else max(policy.silence_s, observation.silence_s)


def is_silent(observation: NodeObservation, now: Instant, policy: Policy) -> bool:
    """True when a node has reported nothing for so long that nothing is known of it any more."""
    return now.mono_s - observation.reported_at_s > silence_limit_s(observation, policy)


def is_unheard(ledger: Ledger, node: str, now: Instant, policy: Policy) -> bool:
    """True while a node is silent, or has not reported since the daemon started."""
    observation = ledger.node_observations.get(node)
    return observation is None or is_silent(observation, now, policy)


def unheard_nodes(ledger: Ledger, now: Instant, policy: Policy) -> list[str]:
    """The nodes that are silent, or have not reported since the daemon started. Costs nothing for all others."""
    silent = []
    for observation in ledger.node_observations.values():
        if now.mono_s - observation.reported_at_s <= policy.silence_s:
            break
        if is_silent(observation, now, policy):
            silent.append(observation.node)
    return [*ledger.unreported, *silent]


def observed_at(observation: NodeObservation | None, uuid: str) -> float | None:
    """When a GPU's processes and health were read, at the earliest; None where the daemon cannot vouch for any age."""
    if observation is None or observation.observed_at_s is None:
        return None
    reread_at_s = observation.reread_at_s.get(uuid) if observation.reread_at_s else None
    return observation.observed_at_s if reread_at_s is None else max(observation.observed_at_s, reread_at_s)


def is_recent(
    observation: NodeObservation | None,
    uuid: str,
    now: Instant,
    policy: Policy,
    since_s: float = float("-inf"),
    *,
    for_gang: bool = False,
) -> bool:
    """True when a grant may rest on what the last report shows of a GPU.

    It is at most `max_observation_age_s` old. Or it was asked for, was begun after the request was made (`since_s`),
    arrives in this very turn, and is older only by what it took, which is no longer than a reading may. Without this
    second case nothing would be granted on a node with slow readings: it has many GPUs, or a busy driver. The readings
    of several nodes arrive in different turns: for a gang it need not be this one.
    """
    at_s = observed_at(observation, uuid)
    if observation is None or observation.problem is not None or at_s is None:
        return False
    age_s = now.mono_s - at_s
    if age_s <= policy.max_observation_age_s:
        return True
    arrives = observation.answers_request and (for_gang or observation.reported_at_s == now.mono_s)
    took_s = min(observation.read_s or 0.0, observation.reading_limit_s)
    return arrives and at_s > since_s and age_s <= took_s + policy.max_observation_age_s


def is_stale(
    ledger: Ledger, node: str, now: Instant, policy: Policy, since_s: float, *, for_gang: bool = False
) -> bool:
    """True where no GPU of a node has a recent reading, which is known without looking at each: unless some were read
    again alone, all readings are of one age."""
    observation = ledger.node_observations.get(node)
    alike = observation is not None and not observation.reread_at_s
    return alike and not is_recent(observation, "", now, policy, since_s, for_gang=for_gang)


def state_of(ledger: Ledger, gpu: GpuRecord, now: Instant, policy: Policy) -> GpuState:
    """The first state that applies, in the order of `GpuState`."""
    node = gpu.device.node
    if node_problem(ledger, node, now, policy) is not None:
        return GpuState.UNKNOWN
    return state_by_report(gpu, ledger.node_observations.get(node), ledger.nodes.get(node))


def conflicting_processes(ledger: Ledger, gpu: GpuRecord) -> tuple[Process, ...]:
    """Processes on a leased GPU that do not belong to its lease, by a reading that knew of the lease."""
    observation, reading = ledger.node_observations.get(gpu.device.node), reading_of(ledger, gpu)
    watch = observation.gpus.get(gpu.device.uuid) if observation else None
    if gpu.lease_id is None or gpu.draining or reading is None or watch is None or watch.lease_id != gpu.lease_id:
        return ()
    return tuple(process for process in occupants(reading) if process.pid in watch.strangers)


def activity_of(ledger: Ledger, gpu: GpuRecord, reading: GpuReading | None) -> Activity | None:
    """What happens on a leased GPU; None for any other."""
    if gpu.lease_id is None or gpu.draining or reading is None:
        return None
    if not occupants(reading):
        return Activity.STARTING
    if conflicting_processes(ledger, gpu):
        return Activity.CONFLICT
    return Activity.IDLE if reading.utilization_ratio == 0 else Activity.ACTIVE
