"""inpaint: cells and pixels by their definition, every step over diffusers, kept pixels outside."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from ltx2rt.media.sound import read_sound
from ltx2rt.media.video import read_frames
from ltx2rt.models.geometry import Geometry, pack_audio, pack_video
from ltx2rt.pipelines import chosen, make_request
from ltx2rt.run.plan import make_plan
from ltx2rt.stages.region import FADE_PX, Region, near
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, shifted_sigmas
from tests.conftest import denoised, refused
from tests.pipelines.test_ic_lora import movie, save
from tests.pipelines.test_retake import write
from tests.reference import assert_stage, positions_of, stored_module

SIZE = (64, 96)  # rows and columns of the clip's pixels


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write(tmp_path_factory.mktemp("clips") / "a.mp4", size=SIZE[::-1])


def drawn(*boxes, frames=17):
    """bool[F, H, W], True in boxes of (frames, rows, columns)."""
    found = np.zeros((frames, *SIZE), bool)
    for box in boxes:
        found[box] = True
    return found


def mask_file(path, mask):
    """White where the mask is: a picture of its first frame, or a video without loss."""
    pixels = np.repeat(mask[..., None] * np.uint8(255), 3, axis=-1)
    if path.suffix == ".png":
        Image.fromarray(pixels[0]).save(path)
        return path
    return save(path, list(pixels))


def run(session, path, **more):
    given = {"prompt": "a fox", "video_path": path, "seed": 3}
    return denoised(session, make_request("inpaint", **given, **more))


def grown(mask, px):
    """Pixel by pixel, from the definition."""
    found = np.zeros_like(mask)
    for f, y, x in np.argwhere(mask):
        found[f, max(y - px, 0) : y + px + 1, max(x - px, 0) : x + px + 1] = True
    return found


@pytest.mark.parametrize("pad", [(0, 0, 0, 0), (32, 0, 64, 32)])
@pytest.mark.parametrize("grow", [0, 5])
def test_a_cell_is_made_if_one_of_its_pixels_is(sessions, tmp_path, grow, pad):
    box = (slice(9, 10), slice(30, 31), slice(40, 60))
    mask = drawn(box, (slice(0, 1), slice(0, 1), slice(95, 96)))
    path = mask_file(tmp_path / "mask.mov", mask)
    region = Region(path, SIZE, 17, grow, pad)
    left, top, right, bottom = pad
    width, height = SIZE[1] + left + right, SIZE[0] + top + bottom
    geometry = Geometry.of(sessions["cuda"].config, width, height, 17, Fraction(24))
    full = np.ones((17, height, width), bool)
    full[:, top : top + SIZE[0], left : left + SIZE[1]] = grown(mask, grow)
    np.testing.assert_array_equal(np.stack(list(region.masks())), full)
    cells = region.cells(geometry)
    for f in range(3):
        frames = slice(0, 1) if f == 0 else slice(8 * f - 7, 8 * f + 1)
        for y in range(height // 32):
            for x in range(width // 32):
                made = full[frames, 32 * y : 32 * y + 32, 32 * x : 32 * x + 32].any()
                ring = (left and x <= left // 32) or (right and x >= (width - right) // 32 - 1)
                ring = ring or (bottom and y >= (height - bottom) // 32 - 1)
                assert cells[f, y, x] == (made or bool(ring)), (f, y, x)


def test_the_share_of_white_pixels_around_one():
    rng = np.random.default_rng(0)
    mask = rng.uniform(size=(9, 11)) > 0.6
    found = near(mask, 2)
    for y, x in np.ndindex(*mask.shape):
        square = mask[max(y - 2, 0) : y + 3, max(x - 2, 0) : x + 3]
        assert found[y, x] == pytest.approx(square.mean(), abs=1e-6)
    np.testing.assert_array_equal(near(mask, 0), mask)


@pytest.mark.parametrize("guided", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_step_is_the_formula_over_diffusers(sessions, folder, clip, tmp_path, guided):
    """On both backends, with a border on one side."""
    mask = drawn((slice(9, 17), slice(40, 60), slice(40, 60)))
    given = {"mask": mask_file(tmp_path / "mask.mov", mask), "pad": (0, 0, 32, 0)}
    given |= {"guided": True, "steps": 2} if guided else {}
    runs = {name: run(session, clip, **given) for name, session in sessions.items()}
    plan, state = runs["cuda"]
    request = plan.clip
    made = request.cells.ravel()
    assert 0 < made.sum() < made.size == 3 * 2 * 4
    geometry = request.geometry(sessions["cuda"].config)
    clean = {
        "video": pack_video(state.record["source.video"])[0].astype(np.float64),
        "audio": pack_audio(state.record["source.audio"])[0].astype(np.float64),
    }
    masks = {"video": made, "audio": np.zeros(len(clean["audio"]))}
    sigmas = shifted_sigmas(2) if guided else DISTILLED_SIGMAS
    given = stored_module(folder), positions_of(geometry), sigmas, masks, clean
    assert_stage(runs, "stage1", *given, frozen=("audio",), guided=guided and request)
    kept = state.record["stage1.video.steps"][-1][made == 0]
    np.testing.assert_array_equal(kept, pack_video(state.record["source.video"])[0][made == 0])


def test_whole_frames_are_a_retake(sessions, clip, tmp_path):
    """Of the pictures, of the last latent frame; bit for bit."""
    mask = mask_file(tmp_path / "mask.mov", drawn((slice(9, 17),)))
    _, state = run(sessions["cuda"], clip, mask=mask, mask_fill="none", mask_grow=0)
    region = {"start_time": 0.4, "end_time": 0.6, "keep": "audio", "seed": 3}
    request = make_request("retake", prompt="a fox", video_path=clip, **region)
    _, expected = denoised(sessions["cuda"], request)
    name = "stage1.video.steps"
    np.testing.assert_array_equal(state.record[name], expected.record[name])


def test_what_the_encoder_sees(tmp_path):
    """The mean of a frame's other pixels, or green, in the mask; the border repeats the edge."""
    mask = drawn((slice(0, 17), slice(8, 24), slice(8, 24)))
    path = mask_file(tmp_path / "mask.png", mask)
    source = list(read_frames(movie(tmp_path / "a.mov", 17, SIZE[::-1]), "", 17))
    region = Region(path, SIZE, 17, 0, (32, 32, 0, 0))
    for fill in ("mean", "green", "none"):
        for pixels, before in zip(region.filled(iter(source), fill), source, strict=True):
            inside = pixels[32:, 32:]
            np.testing.assert_array_equal(inside[~mask[0]], before[~mask[0]])
            expected = {
                "mean": np.floor(before[~mask[0]].mean(0) + 0.5),
                "green": [0x66, 0xFF, 0x00],
                "none": before[mask[0]],
            }[fill]
            np.testing.assert_array_equal(inside[mask[0]], np.broadcast_to(expected, (256, 3)))
            assert (pixels[:32, 32:] == inside[0]).all()
            assert (pixels[:32, :32] == inside[0, 0]).all()


