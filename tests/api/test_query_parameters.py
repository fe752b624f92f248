"""A query parameter that is not known, or given twice, is refused, with what to do."""

from __future__ import annotations

import pytest

from tests.daemon import DaemonProcess


@pytest.mark.parametrize(
    ("path", "unknown", "known"),
    [
        ("/v1/leases?stat=active", "stat", "It accepts cursor, gpu, id_prefix, job, label, limit, node,"),
        (
            "/v1/leases?state=active&Limit=3",
            "Limit",
            "It accepts cursor, gpu, id_prefix, job, label, limit, node,",
        ),
        ("/v1/jobs?nam=x", "nam", "cursor, id_prefix, limit, name"),
        ("/v1/events?since=3", "since", "It accepts after, before, from, gpu,"),
        ("/v1/gpus/history?since=3", "since", "It accepts from, last_s, measures, node, points, to."),
        ("/v1/gpus?node=n1", "node", "It accepts none."),
        ("/v1/nodes/n1?wait_s=3", "wait_s", "It accepts none."),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_known_ones(
    api: DaemonProcess, path: str, unknown: str, known: str
) -> None:
    answer = api.call("GET", path)
    assert answer.problem() == (422, "invalid_request")
    assert f"'{unknown}'" in answer.json["detail"]
    assert known in answer.json["remedy"]


def test_a_request_with_an_unknown_parameter_grants_nothing(api: DaemonProcess) -> None:
    answer = api.call("POST", "/v1/leases?wait=60", {"count": 1})
    assert answer.problem() == (422, "invalid_request")
    assert answer.json["remedy"] == "It accepts wait_s."
    assert not api.call("GET", "/v1/leases?state=active&state=queued").json["items"]


def test_a_parameter_that_is_given_twice_is_refused_unless_it_is_a_list(api: DaemonProcess) -> None:
    answer = api.call("GET", "/v1/leases?user=ann&limit=5&user=bob")
    assert answer.problem() == (422, "invalid_request")
    assert (answer.json["detail"], answer.json["remedy"]) == ("user: is given 2 times.", "Give it once.")
    for path in ("/v1/leases?state=active&state=queued", "/v1/events?kind=lease&kind=job", "/?t=1&t=2"):
        assert api.call("GET", path).status == 200, path


def test_unversioned_routes_accept_unknown_parameters(api: DaemonProcess) -> None:
    assert api.call("GET", "/healthz?t=1700000000").status == 200
    assert api.call("GET", "/?t=1700000000").status == 200


@pytest.mark.parametrize("offset", ["+05:30", "%2B05:30", "+0530"])
def test_a_time_may_have_an_offset_as_date_prints_it(api: DaemonProcess, offset: str) -> None:
    """`curl ".../v1/usage?from=$(date -Is)"`: a `+` in a query is a space."""
    answer = api.call("GET", f"/v1/usage?from=2026-11-28T08:00:00{offset}&to=2026-11-28T04:00")
    assert (answer.json["from_at"], answer.json["to_at"]) == ("2026-11-28T02:30:00Z", "2026-11-28T04:00:00Z")


def test_every_versioned_route_documents_the_refusal(api: DaemonProcess) -> None:
    for path, methods in api.call("GET", "/openapi.json").json["paths"].items():
        for method, operation in methods.items():
            assert not path.startswith("/v1/") or "422" in operation["responses"], (method, path)
