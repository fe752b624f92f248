"""A daemon with idle GPUs that are taken back within seconds, because five minutes are long for a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from gpulease_server.core.policy import Policy
from gpulease_server.policy_settings import policy_of
from gpulease_server.settings import ServeSettings
from tests.daemon import DaemonProcess
from tests.imported_program import run

AFTER_S, NOTICE_S, CHECK_S = 0.5, 0.5, 0.2


def short_policy(settings: ServeSettings) -> Policy:
    """The rules that the settings say, with short times for each lease of priority interactive."""
    short: dict[str, Any] = {"reclaim_notice_s": NOTICE_S, "reclaim_notice_most_s": NOTICE_S}
    return replace(policy_of(settings), reclaim_interactive_after_s=AFTER_S, **short)


def run_with_short_times(*arguments: Any) -> None:
    """In the new process: `gpulease` with these rules."""
    with (
        mock.patch("gpulease_server.serving.policy_of", short_policy),
        mock.patch("gpulease_server.core.reclaim.CHECK_S", CHECK_S),
    ):
        run(*arguments)


class ShortReclaim(DaemonProcess):
    """It takes back what is idle for half a second."""

    forked = staticmethod(run_with_short_times)
