"""GET /docs: one page that shows /openapi.json to people.

It is text of ours alone: it loads nothing but the description, from beside itself, so it works offline and behind a
proxy that adds a prefix. Its policy lets browsers run and fetch nothing else. Texts of the description become text
nodes, never HTML. Rejected: swagger-ui and its like, megabytes that have to be shipped or fetched from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib

from aiohttp import web

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.5rem 0 .25rem; font: 600 1.1rem ui-monospace, monospace; }
h3 { margin: 1.25rem 0 .25rem; font-size: .95rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; }
td:first-child, td:nth-child(2) { font-family: ui-monospace, monospace; font-size: .85rem; }
.required::after { content: " *"; color: #c33; }
"""

SCRIPT = """
"use strict";
const page = document.getElementById("page");

function element(tag, ...parts) {
  const made = document.createElement(tag);
  made.append(...parts);
  return made;
}

function link(reference) {
  const name = reference.split("/").pop();
  const made = element("a", name);
  made.href = "#" + name;
  return made;
}

function joined(lists, separator) {
  return lists.flatMap((list, index) => (index ? [separator, ...list] : list));
}

// The type of a schema, as texts and links; null is left out, because it always means "absent".
function typeOf(schema) {
  if (schema.$ref) return [link(schema.$ref)];
  if (schema.contentSchema) return typeOf(schema.contentSchema);
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return joined(choices.filter((each) => each.type !== "null").map(typeOf), " | ");
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" | ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["array of ", ...(schema.items ? typeOf(schema.items) : ["anything"])];
  if (schema.type === "object" && typeof schema.additionalProperties === "object")
    return ["object of ", ...typeOf(schema.additionalProperties)];
  return [Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "anything"];
}

const RULES = [
  ["minimum", (bound) => "≥ " + bound],
  ["exclusiveMinimum", (bound) => "> " + bound],
  ["maximum", (bound) => "≤ " + bound],
  ["exclusiveMaximum", (bound) => "< " + bound],
  ["minLength", (bound) => "at least " + bound + " characters"],
  ["maxLength", (bound) => "at most " + bound + " characters"],
  ["minItems", (bound) => "at least " + bound + " entries"],
  ["maxItems", (bound) => "at most " + bound + " entries"],
  ["minProperties", (bound) => "at least " + bound + " entries"],
  ["maxProperties", (bound) => "at most " + bound + " entries"],
  ["pattern", (bound) => "matches " + bound],
];

function rangeOf(schema) {
  const own = RULES.filter(([key]) => key in schema).map(([key, say]) => say(schema[key]));
  const inner = [...(schema.anyOf || schema.oneOf || []), ...(schema.items ? [schema.items] : [])];
  if (typeof schema.additionalProperties === "object") inner.push(schema.additionalProperties);
  return [own.join(", "), ...inner.map(rangeOf)].filter(Boolean).join("; ");
}

function row(tag, cells) {
  return element("tr", ...cells.map((cell) => element(tag, ...cell)));
}

function fieldRow(name, field, isRequired) {
  const label = element("span", name);
  if (isRequired) label.className = "required";
  const initial = field.default === undefined || field.default === null ? "" : JSON.stringify(field.default);
  return row("td", [[label], typeOf(field), [rangeOf(field)], [initial], [field.description || ""]]);
}

function schemaSection(name, schema) {
  const title = element("h2", name);
  title.id = name;
  const parts = [title];
  if (schema.description) parts.push(element("p", schema.description));
  const fields = Object.entries(schema.properties || {});
  if (!fields.length) return [...parts, element("p", ...typeOf(schema))];
  const required = new Set(schema.required || []);
  const table = element("table", row("th", [["field"], ["type"], ["range"], ["default"], ["meaning"]]));
  table.append(...fields.map(([field, of]) => fieldRow(field, of, required.has(field))));
  return [...parts, table];
}

function contents(label, content) {
  return Object.entries(content || {}).map(([kind, { schema, itemSchema: item }]) => {
    const what = item ? ["a stream of ", ...typeOf(item.properties ? item.properties.data : item)] : typeOf(schema);
    return element("p", label, kind, ": ", ...what);
  });
}

function operationSection(path, method, operation) {
  const parts = [element("h2", method.toUpperCase() + " " + path), element("p", operation.summary)];
  parts.push(...contents("Takes ", operation.requestBody && operation.requestBody.content));
  for (const [status, response] of Object.entries(operation.responses))
    parts.push(...contents("Answers " + (status === "default" ? "with an error, " : status + ", "), response.content));
  return parts;
}

function show(description) {
  const { info, paths, components } = description;
  page.replaceChildren(element("h1", info.title + " " + info.version));
  for (const [path, operations] of Object.entries(paths))
    for (const [method, operation] of Object.entries(operations))
      page.append(...operationSection(path, method, operation));
  page.append(element("h1", "Types"));
  for (const [name, schema] of Object.entries(components.schemas)) page.append(...schemaSection(name, schema));
}

fetch("openapi.json")
  .then((answer) => (answer.ok ? answer.json() : Promise.reject(new Error("status " + answer.status))))
  .then(show)
  .catch((problem) => page.replaceChildren("openapi.json cannot be shown: " + problem.message));
"""

PAGE = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Octavo API</title><style>{STYLE}</style></head>
<body><main id="page">Loading openapi.json</main><script>{SCRIPT}</script></body>
</html>
"""


def _source_of(text: str) -> str:
    """Return how a policy names an inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_source_of(SCRIPT)}",
        f"style-src {_source_of(STYLE)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


async def show_docs(request: web.Request) -> web.Response:
    """Send the page."""
    return web.Response(text=PAGE, content_type="text/html", headers={"Content-Security-Policy": POLICY})
