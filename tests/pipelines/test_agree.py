"""Every pipeline gives the same latents on both backends, at every step."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.groups.images import parse_image
from ltx2rt.run.plan import make_plan
from ltx2rt.session.open import open_session
from ltx2rt.session.options import NO_LORA, LoraSpec, ModelOptions
from ltx2rt.stages.conditioning import ReferenceSpec
from ltx2rt.stages.denoise import Denoise
from tests.conftest import denoised, refused
from tests.parity import relative_l2
from tests.pipelines.test_ic_lora import lora_with, movie

# Contract: 1e-3 at every step. Float32 rounding, which two evaluations a step and guidance do not
# amplify beyond 1e-5.
CLOSE = 1e-5
SMALL = {"width": 128, "height": 64, "num_frames": 17, "steps": 2, "seed": 3}


@pytest.fixture(scope="module", params=["2.3", pytest.param("2.5", marks=pytest.mark.long)])
def sessions(tiny, request):
    name = f"tiny-{request.param}"
    folder = tiny(name, "official")
    lora = LoraSpec(folder / f"{name}-distilled-lora.safetensors")
    how = {"device": "cpu", "distilled_lora": lora}
    opened = {b: open_session(ModelOptions(b, folder, **how)) for b in ("cuda", "tpu")}
    yield opened
    for session in opened.values():
        session.close()


def latents(session, name: str, **clip) -> dict[str, np.ndarray]:
    """What a run records up to its decoders, which other tests compare."""
    return denoised(session, pipeline(name)("a red fox", **clip))[1].record


def assert_agree(sessions, name: str, **clip) -> dict[str, np.ndarray]:
    ours, theirs = (latents(session, name, **clip) for session in sessions.values())
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if key.endswith((".steps", ".x0", ".mid", ".x0_mid")):
            for i, (a, b) in enumerate(zip(value, theirs[key], strict=True)):
                assert relative_l2(b, a) <= CLOSE, f"{key} {i}"
        else:
            assert relative_l2(theirs[key], value) <= CLOSE, key
    return ours


@pytest.mark.parametrize("name", [
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("hq", "extend")),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("keyframes", "a2v", "retake")),
])  # fmt: skip
def test_latents_agree(sessions, images, film, name):
    places = zip(images, (0, 16), (0.8, 0.9), strict=True)
    given = {"images": tuple(parse_image((path, *place)) for path, *place in places)}
    of_film = {"video_path": film, "seed": 3}
    own = {
        "retake": of_film | {"start_time": 0.3, "end_time": 0.5},
        "extend": of_film | {"join": film, "extend_frames": 15, "guided": True, "steps": 2},
        "a2v": SMALL | {"audio_path": film},
    }
    assert_agree(sessions, name, **own.get(name, SMALL | given | {"image_crf": 0}))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a2v", marks=pytest.mark.long),
        pytest.param("keyframes", marks=pytest.mark.slow),
        "t2a",
    ],
)
def test_guided_pipelines_on_distilled_weights_agree(on_both, images, film, name):
    """LTX-2.5, whose stage 1 adds noise; with a negative prompt, also of sound alone."""
    both = on_both("tiny-2.5", distilled_lora=NO_LORA, assume="distilled")
    clip = {"num_frames": 9, "seed": 3, "nag": (11, 2.5, 0.25), "negative_prompt": "rain"}
    clip |= {} if name == "t2a" else {"width": 64, "height": 64}
    if name == "a2v":
        clip |= {"audio_path": film}
    if name == "keyframes":
        clip |= {"images": tuple(parse_image((path, i * 8)) for i, path in enumerate(images))}
    found = assert_agree(both, name, **clip)
    made = {key.split(".")[1] for key in found if key.startswith("stage1.")}
    assert made == {"a2v": {"video"}, "t2a": {"audio"}}.get(name, {"video", "audio"})
    stages = {"stage1": 8} | ({} if name == "t2a" else {"stage2": 3})
    for stage, steps in stages.items():
        for stream in made:
            assert len(found[f"{stage}.{stream}.steps"]) == steps
        assert (f"{stage}.{min(made)}.ancestral" in found) == (stage == "stage1")
    plain = latents(both["cuda"], name, **clip | {"nag": None, "negative_prompt": None})
    last = f"stage1.{max(made)}.steps"
    assert relative_l2(plain[last][-1], found[last][-1]) > 1e-4


def test_ic_lora_with_coarse_references(sessions, film, tmp_path):
    """Half as many rows, columns and frames, weighed by a number and a mask, after a clip."""
    own = sessions["cuda"].checkpoint.distilled_lora()
    lora = lora_with(own, tmp_path / "ic.safetensors", downscale=2, stride=2)
    video, mask = movie(tmp_path / "a.mov", 17), movie(tmp_path / "mask.mov", 17, (128, 64))
    options = {"loras": (LoraSpec(lora, 0.8),), "distilled_lora": NO_LORA}
    clip = {"seed": 3, "num_frames": 17, "width": 256, "height": 128, "image_crf": 0}
    clip |= {"images": (parse_image(f"{film}:1:0.9"),)}
    clip |= {"video_conditioning": (ReferenceSpec(video, 0.9), ReferenceSpec(video))}
    weights = {"conditioning_attention_strength": 0.6, "conditioning_attention_mask": mask}
    with pytest.MonkeyPatch.context() as patch:
        for session in sessions.values():
            patch.setattr(session, "options", replace(session.options, **options))
        found = assert_agree(sessions, "ic-lora", skip_stage_2=True, **clip, **weights)
    assert found["reference.1"].shape == (1, 128, 2, 1, 2)
    assert found["stage1.video.steps"].shape == (8, 24 + 2 * 8 + 2 * 4, 128)


def test_text_to_audio_computes_no_video(sessions):
    clip = {name: SMALL[name] for name in ("num_frames", "steps", "seed")}
    found = assert_agree(sessions, "t2a", **clip)
    assert not any("video" in name for name in found)
    session = sessions["cuda"]
    plan = make_plan(session, pipeline("t2a")("rain", **clip))
    (stage,) = (s for s in plan.stages if isinstance(s, Denoise))
    (call,) = stage.needs(session.config)
    graph = session.graph(call)
    names = [*graph.inputs, *graph.parameters()]
    assert not [n for n in names if "video" in n]
    assert all("audio" in n for n in names if n.endswith("patchify_proj.weight"))
    assert not [node for node, _ in graph.walk() if "tokens" in node.outputs[0].type.axes]
    assert len(stage.branches.names) == 3  # the isolated branch is the conditional one


def test_a_duration_is_the_frames_that_last_as_long(sessions):
    plan = make_plan(sessions["cuda"], pipeline("t2a")("rain", seconds=0.75, steps=1))
    assert (plan.clip.num_frames, plan.clip.request.seconds) == (18, None)
    with refused("--seconds: given beside --num-frames"):
        make_plan(sessions["cuda"], pipeline("t2a")("rain", seconds=0.75, num_frames=17))


@pytest.mark.parametrize("generation", ["2.0", "2.3"])
def test_sound_alone_equals_the_sound_of_both_streams_kept_apart(
    generation, tiny, command, tmp_path
):
    """The audio velocity of the whole model without cross-attention is that of the audio stream."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    grid = np.indices((1, 2, 3), np.float32).reshape(3, -1)
    times = np.arange(5, dtype=np.float32)[None]
    positions = {m: np.stack([x, x + 1], -1)[None] for m, x in (("video", grid), ("audio", times))}
    positions["audio"] *= np.float32(0.04)
    inputs = {}
    for m, tokens, width in (("video", 6, 64 if generation == "2.0" else 128), ("audio", 5, 64)):
        own = {"latent": draw(1, tokens, 128), "context": draw(1, 32, width)}
        own |= {"timesteps": np.full((1, tokens, 1), 0.7, np.float32), "positions": positions[m]}
        inputs |= {f"{m}_{n}": x for n, x in (own | {"sigma": np.float32([0.7])}).items()}
    off = {f"{name}_keep": np.zeros((1, 3), np.float32) for name in ("a2v", "v2a")}
    found = {}
    alone = {n: x for n, x in inputs.items() if n.startswith("audio")}
    words = "probe --backend cuda --device cpu --model".split()
    words.append(tiny(f"tiny-{generation}", "official"))
    for name, tensors in {"both": inputs | off, "alone": alone}.items():
        save_file(tensors, tmp_path / "in.safetensors")
        files = ["--inputs", tmp_path / "in.safetensors"]
        files += ["--outputs", tmp_path / f"{name}.safetensors"]
        status, _, stderr = command(*words, "--component", "transformer", *files)
        assert status == 0, stderr
        found[name] = load_file(tmp_path / f"{name}.safetensors")
    assert found["alone"].keys() == {"audio_velocity"}
    made = (found[name]["audio_velocity"] for name in ("alone", "both"))
    np.testing.assert_allclose(*made, atol=1e-6)
