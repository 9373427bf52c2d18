"""The page of the API: it needs nothing from elsewhere, and shows what the description says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from http_rig import running, says

from octavo.api_server.http.docs_page import PAGE, POLICY, SCRIPT
from octavo.api_server.http.openapi import make_openapi
from octavo.api_server.http.routes import ROUTES

DOCUMENT_OBJECT_MODEL = """
class Node {
  constructor(tag) { this.tag = tag; this.parts = []; }
  append(...parts) { this.parts.push(...parts); }
  replaceChildren(...parts) { this.parts = parts; }
  get text() {
    const inner = this.parts.map((part) => part instanceof Node ? part.text : String(part)).join("");
    return inner + (["td", "th", "tr"].includes(this.tag) ? "\\t" : ["h1", "h2", "p"].includes(this.tag) ? "\\n" : "");
  }
}
const main = new Node("main");
globalThis.document = { getElementById: () => main, createElement: (tag) => new Node(tag) };
globalThis.fetch = async (path) => ({ ok: path === "openapi.json", status: 404, json: async () => DESCRIPTION });
"""


def shown(description: object) -> str:
    """Run the page's script in node, with just enough of a browser, and return the text that it makes."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    parts = (
        f"const DESCRIPTION = {json.dumps(description)};",
        DOCUMENT_OBJECT_MODEL,
        f"{{ {SCRIPT} }}",
        "setTimeout(() => console.log(main.text), 20);",
    )
    finished = subprocess.run([node, "-"], input="\n".join(parts), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_it_names_no_other_place() -> None:
    assert not re.search(r"//\w|src=|@import|url\(", PAGE), "everything is in the page"
    assert re.findall(r'fetch\("([^"]*)"\)', PAGE) == ["openapi.json"]
    assert "innerHTML" not in PAGE


async def test_browsers_are_told_to_run_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig, rig.session.get("/docs") as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert response.headers["Content-Security-Policy"] == POLICY
        assert await response.text() == PAGE
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY


def test_it_shows_every_path_type_and_field() -> None:
    description = make_openapi(ROUTES)
    text = shown(description)
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            assert f"{method.upper()} {path}\n{operation['summary']}\n" in text
    for name, schema in description["components"]["schemas"].items():
        assert f"{name}\n" in text
        for field, described in schema.get("properties", {}).items():
            assert f"{field}\t" in text
            assert described.get("description", "") in text


def test_it_shows_types_ranges_and_defaults() -> None:
    fields = {
        "share": {
            "anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "null"}],
            "default": None,
        },
        "names": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 4, "default": []},
        "bias": {"type": "object", "additionalProperties": {"type": "number", "maximum": 100}},
        "kind": {"enum": ["a", "b"], "default": "a"},
        "other": {"anyOf": [{"$ref": "#/components/schemas/Other"}, {"type": "boolean"}]},
    }
    schemas = {"Thing": {"properties": fields, "required": ["share"]}, "Other": {"type": "string"}}
    text = shown({"info": {"title": "T", "version": "1"}, "paths": {}, "components": {"schemas": schemas}})
    assert "share\tnumber\t≥ 0, < 1\t\t\t" in text
    assert "names\tarray of string\tat most 4 entries; at most 9 characters\t[]\t\t" in text
    assert "bias\tobject of number\t≤ 100\t\t\t" in text
    assert 'kind\t"a" | "b"\t\t"a"\t\t' in text
    assert "other\tOther | boolean\t\t\t\t" in text
    assert "Other\nstring\n" in text
