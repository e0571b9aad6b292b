"""The OpenAPI document of the server.

It is made from the routes, from the classes of :mod:`deepinfer.server.bodies`, and from the tables of
:mod:`deepinfer.server.protocol`.  No path and no field is listed here a second time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from starlette.routing import Route

from deepinfer import __version__
from deepinfer.server.bodies import MessageItem
from deepinfer.server.gate import PRIORITIES
from deepinfer.server.protocol import BODIES, HARMLESS, REFUSED

_REF: Final = "#/components/schemas/{name}"
_MEDIA: Final = {"/": "text/html", "/metrics": "text/plain"}
"""Media types of answers that are not JSON."""
_KEYS: Final = {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
_HEADERS: Final = [
    {"name": "x-priority", "in": "header", "schema": {"enum": list(PRIORITIES)}, "description": "Class of the request."},
    {
        "name": "x-deadline-ms",
        "in": "header",
        "schema": {"type": "integer", "minimum": 1},
        "description": "Milliseconds after which the request fails.",
    },
]
"""Headers of requests that generate."""
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}
"""What the errors of both families of clients have in common."""


def openapi(routes: Sequence[Route], model_names: Sequence[str], open_paths: Iterable[str], *, has_keys: bool) -> dict[str, Any]:
    """The document, version 3.1.

    Args:
        routes: all routes.  The first line of a handler's docstring is its summary.  A handler with a ``body`` takes an object of
            that class; with ``generates`` it may answer with a stream of events.
        model_names: the models that requests may name.
        open_paths: paths that need no key.
        has_keys: whether the other paths need one.
    """
    bodies = {body for route in routes if (body := getattr(route.endpoint, "body", None)) is not None}
    _, schemas = msgspec.json.schema_components(sorted(bodies, key=lambda each: each.__name__), ref_template=_REF)
    schemas[MessageItem.__name__]["required"].remove("type")
    for body in bodies:
        schemas[body.__name__]["additionalProperties"] = False
        schemas[body.__name__]["properties"]["model"] = {"enum": list(model_names)}
    for api, body in BODIES.items():
        schema = schemas[body.__name__]
        schema["properties"] |= {name: {"description": "Has no effect on tokens."} for name in sorted(HARMLESS[api])}
        schema["properties"] |= {
            name: {"enum": [None, *neutral], "description": "Refused with any other value."}
            for name, neutral in REFUSED[api].items()
        }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, model_names, is_open=path in open_paths)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "deepinfer", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        document["components"]["securitySchemes"] = _KEYS
        document["security"] = [{name: []} for name in _KEYS]
    return document


def _operation(route: Route, path: str, method: str, model_names: Sequence[str], *, is_open: bool) -> dict[str, Any]:
    body, generates = getattr(route.endpoint, "body", None), getattr(route.endpoint, "generates", False)
    words = re.findall(r"\w+", path)
    media = _MEDIA.get(path, "application/json")
    answer = {media: {"schema": {"type": "object" if media == "application/json" else "string"}}}
    made: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *words]),
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            "default": {"description": "An error.", "content": {"application/json": {"schema": _ERROR}}},
        },
    }
    if is_open:
        made["security"] = []
    if generates:
        answer["text/event-stream"] = {}
        made["parameters"] = _HEADERS
    if "{name}" in path:
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"enum": list(model_names)}}]
    if body is not None:
        schema = {"$ref": _REF.format(name=body.__name__)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return made
