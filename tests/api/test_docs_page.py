"""The page at /docs: complete, readable offline, and without any script."""

from __future__ import annotations

import html
import re

from gpulease_protocol.errors import ERRORS_BY_CODE, GpuleaseError
from tests.daemon import DaemonProcess


def test_the_page_has_every_route_and_every_field_of_openapi(api: DaemonProcess) -> None:
    answer = api.call("GET", "/docs")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = answer.content.decode()
    document = api.call("GET", "/openapi.json").json
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"<code>{method.upper()} {path}</code>" in page
            for parameter in operation.get("parameters", ()):
                assert parameter["in"] == "path" or f"<code>{parameter['name']}</code>" in page
    for name, schema in document["components"]["schemas"].items():
        assert f"id={name}>" in page
        for about in schema.get("properties", {}).values():
            assert re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(about.get("description", ""))) in page
    links = set(re.findall(r"href='#([^']*)'", page))
    assert links <= set(document["components"]["schemas"])


def test_the_type_of_each_error_leads_to_its_place_on_the_page(api: DaemonProcess) -> None:
    problem = api.get("/v1/leases/lease-none").json
    assert problem["type"] == "/docs#not_found"
    page = api.get(problem["type"].partition("#")[0]).content.decode()
    for kind in (*ERRORS_BY_CODE.values(), GpuleaseError):
        path, _, anchor = kind("x").problem()["type"].partition("#")
        assert path == "/docs"
        assert page.count(f"id={anchor}>") == 1, "each has one place, and no section or type has the same"


def test_the_page_loads_nothing_and_runs_nothing(api: DaemonProcess) -> None:
    answer = api.call("GET", "/docs")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    page = answer.content.decode()
    assert "<script" not in page
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", page)


def test_routes_that_accept_an_idempotency_key_document_it(api: DaemonProcess) -> None:
    paths = api.call("GET", "/openapi.json").json["paths"]
    for path in ("/v1/leases", "/v1/jobs"):
        assert "Idempotency-Key" in [parameter["name"] for parameter in paths[path]["post"]["parameters"]]
    assert "wait_s" in [parameter["name"] for parameter in paths["/v1/leases"]["post"]["parameters"]]
