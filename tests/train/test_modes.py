"""IC-LoRA, `extend`, `inpaint` and `outpaint`, and what their files are used with; Python's `train`."""

import json
import math
import shutil
from contextlib import closing

import numpy as np
import pytest
import torch

import ltx2rt
from ltx2rt import cli
from ltx2rt.media.sound import write_wav
from ltx2rt.media.video import video_info
from ltx2rt.models.geometry import video_positions
from ltx2rt.models.transformer import position_feeds
from ltx2rt.pipelines import make_request
from ltx2rt.run.plan import make_plan
from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.train.recipe import sigma
from ltx2rt.train.request import Data, TrainRequest
from ltx2rt.train.run import start
from ltx2rt.weights.files import TensorFile
from ltx2rt.weights.lora.file import open_lora, reference_factors
from ltx2rt.weights.names import to_official
from tests.conftest import assert_same
from tests.reference import module_of, reference
from tests.train.test_run import session_of
from tests.train_runs import FPS, RATE, rows_of, write_clips, write_mask


@pytest.fixture(scope="module")
def referenced(prepare, tmp_path_factory):
    """Clips without sound, with references of half the size and masks of the right half."""
    folder = tmp_path_factory.mktemp("referenced")
    clips = write_clips(folder / "clips", 2, sound=False)
    for i in range(2):
        shutil.copy(clips / f"{i}.mp4", clips / f"{i}.reference.mp4")
        write_mask(clips / f"{i}.mask.mp4")
    prepare(clips, folder / "cache", "--trigger", "zorp", "--reference-downscale", 2)
    return folder / "cache"


@pytest.fixture(scope="module")
def begun(model):
    """begun(cache, **flags) -> a run that is not trained."""
    with closing(session_of(model)) as session:

        def made(cache, **flags):
            fixed = {"data": (Data(cache),), "output": cache / "none", "rank": 2, "dry_run": True}
            return start(session, TrainRequest(**fixed | flags))

        yield made


def first(run):
    """The first inputs of a run."""
    return run.feeder.feeds(run.samples.drawn(0, 0))


def test_reference_tokens_are_given_and_follow_those_of_the_clip(begun, referenced):
    run = begun(referenced, mode="ic-lora", first_frame=0.0)
    x = first(run)
    assert x["video_clean"].shape == (1, 8 + 2, 128)
    assert x["video_noised"].tolist() == [[1] * 8 + [0] * 2]
    g, (own, *scales) = run.step.geometry, run.step.reference
    assert scales == [2, 1] and (own.rows, own.columns) == (1, 1)
    positions = np.concatenate([video_positions(g), video_positions(own, 2)], axis=1)
    for name, table in position_feeds(run.session.config.transformer, positions, None).items():
        np.testing.assert_array_equal(x[name], table)
    half = begun(referenced, mode="ic-lora", reference=0.5)
    sizes = [half.feeder.feeds(half.samples.drawn(i, 0))["video_clean"].shape[1] for i in range(30)]
    assert set(sizes) == {8, 10} and 8 < sizes.count(8) < 22


def test_given_tokens_count_for_the_noise_level(begun, cache):
    """The official sampler sees the whole target: 8 tokens of picture, of which 4 are given."""
    run = begun(cache, prefix=(1, 1.0), mode="extend", targets=("video-attn",))
    x, sounds = first(run), first(run)["audio_noised"].size
    assert x["video_noised"].sum() == 4 and 0 < x["audio_noised"].sum() < sounds
    for name, tokens in (("video", 8), ("audio", sounds)):
        level = sigma(tokens, run.request.seed, f"train.0.0.{name}")
        assert x[f"{name}_sigma"] == np.float32(level)


def test_what_masks_and_rectangles_leave_is_generated(begun, referenced):
    masked = begun(referenced, mode="inpaint")
    assert first(masked)["video_noised"].tolist() == [[1, 0] * 4]
    more = {"crop": (0, 0, 32, 64, 1.0), "targets": ("video-attn",)}
    cropped = begun(referenced, mode="outpaint", **more)
    assert first(cropped)["video_noised"].tolist() == [[0, 0, 1, 1] * 2]


