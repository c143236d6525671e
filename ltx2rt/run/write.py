"""Write what a run has made: every file whole, or none of them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from math import prod
from pathlib import Path

from ltx2rt.media.output import STILLS, is_still, remove_made
from ltx2rt.run.files import Files, video_files, write_report
from ltx2rt.run.plan import Plan
from ltx2rt.run.run import Run
from ltx2rt.run.segments import folder_of
from ltx2rt.session.session import Session
from ltx2rt.stages.text import about_texts
from ltx2rt.weights.files import write_arrays

BYTES_PER_PIXEL = 1  # at most: black and white noise takes 0.66 as H.264 and 0.98 as VP9
FRAME_BYTES_PER_PIXEL = dict.fromkeys(STILLS, 3.1) | {".exr": 6.2, ".gif": 1.6}  # at most


def write_files(run: Run, files: Files) -> list[Path]:
    """Write the clips, which decodes their frames, and what else was asked for. A run that fails
    leaves no file. Returns the names of the clips; without any, that of the latents."""
    clips = files.clips(run.clip.seeds)
    with ExitStack() as undo:
        for i, paths in enumerate(clips):
            if run.recorded:
                undo.callback(remove_made, run.recorded.finish(paths[0]))
            if rest := paths[1:] if run.recorded else paths:
                undo.callback(remove_made, run.save(i, rest))
        if files.latents_out:
            record = run.state.record
            known = run.comment()
            if not files.metadata:  # what `--context` reads, and only of encoded texts
                known = about_texts(known) if "video_context" in record else {}
            write_arrays(files.latents_out, record, known and {"ltx2rt": json.dumps(known)})
            undo.callback(files.latents_out.unlink, missing_ok=True)
        if files.report:
            write_report(files.report, run.report())
        undo.pop_all()
    return [path for paths in clips for path in paths] or [
        path for path in (files.latents_out,) if path
    ]


def sizes(session: Session, plan: Plan, files: Files) -> dict[Path, int]:
    """Bytes that the run's large files take at most."""
    clip = plan.clip
    pixels = prod(clip.size_px) * clip.clip_frames
    seconds = float(clip.clip_frames / clip.clip_fps)
    samples, wide = 2 * seconds * session.config.vocoder.sample_rate, 2 if clip.hdr else 1
    size, sizes = 0, dict[Path, int]()
    for output in files.outputs:
        per_pixel = FRAME_BYTES_PER_PIXEL.get(output.suffix.lower(), wide * BYTES_PER_PIXEL)
        shown = 1 if is_still(output) else clip.clip_frames
        size = int(pixels * per_pixel * shown / clip.clip_frames)
        size += int(3 * samples) + 2**16  # 24 bits
        sizes |= dict.fromkeys(video_files(output, clip.seeds), size)
    if clip.segments and (output := files.output or files.latents_out):
        kept = 4 * (wide * pixels + samples)
        sizes[folder_of(output)] = int(2 * kept) + size  # and the stream
    # noise, start, result and what is made of it, each step's latents and x0; samplers' noise
    if files.latents_out:
        latents = sum(  # names of a segment begin with its own
            prod(shape) * (4 + 2 * s.steps() if name.count(".") - bool(clip.segments) == 1 else 1)
            for s in plan.stages
            for name, shape in s.draws(session.config).items()
        )
        sizes[files.latents_out] = int(4 * (latents + len(clip.seeds) * samples)) + 2**16
        if clip.segments:  # those of each segment, too, until the clip is whole
            sizes[files.latents_out.with_suffix(".segments")] = sizes[files.latents_out]
    return sizes
