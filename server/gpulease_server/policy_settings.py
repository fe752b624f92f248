"""The policy that settings of `gpulease serve` say."""

from __future__ import annotations

from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import DESKTOP_NAMES, MONITOR_NAMES, Policy
from gpulease_server.setting_checks import gpu_weight, group_share
from gpulease_server.settings import CommandVisibility, ServeSettings


def policy_of(settings: ServeSettings) -> Policy:
    """The rules that the core works by."""
    return Policy(
        desktop_names=DESKTOP_NAMES.union(settings.desktop_names),
        monitor_names=MONITOR_NAMES.union(settings.monitor_names),
        max_bypass=settings.max_bypass,
        max_bypass_s=settings.max_bypass_s,
        max_overtakes=settings.max_overtakes,
        easy_backfill=settings.easy_backfill,
        fair_share=settings.fair_share,
        preemption=settings.preemption,
        preempt_after_s=settings.preempt_after_s,
        preempt_notice_s=settings.preempt_notice_s,
        usage_half_life_s=settings.usage_half_life_days * 24 * 3600.0,
        gpu_weights=tuple(map(gpu_weight, settings.gpu_weights)),
        group_shares=tuple(map(group_share, settings.group_shares)),
        node_lost_after_s=settings.node_lost_after_s,
        max_keep_s=settings.max_keep_s,
        reclaim_interactive_after_s=settings.reclaim_idle_interactive_after_s,
        max_observation_age_s=settings.max_observation_age_s,
        retained_memory_s=settings.retained_memory_s,
        limits=UserLimits(
            leases=settings.max_leases_per_user,
            gpus=settings.max_gpus_per_user,
            interactive_gpus=settings.max_interactive_gpus,
            interactive_s=settings.max_interactive_s,
            queued=settings.max_queue_per_user,
            queued_bytes=settings.max_queue_bytes_per_user,
        ),
        show_commands=settings.show_commands is CommandVisibility.ALL,
        node_lifetime_s=settings.keep_days * 24 * 3600.0,
    )