def test_pixels_outside_are_the_files_own(tmp_path):
    """Bit for bit from FADE_PX on, and made ones as far inside."""
    mask = drawn((slice(0, 17), slice(20, 44), slice(30, 60)))
    region = Region(mask_file(tmp_path / "mask.png", mask), SIZE, 17, 0, (32, 0, 0, 0))
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, (17, *SIZE, 3)).astype(np.uint8)
    made = rng.integers(0, 256, (17, 64, 128, 3)).astype(np.uint8)
    found = np.concatenate(list(region.composed(iter([made[:9], made[9:]]), iter(source))))
    full = np.stack(list(region.masks()))
    outside = ~grown(full[:1], FADE_PX)[0]
    inside = ~grown(~full[:1], FADE_PX)[0]
    assert outside.any() and inside.any()
    padded = np.pad(source, ((0, 0), (0, 0), (32, 0), (0, 0)), mode="edge")
    np.testing.assert_array_equal(found[:, outside], padded[:, outside])
    np.testing.assert_array_equal(found[:, inside], made[:, inside])
    share = near(full[0], FADE_PX)[..., None]
    blend = padded[3] + share * (made[3] - padded[3].astype(np.float32))
    np.testing.assert_array_equal(found[3], np.rint(blend).astype(np.uint8))


