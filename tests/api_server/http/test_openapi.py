"""The description of the API: every route and type is in it, with the ranges that bodies are checked against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import pytest
from http_rig import MODEL, running, says

from octavo.api_server.errors import ErrorShape
from octavo.api_server.http.api_texts import NOT_SUPPORTED, ROUTE_TEXTS
from octavo.api_server.http.openapi import make_openapi
from octavo.api_server.http.routes import ROUTES
from octavo.api_server.http.sse import NDJSON, SSE, SSE_UNTIL_DONE, Media

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"


class Inner(msgspec.Struct):
    value: int


class Asked(msgspec.Struct, kw_only=True):
    """What is asked.

    Attributes:
        first, second: two of one kind, in a text
            of two lines.
        n: its own words.
    """

    first: Annotated[int, msgspec.Meta(ge=1, le=9)]
    second: list[Inner] | None = None
    n: int = 3
    temperature: float | None = None
    stranger: str | None = None
    others: Any = None
    described: Annotated[int, msgspec.Meta(description="by its type")] = 0


class Answered(msgspec.Struct):
    """No attributes here."""

    temperature: float


class Planted(NamedTuple):
    method: str
    path: str
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    event: Any = None
    error_shape: ErrorShape = ErrorShape.OPENAI
    media: Media = SSE


def planted() -> dict[str, Any]:
    return make_openapi(
        [
            Planted("POST", "/ask", Asked, Answered, Answered | Inner),
            Planted("GET", "/ask"),
            Planted("GET", "/v1/things/{thing:.+}/{part}", None, Inner),
            Planted("POST", "/tell", Asked, Answered, Answered, ErrorShape.OLLAMA, NDJSON),
            Planted("POST", "/until", Asked, Answered, Answered, media=SSE_UNTIL_DONE),
        ]
    )


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from references(each)


def test_a_field_has_its_type_range_and_words() -> None:
    fields = planted()["components"]["schemas"]["Asked"]["properties"]
    assert fields["first"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "description": "Two of one kind, in a text of two lines.",
    }
    assert fields["second"]["description"] == fields["first"]["description"]
    assert (fields["n"]["description"], fields["n"]["default"]) == ("Its own words.", 3)
    assert fields["temperature"]["description"].startswith("0 is greedy"), "the words that all routes share"
    assert fields["others"]["description"] == NOT_SUPPORTED
    assert fields["described"]["description"] == "by its type"
    assert "description" not in fields["stranger"]


def test_the_words_of_request_fields_are_not_put_on_answers() -> None:
    schema = planted()["components"]["schemas"]["Answered"]
    assert schema["description"] == "No attributes here."
    assert "description" not in schema["properties"]["temperature"]


def test_the_docstring_of_a_type_ends_before_its_attributes() -> None:
    assert planted()["components"]["schemas"]["Asked"]["description"] == "What is asked."


def test_bodies_answers_and_events_are_where_clients_look() -> None:
    paths = planted()["paths"]
    assert paths["/ask"].keys() == {"post", "get"}
    asked = paths["/ask"]["post"]
    assert asked["requestBody"]["content"][JSON]["schema"] == {"$ref": "#/components/schemas/Asked"}
    content = asked["responses"]["200"]["content"]
    assert content[JSON]["schema"] == {"$ref": "#/components/schemas/Answered"}
    data = content[EVENTS]["itemSchema"]["properties"]["data"]
    assert data["contentMediaType"] == JSON
    assert list(references(data["contentSchema"])) == ["#/components/schemas/Answered", "#/components/schemas/Inner"]
    assert "requestBody" not in paths["/ask"]["get"]
    error = asked["responses"]["default"]["content"][JSON]["schema"]
    assert error == {"$ref": "#/components/schemas/ErrorBody"}


def test_a_stream_has_its_media_and_an_error_its_shape() -> None:
    responses = planted()["paths"]["/tell"]["post"]["responses"]
    content = responses["200"]["content"]
    assert content.keys() == {JSON, LINES}
    assert content[LINES] == {"itemSchema": {"$ref": "#/components/schemas/Answered"}}
    assert responses["default"]["content"][JSON]["schema"] == {"$ref": "#/components/schemas/OllamaErrorBody"}


def test_what_is_no_json_at_the_end_of_a_stream_is_said() -> None:
    item = planted()["paths"]["/until"]["post"]["responses"]["200"]["content"][EVENTS]["itemSchema"]
    json_text, last = item["properties"]["data"]["anyOf"]
    assert json_text["contentSchema"] == {"$ref": "#/components/schemas/Answered"}
    assert last == {"const": "[DONE]"}


def test_parameters_of_paths_lose_aiohttps_patterns() -> None:
    operation = planted()["paths"]["/v1/things/{thing}/{part}"]["get"]
    assert [(each["name"], each["in"], each["required"]) for each in operation["parameters"]] == [
        ("thing", "path", True),
        ("part", "path", True),
    ]
    assert operation["operationId"] == "get_v1_things_thing_part"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_says_what_it_does_and_has_its_types(route: Any) -> None:
    document = make_openapi(ROUTES)
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len(operations) == len(ROUTES)
    assert route.path in ROUTE_TEXTS, "say in http/api_texts.py what the route does"
    names = {each.removeprefix("#/components/schemas/") for each in references(document)}
    assert names <= document["components"]["schemas"].keys()
    for described in (route.body, route.answer):
        assert described is None or described.__name__ in names
    if route.body is not None:
        described = document["components"]["schemas"][route.body.__name__]["properties"]
        assert described.keys() == {field.encode_name for field in msgspec.structs.fields(route.body)}


async def test_the_server_sends_it_and_answers_as_it_says(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        async with rig.session.get("/openapi.json") as response:
            assert (response.status, response.content_type) == (200, JSON)
            document = await response.json()
        maximum = document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"]
        for temperature, expected in ((maximum, 200), (maximum + 1, 400)):
            status, _ = await rig.complete(temperature=temperature, max_tokens=1)
            assert status == expected
        assert (await rig.complete(model=MODEL))[0] == 200
