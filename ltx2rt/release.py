"""The releases of LTX-2, one row each: how one is recognised, its defaults, and what its files go
with.

A row decides defaults and versions only. How large and of which kind the networks are, the
checkpoint's own config says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Published with the models and in diffusers (Apache-2.0); since 1.2.0 the official code has one
# text for all releases, with the first five terms in front.
NEGATIVE_PROMPT = (
    "has_subtitles, has_blurbox, transition from black, transition to black, speech_ending_short, "
    "blurry, out of focus, overexposed, underexposed, low contrast, washed out colors, excessive "
    "noise, grainy texture, poor lighting, flickering, motion blur, distorted proportions, "
    "unnatural skin tones, deformed facial features, asymmetrical face, missing facial features, "
    "extra limbs, disfigured hands, wrong hand count, artifacts around text, inconsistent "
    "perspective, camera shake, incorrect depth of field, background too sharp, background "
    "clutter, distracting reflections, harsh shadows, inconsistent lighting direction, color "
    "banding, cartoonish rendering, 3D CGI look, unrealistic materials, uncanny valley effect, "
    "incorrect ethnicity, wrong gender, exaggerated expressions, wrong gaze direction, "
    "mismatched lip sync, silent or muted audio, distorted voice, robotic voice, echo, "
    "background noise, off-sync audio, incorrect dialogue, added dialogue, repetitive speech, "
    "jittery movement, awkward pauses, incorrect timing, unnatural transitions, inconsistent "
    "framing, tilted camera, flat lighting, inconsistent tone, cinematic oversaturation, "
    "stylized filters, or AI artifacts."
)
DEPTH = 48  # blocks of every released transformer


@dataclass(frozen=True)
class Release:
    """One release.

    since: the first `model_version` of its files. field, tensor: a field of the transformer's
    config, and words in a tensor's name, that it is the first to have. text_encoder: the family
    it was trained with. stg_block: the one that STG skips, of `DEPTH`. image_crf: H.264 compression
    of given images. samplers: those of distilled steps, stage 1 takes the first. split: it is
    published as a file for each part; every such file states its version, and goes with files of
    its release alone. chooses_length: the model does, of a clip.
    lora_changes_text: the distilled LoRA also changes the text projection. dev: the repository and
    file of its dev weights.
    """

    name: str
    since: tuple[int, ...]
    field: str
    tensor: str
    text_encoder: str
    steps: int = 30
    stg_block: int = 28
    image_crf: int = 33
    negative_prompt: str = NEGATIVE_PROMPT
    samplers: tuple[str, ...] = ("euler",)
    split: bool = False
    chooses_length: bool = False
    lora_changes_text: bool = False
    dev: str = ""

    def goes_with(self, other: Release) -> bool:
        """Whether files of both may make one model, as far as their versions say."""
        return self is other or not (self.split or other.split)

    def stg_blocks(self, num_layers: int) -> tuple[int, ...]:
        """The block that STG skips, at the same depth whatever the number of blocks."""
        return (self.stg_block * num_layers // DEPTH,)


RELEASES = [  # the latest first
    Release(
        "2.5", (2, 4), "keyframe_vector", "keyframes_abs_pos_embedding", "Gemma 4", image_crf=18,
        samplers=("ancestral", "euler"), split=True,
        chooses_length=True,
        dev="Lightricks/LTX-2.5, diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors",
    ),
    Release(
        "2.3", (2, 3), "text_modulation", "prompt_adaln_single.", "Gemma 3",
        dev="Lightricks/LTX-2.3, ltx-2.3-22b-dev.safetensors",
    ),
    Release(
        "2.0", (), "", "", "Gemma 3", steps=40, stg_block=29, lora_changes_text=True,
        dev="Lightricks/LTX-2, ltx-2-19b-dev.safetensors",
    ),
]  # fmt: skip


def of_version(version: tuple[int, ...]) -> Release:
    """The release of a `model_version`; of none, or of an earlier model's, the first."""
    return next(row for row in RELEASES if version >= row.since)


def of_config(transformer: Any) -> Release:
    """The release whose fields a transformer's config has."""
    return next(row for row in RELEASES if not row.field or getattr(transformer, row.field))


def of_tensors(names: set[str]) -> Release:
    """The release whose tensors a transformer has."""
    return next(row for row in RELEASES if any(row.tensor in name for name in (*names, "")))


def named(name: str) -> Release:
    """The release of that name; of another name, such as an earlier model's, the first."""
    return next((row for row in RELEASES if row.name == name), RELEASES[-1])


def version_tuple(text: str | None) -> tuple[int, ...]:
    """ "2.3.0" -> (2, 3, 0): the leading integers, "-" read as "."; () if there are none."""
    parts: list[int] = []
    for part in (text or "").strip().strip('"').replace("-", ".").split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def stated(metadata: Mapping[str, str]) -> str:
    """The name of the release that a file's metadata state, an earlier model's such as "0.9", or
    ""."""
    version = version_tuple(metadata.get("model_version"))
    if not version:
        return ""
    return ".".join(map(str, version[:2])) if version < (2,) else of_version(version).name
