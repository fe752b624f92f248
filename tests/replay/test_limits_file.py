"""Limits to try, read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulease_protocol.codec import to_json
from gpulease_protocol.limits import LimitKind, Limits, LimitUse
from gpulease_protocol.model import Page
from gpulease_server.replay.limits_file import LimitsFileRefused, read_limits
from tests.replay.build import BEGUN


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "limits.json"


def test_the_list_of_the_daemon_is_read_without_what_is_used_and_what_the_configuration_says(file: Path) -> None:
    listed = LimitUse(
        kind=LimitKind.USER,
        name="ada",
        defaults=("max_queued",),
        max_gpus=4,
        max_queued=8000,
        max_lease_s=86400.0,
        gpus=3,
        leases=2,
        queued=1,
        set_at=BEGUN,
        set_by="root",
    )
    group = LimitUse(
        kind=LimitKind.GROUP, name="vision", members=("bob", "cy"), gpu_hours=5.0, gpu_hours_used=1.0,
        gpus=0, leases=0, queued=0, set_at=BEGUN,
    )  # fmt: skip
    file.write_text(json.dumps(to_json(Page(items=(listed, group)))))

    found = read_limits(file)

    assert [(one.kind, one.name, one.limits, one.members) for one in found] == [
        (LimitKind.USER, "ada", Limits(max_gpus=4, max_lease_s=86400.0), ()),
        (LimitKind.GROUP, "vision", Limits(gpu_hours=5.0), ("bob", "cy")),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no list `items`"),
        ('{"items": [3]}', "item 1: it is not an object"),
        ('{"items": [{"kind": "team", "name": "a"}]}', "kind must be user, group or token"),
        ('{"items": [{"kind": ["user"], "name": "a"}]}', "kind must be user, group or token"),
        ('{"items": [{"kind": "user", "name": ""}]}', "and name must say which"),
        ('{"items": [{"kind": "user", "name": "a", "max_gpu": 1}]}', "item 1: max_gpu is not known"),
        ('{"items": [{"kind": "user", "name": "a", "max_gpus": 0}]}', "max_gpus: must be 1 to 1000000, not 0"),
        ('{"items": [{"kind": "user", "name": "a", "max_gpus": "4"}]}', "max_gpus: "),
        ('{"items": [{"kind": "user", "name": "a", "window_s": 1}]}', "window_s: must be 3600 to 7776000 seconds"),
        ('{"items": [{"kind": "user", "name": "a", "gpu_hours": NaN}]}', "gpu_hours"),
        ('{"items": [{"kind": "user", "name": "a", "members": ["b"]}]}', "members are for a group"),
        ('{"items": [{"kind": "user", "name": "a"}, {"kind": "user", "name": "a"}]}', "twice"),
    ],
    ids=lambda text: text[:60],
)
def test_a_slip_of_the_pen_is_refused_with_its_place(file: Path, text: str, why: str) -> None:
    file.write_text(text)

    with pytest.raises(LimitsFileRefused) as refused:
        read_limits(file)

    assert why in refused.value.detail
    assert str(file) in refused.value.detail
