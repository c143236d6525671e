"""Flags of `train run` beside those of `test_run`: what each changes, and what each refuses."""

import json
import shutil
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry
from ltx2rt.train.conditions import given_tokens
from ltx2rt.train.recipe import GROUPS, NoiseLevels, sigma, targeted
from ltx2rt.train.request import TrainRequest, parse_crop, parse_data, parse_span
from ltx2rt.train.state import read_state, states
from ltx2rt.weights.files import TensorFile
from tests.conftest import assert_same
from tests.parity import relative_l2
from tests.train_runs import rows_of, run_train, write_clips

BLOCK = "model.diffusion_model.transformer_blocks.*."


def test_targets_by_regular_expression():
    known = list({BLOCK + part: 0 for parts in GROUPS.values() for part in parts})
    assert targeted([r"attn1\.to_[qk]$"], known, 3) == [
        BLOCK + f"{name}.to_{x}" for name in ("attn1", "audio_attn1") for x in "qk"
    ]
    for word, message in (
        (r"attn9", "matches some of 34 linears"),
        (r"blocks\.1\.attn1\.to_q", "in 1 of 3 blocks"),
        (r"attn1(", "is no regular expression"),
        (r"gate_logits", "gates alone teach nothing"),
    ):
        with pytest.raises(InputError, match=message):
            targeted([word], known, 3)


def test_noise_levels_of_other_distributions():
    def levels(**how):
        return np.array([sigma(1008, 1, f"s{i}", NoiseLevels(**how)) for i in range(2000)])

    uniform, logit = levels(kind="uniform"), levels(kind="logit", shift=0.0)
    assert uniform.min() < 1e-3  # the official range is [0, 1]
    assert uniform.mean() == pytest.approx(0.5, abs=0.02) and np.quantile(uniform, 0.1) < 0.12
    assert np.median(logit) == pytest.approx(0.5, abs=0.02) and logit.std() < uniform.std()
    assert np.median(levels(shift=3.0)) > 0.85
    narrow = levels(kind="uniform", least=0.2, most=0.4)
    np.testing.assert_allclose(narrow, 0.2 + 0.2 * uniform)


def test_tokens_that_conditions_give():
    g = Geometry(6, 4, 4, 128, 8, 32, 24, 43, 8, 16, 4, 160, 16000)
    r, mask = TrainRequest(data=(), output="x", mode="t2v").resolved(), np.zeros((6, 4, 4), "f4")
    mask[:, 0] = 0.9

    def given(stream="s", name="video", **more):
        found = given_tokens(replace(r, **more), g, {"mask": mask}, stream)[name]
        return found.reshape(6, 4, 4) if name == "video" else found

    assert not given().any()
    spans = {"prefix": (2, 1.0), "suffix": (1, 1.0)}
    video, audio = given(**spans), given(name="audio", **spans)
    assert video[[0, 1, 5]].all() and not video[2:5].any()
    # 9 of 41 pixel frames, and the last 8
    assert audio[:9].all() and audio[-8:].all() and not audio[9:-8].any()
    crop = given(crop=parse_crop("30,64,128,96:1"))
    assert crop[:, 1:, 2].all() and crop.sum() == 6 * 3
    middle = given(crop=parse_crop("0,0,0,0:1"))
    assert middle[:, 1:3, 1:3].all() and middle.sum() == 24
    with pytest.raises(InputError, match="holds no whole square of 32 pixels"):
        given(crop=(0, 0, 20, 20, 1.0))
    assert given(mask=1.0).sum() == 24
    assert 70 < sum(given(f"s{i}", mask=0.5).any() for i in range(200)) < 130


def test_values_are_read_and_refused():
    assert parse_span("3") == (3, 1.0) and parse_span("3:0.5") == parse_span((3, 0.5)) == (3, 0.5)
    assert parse_crop((0, 32, 64, 96, 0.5)) == parse_crop("0,32,64,96:0.5") == (0, 32, 64, 96, 0.5)
    assert str(parse_data("a/b:0.5")) == "a/b:0.5" and parse_data("c:/x").weight == 1
    wrong = {parse_span: ("-1:1", "2:1.5", "1,2"), parse_crop: ("5,5,1,9:1",), parse_data: ("a:0",)}
    for parse, text in ((parse, text) for parse, texts in wrong.items() for text in texts):
        with pytest.raises(ValueError):
            parse(text)


