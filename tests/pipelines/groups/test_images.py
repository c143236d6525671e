"""--hdr: an EXR image in, EXR frames or HLG out, of one clip."""

import av
import numpy as np
import pytest

from ltx2rt.media import hdr
from ltx2rt.media.images import cover
from ltx2rt.pipelines import make_request
from ltx2rt.run.files import Files, Marks
from ltx2rt.run.plan import make_plan
from ltx2rt.run.recording import STREAM, recording
from ltx2rt.run.run import produce
from ltx2rt.run.segments import claimed, folder_of
from ltx2rt.run.write import sizes
from ltx2rt.session.options import NO_LORA

START = (
    "generate", "--backend", "cuda", "--device", "cpu", "--pipeline", "one-stage", "--prompt", "a fox", "--seed", 3,
    "--distilled-lora", "none", "--width", 64, "--height", 64, "--num-frames", 9, "--steps", 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("exr") / "a.exr"
    light = np.random.default_rng(0).uniform(0, 8, (48, 100, 3)).astype(np.float32)
    path.write_bytes(hdr.exr_bytes(light, "SRGB_LINEAR"))
    return path


def test_a_clip_of_an_exr_image(tiny, command, picture, tmp_path):
    model = ("--model", tiny("tiny-2.3", "official"), "--hdr", "SRGB_LINEAR", "--no-audio")
    words = (*START, *model, "--image", f"{picture}:0", "--output")
    frames = tmp_path / "exr" / "%05d.exr"
    frames.parent.mkdir()
    for output in (frames, tmp_path / "a.mp4"):
        status, _, err = command(*words, output)
        assert status == 0, err
    written = [hdr.read_exr(frames.parent / f"{i:05d}.exr") for i in range(9)]
    assert len([*frames.parent.iterdir()]) == 9 and written[0].shape == (64, 64, 3)
    with av.open(str(tmp_path / "a.mp4")) as found:
        shown = list(found.decode(video=0))
        assert len(shown) == 9 and int(found.streams.video[0].codec_context.color_trc) == 18
    plane = np.frombuffer(shown[4].planes[0], np.uint16).reshape(64, -1)[:, :64]
    how = hdr.HighRange("SRGB_LINEAR")
    signal = hdr.video_signal(hdr.to_model(written[4].astype(np.float64), "SRGB_LINEAR"), how)
    # White noise at crf 12: 6.6.
    assert np.abs(plane.astype(float) - hdr.ten_bits(signal)[0]).mean() < 10


@pytest.fixture
def spied(on_both, monkeypatch):
    """A session, and the frames that its encoder is given."""
    session = on_both("tiny-2.3", distilled_lora=NO_LORA, assume="dev")["cuda"]
    seen, run = [], session.run

    def spy(call, feeds, *more):
        if call.network == "video-encoder":
            seen.append(feeds["frames"])
        return run(call, feeds, *more)

    monkeypatch.setattr(session, "run", spy)
    return session, seen


def test_the_encoder_is_given_the_images_codes(spied, picture):
    session, seen = spied
    request = make_request(
        "one-stage", prompt="a fox", width=64, height=64, num_frames=9, steps=1, seed=3,
        images=[(picture, 0)], hdr="ACESCG",
    )  # fmt: skip
    produce(session, make_plan(session, request))
    light = cover(hdr.read_exr(picture).astype(np.float64), 64, 64)
    x = np.maximum(light, 1e-12)
    codes = np.where(
        x > 0.0078125, (np.log2(x) + 9.72) / 17.52, 10.5402377416545 * x + 0.0729055342
    )
    np.testing.assert_allclose(seen[0][0, :, 0], (codes * 2 - 1).transpose(2, 0, 1), atol=1e-5)


@pytest.mark.long
def test_segments_keep_codes_of_16_bits(spied, picture, tmp_path):
    """The next one is given those, without a step through 8 bits; made anew it is the same."""
    session, seen = spied
    clip = {"prompt": "a fox", "width": 64, "height": 64, "num_frames": 17, "steps": 1, "seed": 3}
    clip |= {"images": [(picture, 0)], "hdr": "ACESCG", "hdr_transfer": "pq"}
    folder, output = tmp_path / "parts", tmp_path / "a.mp4"
    more = {"num_frames": 33, "segment_frames": 17, "overlap": 9, "anchor": 0.5}
    request = make_request("one-stage", **clip | more).kept_in(folder)
    plan = make_plan(session, request)
    with (
        claimed(session, plan, folder),
        recording(session, plan, folder, output, Marks()) as recorded,
    ):
        state, *_ = produce(session, plan)
        codes = np.concatenate(list(next(state.frames)))
        parts = [np.stack(list(part.frames())) for part in plan.clip.parts]
        recorded.finish(output)
        with av.open(str(folder / STREAM)) as streamed:
            assert len(list(streamed.decode(video=0))) == 33
    assert codes.dtype == parts[0].dtype == np.uint16 and len(codes) == 17 + 8 + 8
    np.testing.assert_array_equal(codes, np.concatenate([parts[0][:8], parts[1][:8], parts[2]]))
    for pixels, given in (
        (parts[0][8:], seen[1]),
        (parts[0][:1], seen[2]),
        (parts[1][8:], seen[3]),
    ):
        np.testing.assert_allclose(given[0].transpose(1, 2, 3, 0), hdr.as_frames(pixels), atol=1e-6)
    plain = produce(session, make_plan(session, make_request("one-stage", **clip)))[0]
    chunks = [hdr.to_codes(chunk) for chunk in next(plain.frames)]
    np.testing.assert_array_equal(parts[0], np.concatenate(chunks))
    with av.open(str(output)) as found:
        shown = list(found.decode(video=0))
        assert len(shown) == 33 and int(found.streams.video[0].codec_context.color_trc) == 16
    plane = np.frombuffer(shown[20].planes[0], np.uint16).reshape(64, -1)[:, :64]
    signal = hdr.video_signal(
        hdr.as_frames(codes[20:21])[0], hdr.HighRange("ACESCG", "acescct", "pq")
    )
    assert np.abs(plane.astype(float) - hdr.ten_bits(signal)[0]).mean() < 10  # as above
    (folder / "0002.mov").unlink()
    again = produce(session, make_plan(session, request))[0]
    np.testing.assert_array_equal(np.concatenate(list(next(again.frames))), codes)
    assert sizes(session, plan, Files(outputs=(output,)))[folder_of(output)] > 8 * codes.size / 3
