"""Bodies: JSON or multipart, read within limits of size and time, to the fields of admission.

The official client sends multipart with every value as text; `loras[][name]` and JSON in a field
say the same.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from ltx2rt.serve.fields import file_field, several, structured, uploads
from ltx2rt.serve.folder import Folder
from ltx2rt.serve.inline import ABOUT, KEYS, bytes_of, is_file, text_of
from ltx2rt.serve.refusal import Refusal, invalid, unknown
from ltx2rt.serve.upload import IMAGE, SUFFIX, check_upload, kind_of
from ltx2rt.text_files import once

MAX_FIELDS, MAX_FILES = 64, 8
MAX_MARKS = 50_000  # commas and opening brackets of JSON, which cost a hundred times their size
MAX_ESCAPES = 2**20  # in a form of text; reading one takes half a microsecond
SLOW_S, SLOWEST_BYTES_PER_S = 10, 64_000
FORM = "application/x-www-form-urlencoded"
# One body at a time: the server answers others meanwhile, and large ones need memory in turn.
_places = asyncio.Semaphore(4)  # files that are decoded at once
_reader = ThreadPoolExecutor(1, thread_name_prefix="body")


class HungUp(Exception):
    """The client has left."""


async def fields_of(
    request: Request, max_bytes: int, folder: Folder | None = None
) -> dict[str, Any]:
    """The fields of a body; the files that it holds are kept, and stand where they are named by
    their `file_id`. folder: where; none: their bytes are there. Raises Refusal."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise Refusal(
            415,
            "bad_content_encoding",
            f"content-encoding: {coding[:80]!r}, expected none; send the body as it is",
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    chunks = _chunks(request, max_bytes)
    files: dict[str, list[bytes]] = {}
    if kind == "multipart/form-data":
        given, files = await _multipart(request, chunks, max_bytes)
    elif kind in ("application/json", FORM, ""):
        body = b"".join([chunk async for chunk in chunks])
        json_body = kind != FORM or body.lstrip()[:1] == b"{"  # `curl -d` calls JSON a form
        given = await _read(_json if json_body else _urlencoded, body)
    else:
        raise Refusal(
            415,
            "bad_content_type",
            f"content-type: {kind[:80]!r}, expected multipart/form-data or application/json",
        )
    await _read(_structure, given)
    if folder is None:
        return {**given, **{name: data[0] for name, data in files.items()}}
    return await _with_files(given, files, folder, request.state.user)


async def _read(call: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call in the thread that reads large texts."""
    return await asyncio.get_running_loop().run_in_executor(_reader, call, *args)


def _structure(given: dict[str, Any]) -> None:
    """Replace lists and objects that came as text. Raises Refusal."""
    for name in structured():
        text = given.get(name)
        if isinstance(text, str) and text.lstrip()[:1] in ("[", "{"):
            given[name] = _parsed(text, name)
        elif isinstance(text, list) and name in ("loras", "images", *uploads()):
            given[name] = [
                _parsed(x, name) if isinstance(x, str) and x.lstrip()[:1] == "{" else x
                for x in text
            ]


async def _chunks(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    size, start, more = 0, time.monotonic(), True
    text = f"the body is longer than {max_bytes} bytes; send less"
    too_large = Refusal(413, "payload_too_large", text)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), SLOW_S)
        except TimeoutError:
            raise Refusal(
                408, "too_slow", f"nothing arrived for {SLOW_S} s; send it again"
            ) from None
        if message["type"] == "http.disconnect":
            raise HungUp
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size, spent_s = size + len(chunk), time.monotonic() - start
        if size > max_bytes:
            raise too_large
        if spent_s > SLOW_S and size < spent_s * SLOWEST_BYTES_PER_S:
            raise Refusal(
                408, "too_slow", f"{size} bytes in {spent_s:.0f} s; send it again, faster"
            )
        yield chunk


async def _multipart(
    request: Request, chunks: AsyncGenerator[bytes, None], max_bytes: int
) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Fields, and the files of each name. Raises Refusal."""
    most = {"max_files": MAX_FILES, "max_fields": MAX_FIELDS, "max_part_size": max_bytes}
    parser = MultiPartParser(request.headers, chunks, **most)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeError, ValueError) as error:
        said = getattr(error, "message", "") or "the form cannot be read"
        raise invalid(f"form: {said}; see RFC 7578") from None
    try:
        items = form.multi_items()
        files: dict[str, list[bytes]] = {}
        for name, x in items:
            if not isinstance(x, str):
                files.setdefault(name.removesuffix("[]"), []).append(await x.read())
        return _fields((name, x) for name, x in items if isinstance(x, str)), files
    finally:
        await form.close()


def _urlencoded(body: bytes) -> dict[str, Any]:
    """Raises Refusal."""
    if body.count(b"%") > MAX_ESCAPES:
        raise invalid(f"form: over {MAX_ESCAPES} escapes; send multipart/form-data or JSON")
    try:
        found = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise invalid(f"form: {str(error)[:120]}") from None
    return _fields(found)


