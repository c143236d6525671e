"""A job as OpenAI's `Video`: what a client sees of it.

OpenAI's client knows four statuses, so a cancelled job is `failed` with the code `cancelled`. What
OpenAI has no field for is in `x`; its addresses are relative to the server's root, so that they
hold behind a proxy that puts it under a path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ltx2rt.serve.board import Progress
from ltx2rt.serve.jobs import CANCELLED, COMPLETED, FAILED, RUNNING, Job


def as_video(
    job: Job, model: str, keep_s: float, live: Progress | None, preview: int | None,
    position: int | None, eta_s: float | None,
) -> dict[str, Any]:  # fmt: skip
    """live: of one that runs; preview: the number of its latest picture; position, eta_s: of one
    that waits, jobs before it and seconds until it is over."""
    clip, result = job.job["clip"], job.result or {}
    made, report = job.status == COMPLETED and result.get("file"), result.get("report", {})
    progress = 100 if job.status == COMPLETED else 0
    if live and not progress:
        progress = min(99, max(1, int(99 * live["fraction"])))
    seconds, pinned = float(job.job.get("seconds", 0.0)), bool(result.get("pinned"))
    ends = made and job.finished and not pinned and keep_s < math.inf
    kept_until = int(job.finished + keep_s) if ends and job.finished else None
    running = live if job.status == RUNNING and live else {}
    content = f"v1/videos/{job.id}/content"
    return {
        "id": job.id,
        "object": "video",
        "model": model,
        "status": FAILED if job.status == CANCELLED else job.status,
        "progress": progress,
        "created_at": int(job.created),
        "completed_at": int(job.finished) if job.finished and job.status == COMPLETED else None,
        "expires_at": kept_until,
        "seconds": str(job.given.get("seconds") or f"{seconds:.3f}"),
        "size": job.job.get("size", ""),
        "prompt": clip.get("prompt"),
        "remixed_from_video_id": job.remixed_from,
        "error": job.error,
        "metadata": job.given.get("metadata"),
        "x": {
            "stage": running.get("stage"),
            "step": running.get("step"),
            "steps": running.get("of"),
            "eta_s": running.get("eta_s", eta_s),
            "queue_position": position,
            "seconds": seconds,
            "seed": clip.get("seed"),
            "settings": settings(job.job),
            "stream": f"v1/videos/{job.id}/stream" if in_segments(job) else None,
            "segments": f"v1/videos/{job.id}/segments" if in_segments(job) else None,
            "preview": None if preview is None else f"{content}?variant=preview&number={preview}",
            "timings": {stage["name"]: stage["time_s"] for stage in report.get("stages", ())},
            "run_s": job.run_s,
            "kept_until": kept_until,
            "pinned": pinned,
            "attempts": job.attempts,
            "priority": job.priority,
            "cancel_requested_at": int(job.cancel) if job.cancel else None,
            "urls": _urls(content, job) if made else {},
        },
    }


def _urls(content: str, job: Job) -> dict[str, Any]:
    videos = [f"{content}?video={number}" for number in range(job.job.get("n", 1))]
    frames = [f"{url}&variant=frames" for url in videos if job.job.get("frames")]
    thumbnail = f"{content}?variant=thumbnail"
    return {"video": content, "thumbnail": thumbnail, "videos": videos, "frames": frames}


def in_segments(job: Job) -> bool:
    """Whether the job's clip plays while it is made."""
    return job.job["clip"].get("segment_frames") is not None


def _file_id(name: str, *strength: float) -> dict[str, Any]:
    return {"file_id": name.split(".")[0]} | ({"strength": strength[0]} if strength else {})


def settings(job: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that gets the same video."""
    images = [_file_id(file, *rest) | {"frame": frame} for file, frame, *rest in job["images"]]
    named = [(Path(file).stem, *rest) for file, *rest in job["loras"]]
    loras = [dict(zip(("name", "strength", "stage"), lora, strict=True)) for lora in named]
    files = {field: [_file_id(*x) for x in kept] for field, kept in job.get("files", {}).items()}
    own = dict(pipeline=job["pipeline"], n=job.get("n", 1), images=images, loras=loras)
    frames = {"hdr_frames": True} if job.get("frames") else {}
    return {**own, **frames, **job["clip"], **files}
