"""Latents and text features that the official trainer has computed, as its `.precomputed` folder
holds them: one `.pt` file a clip in each of several sub-folders, under the clip's relative path.
PyTorch reads the files, without running code that a pickle may name."""

from __future__ import annotations

import math
import pickletools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError, few
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.session.options import existing_file
from ltx2rt.train.data import Bucket, ClipFiles, is_hidden

FOLDER = ".precomputed"
VIDEO, AUDIO, TEXT = "latents", "audio_latents", "conditions"
FOLDERS = {
    "video": VIDEO,
    "audio": AUDIO,
    "reference": "reference_latents",
    "mask": "video_masks",
    "audio_reference": "reference_audio_latents",
    "audio_mask": "audio_masks",
}
OLD_NAMES = ("latent_", "condition_")  # latents/latent_7.pt goes with conditions/condition_7.pt
# types that a pickle of tensors asks for
KNOWN = r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict"
FPS = 24  # the default of files without a rate


def folder_of(path: Path) -> Path | None:
    """The folder of latents that `path` is or holds; None if it is another kind of data."""
    for found in (path, path / FOLDER):
        if (found / TEXT).is_dir() and any((found / kind).is_dir() for kind in (VIDEO, AUDIO)):
            return found
    return None


def read_pt(path: Path) -> dict[str, Any]:
    """The dictionary of numbers and arrays in a file of `torch.save`. Raises InputError for
    anything else, also for compressed members and tensors of more numbers than their storage holds,
    which could take any memory."""
    existing_file("--data", path)
    if find_spec("torch") is None:
        raise InputError(f"{path}: reading it takes PyTorch; in the clone: pip install '.[cuda]'")
    torch = import_module("torch")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise InputError("it is compressed, which torch.save never does")
            (head,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            for op, asked, _ in pickletools.genops(archive.read(head)):
                if "GLOBAL" in op.name and not re.fullmatch(KNOWN, str(asked)):
                    raise InputError(f"it asks for {asked}; expected tensors and numbers only")
        found = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, dict):
            raise InputError(f"holds a {type(found).__name__}, expected a dictionary")
        return {name: _plain(value, torch) for name, value in found.items()}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # a damaged file raises anything
        said = str(error).partition("\n")[0][:200]
        raise InputError(
            f"{path} cannot be read ({type(error).__name__}: {said}); expected a file of "
            "torch.save, such as the official trainer writes"
        ) from None


def _plain(value: Any, torch: Any) -> Any:
    """A dense tensor as an array; another value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_quantized or value.layout != torch.strided:
        raise InputError("it holds a quantised or sparse tensor, expected plain ones")
    if value.nbytes > value.untyped_storage().nbytes():
        raise InputError(f"a tensor of shape {tuple(value.shape)} reaches beyond its storage")
    return (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()


@dataclass(frozen=True)
class Precomputed(ClipFiles):
    """One clip's latents, and its text features. name: its relative path without the ending."""

    name: str
    text: Path


def read_folder(folder: Path) -> list[Precomputed]:
    """The clips of a `.precomputed` folder by name. Raises InputError for one without text features
    and for a folder without clips."""
    main = folder / (VIDEO if (folder / VIDEO).is_dir() else AUDIO)
    found, (old, new) = [], OLD_NAMES
    for path in sorted(p for p in main.rglob("*.pt") if not is_hidden(p)):
        relative = path.relative_to(main)
        other = relative.with_name(new + relative.name.removeprefix(old))
        texts = [folder / TEXT / name for name in (relative, other)]
        text = next((text for text in texts if text.is_file()), None)
        if text is None:
            raise InputError(f"{path}: {texts[0]} does not exist; compute the captions' features")
        files = {kind: folder / inner / relative for kind, inner in FOLDERS.items()}
        there = {kind: file for kind, file in files.items() if file.is_file()}
        found.append(Precomputed(str(relative.with_suffix("")), text, **there))
    if not found:
        raise InputError(f"{main}: no .pt files were found")
    return found


