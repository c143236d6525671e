"""Files within the text of a request: `data:` URLs (RFC 2397) and base64, as clients write
them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from ltx2rt.serve.refusal import Refusal, invalid
from ltx2rt.serve.upload import EXR, IMAGE, MAX_BYTES

URL = re.compile(r"\s*data:(?P<about>[^,]*),", re.IGNORECASE)
SCHEME = re.compile(r"\s*[a-z][a-z0-9+.-]{0,40}:", re.IGNORECASE)
LEAST = 60  # characters of base64 without a `data:`; shorter ones are names
KEYS = ("image_url", "video_url", "audio_url", "url", "b64_json", "data")
ABOUT = ("type", "detail")  # beside these keys in other servers' requests: without meaning here


def text_of(item: Any) -> str | None:
    """The text that an item of a request holds a file in: itself, or under one of `KEYS`."""
    if isinstance(item, Mapping):
        return text_of(next((item[key] for key in KEYS if key in item), None))
    return item if isinstance(item, str) else None


def is_file(text: str) -> bool:
    """Whether a text holds a file, and is no name or address."""
    return bool(URL.match(text)) or not (SCHEME.match(text) or len(text) < LEAST)


def bytes_of(text: str, name: str, kind: str) -> bytes:
    """The bytes of a file in text. name: the field. Raises Refusal."""
    most = MAX_BYTES[EXR if kind == IMAGE else kind]
    if len(text) > 4 * most:
        raise Refusal(413, "payload_too_large", f"{name}: longer than {most} bytes", name)
    match = URL.match(text)
    if not is_file(text):
        raise invalid(f"{name}: only data: URLs and base64 are read; send the file", name)
    about = match["about"].lower().replace(" ", "").split(";") if match else ["base64"]
    data = text[match.end() if match else 0 :].encode("utf-8", "replace")
    data = unquote_to_bytes(data) if b"%" in data else data
    if "base64" not in about:
        return data
    packed = b"".join(data.split()).rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
    try:
        return base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except ValueError:
        raise Refusal(400, f"bad_{kind}", f"{name}: no base64", name) from None
