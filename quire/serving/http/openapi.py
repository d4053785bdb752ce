"""The OpenAPI description, generated from the endpoints and the types of their bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from quire.serving.endpoint import Endpoint, header
from quire.serving.errors import MAX_RETRY_AFTER_S, OVERLOADED_STATUS, ErrorStyle

_ERROR_NAMES: Mapping[ErrorStyle, str] = {"openai": "OpenAIError", "anthropic": "AnthropicError", "ollama": "OllamaError"}
_REF = "#/components/schemas/{name}"
_ERROR_STATUSES = (400, 401, 403, 404, 408, 429, 431, 500, 503, 504)
_BODY_STATUSES = (413, 415)
_RETRIED_STATUSES = (429, 503, OVERLOADED_STATUS)
_ERRORS = {
    400: "The request is not valid; the error names the field.",
    401: "A key is missing, or unknown.",
    403: "The page, or the name of the host, may not ask.",
    404: "What the request names is not there.",
    408: "The request did not arrive in time, or its deadline passed in the queue.",
    413: "The body, or a part of it, is too large.",
    415: "The body is of another type.",
    429: "The key is over its share or its rate.",
    431: "The headers are too large.",
    500: "The server, or its engine, failed on this request.",
    503: "The server has no room, or no engine, now.",
    504: "The deadline passed while the request ran.",
    OVERLOADED_STATUS: "The queue is full.",
}


def schemas_of(endpoints: Sequence[Endpoint[Any]]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """Return the schemas of the types of bodies and answers, and the components that they reference."""
    found = [
        kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer, *endpoint.other_answers.values()) if kind
    ]
    types = list(dict.fromkeys(found))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    return dict(zip(types, schemas, strict=True)), components


def describe(endpoint: Endpoint[Any], schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """Return the operation of one endpoint, as openapi_extra."""
    has_body = endpoint.body is not None or endpoint.request_body is not None
    statuses = [
        *_ERROR_STATUSES,
        *(_BODY_STATUSES if has_body else ()),
        *((OVERLOADED_STATUS,) if endpoint.error_style == "anthropic" else ()),
    ]
    responses = {str(status): _error(endpoint, status) for status in sorted(statuses)}
    for status, kind in endpoint.other_answers.items():
        responses[str(status)] = _other(responses.get(str(status)), None if kind is None else schemas[kind])
    operation: dict[str, Any] = {
        "responses": {"200": {"description": "Success", "content": _success(endpoint, schemas)}, **responses},
        "parameters": [*_path_parameters(endpoint.path), *endpoint.query, *endpoint.headers, _REQUEST_ID],
    }
    if not endpoint.is_open:
        operation["security"] = [{"bearer": []}, {"key": []}, {"azure": []}]
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[endpoint.body]}}}
    elif endpoint.request_body is not None:
        operation["requestBody"] = endpoint.request_body
    return operation


def _success(endpoint: Endpoint[Any], schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        content["application/json"] = {"schema": schemas[endpoint.answer]}
    if endpoint.success_media_type is not None:
        content[endpoint.success_media_type] = {}
    if endpoint.is_streaming:
        content["text/event-stream"] = {"schema": _EVENTS}
    return content


def _error(endpoint: Endpoint[Any], status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": _ERRORS[status],
        "content": {"application/json": {"schema": _error_schema(endpoint)}},
    }
    return {**found, "headers": _RETRY_HEADERS} if status in _RETRIED_STATUSES else found


def _other(error: dict[str, Any] | None, schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the description of an answer whose status may also mean an error."""
    if schema is None:
        return {"description": "Nothing has changed."}
    if error is None:
        return {"description": "An answer, too.", "content": {"application/json": {"schema": schema}}}
    of_error = error["content"]["application/json"]["schema"]
    return {**error, "content": {"application/json": {"schema": {"anyOf": [schema, of_error]}}}}


def document(
    title: str,
    version: str,
    endpoints: Iterable[Endpoint[Any]],
    maxima: Mapping[str, int] = MappingProxyType({}),
    root_path: str = "",
) -> dict[str, Any]:
    """Return the whole OpenAPI 3.1 document; `maxima` are of fields of bodies, as this server is configured.

    root_path  where all paths are, at a proxy in front
    """
    listed = list(endpoints)
    schemas, components = schemas_of(listed)
    for name in {endpoint.body.__name__ for endpoint in listed if endpoint.body is not None}:
        _limit(components[name]["properties"], maxima)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in listed:
        operation = describe(endpoint, schemas)
        name = "".join(part.title() for part in endpoint.path.replace(":path", "").strip("/").replace("{", "").split("/"))
        operation |= {
            "summary": endpoint.summary,
            "tags": [endpoint.tag],
            "operationId": f"{endpoint.method.lower()}{''.join(c for c in name if c.isalnum())}",
        }
        paths.setdefault(endpoint.path.replace(":path", ""), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": {
                **components,
                "OpenAIError": _OPENAI_ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                "OllamaError": _OLLAMA_ERROR,
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "azure": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
    }


def _limit(properties: Mapping[str, Any], maxima: Mapping[str, int]) -> None:
    for name, maximum in maxima.items():
        schema = properties.get(name, {})
        for part in (schema, *schema.get("anyOf", ())):
            if part.get("type") == "integer":
                part["maximum"] = maximum


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part[1:].partition("}")[0].partition(":")[0] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _error_schema(endpoint: Endpoint[Any]) -> dict[str, str]:
    return {"$ref": _REF.format(name=_ERROR_NAMES[endpoint.error_style])}


# The schema of one event: OpenAPI tools expect the schema of a stream in this form.
_EVENTS = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"type": "string", "description": "JSON; in streams of the OpenAI API [DONE] at the end."},
        "event": {"type": "string"},
        "id": {"type": "string"},
    },
    "description": "A server-sent event. An error is an event of its own; lines that begin with a colon are comments.",
}
_SECONDS = {"type": "integer", "minimum": 1, "maximum": MAX_RETRY_AFTER_S}
_RETRY_HEADERS = {
    "retry-after": {"description": "Seconds until when to come back.", "schema": _SECONDS},
    "retry-after-ms": {"description": "The same in milliseconds.", "schema": {"type": "integer", "minimum": 1000}},
}
_REQUEST_ID = header(
    "x-request-id", {"type": "string"}, "A name of the client's own, told back in x-request-id; the server's is in request-id."
)
_NULLABLE = {"type": ["string", "null"]}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _NULLABLE, "code": _NULLABLE},
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": _NULLABLE,
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
