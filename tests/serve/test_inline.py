"""Files in the text of a request, in every form that clients send."""

import base64
from urllib.parse import quote_from_bytes

import pytest

from ltx2rt.serve.inline import bytes_of, text_of
from ltx2rt.serve.refusal import Refusal
from tests.serve.serving import png

PNG = png(40, 30)
PACKED = base64.b64encode(PNG).decode()
LINES = base64.encodebytes(PNG).decode()


@pytest.mark.parametrize("text", [
    f"data:image/png;base64,{PACKED}",
    f"data:image/png;charset=utf-8;name=a%20b.png;base64,{PACKED}",
    f"data:;base64,{PACKED}",
    f"data:base64,{PACKED}",
    f"DATA:Image/PNG ; Base64,{PACKED}",
    f" data:image/png;base64,{LINES}",
    f"data:image/png;base64,{LINES.replace(chr(10), chr(13) + chr(10))}",
    f"data:image/png;base64,{LINES.replace(chr(10), '%0A').replace('+', '%2B')}",
    f"data:image/png;base64,{PACKED.rstrip('=')}",
    f"data:image/png;base64,{PACKED.replace('+', '-').replace('/', '_')}",
    f"data:image/png,{quote_from_bytes(PNG)}",
    PACKED,
    LINES,
])  # fmt: skip
@pytest.mark.parametrize("item", [
    lambda text: text,
    lambda text: {"url": text},
    lambda text: {"image_url": text, "frame": 3},
    lambda text: {"type": "image_url", "image_url": {"url": text, "detail": "high"}},
    lambda text: {"b64_json": text},
])  # fmt: skip
def test_a_file_is_read_from_every_form_of_text(text, item):
    assert bytes_of(text_of(item(text)), "images", "image") == PNG


@pytest.mark.parametrize("text, words", [
    ("https://example.com/x.png", "only data: URLs"),
    ("file:///etc/passwd", "only data: URLs"),
    ("/etc/passwd", "only data: URLs"),
    ("fox.png", "only data: URLs"),
    ("data:image/png;base64", "only data: URLs"),
    ("data:image/png;base64,!!!", "no base64"),
    ("data:image/png;base64,A", "no base64"),
])  # fmt: skip
def test_what_holds_no_file_is_refused(text, words):
    with pytest.raises(Refusal, match=words):
        bytes_of(text, "images", "image")