@pytest.mark.long
def test_a_run_of_many_flags_and_its_configuration(model, train, refused, no_run, tmp_path, capsys):
    first, again, config = tmp_path / "first", tmp_path / "again", tmp_path / "train.toml"
    more = {"mode": "t2v", "targets": r"attn1\.to_[qv]", "audio_rank": 1, "ema": 0.5}
    more |= {"sigma": "uniform", "keep": 1}
    settings = tmp_path / "settings.toml"
    ours = 'betas = "0.8,0.99"', "audio_balance = 0.5", "keep_every = 1", 'sigma_range = "0.3,0.9"'
    settings.write_text("\n".join(ours))
    words = ("--deterministic", "--json", "--config", settings)
    capsys.readouterr()
    train(first, *words, **more)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("step") for row in printed] == [0, 1, 2, 3, None]
    assert printed[-1] == {"lora": str(first / "lora-000004.safetensors")}
    assert [path.name for path in states(first)] == ["000002", "000004"]  # --keep 1
    found = TensorFile(first / "lora-000004.safetensors")
    ranks = {("audio" in n): found.info(n).shape[0] for n in found.names() if "lora_A" in n}
    assert ranks == {False: 2, True: 1}
    arrays, averages = (read_state(states(first)[-1])[1][name] for name in ("parameters", "ema"))
    assert any(0 < relative_l2(averages[n], x) < 1 for n, x in arrays.items() if "lora_B" in n)
    ema = TensorFile(first / "lora-000004-ema.safetensors")
    name = next(n for n in ema.names() if "lora_B" in n)
    written = ema.read(name).astype(np.float32)
    np.testing.assert_allclose(written, averages[f"model.{name}"], rtol=0.01)
    rows = rows_of(first)
    assert all(row["audio_weight"] > 0 for row in rows)
    expected = 0.5 * rows[0]["video_loss"] / rows[0]["audio_loss"]  # the means begin with step 0
    assert rows[1]["audio_weight"] == pytest.approx(expected)
    # the file that the run wrote gives the same run
    shutil.copy(first / "train.toml", config)
    assert tomllib.loads(config.read_text())["betas"] == "0.8,0.99"
    assert run_train(model, "run", "--config", config, "--output", again) == 0
    names = ("video_loss", "audio_loss", "grad_norm")
    ours, theirs = ([[row[n] for n in names] for row in rows_of(run)] for run in (first, again))
    assert ours == theirs
    # goes on, bit for bit, with the average and the running means
    whole = read_state(states(again)[-1])[1]
    (first / "state" / "000004").rename(first / ".000004")
    train(first, *words, **more)
    for kind, arrays in read_state(states(first)[-1])[1].items():
        assert_same(whole[kind], arrays)
    more |= {"sigma": "shifted", "steps": 5}
    assert "--sigma: shifted" in no_run(first, *words, **more)
    train(first, *words, "--allow-change", **more)
    for text, said in (
        ("ranks = 3\n", "'ranks', which is no flag of `train run`"),
        ('rank = "x"\n', "train.toml, rank: 'x', expected"),
        ("rank = [\n", "is no TOML file"),
        ("rank = 3\n", "--data: none was given"),
    ):
        config.write_text(text)
        assert said in refused("run", "--config", config)


def test_a_run_that_begins_with_a_lora(train, no_run, tmp_path):
    first, second, third = (tmp_path / name for name in "abc")
    train(first, steps=1)
    lora = first / "lora-000001.safetensors"
    train(second, steps=1, lr=1e-9, rank=3, init=lora)
    files = TensorFile(lora), TensorFile(second / "lora-000001.safetensors")
    for name in (name for name in files[0].names() if "lora_A" in name):
        up = name.replace("lora_A", "lora_B")
        a, b = (np.float32(file.read(up)) @ np.float32(file.read(name)) for file in files)
        assert np.abs(a - b).max() <= 0.02 * np.abs(a).max() + 1e-9  # widened by what adds nothing
    assert "has rank 2, the run 1; pass --rank 2" in no_run(third, rank=1, init=lora)
    line = no_run(third, targets="video-attn", init=lora)
    assert "which --targets leave out" in line


@pytest.mark.long
def test_several_caches_and_kinds_of_clips(prepare, train, cache, no_run, tmp_path, capsys):
    """Silent and longer clips beside those with sound: batches are of one kind, shares are drawn."""
    clips, other = write_clips(tmp_path / "clips", 2, sound=False, frames=17), tmp_path / "other"
    prepare(clips, other, "--buckets", "64x64x17,32x64x9")
    more = {"batch": 2, "steps": 3, "mode": "t2v"}
    (half := tmp_path / "half.toml").write_text("sound_share = 0.5")
    train(tmp_path / "a", "--data", f"{other}:3", "--config", half, **more)
    capsys.readouterr()
    train(tmp_path / "b", "--data", other, **more)
    assert "2 of 5 clips have no sound: they train only the picture" in capsys.readouterr().err
    for row in rows_of(tmp_path / "a") + rows_of(tmp_path / "b"):
        assert len(row["samples"]) == 2 and row["video_loss"] > 0
    losses = [row["audio_loss"] for row in rows_of(tmp_path / "b")]
    assert None in losses and any(losses)  # a batch of silent clips has no loss of sound
    train(tmp_path / "d", mode="t2v", streams="video", targets="video-attn", steps=1)
    assert rows_of(tmp_path / "d")[0].keys() & {"video_loss", "audio_loss"} == {"video_loss"}
    for flags, said in (
        ({"config": half}, "no clip is without sound"),
        ({"betas": "0.9,0.99"}, "--betas: write it, with underscores, into the file of --config"),
        ({"mode": "a2v", "streams": "audio"}, "--streams: audio, --mode a2v trains video"),
        ({"mode": "t2v", "prefix": "2:1"}, "--prefix: 2 latent frames, the clips have 2"),
        ({"mode": "inpaint"}, "--mask: 3 of 3 clips have none, such as 0.mp4"),
        ({"tensorboard": tmp_path}, "--tensorboard: the package is not installed"),
    ):
        assert said in no_run(tmp_path / "e", **flags)
    capsys.readouterr()
    train(tmp_path / "e", "--dry-run", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["first_batch"]["video_clean"] == [1, 8, 128] and found["memory_bytes"] > 0
    assert not (tmp_path / "e").exists()
