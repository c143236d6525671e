"""LoRAs that `ltx2rt train run` wrote: their model, and the contents of their headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ltx2rt.notes import note
from ltx2rt.text_files import parse
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.files import TensorFile


def model_digest(checkpoint: Checkpoint) -> str:
    """A digest that tells the parts of a model that encode from another's."""
    return checkpoint.digest("transformer", "text", "gemma", "video_vae", "audio_vae")


def is_of(base: str, checkpoint_digest: str, what: Any) -> bool:
    """Whether this model made something that states `base`; notes an earlier version's digest."""
    if unknown := len(base) == 16:
        note(f"{what} is of an earlier version: which model it is for cannot be checked")
    return unknown or base == checkpoint_digest


def remarks(lora: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """Sentences that the header of a LoRA file that `train run` wrote says about its use."""
    try:
        about = parse(TensorFile(lora).metadata.get("ltx2rt", "{}"), {"base": str})
    except ValueError:
        return
    trigger = about.get("trigger")
    begin = f"; begin the prompt with {trigger!r}" if trigger else ""
    yield f"{lora}: trained by `ltx2rt train run` to step {about.get('step')} ({about.get('mode')}){begin}"
    if not is_of(about["base"], model_digest(checkpoint), lora):
        yield f"{lora}: trained on another model or with other parts; its effect here is not known"
