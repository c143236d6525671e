"""Pictures of latents, by the tiny model's own encoder."""

import io
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from ltx2rt.media.mp4 import write_mp4
from ltx2rt.serve.preview import GRID, fitted, picture_of, smooth, sprite_sheet
from ltx2rt.session.call import Call
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions


@pytest.mark.long
def test_a_picture_looks_like_what_was_encoded(tiny):
    session = open_session(
        ModelOptions(model=tiny("tiny-2.3", "official"), backend="cuda", device="cpu")
    )
    projection = fitted(session)
    assert projection.shape == (129, 3) and not session.weights.held
    side = GRID * session.config.video_vae.space_factor
    seen = smooth(99, side)  # none of those that it was fitted to
    latent = session.run(
        Call("video-encoder", (1, 3, 1, side, side)), {"frames": seen[None, :, None]}
    )["latent"]
    latents = np.repeat(session.backend.to_host(latent)[0], 3, axis=1)
    with Image.open(io.BytesIO(picture_of(latents, projection))) as picture:
        assert picture.format == "JPEG" and picture.size == (192, 192)
        small = (
            np.asarray(picture.resize((GRID, GRID), Image.Resampling.BOX), np.float32) / 127.5 - 1
        )
    meant = seen.reshape(3, GRID, -1, GRID, side // GRID).mean(axis=(2, 4)).transpose(1, 2, 0)
    assert (
        np.corrcoef(small.ravel(), meant.ravel())[0, 1] > 0.9
    )  # of random weights; reached: 0.961
    session.close()


@pytest.mark.parametrize("width, height", [(24, 16), (3, 40)])
def test_a_preview_keeps_the_shape_of_the_clip(width, height):
    picture = picture_of(np.zeros((8, 5, height, width), np.float32), np.zeros((9, 3), np.float32))
    with Image.open(io.BytesIO(picture)) as image:
        assert max(image.size) == 192
        assert image.width * height == pytest.approx(image.height * width, rel=0.05)


@pytest.mark.parametrize("num_frames", [31, 4])
def test_a_sprite_sheet_has_frames_from_the_first_to_the_last(tmp_path, num_frames):
    grey = np.linspace(-1, 1, num_frames, dtype=np.float32)[None, :, None, None]
    frames = np.broadcast_to(grey, (3, num_frames, 64, 96))
    write_mp4(tmp_path / "clip.mp4", iter([frames]), num_frames=num_frames, fps=Fraction(24))
    with Image.open(io.BytesIO(sprite_sheet(tmp_path / "clip.mp4"))) as sheet:
        assert sheet.size == (4 * 192, 4 * 128)
        means = np.asarray(sheet.convert("L"), np.float32).reshape(4, 128, 4, 192).mean((1, 3))
    assert means.min() < 4 and means.max() > 251 and (np.diff(means.ravel()) > -2).all()


def test_a_command_writes_a_preview_while_it_runs(tiny, command, tmp_path):
    words = ("--width", 128, "--height", 64, "--num-frames", 9, "--steps", 4, "--prompt", "a fox")
    where = ("--backend", "cuda", "--device", "cpu", "--model", tiny("tiny-2.3", "official"))
    given = ("generate", *where, *words, "--output", tmp_path / "a.mp4", "--preview")
    status, _, err = command(*given, tmp_path / "now.png")
    assert status == 0, err
    with Image.open(tmp_path / "now.png") as picture:
        assert picture.size == (192, 96) and picture.format == "PNG"
    status, _, err = command(*given, tmp_path / "now.mp4")
    assert status == 2 and "expected a name that ends in .jpg" in err
