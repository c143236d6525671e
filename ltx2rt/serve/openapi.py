"""The routes as OpenAPI has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from inspect import getdoc
from typing import Any

from ltx2rt.serve.admission import MAX_PRIORITY, MAX_VIDEOS, OURS, Admission
from ltx2rt.serve.fields import MAX_PROMPT, uploads
from ltx2rt.serve.jobs import JOB_ID

Answer = tuple[str, str, Callable[..., Any]]  # method, path, and what answers


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
    return {
        "type": "object",
        "anyOf": [{"required": ["prompt"]}, {"required": ["context"]}],
        "additionalProperties": False,
        "properties": properties,
    }


def openapi(admission: Admission, routes: Iterable[Answer]) -> dict[str, Any]:
    """The routes below /v1, as their methods' docstrings tell of them, and what a request may
    hold."""
    body = _body(admission)
    file = {"input_reference": {"type": "string", "format": "binary"}}
    form = {**body, "properties": body["properties"] | file}
    content = {"application/json": {"schema": body}, "multipart/form-data": {"schema": form}}
    prompt = {"type": "object", "properties": {"prompt": {"type": "string"}}}
    bodies = dict.fromkeys(("create", "extend", "extension"), content)
    bodies["remix"] = {"application/json": {"schema": prompt}}
    kinds = {"index": {"type": "integer"}, "id": {"type": "string", "pattern": JOB_ID.pattern}}
    kinds["id:path"] = {"type": "string"}  # a model
    paths: dict[str, dict[str, Any]] = {}
    for method, path, call in routes:
        if not path.startswith("/v1/") or call.__name__ == "not_here":
            continue
        about: dict[str, Any] = {
            "responses": {"200": {"description": "done"}, "4XX": {"description": "an error object"}}
        }
        if said := getdoc(call):
            about["summary"] = " ".join(said.split())
        if names := re.findall("{(.+?)}", path):
            about["parameters"] = [
                {"name": n.partition(":")[0], "in": "path", "required": True, "schema": kinds[n]}
                for n in names
            ]
        if call.__name__ in bodies:
            required = {"required": True} if call.__name__ == "create" else {}
            about["requestBody"] = {**required, "content": bodies[call.__name__]}
        paths.setdefault(path.replace(":path", ""), {})[method.lower()] = about
    return {"openapi": "3.1.0", "info": {"title": "ltx2rt", "version": "1"}, "paths": paths}
