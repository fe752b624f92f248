"""Pages of a long list: the query parameters, the header `Link`, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request, Response
from pydantic import TypeAdapter

from gpulease_protocol.errors import InvalidRequest
from gpulease_server.api.long_lists import list_json

Record = TypeVar("Record")
Limit = Annotated[
    int, Query(ge=1, le=1000, description="Maximum number of items on a page; there are fewer where they are large.")
]
Cursor = Annotated[str | None, Query(description="`next` of the previous page.", pattern=r"^[0-9]{1,18}$")]
NEXT_LINK: dict[int | str, dict[str, Any]] = {
    200: {
        "headers": {
            "Link": {
                "description": 'The next page, as `<...>; rel="next"`; absent at the end.',
                "schema": {"type": "string"},
            }
        }
    }
}
"""OpenAPI entry of a page, for `responses` of its route."""


def link_to_next(request: Request, response: Response, cursor: str | None, parameter: str = "cursor") -> None:
    """Add the header `Link` to a page that has a next one."""
    if cursor is not None:
        url = request.url.include_query_params(**{parameter: cursor})
        response.headers["Link"] = f'<{url.path}?{url.query}>; rel="next"'


def cursor_number(cursor: str | None) -> int | None:
    """The number in a cursor. Raises `InvalidRequest` for any other text."""
    if cursor is None:
        return None
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise InvalidRequest(f"cursor: {cursor[:40]!r} is not the `next` of a page.")
    return int(cursor)


async def page_response(
    request: Request,
    records: Iterable[Record],
    view: Callable[[Record], object],
    adapter: TypeAdapter[object],
    number: int | None,
) -> Response:
    """The answer with a noun for each record, in a page that continues after this number, or is the last one."""
    cursor = None if number is None else str(number)
    response = Response(await list_json(records, view, adapter, cursor), media_type="application/json")
    link_to_next(request, response, cursor)
    return response
