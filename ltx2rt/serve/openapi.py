"""The routes as OpenAPI has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ltx2rt.serve.admission import MAX_PRIORITY, MAX_VIDEOS, OURS, Admission
from ltx2rt.serve.fields import MAX_PROMPT, uploads
from ltx2rt.serve.jobs import JOB_ID


def _body(admission: Admission) -> dict[str, Any]:
    """The schema of a request's body, from the flags themselves."""
    properties: dict[str, Any] = {}
    limits = admission.limits()
    for pipeline in limits["pipelines"].values():
        for name, found in pipeline["fields"].items():
            properties.setdefault(name, found)
    objects = {"type": "array", "items": {"type": "object"}}
    videos = {"minimum": 1, "maximum": MAX_VIDEOS, "default": limits["videos"]["multiple_of"]}
    properties |= {name: {"type": "string"} for name in OURS}
    properties |= {
        "images": objects,
        "loras": objects,
        "metadata": {"type": "object"},
        "hdr_frames": {"type": "boolean", "default": False},
        "priority": {"type": "integer", "minimum": 0, "maximum": MAX_PRIORITY},
        "n": {"type": "integer", **videos},
    }
    for name, kind in uploads().items():
        about = f"a {kind}: a file of the form with this name, or a data: URL"
        properties[name] = {"type": "string", "description": about}
    properties["prompt"] = {"type": "string", "maxLength": MAX_PROMPT}
    fixed = {"type": "object", "required": ["prompt"], "additionalProperties": False}
    return {**fixed, "properties": properties}


def openapi(admission: Admission) -> dict[str, Any]:
    """The routes, and what a request may hold."""
    body = _body(admission)
    properties = body["properties"]
    file = {"input_reference": {"type": "string", "format": "binary"}}
    form = {**body, "properties": properties | file}
    content = {"application/json": {"schema": body}, "multipart/form-data": {"schema": form}}
    schema = {"type": "string", "pattern": JOB_ID.pattern}
    id = {"name": "id", "in": "path", "required": True, "schema": schema}
    answers = {"200": {"description": "done"}, "4XX": {"description": "an error object"}}

    def at(**methods: Mapping[str, Any]) -> dict[str, Any]:
        return {method: {"responses": answers, **more} for method, more in methods.items()}

    one = {"parameters": [id]}
    remix = {"type": "object", "properties": {"prompt": {"type": "string"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ltx2rt", "version": "1"},
        "paths": {
            "/v1/videos": at(get={}, post={"requestBody": {"required": True, "content": content}}),
            "/v1/videos/{id}": at(get=one, delete=one),
            "/v1/videos/{id}/cancel": at(post=one),
            "/v1/videos/{id}/remix": at(
                post={**one, "requestBody": {"content": {"application/json": {"schema": remix}}}}
            ),
            "/v1/videos/{id}/retry": at(post=one),
            "/v1/videos/{id}/pin": at(post=one, delete=one),
            "/v1/videos/{id}/extend": at(post={**one, "requestBody": {"content": content}}),
            "/v1/videos/extensions": at(post={"requestBody": {"content": content}}),
            "/v1/videos/{id}/stream": at(get=one),
            "/v1/videos/{id}/segments": at(get=one),
            "/v1/videos/{id}/segments/{index}": at(
                get={"parameters": [id, {**id, "name": "index", "schema": {"type": "integer"}}]}
            ),
            "/v1/videos/{id}/content": at(get=one),
            "/v1/videos/{id}/events": at(get=one),
            "/v1/events": at(get={}),
            "/v1/models": at(get={}),
            "/v1/loras": at(get={}),
            "/v1/limits": at(get={}),
            "/v1/status": at(get={}),
            "/v1/queue/pause": at(post={}),
            "/v1/queue/resume": at(post={}),
        },
    }
