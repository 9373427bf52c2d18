"""GET /openapi.json: the API described by the very types that check it.

Paths come from the table of routes, types and ranges from the msgspec structs that decode bodies and encode answers,
and words from docstrings and `api_texts`. So the description cannot say something else than the server does. It is
OpenAPI 3.2, the first version that can say what one event of a stream is; its schemas are JSON Schema as msgspec
writes it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version
from types import UnionType
from typing import Any, Protocol, get_args

import msgspec
from aiohttp import web

from octavo.api_server.errors import AnthropicErrorBody, ErrorBody, ErrorShape, OllamaErrorBody
from octavo.api_server.http.api_texts import FIELD_TEXTS, NOT_SUPPORTED, ROUTE_TEXTS
from octavo.api_server.http.sse import SSE, Media

REF_TEMPLATE = "#/components/schemas/{name}"
JSON = "application/json"
ERROR_BODIES = {
    ErrorShape.OPENAI: ErrorBody,
    ErrorShape.ANTHROPIC: AnthropicErrorBody,
    ErrorShape.OLLAMA: OllamaErrorBody,
}
PATH_PARAMETER = re.compile(r"\{(\w+)(:[^}]*)?\}")
ATTRIBUTES = "Attributes:\n"
ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", re.MULTILINE)
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}

Schema = dict[str, Any]


class DescribedRoute(Protocol):
    """What the description reads of a route."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def body(self) -> type[msgspec.Struct] | None: ...
    @property
    def answer(self) -> Any: ...
    @property
    def event(self) -> Any: ...
    @property
    def error_shape(self) -> ErrorShape: ...
    @property
    def media(self) -> Media: ...


def make_openapi_handler(routes: Iterable[DescribedRoute]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler that sends the description of `routes`, which is made once, when it is first asked for."""

    @cache
    def document() -> bytes:
        return msgspec.json.encode(make_openapi(routes))

    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=document(), content_type=JSON)

    return handle


def make_openapi(routes: Iterable[DescribedRoute]) -> dict[str, Any]:
    """Return the whole document, ready for JSON."""
    routes = list(routes)
    described = [each for route in routes for each in (route.body, route.answer, route.event) if each is not None]
    types = [member for each in (*ERROR_BODIES.values(), *described) for member in _members(each)]
    references, schemas = msgspec.json.schema_components(types, ref_template=REF_TEMPLATE)
    schema_of = dict(zip(types, references, strict=True))
    bodies = [route.body for route in routes if route.body is not None]
    _, request_schemas = msgspec.json.schema_components(bodies, ref_template=REF_TEMPLATE)
    for name, schema in schemas.items():
        _put_in_words(schema, is_request=name in request_schemas)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = PATH_PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.2.0",
        "info": {"title": "Octavo", "version": version("octavo")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SECURITY_SCHEMES},
        "security": [{}, *({name: []} for name in SECURITY_SCHEMES)],
    }


def _operation(route: DescribedRoute, schema_of: Mapping[Any, Schema]) -> dict[str, Any]:
    words = re.findall(r"\w+", PATH_PARAMETER.sub(r"\1", route.path))
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name, _ in PATH_PARAMETER.findall(route.path)
    ]
    content = {}
    if route.answer is not None:
        content[JSON] = _content(route.answer, schema_of)
    if route.event is not None:
        content[route.media.content_type] = {"itemSchema": _item_schema(route, schema_of)}
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *words]),
        "summary": ROUTE_TEXTS.get(route.path, ""),
        "parameters": parameters,
        "responses": {
            "200": {"description": "The answer, whole or as a stream.", "content": content},
            "default": {
                "description": "An error.",
                "content": {JSON: _content(ERROR_BODIES[route.error_shape], schema_of)},
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: _content(route.body, schema_of)}}
    return operation


def _content(described: Any, schema_of: Mapping[Any, Schema]) -> dict[str, Any]:
    schemas = [schema_of[member] for member in _members(described)]
    return {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}


def _item_schema(route: DescribedRoute, schema_of: Mapping[Any, Schema]) -> Schema:
    """Return the schema of one item of a route's stream: a line, or an event with JSON as the text of its data."""
    data = _content(route.event, schema_of)["schema"]
    if route.media.content_type != SSE.content_type:
        return data
    text: Schema = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    if route.media.last_data:
        text = {"anyOf": [text, {"const": route.media.last_data}]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": text}, "required": ["data"]}


def _members(described: Any) -> tuple[Any, ...]:
    """Return the types of a union, else the type itself: msgspec takes no union of structs that only we tell apart."""
    return get_args(described) if isinstance(described, UnionType) else (described,)


def _put_in_words(schema: Schema, *, is_request: bool) -> None:
    """Move the texts of a docstring's attributes to the fields, and give a request's other fields their words."""
    summary, _, attributes = schema.get("description", "").partition(ATTRIBUTES)
    if summary:
        schema["description"] = summary.strip()
    texts = _attribute_texts(attributes)
    for name, field in schema.get("properties", {}).items():
        if "description" in field:
            continue
        text = texts.get(name)
        if text is None and is_request:
            text = NOT_SUPPORTED if _takes_anything(field) else FIELD_TEXTS.get(name)
        if text is not None:
            field["description"] = text


def _attribute_texts(attributes: str) -> dict[str, str]:
    texts = {}
    for names, text in ATTRIBUTE.findall(attributes):
        line = " ".join(text.split())
        texts.update(dict.fromkeys(names.split(", "), line[:1].upper() + line[1:]))
    return texts


def _takes_anything(field: Schema) -> bool:
    return not field.keys() - {"default"}