def test_the_clip_is_larger_and_keeps_its_sound(tiny, clip, tmp_path, generate):
    output = tmp_path / "clip.mov"
    mask = mask_file(tmp_path / "mask.png", drawn((slice(0, 1), slice(20, 40), slice(20, 40))))
    words = ["--pipeline", "inpaint", "--distilled-lora", "none", "--video-path", clip, "--seed", 5]
    words += ["--mask", mask, "--pad", "32,0,0,0", "--output", output]
    run = generate("cuda", tiny("tiny-2.3", "official"), *words)
    assert run.status == 0, run.stderr
    assert "white is made anew: 18 of 24 cells of 32x32 pixels and 8 frames" in run.stderr
    found = list(read_frames(output, "", 17))
    assert found[0].shape == (64, 128, 3)
    samples, rate = read_sound(clip, 0.0, 17 / 24)
    heard, heard_rate = read_sound(output, 0.0, 17 / 24)
    assert rate == heard_rate and np.corrcoef(heard.ravel(), samples.ravel())[0, 1] > 0.99
    frames = np.stack(list(read_frames(clip, "", 17)))
    far = np.stack(found)[:, :, 32 + 52 :].astype(float) - frames[:, :, 52:]
    assert np.sqrt((far**2).mean()) < 12  # of H.264; made pixels differ by 60 or more


@pytest.mark.parametrize("fit, at", [("pad", (36, 16)), ("crop", (12, 0)), ("scale", (12, 16))])
def test_a_rectangle_and_a_mask_follow_the_file(sessions, clip, tmp_path, fit, at):
    """at: the first row and column of the white, of 96x64 pixels brought to 48x96."""
    box = (slice(None), slice(8, 24), slice(32, 56))
    given = {"mask_box": (32, 8, 24, 16)}, {"mask": mask_file(tmp_path / "m.png", drawn(box))}
    how = {"video_path": clip, "width": 48, "height": 96, "fit": fit, "mask_grow": 0}
    requests = [make_request("inpaint", prompt="a", **how, **one) for one in given]
    plans = [make_plan(sessions["cuda"], request) for request in requests]
    first, second = (next(plan.clip.request.region(plan.clip).masks()) for plan in plans)
    assert (first == second).all() and first.shape == (96, 48)
    assert tuple(np.argwhere(first)[0]) == at


@pytest.mark.parametrize("sound, made", [(None, []), ("new", ["audio"])])
def test_a_silent_clip_gets_sound_on_demand(sessions, tmp_path, sound, made):
    silent = write(tmp_path / "silent.mp4", size=SIZE[::-1], sound_s=0)
    given = {"prompt": "fox", "video_path": silent, "pad": "32,0,0,0", "sound": sound}
    plan = make_plan(sessions["cuda"], make_request("inpaint", **given))
    names = [stage.name for stage in plan.stages]
    assert names == ["source video", "text", "stage1", *made, "decode", "compose"]


def test_a_rectangle_is_made_for_a_part_of_the_time(sessions, clip):
    """Of 17 frames at 24 fps those from 8 to 11, which are of the second latent."""
    given = {"prompt": "x", "video_path": clip, "mask_box": (0, 0, 16, 16), "mask_grow": 0}
    assert chosen(given.keys() | {"start_time", "end_time"})[0] == "inpaint"
    request = make_request("inpaint", start_time=8 / 24, end_time=12 / 24, **given)
    made = make_plan(sessions["cuda"], request).clip
    assert [mask.any() for mask in made.request.region(made).masks()] == [
        8 <= number < 12 for number in range(17)
    ]
    assert made.cells.any((1, 2)).tolist() == [False, True, True]
    with refused("--start-time: 9 s"):
        make_plan(sessions["cuda"], replace(request, start_time=9.0, end_time=None))