@pytest.mark.long
def test_an_ic_lora_in_all_formats_and_in_generate(model, referenced, train, tmp_path):
    output, prompts = tmp_path / "run", tmp_path / "prompts.jsonl"
    prompt = {"prompt": "a", "reference": str(referenced.parent / "clips" / "0.reference.mp4")}
    prompts.write_text(json.dumps(prompt))
    more = {"mode": "ic-lora", "steps": 2, "reference": 0.5, "validation": prompts}
    train(output, data=referenced, **more)
    info = video_info(output / "validation" / "000002" / "00.mp4", "clip")
    assert (info.width, info.height, info.num_frames) == (64, 64, 9)
    assert all(row["video_loss"] > 0 for row in rows_of(output))
    lora, changes = output / "lora-000002.safetensors", []
    assert reference_factors([lora]) == (2, 1)
    metadata = TensorFile(lora).metadata
    assert metadata["reference_spatial_scale_factor"] == "2"
    assert metadata["model_version"].startswith("2.3")
    assert json.loads(metadata["ltx2rt"])["trigger"] == "zorp"
    with ltx2rt.open(model, backend="cuda", device="cpu", lora=[lora]) as session:
        size = {"width": 64, "height": 64, "num_frames": 9}
        asked = make_request("one-stage", prompt="x", seed=0, **size)
        plan = make_plan(session.resident, asked)
        (line,) = [x for x in plan.merge_lines() if "trained by" in x]
        assert "begin the prompt with 'zorp'" in line
        names = set(session.resident.checkpoint.source("transformer").names())
    for format in ("official", "diffusers", "kohya"):
        path = tmp_path / f"{format}.safetensors"
        words = ("export", output, "--output", path, "--format", format, "--dtype", "float32")
        assert cli.main(["train", *map(str, words)]) == 0
        found = open_lora(path)
        assert not found.unknown
        own = {name: change.factors(found.file, ()) for name, change in found.on(names).items()}
        assert {scale for _, scale in own.values()} == {1}
        halves = {n: terms[0] for n, (terms, _) in own.items()}
        changes.append({(n, i): half for n, each in halves.items() for i, half in enumerate(each)})
    for other in changes[1:]:
        assert_same(other, changes[0])


def test_training_in_python(model, cache, tmp_path):
    seen, run = [], tmp_path / "run"
    flags = {"rank": 2, "steps": 2, "mode": "extend", "targets": ["video-attn", "audio-attn"]}
    flags |= {"ema": 0.9, "backend": "cuda", "device": "cpu", "on_progress": seen.append}
    path = ltx2rt.train(model, data=cache, output=run, **flags)
    assert path == run / "lora-000002.safetensors" and path.is_file()
    assert [(p.step, p.of) for p in seen] == [(1, 2), (2, 2)] and seen[-1].eta_s == 0
    with pytest.raises(ltx2rt.InputError, match="--rank: 0"):
        ltx2rt.train(model, data=cache, output=run, backend="cuda", rank=0)
    words = ("export", run, "--output", tmp_path / "ema.safetensors", "--ema")
    assert cli.main(["train", *map(str, words)]) == 0


