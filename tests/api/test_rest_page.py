"""The reference of the REST API against the OpenAPI document: docs/rest.md and the page at `/docs`.

`python -m tests.api.test_rest_page` writes both.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from gpulease_server.api.openapi import docs_page
from gpulease_server.api.openapi.document import TAGS
from tests.api.reference import ERRORS, TYPES, Entry, entries, html_page, introduction
from tests.daemon import DaemonProcess, daemon

PAGE = Path(__file__).parents[2] / "docs" / "rest.md"
HEAD = """# The REST API

`python -m tests.api.test_rest_page` generates this page from the OpenAPI document, and a test compares the two. A
running daemon serves the same at `/docs`, and for programs at `/openapi.json`. [curl.md](curl.md) shows each route in
use, [generated-clients.md](generated-clients.md) how to generate clients.

"""


def markdown_page(document: dict[str, Any]) -> str:
    """docs/rest.md."""
    parts, subject = [HEAD, introduction(document), "\n"], ""
    for entry in entries(document):
        if entry.subject != subject:
            subject = entry.subject
            about = TAGS.get(subject.lower())
            parts.append(f"\n## {subject}\n" + (f"\n{about}\n" if about else ""))
        parts.append(written(entry))
    return "".join(parts)


def written(entry: Entry) -> str:
    name = entry.name if entry.subject in (ERRORS, TYPES) else f"`{entry.name}`"
    lines = [f"\n### {name}\n", linked(entry.text)]
    if entry.rows:
        heads = "| field | type | meaning |" if entry.subject == TYPES else "| parameter or status | type | meaning |"
        lines += ["", heads, "|---|---|---|"]
        lines += [f"| `{what}` | {cell(kind)} | {cell(meaning)} |" for what, kind, meaning in entry.rows]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return linked(text).replace("|", "\\|").replace("\n\n", "<br>").replace("\n", " ")


def linked(text: str) -> str:
    return re.sub(r"\[([A-Z]\w+)\]", lambda name: f"[{name[1]}](#{name[1].lower()})", text)


def test_both_pages_are_up_to_date_with_the_openapi_document(api: DaemonProcess) -> None:
    document = api.call("GET", "/openapi.json").json
    assert markdown_page(document) == PAGE.read_text(), "run python -m tests.api.test_rest_page"
    assert html_page(document) == docs_page.PAGE.read_text(), "run python -m tests.api.test_rest_page"


def test_every_link_of_the_page_leads_to_a_heading() -> None:
    text = PAGE.read_text()
    places = {heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.MULTILINE)}
    links = set(re.findall(r"\]\(#(\w+)\)", text))
    assert len(links) > 20
    assert links <= places


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, daemon(Path(place), "--simulate", "1") as running:
        document = running.call("GET", "/openapi.json").json
    PAGE.write_text(markdown_page(document))
    docs_page.PAGE.write_text(html_page(document))
