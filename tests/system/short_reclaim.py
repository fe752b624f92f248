"""The `gpulease` program with idle GPUs that are taken back within seconds, because five minutes are long for a test.

`python -m tests.system.short_reclaim serve ...` covers each lease of priority interactive.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

from gpulease_cli import main
from gpulease_server import serving
from gpulease_server.core.policy import Policy
from gpulease_server.policy_settings import policy_of
from gpulease_server.settings import ServeSettings

AFTER_S, NOTICE_S, CHECK_S = 0.5, 0.5, 0.2


def short_policy(settings: ServeSettings) -> Policy:
    """The rules that the settings say, with short times."""
    return replace(policy_of(settings), reclaim_interactive_after_s=AFTER_S, reclaim_notice_s=NOTICE_S)


if __name__ == "__main__":
    with (
        mock.patch.object(serving, "policy_of", short_policy),
        mock.patch("gpulease_server.core.reclaim.CHECK_S", CHECK_S),
    ):
        sys.exit(main())