def latents(clip: Precomputed, config: ModelConfig) -> tuple[dict[str, np.ndarray], Bucket, str]:
    """The arrays that `train prepare` makes of a clip: float32 video and reference [C, f, h, w],
    audio [channels, n, mel] and mask [f, h, w], whichever there are; its size; its frames a second.
    Raises InputError for latents of another model, and for sound of another length."""
    found: dict[str, np.ndarray] = {}
    vae, sound = config.video_vae, _sound(clip.audio, config) if clip.audio else None
    if clip.video:
        found["video"], fps = _video(clip.video, vae.latent_channels)
        frames, rows, columns = found["video"].shape[1:]
        width, height = columns * vae.space_factor, rows * vae.space_factor
        bucket = Bucket(width, height, pixel_frames(frames, vae.time_factor))
    else:
        assert sound is not None
        seconds = Fraction(sound.shape[1] / config.audio_vae.latents_per_second)
        count = pixel_frames(max(1, round(seconds * 3)), 8)  # at about 24 a second
        bucket, fps = Bucket(32, 32, count), count / seconds
    if clip.reference:
        found["reference"], _ = _video(clip.reference, vae.latent_channels)
    geometry = Geometry.of(config, bucket.width, bucket.height, bucket.frames, fps)
    count = geometry.audio_latents
    if sound is not None:
        found["audio"] = _fitted(sound, count, clip.audio)
        if path := clip.audio_reference:
            found["audio_reference"] = _sound(path, config)
        if path := clip.audio_mask:
            given = _entry(path, read_pt(path), "mask").reshape(1, -1, 1)
            found["audio_mask"] = _fitted(given, count, path).reshape(-1)
    if clip.mask:
        shape = (geometry.frames, geometry.rows, geometry.columns)
        mask = _entry(clip.mask, read_pt(clip.mask), "mask")
        if mask.size != math.prod(shape):
            raise InputError(f"{clip.mask}: mask of {mask.size} numbers, the clip has {shape}")
        found["mask"] = mask.reshape(shape)
    return found, bucket, str(fps)


def _entry(path: Path, data: Mapping[str, Any], name: str) -> np.ndarray:
    """f32, without axes of length 0. Raises InputError."""
    if not isinstance(value := data.get(name), np.ndarray):
        raise InputError(f"{path}: no tensor {name}; it has {few(data)}")
    value = value.astype(np.float32)
    if not value.size or not np.isfinite(value).all():
        raise InputError(f"{path}: {name} is empty, or not a number everywhere; compute it again")
    return value


def _number(path: Path, data: Mapping[str, Any], name: str, default: float) -> float:
    """Read a number from 0.01 to 100 000. Raises InputError."""
    value = data.get(name, default)
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, int | float) or not 0.01 <= value <= 1e5:
        raise InputError(f"{path}: {name}: {str(value)[:40]!r}, expected a number from 0.01 on")
    return value


def _video(path: Path, channels: int) -> tuple[np.ndarray, Fraction]:
    """Latents [C, f, h, w] and frames a second; older files have them as [tokens, C]."""
    data = read_pt(path)
    value = _entry(path, data, "latents")
    if value.ndim == 2 and value.shape[1] == channels:
        sizes = [int(_number(path, data, name, 0)) for name in ["num_frames", "height", "width"]]
        if math.prod(sizes) != len(value):
            raise InputError(f"{path}: {len(value)} tokens, not {' x '.join(map(str, sizes))}")
        value = value.T.reshape(channels, *sizes)
    if value.ndim != 4 or len(value) != channels:
        raise InputError(
            f"{path}: latents of shape {value.shape}, expected ({channels}, frames, rows, columns)"
        )
    return value, Fraction(_number(path, data, "fps", FPS)).limit_denominator(1001)


def _sound(path: Path, config: ModelConfig) -> np.ndarray:
    value = _entry(path, read_pt(path), "latents")
    expected = config.audio_vae.latent_channels, config.audio_vae.latent_mel_bins
    if value.ndim != 3 or (len(value), value.shape[2]) != expected:
        raise InputError(
            f"{path}: latents of shape {value.shape}, expected ({expected[0]}, time, {expected[1]})"
        )
    return value


def _fitted(sound: np.ndarray, count: int, path: Path | None) -> np.ndarray:
    """Sound of a clip, at most one latent longer or shorter than it: rounding differs."""
    if abs(sound.shape[1] - count) > 1:
        raise InputError(
            f"{path}: {sound.shape[1]} latents of sound, the clip has {count}; compute both "
            "from the same clip"
        )
    return np.concatenate([sound, sound[:, -1:]], axis=1)[:, :count]


def text_features(path: Path, config: ModelConfig) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """video_features and audio_features f32[1, PROMPT_TOKENS, D], and mask [1, PROMPT_TOKENS],
    padded on the left. Raises InputError for features of another model."""
    data, found = read_pt(path), {}
    mask = _entry(path, data, "prompt_attention_mask").reshape(-1) != 0
    for name, connector in (("video", config.text.video), ("audio", config.text.audio)):
        key = f"{name}_prompt_embeds"
        value = _entry(path, data, key if key in data else "prompt_embeds")
        if value.shape != (len(mask), connector.width) or len(mask) > PROMPT_TOKENS:
            raise InputError(
                f"{path}: {name} features of shape {value.shape}, expected at most "
                f"{PROMPT_TOKENS} tokens of {connector.width}; they are of another model"
            )
        more = PROMPT_TOKENS - len(mask)
        found[f"{name}_features"] = np.pad(value, ((more, 0), (0, 0)))[None]
    return found, np.pad(mask, (more, 0)).astype(np.int32)[None]
