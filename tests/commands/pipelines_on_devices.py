"""Run by test_ranks_agree on every rank, or on virtual devices: pipelines up to their decoders.

python pipelines_on_devices.py BACKEND MODEL MESH PROFILE FOLDER NAME...: the main process writes
what they record to FOLDER/BACKEND.npz. FOLDER holds film.mp4, first.png and later.png; the LoRA
beside the model serves as IC-LoRA, too.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from ltx2rt.pipelines import pipeline
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.open import open_session
from ltx2rt.session.options import NO_LORA, LoraSpec, ModelOptions, parse_mesh
from ltx2rt.stages.conditioning import ImageSpec, ReferenceSpec
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.sound import Sound


def clips(folder: Path) -> dict[str, dict]:
    """By pipeline, or a word more for a variant of it, a request's fields: mostly 4 and 16 video
    tokens in its stages, and those that are appended."""
    size = {"width": 64, "height": 64, "num_frames": 25, "image_crf": 0}
    images = ImageSpec(folder / "first.png", 0, 0.8), ImageSpec(folder / "later.png", 9)
    film = folder / "film.mp4"
    followed = {"video_conditioning": (ReferenceSpec(film, 0.9),)}
    part = {"start_time": 0.3, "end_time": 0.5, "guided": True}
    return {
        "hq": size | {"steps": 2, "images": images},
        "keyframes": size | {"steps": 2, "images": images},
        "a2v": size | {"steps": 2, "audio_path": film},
        "retake": {"steps": 2, "video_path": film} | part,
        "ic-lora": size | followed | {"conditioning_attention_strength": 0.6},
        "t2a": {"steps": 2, "num_frames": 25},
        "dubit": {"video_path": film},
        "hdr-ic-lora": {"video_path": film},
        "upscale": {"upscale": film},
        "inpaint": {"video_path": film, "pad": (32, 0, 0, 0), "nag": (11, 2.5, 0.25)},
        "one-stage": size | {"steps": 2, "voice": film},
    }


def records(
    backend: str, model: Path, mesh: str, profile: str, folder: Path, names: tuple[str, ...]
) -> dict | None:
    """pipeline/name -> what the pipeline records; None in all processes but the main one. mesh,
    profile: "" for one device."""
    (lora,) = (LoraSpec(path) for path in model.glob("*distilled-lora.safetensors"))
    where = {"mesh": parse_mesh(mesh) if mesh else {}, "profile": profile or None}
    session, found = open_session(ModelOptions(backend, model, device="cpu", **where)), {}
    for name in names:
        merged = {"loras": (), "distilled_lora": lora}
        if name in ("ic-lora", "dubit", "hdr-ic-lora", "upscale"):
            merged = {"loras": (lora,), "distilled_lora": NO_LORA}
        session.options = replace(session.options, **merged)
        request = pipeline(name.split()[0])("a red fox", seed=3, **clips(folder)[name])
        plan = make_plan(session, request)
        stages = tuple(stage for stage in plan.stages if not isinstance(stage, (Frames, Sound)))
        state, *_ = produce(session, replace(plan, stages=stages), keep=session.backend.is_main)
        found |= {f"{name}/{key}": value for key, value in state.record.items()}
    main = session.backend.is_main
    session.close()
    return found if main else None


if __name__ == "__main__":
    backend, model, mesh, profile, folder, *names = sys.argv[1:]
    found = records(backend, Path(model), mesh, profile, Path(folder), tuple(names))
    if found is not None:
        np.savez(Path(folder) / f"{backend}.npz", **found)
