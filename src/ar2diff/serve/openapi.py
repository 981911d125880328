"""The description at `/openapi.json`, with the request bodies that the server really reads."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ar2diff.serve.fields import GenerationFields
from ar2diff.serve.schemas import ChatRequest, CompletionRequest

_BODIES: dict[str, type[GenerationFields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Any] = {"Error": _ERROR}
    failed = _content("Error")
    for path, kind in _BODIES.items():
        schema = kind.model_json_schema(ref_template=_REF)
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = schema
        document["paths"][path]["post"]["requestBody"] = {"required": True, **_content(kind.__name__)}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "An error.", **failed}
    document["components"] = {"schemas": schemas}
    return document


def _content(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}}