def _fields(items: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The fields of a form, with the lists and objects that names in brackets make: `a[]` adds to a
    list, `a[key]` to an object, `a[][key]` to the latest object of a list, or to a new one where
    that has the key. A field that takes several values may be there several times. Raises
    Refusal."""
    given: dict[str, Any] = {}
    for name, value in items:
        if match := re.fullmatch(r"(\w+)(\[\])?\[(\w*)\]", name):
            field, listed, key = match.groups()
            into = given.setdefault(field, [] if listed or not key else {})
            if listed and isinstance(into, list):
                if not into or (isinstance(into[-1], dict) and key in into[-1]):
                    into.append({})
                into = into[-1]
            elif listed:
                into = None
            if isinstance(into, dict) and key and key not in into:
                into[key] = value
            elif isinstance(into, dict) and key:
                raise _twice(name)
            elif isinstance(into, list) and not key:
                into.append(value)
            else:
                raise invalid(f"{name[:80]}: a list and something else", name[:80])
        elif name not in given:
            given[name] = value
        elif several(name):
            given[name] = [*_listed(given[name]), value]
        else:
            raise _twice(name)
    return given


def _twice(name: str, too: str = "") -> Refusal:
    """too: what else it was given as, in words."""
    return invalid(f"{name[:80]}: given twice{too}; give one", name[:80])


def _json(body: bytes) -> dict[str, Any]:
    found = _parsed(body, None)
    if not isinstance(found, dict):
        raise invalid("the body is no JSON object; send one, or a form")
    return found


def _parsed(text: str | bytes, name: str | None) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no number")

    marks = ",[{" if isinstance(text, str) else (b",", b"[", b"{")
    try:
        if sum(map(text.count, marks)) > MAX_MARKS:  # type: ignore[arg-type]
            raise ValueError("it has too many parts")
        return json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except UnicodeError:
        raise invalid(f"{name or 'body'}: no UTF-8 text", name) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name or 'body'}: no JSON ({str(error)[:120]})", name) from None


async def _with_files(
    given: dict[str, Any], files: dict[str, list[bytes]], folder: Folder, user: str
) -> dict[str, Any]:
    """Every file that a field holds or names is kept, and is there by the digest of its bytes."""
    kinds = {"images": IMAGE} | uploads()
    items = {name: _listed(given[name]) for name in kinds if given.get(name) is not None}
    items.setdefault("images", []).extend(_listed(given.pop("input_reference", None)))
    objects = [x for some in items.values() for x in some if isinstance(x, dict)]
    named = {str(x["file"]) for x in objects if "file" in x}
    for name in [name for name in given if name not in kinds]:  # as other servers call it
        if _holds_a_file(given[name]) and (meant := file_field(name, kinds)):
            _add(items, name, *meant, [{"data": x} for x in _listed(given.pop(name))])
    for name in sorted(files.keys() - named):
        meant = ("images", {}) if name == "input_reference" else file_field(name, kinds)
        if meant is None:
            raise unknown(name, ["input_reference", *kinds])
        _add(items, name, *meant, [{"file": data} for data in files[name]])
    for name, some in items.items():
        if len(some) > MAX_FILES:
            raise invalid(f"{name}: {len(some)} files, expected at most {MAX_FILES}", name)
        if some:
            kind = kinds[name]
            given[name] = [await _kept(item, name, kind, files, folder, user) for item in some]
    return given


def _add(
    items: dict[str, list[Any]], name: str, field: str, place: dict[str, Any], more: list[Any]
) -> None:
    """Add what came under a name to the items of its field. Raises Refusal."""
    found = items.setdefault(field, [])
    found += [item | place for item in more]
    if len(found) > 1 and not several(field):
        raise _twice(name, "" if name == field else f", as {field}")


def _holds_a_file(value: Any) -> bool:
    """Whether it is a file in text, or a list of such."""
    texts = [text_of(item) for item in _listed(value)]
    return bool(texts) and all(text is not None and is_file(text) for text in texts)


async def _kept(
    item: Any, name: str, kind: str, files: dict[str, list[bytes]], folder: Folder, user: str
) -> Any:
    """An object that holds or names a file, with a `file_id` instead; another one as it is."""
    rest = dict(item) if isinstance(item, dict) else {}
    if isinstance(data := rest.get("file"), bytes):
        pass
    elif "file" in rest:
        sent = files.get(file := str(data), [])
        if len(sent) != 1:
            found = "two files" if sent else "no file"
            raise invalid(f"{name}: {found} {file[:80]!r} {'were' if sent else 'was'} sent", name)
        data = sent[0]
    elif (text := text_of(item)) is not None:
        data = await _read(bytes_of, text, name, kind)
    elif rest.keys() & KEYS:
        text = "expected a data: URL, base64, or a file of the form"
        raise invalid(f"{name}: {text}", name)
    else:
        return item
    kind = kind_of(data, kind)
    async with _places:
        await check_upload(data, name, kind)
    rest = {key: value for key, value in rest.items() if key not in ("file", *KEYS, *ABOUT)}
    return {**rest, "file_id": await asyncio.to_thread(folder.keep_input, data, SUFFIX[kind], user)}


def _listed(items: Any) -> list[Any]:
    return items if isinstance(items, list) else [] if items is None else [items]


def close_unread(response: Response) -> Response:
    """For a body that was not read whole: the connection ends with the answer."""
    response.headers["connection"] = "close"
    return response
