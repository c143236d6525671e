"""Routes that make new videos: from fields, or from a video that is there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ltx2rt.backend import DeviceInfo
from ltx2rt.serve.admission import Admitted
from ltx2rt.serve.answers import Json
from ltx2rt.serve.core import Core
from ltx2rt.serve.fields import uploads
from ltx2rt.serve.form import fields_of
from ltx2rt.serve.jobs import QUEUED, Job
from ltx2rt.serve.refusal import Refusal, conflict, invalid
from ltx2rt.serve.upload import IMAGE, SUFFIX, VIDEO
from ltx2rt.serve.video import settings


class Orders(Core):
    async def create(self, request: Request) -> Response:
        """Queue a video of the fields below. With `?check=1` they are only checked: the answer has
        all settings, the time that it takes and the time until it starts."""
        return await self._add(request, await self._given(request))

    async def remix(self, request: Request) -> Response:
        """Queue a video with the settings and the seed of another one, but another `prompt`."""
        await self._require_accepting()
        job = await self._job(request)
        given = await fields_of(request, self.how.flags.max_upload)
        if unknown := sorted(given.keys() - {"prompt"}):
            name = unknown[0][:80]
            raise Refusal(400, "unknown_field", f"{name!r}: a remix changes the prompt alone", name)
        new = {"prompt": None, "context": None} | given | {"seed": job.job["clip"].get("seed")}
        return await self._add(request, job.given | new, remixed_from=job.id)

    async def extend(self, request: Request) -> Response:
        """Queue a video that continues a finished one, by default with the same prompt. Where one
        request made several videos, `video` is the number of one, from 0 on."""
        job, given = await self._job(request), await self._given(request)
        return await self._extended(request, job, given, given.pop("video", "0"))

    async def extension(self, request: Request) -> Response:
        """Queue a video that continues another one, as OpenAI's client asks for it: `video` is a
        file or the id of a finished video, `seconds` the length to add."""
        given = await self._given(request)
        video = given.pop("video", None)
        if video is None and "video_path" in given and "pipeline" not in given:
            return await self._add(request, {**given, "pipeline": "extend"})
        id = video.get("id") if isinstance(video, dict) else video
        if not isinstance(id, str):
            raise invalid("video: expected a file, or the id of a finished video", "video")
        return await self._extended(request, await self._job(request, id), given, "0")

    async def _given(self, request: Request) -> dict[str, Any]:
        """The fields of a body, if new videos are accepted; its files are kept. Raises Refusal."""
        await self._require_accepting()
        return await fields_of(request, self.how.flags.max_upload, self.folder)

    async def _extended(
        self, request: Request, job: Job, given: dict[str, Any], number: str
    ) -> Response:
        for field in ("pipeline", "video_path"):
            if field in given:
                text = f"{field}: the video that is extended is named already; leave it out"
                raise invalid(text, field)
        if job.job["clip"].get("hdr"):
            text = "the clip is in high dynamic range, and extend starts from 8 bits"
            raise conflict(f"{text}; ask for more segments")
        with await asyncio.to_thread(self._clip, job, number) as file:
            data = await asyncio.to_thread(file.read)
        kept = await asyncio.to_thread(self.folder.keep_input, data, SUFFIX[VIDEO], job.user)
        fixed = {"pipeline": "extend", "video_path": [{"file_id": kept}]}
        same = {"prompt": job.job["clip"].get("prompt"), "context": job.given.get("context")}
        given = ({} if same.keys() & given.keys() else same) | given | fixed
        return await self._add(request, given, remixed_from=job.id)

    async def _add(
        self, request: Request, given: dict[str, Any], remixed_from: str | None = None
    ) -> Response:
        user, key = request.state.user, request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= 255:
            raise invalid("Idempotency-Key: expected 1 to 255 characters")
        admitted = await self._admitted(request, given)
        if request.query_params.get("check") == "1":
            return await self._checked(user, admitted)
        # the answer may have been lost
        retried = request.headers.get("x-stainless-retry-count", "0") != "0"
        known = await self.store(self.queue.repeated, user, admitted.digest) if retried else None
        if known is not None:
            return self._answer(await self._video(known))
        await self._require_accepting()  # planning takes time
        job = await self.store(
            self.queue.add, user, admitted.digest, admitted.given, admitted.job,
            work=admitted.work, loras=admitted.loras, priority=admitted.priority, key=key,
            remixed_from=remixed_from,
        )  # fmt: skip
        if job.status == QUEUED:  # else it was sent before
            said = {"prompt": given.get("prompt")} if self.how.flags.log_prompts else {}
            self.board.tell("queued", job.id, user, **said)
            self.supervisor.woken()
        return self._answer(await self._video(job))

    async def _checked(self, user: str, admitted: Admitted) -> Response:
        """The clip that the request would make, and its time; nothing is queued."""
        job, work = admitted.job, admitted.work
        seconds, basis = (await self._pace()).of(work, admitted.least_s)
        _, wait_s = await self._wait(user, admitted.priority)
        return Json({
            "object": "check", "given": admitted.given,
            "resolved": {**settings(job), "size": job["size"], "seconds": job["seconds"]},
            "estimate": {"seconds": seconds, "work_tflop": work, "wait_s": wait_s, "basis": basis},
        })  # fmt: skip

    async def _admitted(self, request: Request, given: dict[str, Any]) -> Admitted:
        """Raises Refusal."""
        given = self.admission.respelled(given)
        await self._require_own_files(request.state.user, given)
        listed = given["images"] if isinstance(given.get("images"), list) else []
        ids = (x["file_id"] for x in listed if isinstance(x, dict) and "file_id" in x)
        clips = (self.folder.inputs / f"{id}{SUFFIX[VIDEO]}" for id in ids if isinstance(id, str))
        if given.keys() & uploads().keys() or any(clip.is_file() for clip in clips):
            admitted = await self._apart.admit(given, self.supervisor.device)
        else:
            loop = asyncio.get_running_loop()
            admitted = await loop.run_in_executor(self._planner, self._admit, given)
        most = self.how.flags.max_work
        if most is not None and admitted.work > most:
            raise Refusal(
                400,
                "too_much_work",
                (
                    f"this takes {admitted.work:.4g} TFLOP, here a request may take {most:.4g}; "
                    "ask for a smaller size, or fewer frames, steps or videos"
                ),
            )
        return admitted

    async def _require_own_files(self, user: str, given: Mapping[str, Any]) -> None:
        """Refuse a `file_id` of somebody else as one that does not exist. Raises Refusal."""
        for name, kind in ({"images": IMAGE} | uploads()).items():
            items = given.get(name)
            for item in items if isinstance(items, list) else []:
                id = item.get("file_id") if isinstance(item, dict) else None
                if not isinstance(id, str) or self.folder.sent_by(user, id):
                    continue
                if not await self.store(self.queue.uses, user, id):
                    text = f"{name}: file_id names no {kind} that was sent here"
                    raise invalid(text, name)

    def _admit(self, given: dict[str, Any]) -> Admitted:
        """With the memory of the replicas, once one has told of it."""
        if self.supervisor.device is not None:
            device, mesh = self.supervisor.device
            self.admission.plan_for(DeviceInfo(**device), mesh)
        return self.admission.admit(given)
