"""Prints the OpenAPI document of this checkout: the types of the page's data are made of it."""

from __future__ import annotations

import json

from tests.api.documents import whole_document

if __name__ == "__main__":
    print(json.dumps(whole_document()))
