"""Pictures of latents, by the tiny model's own encoder."""

import io
from contextlib import redirect_stderr
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

import ltx2rt
from examples.clips import Clip
from ltx2rt.cli import main
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.video import video_info
from ltx2rt.run.preview import Preview, fitted, frames_of, free_name, picture_of, sprite_sheet
from ltx2rt.session.call import Call
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from tests.conftest import refused
from tests.real.table import TINY


@pytest.fixture(scope="module")
def trained():
    session = open_session(ModelOptions(model=TINY, backend="cuda", device="cpu"))
    yield session
    session.close()


@pytest.mark.parametrize("shape, colour", [("circle", "red"), ("triangle", "white")])
def test_a_picture_looks_like_what_was_encoded(trained, shape, colour):
    """Colour and place, by the weights of a trained encoder: the mean error of 2 is 0.16 and 0.22;
    with pictures of patches of four latent pixels it was 0.47 and 0.36."""
    seen = Clip(shape, colour, "grows", "grey", phase=0.2).frames(count=1) * 2 - 1
    picture = np.ascontiguousarray(seen.transpose(3, 0, 1, 2)[None], np.float32)
    latent = trained.run(Call("video-encoder", picture.shape), {"frames": picture})["latent"]
    projection = fitted(trained)
    assert projection.shape == (129, 3) and not trained.weights.held
    shown = frames_of(trained.backend.to_host(latent)[0], projection)
    small, meant = (x[0].reshape(4, -1, 4, x.shape[2] // 4, 3).mean((1, 3)) for x in (shown, seen))
    assert np.abs(small / 127.5 - 1 - meant).mean() < 0.3


@pytest.mark.parametrize("width, height", [(24, 16), (3, 40)])
def test_a_preview_keeps_the_shape_of_the_clip(width, height):
    picture = picture_of(np.zeros((8, 5, height, width), np.float32), np.zeros((9, 3), np.float32))
    image = Image.open(io.BytesIO(picture))
    assert max(image.size) == 192
    assert image.width * height == pytest.approx(image.height * width, rel=0.05)


@pytest.mark.parametrize("num_frames", [31, 4])
def test_a_sprite_sheet_has_frames_from_the_first_to_the_last(tmp_path, num_frames):
    grey = np.linspace(-1, 1, num_frames, dtype=np.float32)[None, :, None, None]
    frames = np.broadcast_to(grey, (3, num_frames, 64, 96))
    write_mp4(tmp_path / "clip.mp4", iter([frames]), num_frames=num_frames, fps=Fraction(24))
    sheet = Image.open(io.BytesIO(sprite_sheet(tmp_path / "clip.mp4")))
    assert sheet.size == (4 * 192, 4 * 128)
    means = np.asarray(sheet.convert("L"), np.float32).reshape(4, 128, 4, 192).mean((1, 3))
    assert means.min() < 4 and means.max() > 251 and (np.diff(means.ravel()) > -2).all()


SMALL = ("--width", 64, "--height", 64, "--num-frames", 9, "--steps", 1, "--prompt", "a fox")
SMALL += ("--pipeline", "one-stage", "--no-audio")


@pytest.fixture(scope="module")
def say(tiny):
    model = tiny("tiny-2.3", "official")
    return ("generate", "--backend", "cuda", "--device", "cpu", "--model", model, *SMALL)


def test_a_command_writes_a_preview_while_it_runs(say, command, tmp_path):
    """Of a clip in segments the one in the making; a latent frame lasts eight of the clip's."""
    more = "--num-frames 25 --segment-frames 17 --overlap 9".split()
    files = ("--output", tmp_path / "a.mp4", "--preview", tmp_path / "now.mp4")
    status, _, err = command(*say, *more, *files)
    assert status == 0, err
    info = video_info(tmp_path / "now.mp4", "")
    assert (info.num_frames, info.fps, info.width) == (3, 3, 192)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "stop", [None, RuntimeError, pytest.param(KeyboardInterrupt, marks=pytest.mark.long)]
)
def test_a_terminal_has_a_preview_until_the_end(say, tmp_path, monkeypatch, stop):
    """It takes a free name, replaces no file, and is gone after a failure as well."""
    there, (found, shown) = tmp_path / "a.mp4.preview.png", ([], Preview.show)
    there.write_bytes(b"a picture of the user's")

    def show(self, frames, fps):
        shown(self, frames, fps)
        with Image.open(self.path) as picture:
            found.append((self.path.name, picture.size, picture.format))
        if stop:
            raise stop

    monkeypatch.setattr(Preview, "show", show)
    with redirect_stderr(Terminal()) as err:
        status = main([*map(str, say), "--output", str(tmp_path / "a.mp4")])
    assert bool(status) == bool(stop) and set(found) == {("a.mp4.preview1.png", (192, 192), "PNG")}
    assert "preview1.png (removed in the end; --preview FILE" in err.getvalue()
    assert there.read_bytes() == b"a picture of the user's"
    assert list(tmp_path.glob("*preview*")) == [there]


def test_a_terminal_has_no_preview_if_none_is_asked_for(say, tmp_path, monkeypatch):
    monkeypatch.setattr(Preview, "show", None)
    words = [*map(str, say), "--output", str(tmp_path / "a.mp4"), "--preview", "none"]
    with redirect_stderr(Terminal()):
        assert main(words) == 0


def test_a_file_that_appeared_meanwhile_stays(tmp_path):
    preview = Preview(tmp_path / "a.png", once=True)
    frames = np.zeros((1, 64, 64, 3), np.uint8)
    assert free_name(tmp_path / "%05d.png").name == "05d.png.preview.png"  # one file
    preview.show(frames, Fraction(3))
    preview.path.unlink()
    preview.path.write_text("another")
    preview.show(frames, Fraction(3))
    preview.end()
    assert preview.path.read_text() == "another"


def test_a_preview_that_cannot_be_written_ends_and_the_clip_goes_on(tmp_path):
    (tmp_path / "file").touch()
    preview = Preview(tmp_path / "file" / "a.png")
    preview.show(np.zeros((1, 64, 64, 3), np.uint8), Fraction(3))
    assert preview.failed


def test_python_has_the_frames_or_a_file(say, tmp_path):
    asked = {"width": 64, "height": 64, "num_frames": 9, "steps": 1, "seed": 1}
    asked |= {"pipeline": "one-stage", "audio": False}
    seen, there = [], tmp_path / "a.png"
    there.mkdir()
    with ltx2rt.open(say[6], backend="cuda", device="cpu") as session:
        session.generate("a fox", preview=seen.append, **asked)
        session.generate("a fox", preview=tmp_path / "a.mp4", **asked)
        assert {(x.shape, x.dtype.name) for x in seen} == {((2, 192, 192, 3), "uint8")}
        assert video_info(tmp_path / "a.mp4", "").num_frames == 2
        for given, why in (
            ("a.txt", "--preview: a.txt, expected none, or a name in .mp4"),
            ("a-%03d.png", "expected none, or a name in"),
            (5, "--preview: '5', expected a path"),
            (there, "a.png is a folder; add a file name"),
        ):
            with refused(why):
                session.generate("a fox", preview=given, **asked)
        with refused("--preview: the t2a pipeline makes no new picture"):
            session.generate("a fox", pipeline="t2a", seconds=1, seed=1, preview="a.png")
