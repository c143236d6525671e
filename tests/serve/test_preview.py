"""Pictures of latents, by the tiny model's own encoder."""

import io

import numpy as np
import pytest
from PIL import Image

from ltx2rt.serve.preview import GRID, fitted, picture_of, smooth
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
