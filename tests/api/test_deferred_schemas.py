"""A daemon that starts makes no schema that it may never need."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.api.documents import whole_document

PROGRAM = """
import json
from types import SimpleNamespace
import pydantic
made = []
whole = pydantic.TypeAdapter._init_core_attrs
def noted(self, *where, **how):
    done = whole(self, *where, **how)
    if done:
        made.append(str(self._type))
    return done
pydantic.TypeAdapter._init_core_attrs = noted
from gpulease_server.api.app import create_app
from gpulease_server.runtime.leadership.status import LeadershipStatus
app = create_app(SimpleNamespace(leadership=LeadershipStatus()))
nouns = ("model.Lease,", "model.Job,", "model.Gpu,", "model.Node,", "DesiredState", "JobRequest", "LeaseRequest")
early = [name for name in made if any(noun in name for noun in nouns)]
print(json.dumps([early, sorted(app.openapi()["components"]["schemas"])]))
"""


def test_the_schemas_of_bodies_and_answers_are_made_when_they_are_used() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    early, described = json.loads(found.stdout)
    assert early == []
    assert {"Lease", "Job", "Gpu", "Node", "JobRequest", "LeaseRequest"} <= set(described)


AS_A_DAEMON = """
import json
from types import SimpleNamespace
from gpulease_server.deferred_models import deferred_models
with deferred_models():
    import gpulease_server.serving
from fastapi.openapi.models import Components, OpenAPI
from pydantic import BaseModel
own = type("Own", (BaseModel,), {"__annotations__": {"name": "str"}})
early = [model.__name__ for model in (OpenAPI, Components, own) if model.__pydantic_complete__]
from gpulease_server.api.app import create_app
print(json.dumps([early, create_app(SimpleNamespace(leadership=None)).openapi()]))
"""


def test_a_daemon_describes_itself_as_fastapi_would_with_its_models_built_at_once() -> None:
    ran = subprocess.run([sys.executable, "-c", AS_A_DAEMON], capture_output=True, text=True, timeout=100, check=True)
    early, document = json.loads(ran.stdout)
    assert early == ["Own"], "models of others are built as always"
    assert document == json.loads(json.dumps(whole_document()))
