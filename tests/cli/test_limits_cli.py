"""`gpulease limits` against a daemon."""

from __future__ import annotations

import getpass
import json

import pytest

from gpulease import Client
from gpulease_protocol.limits import LimitKind
from tests.cli.programs import Program


def test_set_changes_what_it_names_and_remove_undoes_it(client: Client, gpulease: Program) -> None:
    first = gpulease("limits", "set", "ada", "--gpus", "4", "--max-time", "24h")
    assert first.returncode == 0, first.stderr
    assert "0 of 4" in first.stdout
    assert f"set by {getpass.getuser()} on " in first.stdout
    gpulease("limits", "set", "ada", "--leases", "2", "--window", "2d")
    shown = json.loads(gpulease("limits", "show", "ada", "--json").stdout)
    kept = {"max_gpus": 4, "max_leases": 2, "max_lease_s": 86400.0, "window_s": 172800.0, "defaults": ["max_queued"]}
    assert shown | kept == shown
    listed = json.loads(gpulease("limits", "list", "--json").stdout)
    assert [one["name"] for one in listed["items"]] == ["ada"]
    removed = gpulease("limits", "remove", "ada")
    assert (removed.returncode, removed.stdout) == (0, "no limits are set for ada any more\n")
    assert not client.limits()
    again = gpulease("limits", "remove", "ada")
    assert again.returncode == 1
    assert "No limits are set for user ada." in again.stderr
    assert "gpulease limits list" in again.stderr


@pytest.mark.parametrize(
    ("hours", "shown"),
    [("0.05", "0.000 of 0.05 in 2h"), ("1e-5", "0.000000 of 0.00001 in"), ("2.5e6", "0.0 of 2500000 in")],
)
def test_any_limit_of_gpu_hours_is_shown_as_it_is(client: Client, gpulease: Program, hours: str, shown: str) -> None:
    gpulease("limits", "set", "ada", "--gpu-hours", hours, "--window", "2h")
    assert shown in gpulease("limits", "list").stdout
    client.remove_limits(LimitKind.USER, "ada")


def test_a_group_is_named_with_an_at_sign_and_keeps_its_members(client: Client, gpulease: Program) -> None:
    gpulease("limits", "set", "@vision", "--member", "ada", "--member", "bob", "--gpus", "3")
    gpulease("limits", "set", "@vision", "--gpu-hours", "5")
    found = client.limits_of(LimitKind.GROUP, "vision")
    assert (found.members, found.max_gpus, found.gpu_hours, found.gpu_hours_used) == (("ada", "bob"), 3, 5.0, 0.0)
    assert "@vision" in gpulease("limits", "list").stdout
    other = gpulease("limits", "set", "@nlp", "--member", "ada", "--gpus", "1")
    assert other.returncode == 2
    assert "user ada is in group vision" in other.stderr
    empty = gpulease("limits", "set", "bob")
    assert (empty.returncode, "Name at least one limit" in empty.stderr) == (2, True)
    assert [(one.kind, one.name) for one in client.limits()] == [(LimitKind.GROUP, "vision")]
    wrong = gpulease("limits", "set", "bob", "--gpus", "0")
    assert wrong.returncode == 2
    assert "--gpus" in wrong.stderr
    gpulease("limits", "remove", "@vision")
