"""Any upsampler gives latents of the size that the next stage is made for."""

from fractions import Fraction

import numpy as np
import pytest

import ltx2rt
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.stage import State
from ltx2rt.stages.upsample import Upsample, UpsampleTime
from tests.conftest import normal, refused


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """By kind of the folder's only upsampler, named by `--upsampler` if not temporal."""
    opened = {}
    for kind in ("x2", "x1.5", "temporal"):
        folder = tmp_path_factory.mktemp(kind)
        make_checkpoint("tiny-2.3", "official", folder, upsampler=kind)
        (file,) = folder.glob("*upsampler*")
        given = {} if kind == "temporal" else {"upsampler": file}
        opened[kind] = ltx2rt.open(folder, backend="cuda", device="cpu", **given)
    yield {kind: session.resident for kind, session in opened.items()}
    for session in opened.values():
        session.close()


@pytest.mark.parametrize(("kind", "stage", "scale", "after"), [
    ("x2", Upsample, Fraction(2), (384, 256, 9)),
    ("x1.5", Upsample, Fraction(3, 2), (288, 192, 9)),  # sizes that divide by 96
    ("temporal", UpsampleTime, Fraction(1), (192, 128, 17)),
])  # fmt: skip
def test_the_next_stages_latents(sessions, kind, stage, scale, after):
    session = sessions[kind]
    before, expected = (Geometry.of(session.config, *size, 24) for size in ((192, 128, 9), after))
    made, state = stage(before, 2, *([] if stage is UpsampleTime else [scale])), State(keep=True)
    session.audit([made])
    state.video = normal(2, *before.video_shape[1:])
    made.run(session, state, Stopwatch())
    assert state.video.shape == (2, *expected.video_shape[1:]) and np.isfinite(state.video).all()
    in_time, config = kind == "temporal", session.config
    np.testing.assert_array_equal(state.record["upsampled" + "_round1" * in_time], state.video)
    config = config.part("temporal_upsampler") if in_time else config.upsampler
    assert config.scale == scale


@pytest.mark.parametrize(("kind", "scale"), [("x1.5", Fraction(2)), ("x2", Fraction(3, 2))])
def test_an_upsampler_of_another_scale_is_refused(sessions, kind, scale):
    session = sessions[kind]
    stage = Upsample(Geometry.of(session.config, 192, 128, 9, 24), 1, scale)
    with refused(rf"--upsampler: it is a {kind} spatial one, a x{float(scale):g} spatial one"):
        session.audit([stage])
