"""Pages of other origins: none may read anything, but those of a listed one with a token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulease_cli import main, output
from gpulease_server.api.auth.access_rules import ACCESS_RULES
from gpulease_server.setting_checks import normalized_origins
from tests.daemon import Answer, DaemonProcess, daemon

LISTED, OTHER = "https://dashboard.example", "https://evil.example"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    listed = ("--cors-origin", "HTTPS://Dashboard.Example:443", "--cors-origin", "http://localhost:3000")
    with daemon(tmp_path_factory.mktemp("origins"), "--simulate", "2", *listed) as made:
        yield made


def bearer(running: DaemonProcess, role: str = "user") -> dict[str, str]:
    made = running.call("POST", "/v1/tokens", {"user": "ann-elsewhere", "role": role}).json
    return {"Authorization": f"Bearer {made['bearer']}"}


def of_cors(answer: Answer) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("origin", [LISTED, "http://localhost:3000"])
@pytest.mark.parametrize("method", sorted({"HEAD", *(operation.split()[0] for operation in ACCESS_RULES)}))
def test_the_preflight_of_a_listed_origin_is_answered_without_a_token(
    running: DaemonProcess, origin: str, method: str
) -> None:
    wanted = "authorization, content-type, idempotency-key"
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": wanted}
    answer = running.call("OPTIONS", "/v1/leases", None, Origin=origin, **asked)
    assert answer.status == 200
    told = of_cors(answer)
    assert told["access-control-allow-origin"] == origin
    assert method in told["access-control-allow-methods"].split(", ")
    assert set(wanted.split(", ")) <= set(told["access-control-allow-headers"].lower().split(", "))
    assert "access-control-allow-credentials" not in told


def test_a_page_of_a_listed_origin_reads_answers_with_a_token(running: DaemonProcess) -> None:
    token = bearer(running)
    answer = running.call("GET", "/v1/gpus", None, Origin=LISTED, **token)
    assert answer.status == 200
    assert len(answer.json["items"]) == 2
    told = of_cors(answer)
    assert told["access-control-allow-origin"] == LISTED
    shown = told["access-control-expose-headers"].lower().split(", ")
    assert {"etag", "retry-after", "location", "x-request-id", "gpulease-log-offset"} <= set(shown)
    assert "Origin" in answer.headers["vary"]
    made = running.call("POST", "/v1/leases", {"count": 1}, Origin=LISTED, **token)
    assert (made.status, of_cors(made)["access-control-allow-origin"]) == (201, LISTED)
    assert made.json["holder"]["user"] == "ann-elsewhere"
    refused = running.call("POST", "/v1/leases", {"cuont": 1}, Origin=LISTED, **token)
    assert refused.problem() == (422, "invalid_request")
    assert of_cors(refused)["access-control-allow-origin"] == LISTED, "the page may read why"


@pytest.mark.parametrize("origin", [LISTED, "http://localhost:3000"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_over_loopback_a_listed_origin_without_a_token_is_refused(
    running: DaemonProcess, origin: str, method: str
) -> None:
    answer = running.call(method, "/v1/leases", {"count": 1} if method == "POST" else None, Origin=origin)
    assert answer.problem() == (403, "not_allowed")


@pytest.mark.parametrize(
    "origin", [OTHER, "http://dashboard.example", f"{LISTED}:8443", f"{LISTED}.evil.example", "null", "http://[x"]
)
def test_an_origin_that_is_not_listed_gets_no_cors_headers(running: DaemonProcess, origin: str) -> None:
    token = bearer(running)
    asked = {"Origin": origin, "Access-Control-Request-Method": "GET"}
    assert of_cors(running.call("GET", "/v1/gpus", None, Origin=origin, **token)) == {}
    preflight = running.call("OPTIONS", "/v1/gpus", None, **asked)
    assert (preflight.problem(), of_cors(preflight)) == ((403, "not_allowed"), {})


def test_a_request_without_an_origin_gets_no_cors_headers(running: DaemonProcess) -> None:
    answer = running.call("GET", "/v1/gpus")
    assert (answer.status, of_cors(answer)) == (200, {})


def test_an_origin_is_spelled_as_browsers_spell_it() -> None:
    given = ["HTTPS://A.example:443", "http://a:80", "http://a:8080", "https://[::1]:3000"]
    assert normalized_origins(given) == ["https://a.example", "http://a", "http://a:8080", "https://[::1]:3000"]


@pytest.mark.parametrize(
    "wrong",
    [
        *("*", "https://*.example", "null", "a.example", "ftp://a", "http://a/", "http://a/x", "http://u@a"),
        *("http://a:0", "http://a:99999", "http://", ""),
    ],
)
def test_an_invalid_origin_is_refused_before_the_daemon_starts(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--cors-origin", wrong]) == output.USAGE
    said = capsys.readouterr().err
    assert "--cors-origin" in said
    assert ("list each origin" in said) or ("write it like https://" in said)
