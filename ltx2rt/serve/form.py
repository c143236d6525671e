"""Bodies: JSON or multipart, read within limits of size and time, to the fields that admission takes.

The official client sends multipart with every value as text; `loras[][name]` and JSON in a field say the same.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from ltx2rt.serve.folder import Folder
from ltx2rt.serve.image import MAX_BYTES, check_image
from ltx2rt.serve.refusal import Refusal

MAX_FIELDS, MAX_FILES = 64, 8
SLOW_S, SLOWEST_BYTES_PER_S = 10, 64_000
STRUCTURED = ("loras", "images", "metadata", "stg_blocks")


class Gone(Exception):
    """The client has left."""


async def fields_of(request: Request, folder: Folder, max_bytes: int) -> dict[str, Any]:
    """The fields of a body; its images are kept and stand in `images` by their `file_id`. Raises Refusal."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    chunks = _chunks(request, max_bytes)
    if kind == "multipart/form-data":
        given, files = await _multipart(request, chunks, max_bytes)
    elif kind in ("application/json", ""):
        given, files = _json(b"".join([chunk async for chunk in chunks])), {}
    else:
        text = f"content-type: {kind[:80]!r}, expected multipart/form-data or application/json"
        raise Refusal(415, "bad_content_type", text)
    return await _with_images(given, files, folder)


async def _chunks(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    size, start, more = 0, time.monotonic(), True
    too_large = Refusal(413, "payload_too_large", f"the body is longer than {max_bytes} bytes; send less")
    if (length := request.headers.get("content-length", "0")).isdecimal() and int(length) > max_bytes:
        raise too_large
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), SLOW_S)
        except TimeoutError:
            raise Refusal(408, "too_slow", f"nothing arrived for {SLOW_S} s; send it again") from None
        if message["type"] == "http.disconnect":
            raise Gone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size, spent_s = size + len(chunk), time.monotonic() - start
        if size > max_bytes:
            raise too_large
        if spent_s > SLOW_S and size < spent_s * SLOWEST_BYTES_PER_S:
            raise Refusal(408, "too_slow", f"{size} bytes in {spent_s:.0f} s; send it again, faster")
        yield chunk


async def _multipart(
    request: Request, chunks: AsyncGenerator[bytes, None], max_bytes: int
) -> tuple[dict[str, Any], dict[str, bytes]]:
    parser = MultiPartParser(
        request.headers, chunks, max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=max_bytes
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeError, ValueError) as error:
        said = getattr(error, "message", "") or "the form cannot be read"
        raise Refusal(400, "invalid_value", f"form: {said}; see RFC 7578") from None
    given: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    try:
        for name, value in form.multi_items():
            if not isinstance(value, str):
                files[name] = await value.read()
            elif match := re.fullmatch(r"(\w+)\[\]\[(\w+)\]", name):
                _append(given.setdefault(match[1], []), match[2], value, name)
            elif match := re.fullmatch(r"(\w+)\[(\w*)\]", name):
                _put(given.setdefault(match[1], {} if match[2] else []), match[2], value, name)
            elif name in given:
                raise Refusal(400, "invalid_value", f"{name[:80]}: given twice", name[:80])
            else:
                given[name] = value
    finally:
        await form.close()
    for name in STRUCTURED:
        if isinstance(text := given.get(name), str) and text.lstrip()[:1] in ("[", "{"):
            given[name] = _parsed(text, name)
    return given, files


def _append(items: Any, key: str, value: str, name: str) -> None:
    """`a[][key]=value`: of the latest object, or of a new one where that has the key."""
    if not isinstance(items, list) or (items and not isinstance(items[-1], dict)):
        raise Refusal(400, "invalid_value", f"{name[:80]}: a list and something else", name[:80])
    if not items or key in items[-1]:
        items.append({})
    items[-1][key] = value


def _put(into: Any, key: str, value: str, name: str) -> None:
    if key and isinstance(into, dict):
        into[key] = value
    elif not key and isinstance(into, list):
        into.append(value)
    else:
        raise Refusal(400, "invalid_value", f"{name[:80]}: a list and something else", name[:80])


def _json(body: bytes) -> dict[str, Any]:
    found = _parsed(body, None)
    if not isinstance(found, dict):
        raise Refusal(400, "invalid_value", "the body is no JSON object; send one, or a form")
    return found


def _parsed(text: str | bytes, name: str | None) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_value", f"{name or 'body'}: no JSON ({str(error)[:120]})", name) from None


async def _with_images(given: dict[str, Any], files: dict[str, bytes], folder: Folder) -> dict[str, Any]:
    """Images by the digest of their bytes, which are kept."""
    images = given.pop("images", None)
    if (reference := given.pop("input_reference", None)) is not None:
        images = [
            *(images or ()),
            {"image_url": reference.get("image_url") if isinstance(reference, dict) else reference},
        ]
    if "input_reference" in files:
        images = [*(images or ()), {"file": "input_reference"}]
    unused = set(files)
    if isinstance(images, list) and len(images) <= MAX_FILES:
        resolved = []
        for item in images:
            if isinstance(item, dict) and ("file" in item or "image_url" in item):
                data = _bytes_of(item, files)
                unused.discard(str(item.get("file")))
                await check_image(data)
                rest = {key: item[key] for key in item if key not in ("file", "image_url")}
                item = {**rest, "file_id": await asyncio.to_thread(folder.keep_input, data)}
            resolved.append(item)
        images = resolved
    if unused:
        name = sorted(unused)[0][:80]
        raise Refusal(400, "unknown_field", f"{name!r} is a file that no entry of images names", name)
    return given if images is None else {**given, "images": images}


def _listed(images: Any) -> list[Any]:
    return images if isinstance(images, list) else [] if images is None else [images]


def _bytes_of(item: dict[str, Any], files: dict[str, bytes]) -> bytes:
    if "file" in item:
        if item["file"] not in files:
            raise Refusal(400, "invalid_value", f"images: no file {str(item['file'])[:80]!r} was sent", "images")
        return files[item["file"]]
    url = item["image_url"]
    match = re.match(r"data:image/[\w.+-]{1,40};base64,", url) if isinstance(url, str) else None
    if match is None:
        raise Refusal(400, "invalid_value", "images: only data: URLs in base64 are read; send the file", "images")
    if len(url) > 2 * MAX_BYTES:
        raise Refusal(413, "payload_too_large", f"images: longer than {MAX_BYTES} bytes", "images")
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(400, "bad_image", "images: no base64", "images") from None


def close_unread(response: Response) -> Response:
    """Of a body that was not read whole: the connection ends with the answer."""
    response.headers["connection"] = "close"
    return response
