"""Routes of a video's files: the clip, its pictures, its segments while it is made."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ltx2rt.errors import InputError
from ltx2rt.media.mp4 import whole_fragments
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.clip import Clip, fill
from ltx2rt.run.preview import sprite_sheet
from ltx2rt.run.recording import STREAM, write_segment
from ltx2rt.serve.admission import as_given
from ltx2rt.serve.answers import Json, Opened
from ltx2rt.serve.core import Core, expired, require_video
from ltx2rt.serve.folder import CLIP, FRAMES, SEGMENTS, THUMBNAIL, clip_names
from ltx2rt.serve.jobs import COMPLETED, Job
from ltx2rt.serve.refusal import Refusal, invalid, misfit
from ltx2rt.serve.video import in_segments
from ltx2rt.stages.segments import stops
from ltx2rt.system import pread

VARIANTS = ("video", "frames", "thumbnail", "spritesheet", "report", "preview")
EVENT_GAP_S = 0.2
STREAM_BYTES = 2**18  # bytes of a stream at once


class FileRoutes(Core):
    async def content(self, request: Request) -> Response:
        """Download the clip, or with `variant` its frames, thumbnail, spritesheet or report, or the
        preview of one that runs. `video` is the number of one of several clips, from 0 on."""
        job, variant = await self._job(request), request.query_params.get("variant", "video")
        if variant not in VARIANTS:
            raise misfit("variant", variant, f"one of {', '.join(VARIANTS)}")
        if variant == "preview":
            if (shown := self.board.previews.get(job.id)) is None:
                text = "there is no preview; listen to /v1/events?previews=1 while it runs"
                raise Refusal(404, "not_found", text)
            headers = {"cache-control": "no-store"}
            return Response(shown[1], media_type="image/jpeg", headers=headers)
        number, result = request.query_params.get("video", "0"), job.result or {}
        require_video(job, number)
        if variant == "report":
            return Json(result.get("report", {}))
        try:
            if variant == "thumbnail":
                picture = self.folder.outputs / (job.stem + THUMBNAIL)
                return await asyncio.to_thread(Opened, picture, media_type="image/webp")
            clip = self.folder.outputs / clip_names(job.stem, job.job.get("n", 1))[int(number)]
            name = job.id + (f"-{number}" if number != "0" else "")
            if variant == "spritesheet":
                async with self._encoding:
                    sheet = await asyncio.to_thread(sprite_sheet, clip)
                return Response(sheet, media_type="image/jpeg")
            if variant == "frames":
                if not job.job.get("frames"):
                    text = "there are no frames of high dynamic range; ask for them by hdr_frames"
                    raise Refusal(404, "not_found", text)
                how = {"media_type": "application/zip", "filename": f"{name}{FRAMES}"}
                return await asyncio.to_thread(Opened, clip.with_suffix(FRAMES), **how)
            noted = None
            if request.method == "GET" and "fetched" not in result:
                now = int(time.time())
                noted = BackgroundTask(self.store.insist, self.queue.note, job.id, fetched=now)
            return await asyncio.to_thread(
                Opened, clip, media_type="video/mp4", background=noted, filename=f"{name}.mp4",
                content_disposition_type="inline",
            )  # fmt: skip
        except FileNotFoundError:
            raise expired() from None

    async def stream(self, request: Request) -> Response:
        """Play a clip in segments while it is made: fragmented MP4, from the byte `from` on. Once
        the video is completed, the answer is the finished file."""
        job, start = await self._job(request), request.query_params.get("from", "0")
        if not (start.isascii() and start.isdecimal() and len(start) < 16):
            raise misfit("from", start, "a byte")
        if job.over and not int(start):
            return await self.content(request)
        if job.over:
            text = "the stream is over; fetch the content instead"
            raise Refusal(409, "stream_over", text, "from")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        followed = self._followed(job, int(start))
        return StreamingResponse(followed, media_type="video/mp4", headers=headers)

    async def _in_segments(self, request: Request) -> tuple[Job, Clip]:
        """The job of the path and its clip, which knows its parts. Raises Refusal."""
        job = await self._job(request)
        if not in_segments(job):
            text = "the clip has no segments; ask for more than 20 s, or with `segment_frames`"
            raise Refusal(409, "no_segments", text)
        files = as_given(job.job.get("files", {}), self.folder.inputs)
        asked = make_request(job.job["pipeline"], **job.job["clip"], **files)
        asked = asked.kept_in(self.folder.outputs / f"{job.id}{SEGMENTS}")
        try:
            draft = await asyncio.to_thread(fill, asked, self.admission.checkpoint.config)
        except InputError:
            text = "the file that the clip starts from was deleted"
            raise Refusal(409, "no_segments", text) from None
        return job, draft.clip()

    async def segment(self, request: Request) -> Response:
        """Download a finished segment of a clip that is still being made, as an MP4 file."""
        (job, clip), number = await self._in_segments(request), request.path_params["index"]
        parts = list(stops(clip.parts))
        if number not in map(str, range(1, len(parts) + 1)):
            raise invalid(f"segment: {number[:80]!r}, expected 1 to {len(parts)}")
        if job.status == COMPLETED:
            text = "the clip is whole, and its segments are deleted; fetch the content instead"
            raise Refusal(409, "stream_over", text)
        part, stop = parts[int(number) - 1]
        path = part.path.with_suffix(CLIP)  # encoded once, and kept until the clip is whole
        try:
            async with self._encoding:
                if not path.exists():
                    hdr = self.admission.high_range(clip, job.job["loras"])
                    await asyncio.to_thread(write_segment, path, part, stop, hdr)
            named = {"media_type": "video/mp4", "filename": f"{job.id}-segment{number}.mp4"}
            return await asyncio.to_thread(Opened, path, **named)
        except (OSError, InputError) as error:
            over = (await self._job(request)).over  # it may have been deleted meanwhile
            if not over and not isinstance(error, (FileNotFoundError, InputError)):
                raise
            text = f"segment {number} is not there; ask again when it is made, or for the content"
            raise Refusal(409, "not_ready", text) from None

    async def segments(self, request: Request) -> Response:
        """List the segments of a clip: frames, prompt, and whether each is made."""
        job, clip = await self._in_segments(request)
        prompts, found = (clip.prompt, *clip.request.segment_prompts), []
        for i, (part, stop) in enumerate(stops(clip.parts), 1):
            size = None
            with suppress(FileNotFoundError):
                size = part.path.stat().st_size
            made = job.status == COMPLETED or size is not None
            found.append({
                "index": i, "start": part.start, "frames": stop - part.start,
                "start_s": float(part.start / clip.fps), "made": made, "bytes": size,
                "prompt": prompts[min(i, len(prompts)) - 1],
            })  # fmt: skip
        return Json({"object": "list", "data": found})

    async def _followed(self, job: Job, start: int) -> AsyncIterator[bytes]:
        """Whole fragments; a job without any ends in its finished file."""
        path, border, file = self.folder.outputs / f"{job.id}{SEGMENTS}" / STREAM, 0, None
        now: Job | None = None
        try:
            while not self.closing:
                now = await self.store(self.queue.get, job.id)
                if file is None:
                    with suppress(FileNotFoundError):
                        file = path.open("rb")
                if file is not None:
                    size = os.fstat(file.fileno()).st_size
                    border = await asyncio.to_thread(whole_fragments, file, border, size)
                    while start < border:
                        size = min(border - start, STREAM_BYTES)
                        data = await asyncio.to_thread(pread, file.fileno(), size, start)
                        start += len(data)
                        yield data
                if now is None or now.over:
                    break
                await asyncio.sleep(EVENT_GAP_S)
            if not start and now is not None and now.status == COMPLETED and file is None:
                file = await asyncio.to_thread(self._clip, now, "0")
                while data := await asyncio.to_thread(file.read, STREAM_BYTES):
                    yield data
        finally:
            if file is not None:
                file.close()
