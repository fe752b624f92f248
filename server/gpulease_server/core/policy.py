"""The rules that an administrator may set, and the programs that do not keep a GPU from being free."""

from __future__ import annotations

from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.limit_records import UserLimits

DESKTOP_NAMES = frozenset(
    {
        *("Xorg", "X", "Xwayland", "Xvnc", "Xtigervnc", "Xdcv", "nxagent", "xrdp-accel-assist"),
        *("gnome-shell", "mutter", "kwin_x11", "kwin_wayland", "plasmashell", "cinnamon", "muffin", "gala", "xfwm4"),
        *("sway", "weston", "Hyprland", "labwc", "wayfire", "river", "niri", "cosmic-comp", "budgie-wm", "picom"),
        *("gnome-remote-desktop-daemon", "krdpserver", "krfb", "wayvnc", "sunshine", "dcvagent", "nxnode.bin"),
    }
)
"""Display servers, compositors and shells, and what captures a screen: they hold GPU memory on every desktop."""
MONITOR_NAMES = frozenset(
    {
        # NVIDIA's own services and tools
        *("nvidia-persistenced", "nvidia-powerd", "nvidia-smi", "nv-fabricmanager", "nvlsm", "nvidia-imex", "nvsm"),
        *("nvsm_core", "nvsm_api_gateway", "nv-hostengine", "dcgmi", "dcgm-exporter", "nvidia-dcgm"),
        *(
            "nvidia-device-plugin",
            "gpu-feature-discovery",
            "nvidia-validator",
            "nvidia-mig-manager",
            "mps-control-daemon",
        ),
        *("nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-container-cli", "nvidia-ctk", "nvidia-settings"),
        # what watches a host or a training
        *("nvtop", "nvitop", "nvitop-exporter", "gpustat", "btop", "glances", "netdata", "nvidia_gpu_exporter"),
        *("nvidia_smi_exporter", "gpud", "telegraf", "datadog-agent/bin/agent/agent", "cadvisor"),
        *("node_exporter", "zabbix_agent2", "otelcol", "otelcol-contrib", "collectd", "slurmd"),
        *("wandb-core", "gpu_stats", "wandb-xpu"),
    }
)
"""NVML clients: they have every device file open for as long as they run, and hold no memory. Name or end of a path."""
MPS_SERVER = "nvidia-cuda-mps-server"
"""It has a context on every GPU from its first client on until it is told to quit; clients are listed beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules that an administrator may set."""

    max_observation_age_s: float = 0.5
    """No grant rests on a reading older than this, but on one that was asked for, and has just arrived, see
    `gpu.is_recent`."""
    reading_deadline_s: float = 5.0
    """How long a verdict waits for a fresh reading of GPUs that look free. Only a node under extreme load takes so
    long: a silent node, or one with a probe that hangs, is unknown sooner."""
    silence_s: float = 3.0
    """A node that has reported nothing for this long is unknown; slow readings make it longer."""
    stall_s: float = 1.0
    """A daemon that did not run for longer than this could hear no holder in that time."""
    node_lost_after_s: float = 3600.0
    """A node that has been silent for so long is gone for good, see `core.node_loss`; 0: never."""
    memory_tolerance_bytes: int = 256 * 2**20
    """A draining GPU's memory is back when it is at most this much over what it was while the GPU was free."""
    retained_memory_s: float = 30.0
    """Memory counts as the driver's own, as on coherent systems (GH200), if it stays in use for so long without change,
    without a process, and without a device file that the lease's own have open. Then it no longer keeps a GPU from
    being clean. A stranger's open device file delays a GPU for so long at most."""
    gone_after_s: float = 600.0
    """A GPU that its node has not shown for so long is forgotten; one that drains and comes back sooner drains on."""
    leftover_after_s: float = 1.0
    """What is still on a draining GPU after so long was left behind; before, it is taken to be ending."""
    desktop_names: frozenset[str] = DESKTOP_NAMES
    """Programs of a desktop: their graphics processes do not make a GPU foreign, whatever memory they hold."""
    desktop_memory_bytes: int = 512 * 2**20
    """Any other graphics process, and a desktop program on the compute list, is let pass up to this much memory."""
    mps_server_bytes: int = 256 * 2**20
    """An MPS server is let pass up to this much memory on a GPU: more is that of clients (before Volta)."""
    monitor_names: frozenset[str] = MONITOR_NAMES
    """Programs that keep device files open only to watch."""
    retry_pause_s: tuple[float, float] = (2.0, 300.0)
    """Pause before the first retry of a job that has failed, and the longest; it doubles from one to the next."""
    gang_start_s: float = 60.0
    """How long the nodes of a job on several may take to be prepared, see `core.gang_run`."""
    max_bypass: int = 10
    """How many newer requests may start before a waiting one until GPUs are held for it; 0: none."""
    max_bypass_s: float = 300.0
    """For how long from the first time on it may be bypassed; 0: not at all."""
    max_overtakes: int = 50
    """How many requests may be granted by priority or usage until the one that has waited longest goes first; over 0,
    see `core.order`."""
    easy_backfill: bool = False
    """Whether requests that declare their time run ahead of older ones, see `core.easy_backfill`."""
    fair_share: bool = False
    """Whether usage orders the requests of one priority, see `core.fair_share`; it is counted in any case."""
    preemption: bool = False
    """Whether a request may have leases end that have opted in, see `core.preemption`."""
    preempt_after_s: float = 600.0
    """A lease that has held its GPUs for less is not preempted."""
    preempt_notice_s: float = 120.0
    """So long before its end the holder of a preempted lease is told."""
    usage_half_life_s: float = 7 * 24 * 3600.0
    """Of what was used so long ago half counts."""
    gpu_weights: tuple[tuple[str, float], ...] = ()
    """Texts in the names of GPU models, and for how many GPUs such a one counts: the first that is found, else 1."""
    group_shares: tuple[tuple[str, float], ...] = ()
    """Groups whose members are ordered by what the group has used, and for how many users each counts; see
    `core.group_usage`."""
    max_keep_s: float = 24 * 3600.0
    """For how long idle GPUs may be kept on purpose from the moment when that is said; 0: not at all."""
    reclaim_interactive_after_s: float = 0.0
    """For how long none of the GPUs of an interactive lease has worked when they are taken back; 0: never."""
    reclaim_notice_s: float = 300.0
    """How long before that its holder is told, at least."""
    reclaim_notice_most_s: float = 3600.0
    """For so long at most it is waited for the end of what the holder was promised before they were told."""
    max_queued: int = 10_000
    """Requests that may wait at once."""
    max_queued_bytes: int = 2**30
    """Memory that requests may keep while they wait, of all users together."""
    max_waiting_for_jobs: int = 1000
    """Jobs of one user that may wait for other jobs at once: what follows from one end is decided in one turn."""
    limits: UserLimits = field(default_factory=UserLimits)
    """What one user may have."""
    show_commands: bool = True
    """Whether sentences tell the command lines of processes."""
    max_ttl_s: float = 30 * 24 * 3600.0
    """The longest `ttl_s` that may be asked for."""
    node_lifetime_s: float = 90 * 24 * 3600.0
    """A node that has reported nothing for so long, and that nothing refers to, is forgotten."""
    key_lifetime_s: float = 24 * 3600.0
    """How long an Idempotency-Key is remembered."""
    max_keys: int = 100_000
    """Idempotency-Keys remembered at once; beyond that the oldest are forgotten sooner."""


def undisturbed(policy: Policy) -> Policy:
    """The policy, with nodes that are always heard, and holders that always live: for a virtual clock."""
    forever = float("inf")
    return replace(
        policy,
        max_observation_age_s=forever,
        silence_s=forever,
        node_lost_after_s=0.0,
        node_lifetime_s=forever,
        stall_s=forever,
    )
