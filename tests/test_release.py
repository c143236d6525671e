"""A release is a row: another one is recognised, has its defaults, and keeps its files apart, by
that row alone."""

from dataclasses import replace

import pytest

from ltx2rt import release
from ltx2rt.errors import InputError
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.distilled import Distilled
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.session.options import ModelOptions
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.presets import preset

NEXT = release.Release(
    "2.6", (2, 6), "keyframe_vector", "keyframes_abs_pos_embedding", "Gemma 4", steps=20, stg_block=24, image_crf=10,
    negative_prompt="fog", samplers=("euler", "heun"), split=True,
)  # fmt: skip


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(release, "RELEASES", [NEXT, *release.RELEASES])


def test_a_new_release_is_a_row(rows, tmp_path):
    model = replace(
        preset("tiny-2.5").config, version=(2, 6, 0), video_vae_version=(2, 6, 0), parts={}
    )
    assert model.release is NEXT and preset("tiny-2.5").config.release.name == "2.5"
    full = resolve(TwoStage("a cat"), model).request
    assert (full.steps, full.stg_blocks, full.image_crf, full.num_frames) == (20, (1,), 10, 121)
    assert full.negative_prompt == "fog"
    clip = resolve(Distilled("a cat", stage2_sampler="euler"), model)
    options = ModelOptions(backend="cuda", model=tmp_path)
    stages = {stage.name: stage for stage in clip.stages(model, options, Loras())}
    assert stages["stage1"].sampler == "euler"
    with pytest.raises(InputError, match=r"ancestral, but LTX-2\.6 takes euler, heun"):
        resolve(Distilled("a cat", stage2_sampler="ancestral"), model)


def test_files_of_two_releases_that_are_apart_do_not_go_together(rows, tiny, tmp_path):
    for path in tiny("tiny-2.5", "official").glob("*.safetensors"):
        if "upsampler" not in path.name:
            (tmp_path / path.name).symlink_to(path)
        elif "spatial" in path.name:
            file = TensorFile(path)
            arrays = {name: file.read(name) for name in file.names()}
            write_arrays(tmp_path / path.name, arrays, file.metadata | {"model_version": "2.6.0"})
    with pytest.raises(InputError, match=r"of LTX-2\.6\.0 beside LTX-2\.5\.0"):
        open_checkpoint(tmp_path)


def test_no_row_but_the_latest_is_told_by_what_an_earlier_one_has():
    assert [row.since for row in release.RELEASES] == sorted(
        (row.since for row in release.RELEASES), reverse=True
    )
    for name in ("2.0", "2.3", "2.5"):
        config = preset(f"ltx-{name}").config
        assert (
            release.of_config(config.transformer).name
            == release.of_version(config.version).name
            == name
        )
        assert config.gemma.family == config.release.text_encoder
