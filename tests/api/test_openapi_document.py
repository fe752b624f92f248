"""The OpenAPI document is one that strangers' generators read well. tests/generated makes clients of it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from gpulease_server.api.openapi import document as document_module
from gpulease_server.api.openapi.document import install_openapi
from tests.api.documents import public_document, whole_document

VERBS = {
    *("get", "list", "create", "replace", "delete", "renew", "release", "explain", "cancel", "revoke"),
    *("cordon", "uncordon", "drain", "resume", "pause", "forget", "join", "keep"),
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return public_document()


def operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in document["paths"].values():
        yield from methods.values()


def parts(part: Any) -> Iterator[dict[str, Any]]:
    """Every object in a part of the document."""
    if isinstance(part, dict):
        yield part
        for inner in part.values():
            yield from parts(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from parts(inner)


def test_each_operation_is_called_by_a_verb_and_a_noun(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for operation in operations(document)]
    assert len(set(names)) == len(names)
    assert {"createLease", "getLease", "listLeases", "renewLease", "releaseLease", "createJob", "cancelJob"} < set(
        names
    )
    verbs = {re.match("[a-z]+(?=[A-Z])", name)[0] for name in names}  # type: ignore[index]
    assert verbs <= VERBS, "a verb is one that strangers guess"


def test_each_schema_has_a_title_of_its_own(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert {schema["title"] for schema in schemas.values()} == set(schemas)
    assert {"GpuPage", "NodePage", "LeasePage", "JobPage", "BearerTokenPage"} < set(schemas)
    assert all(name.isalpha() for name in schemas)


def test_no_field_has_a_default_and_answers_have_all_their_fields(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        for field, kind in schema.get("properties", {}).items():
            assert "default" not in kind, (name, field)
        if "properties" in schema and not name.endswith(("Request", "Proof", "Problem", "Input")):
            assert schema["required"] == list(schema["properties"]), name
    request = document["components"]["schemas"]["LeaseRequest"]
    assert "required" not in request
    assert request["properties"]["ttl_s"]["description"].endswith("Default: 300.0.")


def test_it_says_how_to_authenticate_and_where(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["security"] == [{}, {"bearer": []}], "a caller on the host needs no token"
    assert document["servers"][0]["url"] == "http://127.0.0.1:8750"
    assert {tag["name"] for tag in document["tags"]} == {tag for one in operations(document) for tag in one["tags"]}
    assert all(tag["description"] for tag in document["tags"])


def test_errors_without_a_meaning_of_their_own_are_one_default(document: dict[str, Any]) -> None:
    for operation in operations(document):
        errors = {status for status in operation["responses"] if not status.startswith("2")}
        assert "default" in errors
        assert errors <= {"404", "409", "410", "412", "422", "default"}, operation["operationId"]


def test_answers_name_their_headers(document: dict[str, Any]) -> None:
    made = document["paths"]["/v1/leases"]["post"]["responses"]
    assert "Location" in made["201"]["headers"]
    assert "Location" in made["202"]["headers"]
    assert made["201"]["description"] == "Granted."
    assert "Link" in document["paths"]["/v1/leases"]["get"]["responses"]["200"]["headers"]
    assert "Retry-After" in document["components"]["responses"]["Error"]["headers"]


def test_the_worker_protocol_is_not_public(document: dict[str, Any]) -> None:
    assert "/v1/nodes/{name}/exchange" in whole_document()["paths"]
    assert "/v1/nodes/{name}/exchange" not in document["paths"]
    assert not {"NodeReport", "DesiredState", "JobOrder", "OwnerReport"} & set(document["components"]["schemas"])


def test_a_parameter_of_a_url_is_absent_and_never_null(document: dict[str, Any]) -> None:
    parameters = [one for operation in operations(document) for one in operation.get("parameters", ())]
    assert len(parameters) > 30
    assert not [one["name"] for one in parameters if {"type": "null"} in parts(one["schema"])]


def test_it_is_made_once_beside_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 0.3 s in the event loop would be 0.3 s for everyone."""
    app, made, others = FastAPI(openapi_url=None), list[threading.Thread](), threading.Event()

    def public(document: dict[str, Any]) -> dict[str, Any]:
        made.append(threading.current_thread())
        assert others.wait(10), "no other request was answered meanwhile"
        return {"whole": document}

    @app.get("/healthz")
    async def healthz() -> None:
        if made:
            others.set()

    app.openapi_schema = {"paths": {}}
    monkeypatch.setattr(document_module, "public_document", public)
    install_openapi(app, ())

    async def ask() -> list[Any]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://daemon") as client:
            asked = [asyncio.create_task(client.get("/openapi.json")) for _ in range(3)]
            while not others.is_set():
                await client.get("/healthz")
                await asyncio.sleep(0)
            answers = [(await answer).json() for answer in asked]
            with ThreadPoolExecutor(1) as threads:
                asyncio.get_running_loop().set_default_executor(threads)
                read = threading.Event()
                threads.submit(read.wait, 30)  # of a database that does not answer
                try:
                    answers.append((await asyncio.wait_for(client.get("/openapi.json"), 10)).json())
                finally:
                    read.set()
            return answers

    assert asyncio.run(ask()) == [{"whole": {"paths": {}}}] * 4
    assert len(made) == 1
