"""Images that clients send: looked at by their header, then decoded once in a process that may use little memory.

Decides which are kept. Their bytes stay as they are, so that a clip is that of the command line.
"""

from __future__ import annotations

import asyncio
import io
import resource
import sys

from ltx2rt.serve.refusal import Refusal

MAX_BYTES, MAX_PX = 16 * 2**20, 40_000_000
MEMORY_BYTES, TIME_S = 2**30, 20
FORMATS = ("PNG", "JPEG", "WEBP")
STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF")


async def check_image(data: bytes) -> None:
    """Raises Refusal."""
    if len(data) > MAX_BYTES:
        raise Refusal(413, "payload_too_large", f"images: {len(data)} bytes, expected at most {MAX_BYTES}", "images")
    if not data.startswith(STARTS):
        raise Refusal(400, "bad_image", f"images: no {', '.join(FORMATS)} file; save it as one of them", "images")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ltx2rt.serve.image", stdin=-1, stdout=-1, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(data), TIME_S)
    except TimeoutError:
        said = b"it takes too long to read"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = said.decode(errors="replace").strip()[:200] or "it cannot be read"
        raise Refusal(400, "bad_image", f"images: {reason}", "images")


def main() -> int:
    """Decode stdin; the reason on stdout if that fails."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_S, TIME_S))
    from PIL import Image

    try:
        with Image.open(io.BytesIO(sys.stdin.buffer.read()), formats=FORMATS) as image:
            if image.width * image.height > MAX_PX:
                raise ValueError(f"{image.width}x{image.height} pixels, expected at most {MAX_PX} in all")
            image.load()
    except Exception as error:
        print(f"{error}"[:200])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