@pytest.fixture(scope="module")
def heard(prepare, tmp_path_factory):
    """Two clips with sound, each with a reference of both, where the sound is shorter than the clip
    or longer, and a sound that is loud where given."""
    folder = tmp_path_factory.mktemp("heard")
    clips, rng = write_clips(folder / "clips", 2), np.random.default_rng(4)
    for i in range(2):
        shutil.copy(clips / f"{1 - i}.mp4", clips / f"{i}.reference.mp4")
        other = rng.uniform(-0.3, 0.3, (2, RATE * 9 // FPS)).astype(np.float32)
        followed = rng.uniform(-0.3, 0.3, (2, RATE * (5 + 8 * i) // FPS)).astype(np.float32)
        write_wav(clips / f"{i}.reference.wav", followed, RATE)
        given = np.where(np.arange(other.shape[1]) < other.shape[1] // 2, 0.9, 0.0)
        write_wav(clips / f"{i}.mask.wav", np.stack([given, given]).astype(np.float32), RATE)
    prepare(clips, folder / "cache")
    return folder / "cache"


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["a2a", "av2av"])
def test_losses_after_reference_sounds_are_those_of_the_formula(model, heard, mode, backend):
    """A reference's tokens follow the clip's; those of sound have their own times, one for each 4
    mel frames of their file, also beyond the clip's end. They have no loss. In float64."""
    options = ModelOptions(backend, model, device="cpu", dtype="float32")
    with closing(open_session(options)) as session:
        fixed = {"data": (Data(heard),), "output": heard / "none", "rank": 2, "dry_run": True}
        run = start(session, TrainRequest(mode=mode, **fixed))
        ((item, _),) = drawn = run.samples.drawn(3, 0)
        x = run.feeder.feeds(drawn)
        found = run.trainer().losses(x)
        config, source = session.config.transformer, session.checkpoint.source("transformer")
        module = module_of(config).double()
        named = {name: to_official("transformer", name) for name in module.state_dict()}
        values = {n: torch.tensor(np.float64(source.read(named[n]))) for n in named}
        module.load_state_dict(values)
        g, streams = run.step.geometry, run.samples.streams
    n = g.audio_latents
    size = RATE * (5 + 8 * int(item.sample.name[0])) // FPS
    followed = math.ceil((math.ceil(size * 16000 / RATE) // 160 + 1) / 4)
    at = np.maximum(4 * np.arange(99) - 3, 0) * 0.01  # seconds; 4 mel frames of 10 ms, causal
    times = np.stack([at[:-1], at[1:]], 1)
    both = np.concatenate([times[:n], times[:followed]])
    feeds = {"audio_positions": both[None, None].astype(np.float32)}
    feeds["video_positions"] = np.concatenate([video_positions(g), video_positions(g)], 1)[None]
    for name in ("video", "audio"):
        count = feeds[f"{name}_positions"].shape[2]
        channels = config.video_channels if name == "video" else config.audio_channels
        zero = np.zeros((1, count, channels))
        clean, noise = (x.get(f"{name}_{kind}", zero) for kind in ("clean", "noise"))
        noised = x.get(f"{name}_noised", np.zeros((1, count)))
        sigma_ = np.float64(x.get(f"{name}_sigma", np.zeros(1)))
        level = noised * sigma_[:, None]
        feeds[f"{name}_latent"] = clean + level[..., None] * (noise - np.float64(clean))
        feeds[f"{name}_timesteps"], feeds[f"{name}_sigma"] = level, sigma_
        width = config.width if name == "video" else config.audio_width
        feeds[f"{name}_context"] = x.get(f"{name}_context", np.zeros((1, 1024, width)))
    more = {} if "video" in streams else {"isolate_modalities": True}
    v = reference(module, feeds, "C", **more)
    for name in streams:
        aim = np.float64(x[f"{name}_noise"]) - x[f"{name}_clean"]
        off, noised = np.square(v[f"{name}_velocity"] - aim)[0], x[f"{name}_noised"][0] == 1
        tokens, more = (n, followed) if name == "audio" else (g.num_video_tokens,) * 2
        assert noised.tolist() == [True] * tokens + [False] * more
        assert found[f"{name}_loss"][0] == pytest.approx(off[noised].mean(), rel=1e-5)  # float32


def test_given_parts_of_a_sound_without_a_picture(begun, heard):
    more = {"mode": "t2a", "targets": ("audio-attn",)}
    for flags, expected in (
        ({"prefix": (3, 1.0)}, [[0] * 3 + [1] * 6]),
        ({"suffix": (2, 1.0)}, [[1] * 7 + [0] * 2]),
        ({"mask": 1.0}, [[0] * 4 + [1] * 5, [0] * 5 + [1] * 4]),
    ):
        x = first(begun(heard, **more, **flags))
        assert x["audio_sigma"][0] == np.float32(sigma(9, 42, "train.0.0.audio"))
        assert x["audio_noised"][0].tolist() in expected
    with pytest.raises(ltx2rt.InputError, match="--prefix: 99 latent frames, the clips have 9"):
        begun(heard, **more, prefix=(99, 1.0))


def test_a_mode_without_its_reference_is_refused(begun, cache):
    with pytest.raises(ltx2rt.InputError, match=r"--reference: 3 of 3 .* put NAME\.reference\.wav"):
        begun(cache, mode="a2a")
