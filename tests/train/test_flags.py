"""Flags of `train run` beside those of `test_run`: what each changes, and what each refuses."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry
from ltx2rt.testing import relative_l2
from ltx2rt.train.conditions import given_tokens
from ltx2rt.train.recipe import GROUPS, NoiseLevels, sigma, targeted
from ltx2rt.train.request import TrainRequest, parse_crop, parse_data, parse_span
from ltx2rt.train.state import read_state, states
from ltx2rt.weights.files import TensorFile
from tests.train.test_run import refused
from tests.train_runs import options, run_train, write_clips

BLOCK = "model.diffusion_model.transformer_blocks.*."


def rows_of(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


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

    uniform = levels(kind="uniform")
    logit = levels(kind="logit", shift=0.0)
    shifted = levels(shift=3.0)
    drawn = [sigma(8, 0, f"s{i}", NoiseLevels("uniform")) for i in range(3000)]
    assert min(drawn) < 1e-3  # the official range is [0, 1]
    assert uniform.mean() == pytest.approx(0.5, abs=0.02) and np.quantile(uniform, 0.1) < 0.12
    assert np.median(logit) == pytest.approx(0.5, abs=0.02) and logit.std() < uniform.std()
    assert np.median(shifted) > 0.85
    narrow = levels(kind="uniform", least=0.2, most=0.4)
    np.testing.assert_allclose(narrow, 0.2 + 0.2 * uniform)


def test_tokens_that_conditions_give():
    g = Geometry(6, 4, 4, 128, 8, 32, 24, 43, 8, 16, 4, 160, 16000)
    r = replace(TrainRequest(data=(), output="x", mode="t2v").resolved())
    assert not given_tokens(r, g, {}, "s")["video"].any()
    found = given_tokens(replace(r, prefix=(2, 1.0), suffix=(1, 1.0)), g, {}, "s")
    video = found["video"].reshape(6, 16)
    assert video[[0, 1, 5]].all() and not video[2:5].any()
    # 9 of 41 pixel frames, and the last 8
    assert found["audio"][:9].all() and found["audio"][-8:].all() and not found["audio"][9:-8].any()
    crop = given_tokens(replace(r, crop=parse_crop("30,64,128,96:1")), g, {}, "s")["video"].reshape(
        6, 4, 4
    )
    assert crop[:, 1:, 2].all() and crop.sum() == 6 * 3
    middle = given_tokens(replace(r, crop=parse_crop("0,0,0,0:1")), g, {}, "s")["video"].reshape(
        6, 4, 4
    )
    assert middle[:, 1:3, 1:3].all() and middle.sum() == 24
    with pytest.raises(InputError, match="holds no whole square of 32 pixels"):
        given_tokens(replace(r, crop=(0, 0, 20, 20, 1.0)), g, {}, "s")
    mask = np.zeros((6, 4, 4), np.float32)
    mask[:, 0] = 0.9
    assert given_tokens(replace(r, mask=1.0), g, {"mask": mask}, "s")["video"].sum() == 24
    drawn = [
        given_tokens(replace(r, mask=0.5), g, {"mask": mask}, f"s{i}")["video"].any()
        for i in range(200)
    ]
    assert 70 < sum(drawn) < 130


def test_values_are_read_and_refused():
    assert parse_span("3") == (3, 1.0) and parse_span("3:0.5") == (3, 0.5)
    assert str(parse_data("a/b:0.5")) == "a/b:0.5" and parse_data("c:/x").weight == 1
    for parse, text in (
        (parse_span, "-1:1"),
        (parse_span, "2:1.5"),
        (parse_crop, "5,5,1,9:1"),
        (parse_data, "a:0"),
    ):
        with pytest.raises(ValueError):
            parse(text)


@pytest.mark.long
def test_a_run_of_many_flags_and_its_configuration(model, cache, tmp_path, capsys):
    first, again = tmp_path / "first", tmp_path / "again"
    more = {
        "audio-rank": 1,
        "ema": 0.5,
        "betas": "0.8,0.99",
        "sigma": "uniform",
        "keep-every": 1,
        "keep": 1,
    }
    more |= {
        "audio-balance": 0.5,
        "targets": r"attn1\.to_[qv]",
        "sigma-range": "0.3,0.9",
        "mode": "t2v",
    }
    words = [*options(cache, first, **more), "--deterministic", "--json"]
    capsys.readouterr()
    assert run_train(model, "run", *words) == 0
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
    np.testing.assert_allclose(
        ema.read(name).astype(np.float32), averages[f"model.{name}"], rtol=0.01
    )
    rows = rows_of(first)
    for row in rows[1:]:  # the running means begin with those of step 0
        assert row["audio_weight"] > 0
    assert rows[1]["audio_weight"] == pytest.approx(
        0.5 * rows[0]["video_loss"] / rows[0]["audio_loss"]
    )
    # the file that the run wrote gives the same run
    text = (first / "train.toml").read_text()
    assert tomllib.loads(text)["betas"] == "0.8,0.99"
    config = tmp_path / "train.toml"
    config.write_text(text)
    assert run_train(model, "run", "--config", config, "--output", again) == 0
    same = [[row[n] for n in ("video_loss", "audio_loss", "grad_norm")] for row in rows]
    assert same == [
        [row[n] for n in ("video_loss", "audio_loss", "grad_norm")] for row in rows_of(again)
    ]
    # goes on, bit for bit, with the average and the running means
    whole = read_state(states(again)[-1])[1]
    for step in ("000004",):
        for output in (first,):
            folder = output / "state" / step
            folder.rename(output / f".{step}")
    assert run_train(model, "run", *words) == 0
    for kind, arrays in read_state(states(first)[-1])[1].items():
        assert all(np.array_equal(whole[kind][name], x) for name, x in arrays.items()), kind
    line = refused(capsys, model, "run", *words, "--sigma", "shifted", "--steps", 5)
    assert "--sigma: shifted" in line
    assert (
        run_train(model, "run", *words, "--sigma", "shifted", "--steps", 5, "--allow-change") == 0
    )
    config.write_text("ranks = 3\n")
    assert "'ranks', which is no flag of `train run`" in refused(
        capsys, model, "run", "--config", config
    )
    config.write_text('rank = "x"\n')
    assert "train.toml, rank: 'x', expected" in refused(capsys, model, "run", "--config", config)
    config.write_text("rank = [\n")
    assert "is no TOML file" in refused(capsys, model, "run", "--config", config)
    config.write_text("rank = 3\n")
    assert "--data: none was given" in refused(capsys, model, "run", "--config", config)


def test_a_run_that_begins_with_a_lora(model, cache, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_train(model, "run", *options(cache, first, steps=2)) == 0
    lora = first / "lora-000002.safetensors"
    words = options(cache, second, steps=1, lr=1e-9, rank=3, init=lora)
    assert run_train(model, "run", *words) == 0
    a, b = TensorFile(lora), TensorFile(second / "lora-000001.safetensors")
    for name in a.names():
        if "lora_A" in name:  # of a smaller rank: widened by what adds nothing
            up = name.replace("lora_A", "lora_B")
            products = [
                f.read(up).astype(np.float32) @ f.read(name).astype(np.float32) for f in (a, b)
            ]
            assert (
                np.abs(products[0] - products[1]).max() <= 0.02 * np.abs(products[0]).max() + 1e-9
            )
    line = refused(capsys, model, "run", *options(cache, tmp_path / "third", rank=1, init=lora))
    assert "has rank 2, the run 1; pass --rank 2" in line
    line = refused(
        capsys, model, "run", *options(cache, tmp_path / "third", targets="video-attn", init=lora)
    )
    assert "which --targets leave out" in line


@pytest.mark.long
def test_several_caches_and_kinds_of_clips(model, cache, tmp_path, capsys):
    """Silent and longer clips beside those with sound: batches are of one kind, shares are drawn."""
    clips = write_clips(tmp_path / "clips", 2, sound=False, frames=17)
    other = tmp_path / "other"
    words = ("prepare", clips, "--output", other, "--buckets", "64x64x17,32x64x9")
    assert run_train(model, *words) == 0
    both = ["--data", cache, f"{other}:3"]
    rest = options(cache, tmp_path / "run", batch=2, steps=3, mode="t2v")[2:]
    assert run_train(model, "run", *both, *rest, "--sound-share", 0.5) == 0
    words = ("--data", cache, other, *rest[2:], "--output", tmp_path / "b")
    capsys.readouterr()
    assert run_train(model, "run", *words) == 0
    said = capsys.readouterr().err
    assert "2 of 5 clips have no sound: they train the picture alone" in said
    for name in ("run", "b"):
        assert all(
            len({("x", row["samples"].count(s)) for s in row["samples"]})
            for row in rows_of(tmp_path / name)
        )
        assert all(row["video_loss"] > 0 for row in rows_of(tmp_path / name))
    losses = [row["audio_loss"] for row in rows_of(tmp_path / "b")]
    assert None in losses and any(losses)  # a batch of silent clips has no loss of sound
    line = refused(capsys, model, "run", *options(cache, tmp_path / "c"), "--sound-share", 0.5)
    assert "no clip is without sound" in line
    words = options(
        cache, tmp_path / "d", mode="t2v", streams="video", targets="video-attn", steps=1
    )
    assert run_train(model, "run", *words) == 0
    assert rows_of(tmp_path / "d")[0].keys() & {"video_loss", "audio_loss"} == {"video_loss"}
    line = refused(
        capsys, model, "run", *options(cache, tmp_path / "e", mode="a2v", streams="audio")
    )
    assert "--streams: audio, --mode a2v trains video" in line
    line = refused(capsys, model, "run", *options(cache, tmp_path / "e", mode="t2v", prefix="2:1"))
    assert "--prefix: 2 latent frames, the clips have 2" in line
    line = refused(capsys, model, "run", *options(cache, tmp_path / "e", mode="inpaint"))
    assert "--mask: 3 of 3 clips have none, such as 0.mp4" in line
    line = refused(capsys, model, "run", *options(cache, tmp_path / "e"), "--tensorboard", tmp_path)
    assert "tensorboard is not installed" in line
    capsys.readouterr()
    words = options(cache, tmp_path / "f")
    assert run_train(model, "run", *words, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_batch"]["video_clean"] == [1, 8, 128] and found["memory_bytes"] > 0
    assert not (tmp_path / "f").exists()
