"""Conditioning images are read as the reference reads them."""

import math
import os
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile

from ltx2rt.media.images import (
    bicubic,
    cover,
    load_conditioning_image,
    notes,
    on_disk,
    read_rgb,
    recompress,
)
from tests.conftest import refused


def photo(height=37, width=53, seed=0):
    """Smooth colour gradients with some noise, as a codec expects."""
    y, x = np.mgrid[:height, :width]
    base = np.stack([255 * x / width, 255 * y / height, 127 + 100 * np.sin(x / 9 + y / 7)], axis=-1)
    noise = np.random.default_rng(seed).normal(0, 4, base.shape)
    return np.clip(base + noise, 0, 255).astype(np.uint8)


@settings(max_examples=30, deadline=None)
@given(*(st.integers(1, 70) for _ in range(4)))
def test_cover_equals_torch_interpolate_and_a_centre_crop(rows, columns, height, width):
    pixels = photo(rows, columns)
    scale = max(height / rows, width / columns)
    size = (math.ceil(rows * scale), math.ceil(columns * scale))
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    scaled = torch.nn.functional.interpolate(planes, size=size, mode="bilinear")[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    expected = scaled.permute(1, 2, 0)[top : top + height, left : left + width].numpy()
    # torch may fuse multiply and add: source coordinates near 70 carry 8e-6, times a step of at
    # most 255
    np.testing.assert_allclose(cover(pixels, width, height), expected, atol=4e-3)


def test_recompression_equals_the_reference_bitwise():
    from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf

    pixels = photo(49, 64)
    ours = recompress(pixels, 33)
    assert ours.shape == (48, 64, 3)
    np.testing.assert_array_equal(ours, apply_image_conditioning_crf(pixels, 33))
    assert np.abs(ours.astype(int) - pixels[:48]).mean() > 1  # it does lose something
    np.testing.assert_array_equal(recompress(pixels, 0), pixels)
    assert recompress(pixels[:1], 33).shape == (1, 64, 3)


@pytest.mark.parametrize("shown", [
    np.asarray,
    lambda picture: np.asarray(picture).transpose(2, 0, 1) / np.float32(255),
    lambda picture: np.asarray(picture).astype(np.uint16) * 257,
    lambda picture: np.dstack([np.asarray(picture), np.zeros((37, 53), np.uint8)]),
    lambda picture: picture.transpose(Image.Transpose.ROTATE_90),
    lambda picture: picture.convert("RGBA"),
])  # fmt: skip
def test_pixels_in_memory_become_a_file(tmp_path, shown):
    given = shown(picture := Image.fromarray(photo()))
    if given is not picture and isinstance(given, Image.Image) and given.size != picture.size:
        given.getexif()[0x0112] = 6
    ((path, frame),) = on_disk([(given, "last")], tmp_path)
    assert frame == "last" and np.array_equal(read_rgb(path), photo())


def test_arrays_that_are_no_picture_are_refused(tmp_path):
    large, negative = np.full((4, 4), 1.5), np.full((4, 4), -1)
    for array in (np.zeros((2, 3, 4, 3)), np.zeros((0, 4)), large, negative):
        with refused(r"^image: "):
            on_disk(array, tmp_path)
    grey = on_disk(np.eye(4, dtype=bool), tmp_path)
    assert np.array_equal(read_rgb(grey)[..., 1], 255 * np.eye(4))
    assert on_disk({"steps": 3}, tmp_path) == {"steps": 3} and on_disk("a.png", tmp_path) == "a.png"


def test_an_image_becomes_one_frame_in_minus_one_to_one(tmp_path):
    Image.fromarray(photo()).save(tmp_path / "a.png")
    frame = load_conditioning_image(tmp_path / "a.png", 64, 32, crf=0)
    assert frame.shape == (1, 3, 1, 32, 64) and frame.dtype == np.float32
    assert -1 <= frame.min() < -0.8 and 0.8 < frame.max() <= 1
    expected = (cover(photo(), 64, 32) / np.float32(127.5) - 1).transpose(2, 0, 1)
    np.testing.assert_array_equal(frame[0, :, 0], expected)


UPRIGHT = {  # EXIF orientation: how its pixels are stored, of an upright image
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: lambda x: np.rot90(x, -1),
}


@pytest.mark.parametrize("suffix", ["png", "tiff", "webp", "avif", "heic"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_every_exif_orientation_is_upright_and_unmirrored(tmp_path, orientation, suffix):
    stored = UPRIGHT[orientation](photo(36, 52))
    if suffix == "heic":  # its writer turns the pixels, and says so in a box that its reader obeys
        pytest.importorskip("pillow_heif").register_heif_opener()
        stored = photo(36, 52)
    image = Image.fromarray(np.ascontiguousarray(stored))
    exif = image.getexif()
    exif[0x0112] = orientation
    lossless = {"webp": {"lossless": True}, "avif": {"quality": 100}, "heic": {"quality": -1}}
    image.save(tmp_path / f"a.{suffix}", exif=exif, **lossless.get(suffix, {}))
    # AVIF and HEIC hold YUV: a level of rounding, or two with noise in colour of half the size
    most = {"avif": 4, "heic": 4}.get(suffix, 0)
    found = read_rgb(tmp_path / f"a.{suffix}")
    assert found.shape == (36, 52, 3)
    assert np.abs(found.astype(int) - photo(36, 52)).mean() <= most


def test_alpha_is_dropped_not_composited_and_16_bits_are_scaled(tmp_path):
    alpha = np.full((37, 53, 1), 7, np.uint8)
    Image.fromarray(np.concatenate([photo(), alpha], -1)).save(tmp_path / "rgba.png")
    np.testing.assert_array_equal(read_rgb(tmp_path / "rgba.png"), photo())
    Image.fromarray(photo()[..., :1].repeat(2, -1)).save(tmp_path / "la.png")
    np.testing.assert_array_equal(read_rgb(tmp_path / "la.png"), photo()[..., :1].repeat(3, -1))
    grey = photo()[..., 0]
    Image.fromarray(grey.astype(np.uint16) << 8).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(read_rgb(tmp_path / "grey.png"), grey[..., None].repeat(3, -1))


def test_an_icc_profile_is_converted_to_srgb(tmp_path):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.fromarray(photo()).save(tmp_path / "srgb.png", icc_profile=profile)
    # sRGB to sRGB goes through the profile connection space: one 8-bit step of rounding
    assert np.abs(read_rgb(tmp_path / "srgb.png").astype(int) - photo()).max() <= 1
    Image.fromarray(photo()).save(tmp_path / "bad.png", icc_profile=b"no profile")
    with refused(r"bad\.png has an ICC profile that cannot be applied"):
        read_rgb(tmp_path / "bad.png")


def test_unreadable_images_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    Image.fromarray(photo()).save(path)
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(broken)
        with refused("no readable image"):
            read_rgb(path)
    Image.fromarray(photo()).save(tmp_path / "a.eps")  # starts a program
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("a.eps", "pipe.png"):
        with refused(rf"{name} is no readable image"):
            read_rgb(tmp_path / name)
    for dtype in (np.float32, np.int32):  # Pillow would make the one black and the other white
        Image.fromarray(photo()[..., 0].astype(dtype)).save(tmp_path / "a.tiff")
        with refused(r"a\.tiff holds 32-bit values"):
            read_rgb(tmp_path / "a.tiff")
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with refused(r"a\.heic is HEIC.*\.\[heic\]"):
        read_rgb(tmp_path / "a.heic")
    path.write_bytes(whole)
    monkeypatch.setattr(ImageFile.ImageFile, "load", Mock(side_effect=MemoryError))
    with refused(r"a\.png needs more memory for 53x37 pixels than is free"):
        read_rgb(path)


@pytest.mark.parametrize("size", [(16386, 2), (2, 16386), (10_001, 10_001), (13_000, 13_000)])
def test_sizes_that_no_encoder_takes_are_refused_from_the_header(tmp_path, size, recwarn):
    Image.new("L", size).save(tmp_path / "a.png")
    with refused(rf"a\.png has {size[0]}x{size[1]} pixels, more than 16384 on a side or 100"):
        read_rgb(tmp_path / "a.png")
    assert not recwarn.list


def test_a_large_photo_is_read_without_pillows_warning(tmp_path, recwarn):
    Image.new("L", (9800, 9700)).save(tmp_path / "a.png")  # beyond Pillow's 89 million
    assert notes(tmp_path / "a.png") == [] == recwarn.list


def test_what_is_left_out_is_said(tmp_path):
    picture = Image.fromarray(photo())
    picture.save(tmp_path / "plain.png")
    picture.convert("RGBA").save(tmp_path / "alpha.png")
    Image.fromarray(photo()[..., 0]).save(tmp_path / "key.png", transparency=3)
    more = [Image.fromarray(photo(seed=i)) for i in (1, 2)]
    picture.save(tmp_path / "moving.gif", save_all=True, append_images=more)
    hidden = "its alpha channel is dropped, what it hides becomes visible"
    moving = "only the first of its 3 frames is used"
    for name, said in (("alpha", hidden), ("key", hidden), ("moving", moving), ("plain", None)):
        (path,) = tmp_path.glob(f"{name}.*")
        assert notes(path) == ([f"{path}: {said}"] if said else [])


@pytest.mark.parametrize("rows, columns", [(90, 200), (200, 90), (33, 40), (48, 64)])
def test_bicubic_equals_torch_with_antialias_and_a_crop(rows, columns):
    """Clips of training: scaled down by up to 4, up by 2, and not at all; float64 reference."""
    pixels, height, width = photo(rows, columns), 48, 64
    pixels[: rows // 2] = np.random.default_rng(0).integers(0, 2, pixels[: rows // 2].shape) * 255
    wide = columns * height > rows * width
    size = (height, columns * height // rows) if wide else (rows * width // columns, width)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].double() / 255
    scaled = torch.nn.functional.interpolate(planes, size=size, mode="bicubic", antialias=True)
    expected = (scaled[0].clamp(0, 1) * 2 - 1).numpy()
    for place in ((0.5, 0.5), (1.0, 0.0)):
        left, top = int((size[1] - width) * place[0]), int((size[0] - height) * place[1])
        found = bicubic(pixels, width, height, place)
        part = expected[:, top : top + height, left : left + width]
        assert np.abs(found - part).max() < 2e-6  # float32 sums of at most 18 taps
