"""Two kinds of answers: JSON for every client, and files that may be deleted meanwhile."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import FileResponse, JSONResponse
from starlette.staticfiles import NotModifiedResponse, StaticFiles

from ltx2rt.serve.refusal import Refusal

RANGES = re.compile(r"bytes=\s*(\d+-\d*|-\d+)(\s*,\s*(\d+-\d*|-\d+))*\s*", re.ASCII)
CACHE = StaticFiles(check_dir=False)  # which tells of any file whether a client has it


class Json(JSONResponse):
    """In ASCII: what a client sent may hold half a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class Opened(FileResponse):
    """A file that can be read to its end when it is deleted meanwhile. Raises FileNotFoundError."""

    def __init__(self, path: Path, **how: Any):
        self._file = path.open("rb")
        headers = {"cache-control": "private, no-cache"}  # kept, and asked for again with its etag
        super().__init__(f"/dev/fd/{self._file.fileno()}", headers=headers, **how)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def ranged(message: Any) -> None:
            if message["type"] == "http.response.start" and (status := message["status"]) >= 400:
                text = "range: expected bytes=FIRST-LAST within the file"
                raise Refusal(status, "invalid_value", text, "range")
            await send(message)

        if not RANGES.fullmatch(Headers(scope=scope).get("range", "bytes=0-")):
            headers = [(name, text) for name, text in scope["headers"] if name != b"range"]
            scope = {**scope, "headers": headers}  # ignored, as RFC 9110, 14.2 allows
        with self._file:
            self.set_stat_headers(os.fstat(self._file.fileno()))
            if CACHE.is_not_modified(self.headers, Headers(scope=scope)):
                self.background = None
                await NotModifiedResponse(self.headers)(scope, receive, send)
            else:
                await super().__call__(scope, receive, ranged)
