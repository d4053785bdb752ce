"""The OpenAPI description, made from the endpoints and the types of their bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.serving.endpoint import Endpoint, header

_ERROR_STATUSES = ("400", "401", "403", "404", "408", "409", "413", "415", "429", "500", "503", "504")
_REF = "#/components/schemas/{name}"


def body_schemas(endpoints: Sequence[Endpoint]) -> tuple[dict[type, dict[str, Any]], dict[str, Any]]:
    """Return the schema of each body type, and the components that they refer to."""
    types = list({endpoint.body: None for endpoint in endpoints if endpoint.body is not None})
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    return dict(zip(types, schemas, strict=True)), components


def describe(endpoint: Endpoint, schemas: dict[type, dict[str, Any]]) -> dict[str, Any]:
    """Return the operation of one endpoint, as openapi_extra."""
    media = {endpoint.success_media_type: {}}
    if endpoint.success_media_type == "application/json":
        media = {"application/json": {"schema": {"type": "object"}}}
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "Success", "content": media},
            **{
                status: {"description": "Error", "content": {"application/json": {"schema": _error_schema(endpoint)}}}
                for status in _ERROR_STATUSES
            },
        },
        "parameters": [*_path_parameters(endpoint.path), *endpoint.query, *endpoint.headers, _REQUEST_ID],
    }
    if not endpoint.is_open:
        operation["security"] = [{"bearer": []}, {"key": []}]
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[endpoint.body]}}}
    elif endpoint.request_body is not None:
        operation["requestBody"] = endpoint.request_body
    return operation


def document(title: str, version: str, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the whole OpenAPI 3.1 document."""
    listed = list(endpoints)
    schemas, components = body_schemas(listed)
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
        "paths": paths,
        "components": {
            "schemas": {**components, "OpenAIError": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part[1:].partition("}")[0].partition(":")[0] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _error_schema(endpoint: Endpoint) -> dict[str, str]:
    return {"$ref": _REF.format(name="AnthropicError" if endpoint.is_anthropic else "OpenAIError")}


_REQUEST_ID = header("x-request-id", {"type": "string"}, "A name of the client's own, told back in x-client-request-id.")
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
