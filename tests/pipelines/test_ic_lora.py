"""ic-lora: stage 1 is diffusers' in-context pipeline with the official weights of attention."""

from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from PIL import Image
from safetensors.torch import load_file, save_file

from ltx2rt.media import hdr
from ltx2rt.media.images import fit
from ltx2rt.media.mp4 import to_rgb8
from ltx2rt.media.sound import read_sound
from ltx2rt.media.video import read_frames, video_info
from ltx2rt.models.geometry import pack_audio, pack_video, video_positions
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.groups.sound import parse_reference
from ltx2rt.pipelines.ic_lora import ICLora, hdr_log
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session.open import open_session
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.stages.conditioning import ReferenceSpec
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.region import FADE_PX, near
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS
from ltx2rt.weights.files import write_arrays
from tests.conftest import assert_same, refused
from tests.parity import relative_l2
from tests.pipelines.test_retake import write, write_light
from tests.reference import assert_stage, positions_of, stored_module
from tests.stages.test_denoise import PROMPT, keep_officially, load_pipeline, noise_of, unpacked

CLOSE = 1e-5  # contract: 1e-3 at every step; float32 rounding on both sides
WIDTH, HEIGHT, FRAMES, FPS = 256, 128, 17, 24
SIZE = {"width": WIDTH, "height": HEIGHT, "num_frames": FRAMES}
# Of every run through the command line; later flags win.
FLAGS = (
    "--pipeline", "ic-lora", "--distilled-lora", "none", "--assume", "distilled", "--seed", 3,
    "--width", WIDTH, "--height", HEIGHT, "--num-frames", FRAMES, "--fps", FPS,
)  # fmt: skip


def save(path, frames, rate=FPS):
    """u8[H, W, 3] each, without loss."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "rgb24"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def movie(path, count, size=(64, 32), rate=FPS, seed=0):
    """Smooth in space and time."""
    f, y, x = np.mgrid[:count, : size[1], : size[0]].astype(np.float32)
    waves = np.sin(x / 9 + f / 3 + seed), np.cos(y / 7 + f / 4), np.sin(f / 2 + x * y / 300 + seed)
    return save(path, ((np.stack(waves, -1) + 1) * 127.5).astype(np.uint8), rate)


def lora_with(source, path, downscale=1, stride=1):
    factors = {"reference_downscale_factor": downscale, "reference_temporal_scale_factor": stride}
    save_file(load_file(source), path, {name: str(value) for name, value in factors.items()})
    return path


@pytest.fixture
def files(tmp_path):
    """References as long as the clip and shorter, a quarter of its size; a mask of half of it."""
    first, short = movie(tmp_path / "first.mov", FRAMES), movie(tmp_path / "short.mov", 9, seed=2)
    return first, short, movie(tmp_path / "mask.mov", FRAMES, (128, 64))


def masked_officially(module):
    """Weights w of self-attention as a bias log(w), where diffusers adds (1 - w) * -10000."""
    weights = []

    def kept(_, args, kwargs):
        weights[:] = [kwargs["video_self_attention_mask"]]

    def bias(_, args, kwargs):
        return args, kwargs | {"self_attention_mask": weights[0].log().clamp(min=-1e30)}

    module.register_forward_pre_hook(kept, with_kwargs=True)
    for block in module.transformer_blocks:
        block.register_forward_pre_hook(bias, with_kwargs=True)


def diffusers_stage1(folder, lora, noise, monkeypatch, references, images, mask, strength):
    """The latents after every step. references: (path, strength)."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2 import pipeline_ltx2_ic_lora as module
    from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

    pipe = load_pipeline(module.LTX2InContextPipeline, folder, torch.float32)
    stored = load_file(lora).items()
    pipe.load_lora_weights({k: v for k, v in stored if k.startswith("diffusion_model.")})
    queue = [noise["stage1.video"], noise["stage1.audio"]]
    trail = []
    step = FlowMatchEulerDiscreteScheduler.step

    def recorded(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        trail.append(result[0].numpy()[0])
        return result

    def drawn(shape, **_):
        return torch.from_numpy(unpacked(queue.pop(0), tuple(shape)).copy())

    monkeypatch.setattr(module, "randn_tensor", drawn)
    monkeypatch.setattr(FlowMatchEulerDiscreteScheduler, "step", recorded)
    keep_officially(pipe, queue, monkeypatch)
    masked_officially(pipe.transformer)

    def pixels(path):
        return [*map(Image.fromarray, read_frames(path, "", video_info(path, "").num_frames))]

    grey = np.stack([np.asarray(frame) for frame in pixels(mask)]).mean(-1) / 255
    neutral = dict(guidance_scale=1.0, stg_scale=0.0, modality_scale=1.0, guidance_rescale=0.0)
    pipe(
        prompt=PROMPT, num_frames=FRAMES, frame_rate=float(FPS), use_cross_timestep=True, output_type="latent",
        width=WIDTH // 2, height=HEIGHT // 2, sigmas=[float(s) for s in DISTILLED_SIGMAS[:-1]],
        reference_conditions=[module.LTX2ReferenceCondition(pixels(path), s) for path, s in references],
        conditions=[
            LTX2VideoCondition(frames=Image.open(path), index=(frame + 7) // 8, strength=s, crf=0)
            for path, frame, s in images
        ],
        reference_downscale_factor=2, conditioning_attention_strength=strength,
        conditioning_attention_mask=torch.from_numpy(grey[None, None]).float(),
        **neutral, **{f"audio_{k}": v for k, v in neutral.items()},
    )  # fmt: skip
    assert not queue
    return np.stack(trail[::2]), np.stack(trail[1::2])


@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.slow), "2.3"])
def test_stage_one_equals_diffusers(
    generation, tiny, generate, images, files, tmp_path, monkeypatch
):
    """References of unlike lengths and strengths after two images; a mask at strength 0.7."""
    folder = tiny(f"tiny-{generation}", "diffusers")
    lora = folder / f"tiny-{generation}-distilled-lora.safetensors"
    lora = lora_with(lora, tmp_path / "ic.safetensors", downscale=2)
    references, mask = [(files[0], 1.0), (files[1], 0.8)], files[2]
    places = list(zip(images, (0, 9), (1.0, 0.6), strict=True))
    run = generate(
        "cuda", folder, *FLAGS, "--prompt", PROMPT, "--cross-timestep-rule", "B",
        "--lora", lora, "--image", *(f"{path}:{frame}:{strength}" for path, frame, strength in places),
        "--video-conditioning", *(f"{path}:{strength}" for path, strength in references),
        "--conditioning-attention-mask", mask, "--conditioning-attention-strength", 0.7, "--skip-stage-2", "--no-audio",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    found = run.latents
    assert found["reference.0"].shape == (1, 128, 3, 1, 2)
    assert found["reference.1"].shape == (1, 128, 2, 1, 2)
    assert found["stage1.video.steps"].shape == (8, 3 * 8 + 8 + 3 * 2 + 2 * 2, 128)
    expected = diffusers_stage1(
        folder, lora, noise_of(found), monkeypatch, references, places, mask, 0.7
    )
    for m, steps in zip(("video", "audio"), expected, strict=True):
        for i, (a, b) in enumerate(zip(found[f"stage1.{m}.steps"], steps, strict=True)):
            assert relative_l2(a, b) <= CLOSE, f"{m} {i}"


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


def test_a_picture_is_the_reference_of_every_frame(model, half, generate, tmp_path):
    """As a video that shows it throughout, within black borders."""
    pixels = np.random.default_rng(5).integers(0, 256, (48, 64, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "sheet.png")
    film = save(tmp_path / "sheet.mov", [pixels] * FRAMES)
    found = {}
    for path, *more in ((tmp_path / "sheet.png",), (film, "--fit", "pad")):
        words = ("--lora", half, "--reference", path, "--skip-stage-2", "--no-audio", *more)
        run = generate("cuda", model, *FLAGS, *words)
        assert run.status == 0, run.stderr
        said = f"{path}: one picture, the reference of every frame" in run.stderr
        assert said == (path.suffix == ".png")
        found[path.suffix] = run.latents
    assert found[".png"]["reference.0"].shape == (1, 128, 3, 1, 2)
    assert_same(found[".png"], found[".mov"])


def test_stage_two_has_neither_references_nor_their_lora(model, half, files, generate):
    words = ("--lora", half, "--video-conditioning", files[0], "--no-audio")
    run = generate("cuda", model, *FLAGS, *words)
    assert run.status == 0, run.stderr
    assert run.latents["stage1.video.noise"].shape == (1, 3 * 8 + 3 * 2, 128)
    assert run.latents["stage2.video.noise"].shape == (1, 3 * 32, 128)
    assert run.latents["video_latent"].shape == (1, 128, 3, 4, 8)
    last = run.latents["stage2.audio.steps"][-1].reshape(1, -1, 8, 16).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(run.latents["audio_latent"], last)
    assert f"stage1: merged 130/130 modules of {half}" in run.stderr
    assert "stage2: merged" not in run.stderr
    names = [stage["name"] for stage in run.report["stages"]]
    assert names == ["text", "stage1 videos", "stage1", "upsample", "stage2", "decode"]


def test_a_distilled_lora_is_merged_in_both_stages(model, half, files):
    distilled = LoraSpec(model / "tiny-2.3-distilled-lora.safetensors", 0.5)
    how = {"loras": (LoraSpec(half),), "distilled_lora": distilled}
    session = open_session(ModelOptions("cuda", model, device="cpu", **how))
    request = ICLora("a fox", **SIZE, video_conditioning=(ReferenceSpec(files[0]),))
    first, second = (s for s in make_plan(session, request).stages if isinstance(s, Denoise))
    found = [(lora.path, lora.strength) for lora in first.loras]
    assert found == [(half, 1.0), (distilled.path, 0.5)]
    assert [lora.path for lora in second.loras] == [distilled.path]
    assert first.sampler == second.sampler == "euler" and not second.given
    session.close()


@pytest.mark.long
def test_without_stage_two_the_clip_is_half_as_large(model, half, files, generate):
    flags = (*FLAGS, "--lora", half, "--video-conditioning", files[0], "--skip-stage-2")
    run = generate("cuda", model, *flags)
    assert run.status == 0, run.stderr
    assert "without stage 2 the clip has 128x64 pixels" in run.stderr
    with av.open(str(run.clip)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.frames) == (128, 64, FRAMES)
        assert container.streams.audio
    last = run.latents["stage1.audio.steps"][-1].reshape(1, -1, 8, 16).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(run.latents["audio_latent"], last)
    assert not [name for name in run.latents if name.startswith(("stage2", "upsampled"))]
    more = ("--seed", 4, "--no-audio", "--noise-in", run.latents_file)
    again = generate("cuda", model, *flags, *more)
    np.testing.assert_array_equal(again.latents["video_latent"], run.latents["video_latent"])


def test_what_is_said_of_a_reference(model, half, tmp_path, generate):
    """At another rate than the clip, and shorter: 14 frames, of which the encoder takes 9."""
    path = movie(tmp_path / "short.mov", 14, rate=30)
    flags = ("--lora", half, "--video-conditioning", path, "--skip-stage-2", "--no-audio")
    run = generate("cuda", model, *FLAGS, *flags)
    assert f"{path}: 9 frames are read; the other 8 have no reference" in run.stderr
    assert f"{path}: has 30 fps, its frames are taken one by one as if it had 24" in run.stderr
    assert run.latents["reference.0"].shape == (1, 128, 2, 1, 2)


def test_frames_between_are_left_out_where_the_lora_says_so(model, half, files, generate, tmp_path):
    """Stride 2: frames 0, 1, 3, ... 15 of 17 are nine, two latent frames."""
    lora = lora_with(half, tmp_path / "stride.safetensors", downscale=2, stride=2)
    kept = list(read_frames(files[0], "", FRAMES))
    every = save(tmp_path / "every.mov", [kept[0], *kept[1::2]])
    words = ("--skip-stage-2", "--no-audio", "--lora")
    found, same = (
        generate("cuda", model, *FLAGS, *words, lora, "--video-conditioning", video)
        for lora, video in ((lora, files[0]), (half, every))
    )
    assert found.latents["reference.0"].shape == (1, 128, 2, 1, 2)
    np.testing.assert_array_equal(found.latents["reference.0"], same.latents["reference.0"])
    first, second = (run.latents["video_latent"] for run in (found, same))
    assert relative_l2(first, second) > 1e-3  # its tokens lie elsewhere


def test_references_are_written_as_text_and_as_tuples():
    assert parse_reference("a:b.mp4:0.5") == ReferenceSpec(parse_reference("a:b.mp4").path, 0.5)
    assert parse_reference(("a.mp4", 0.5)) == parse_reference("a.mp4:0.5")
    assert parse_reference("a.mp4").strength == 1


def test_noise_without_the_references_tokens_is_refused(following, files, tmp_path):
    shape = {"video": 3 * 8, "audio": 18}
    noise = {f"stage1.{m}": np.zeros((1, n, 128), np.float32) for m, n in shape.items()}
    write_arrays(tmp_path / "noise.safetensors", noise)
    given = {"skip_stage_2": True, "noise_in": tmp_path / "noise.safetensors"}
    request = ICLora("a fox", **SIZE, video_conditioning=(ReferenceSpec(files[0]),), **given)
    with refused(r"stage1.video .* \[1, 24, 128\], expected float32 \[1, 30, 128\]"):
        make_plan(following["cuda"], request)


def test_with_a_mask_its_pixels_are_remade(following, tmp_path):
    """As of a file that has them in green; outside, pixels and sound are the reference's own."""
    clip, green = write(tmp_path / "a.mp4", size=(WIDTH, HEIGHT)), tmp_path / "green.mov"
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[40:70, 60:140] = True
    Image.fromarray(mask.astype(np.uint8) * 255).save(tmp_path / "mask.png")
    frames = list(read_frames(clip, "", FRAMES))
    save(green, [np.where(mask[..., None], np.array([0x66, 0xFF, 0], np.uint8), x) for x in frames])
    session, size = following["cuda"], SIZE | {"seed": 3, "prompt": "a fox"}

    def made(path, **more):
        request = ICLora(**size, video_conditioning=(ReferenceSpec(path),), **more)
        state, *_ = produce(session, make_plan(session, request), keep=True)
        return state, np.concatenate([to_rgb8(chunk) for chunk in next(state.frames)])

    masked = {"mask": tmp_path / "mask.png", "mask_grow": 0}
    state, found = made(clip, **masked, audio=False)
    plain, whole = made(green, audio=False)
    for name in ("reference.0", "stage1.video.steps", "stage2.video.steps"):
        np.testing.assert_array_equal(state.record[name], plain.record[name])
    inner, outer = near(mask, FADE_PX) == 1, near(mask, FADE_PX) == 0
    np.testing.assert_array_equal(found[:, inner], whole[:, inner])
    np.testing.assert_array_equal(found[:, outer], np.stack(frames)[:, outer])
    assert (found[:, inner] != np.stack(frames)[:, inner]).any()
    heard, _ = made(clip, **masked)
    sound, rate = read_sound(clip)
    assert heard.sample_rate == rate
    size = min(sound.shape[1], heard.waveforms.shape[2])
    np.testing.assert_array_equal(heard.waveforms[0][:, :size], sound[:, :size])
    assert heard.record.keys().isdisjoint({"stage1.audio.steps", "stage2.audio.steps"})


@pytest.mark.long
def test_a_border_is_made_by_the_formula(folder, following, tmp_path):
    """Every step over diffusers, from the file in green; inside, pixels are the file's own."""
    pad = 64, 40, 128, 24
    clip = write(tmp_path / "a.mp4", size=(64, 64))
    source = np.stack(list(read_frames(clip, "", FRAMES)))
    request = ICLora("a fox", **SIZE, seed=3, video_conditioning=(ReferenceSpec(clip),), pad=pad)
    runs = {}
    for name, session in following.items():
        state, *_ = produce(session, make_plan(session, request), keep=True)
        shown = np.concatenate([to_rgb8(chunk) for chunk in next(state.frames)])
        runs[name] = state
        inner = np.s_[:, 40 + FADE_PX : 104 - FADE_PX, 64 + FADE_PX : 128 - FADE_PX]
        own = slice(FADE_PX, 64 - FADE_PX)
        np.testing.assert_array_equal(shown[inner], source[:, own, own])
        assert shown.shape == (FRAMES, HEIGHT, WIDTH, 3) and state.waveforms is not None
    state = runs["cuda"]
    border = np.empty((FRAMES, HEIGHT, WIDTH, 3), np.uint8)
    border[:] = 0x66, 0xFF, 0
    border[:, 40:104, 64:128] = source
    planned = resolve(request, session.config)
    half = planned.geometry(session.config, 2)
    coarse = replace(half, rows=half.rows // 2, columns=half.columns // 2)
    vae = AutoencoderKLLTX2Video.from_pretrained(folder / "vae").eval()
    small = np.stack([fit(x, WIDTH // 4, HEIGHT // 4) for x in border], 1)[None]
    with torch.no_grad():
        latent = vae.encode(torch.from_numpy(small), causal=True).latent_dist.mode().numpy()
    shape = (1, -1, 1, 1, 1)
    mean, deviation = (x.numpy().reshape(shape) for x in (vae.latents_mean, vae.latents_std))
    seen = pack_video(((latent - mean) / deviation).astype(np.float32))[0]
    for each in runs.values():
        assert relative_l2(pack_video(each.record["reference.0"])[0], seen) <= CLOSE
    sound = pack_audio(state.record["source.audio"])[0].astype(np.float64)
    made = pack_video(state.record["upsampled"])[0].astype(np.float64)
    module = stored_module(folder)
    for stage, scale, sigmas in (("stage1", 2, DISTILLED_SIGMAS), ("stage2", 1, STAGE2_SIGMAS)):
        g = planned.geometry(session.config, scale)
        places, tokens = positions_of(g), g.num_video_tokens
        clean, mask = np.zeros((tokens, 128)), np.ones(tokens)
        if stage == "stage1":
            places["video"] = np.concatenate([places["video"], video_positions(coarse, 2)], 1)
            clean, mask = np.concatenate([clean, seen]), np.append(mask, np.zeros(len(seen)))
        start = {"video": np.zeros(clean.shape) if stage == "stage1" else made, "audio": sound}
        clean = {"video": clean, "audio": sound}
        masks = {"video": mask, "audio": np.zeros(len(sound))}
        given = module, places, sigmas, masks, clean, start
        assert_stage(runs, stage, *given, frozen=("audio",))


def test_a_folder_of_exr_images_is_a_reference(following, tmp_path):
    """Its codes lie within the reference's size, mirrored around."""
    light = write_light(tmp_path / "in", 9, (114, 78))
    session = following["cuda"]
    flags = {"prompt": "a fox", "width": 256, "height": 128, "num_frames": 9}
    seen = (ReferenceSpec(tmp_path / "in"),)
    request = ICLora(video_conditioning=seen, hdr="ACESCG", **flags)
    plans = [make_plan(session, replace(request, fit=fit)) for fit in (None, "pad")]
    made = [s for p in plans for s in p.stages if isinstance(s, Denoise) and s.given]
    source, fitted = (stage.given[0].source for stage in made)
    black = next(fitted.pictures())
    assert black.shape == (128, 256, 3) and not black[:, :32].any() and black[:, 40:-40].any()
    assert source.geometry.size_px == (32, 64)
    (found, *_) = map(source.fitted, source.pictures())
    planes = torch.tensor(light[0].transpose(2, 0, 1))[None]
    scaled = torch.nn.functional.interpolate(planes, (32, 47), mode="bilinear")
    padded = torch.nn.functional.pad(scaled, (0, 17, 0, 0), mode="reflect")[0].numpy()
    codes = hdr.encoded(padded).clip(0, 1) * 2 - 1
    np.testing.assert_allclose(found, codes, atol=1e-4)  # float32; the slope takes up an ulp of 4


def test_a_lora_says_which_codes_it_makes(model, half, files, generate, tmp_path):
    """LogC3, by its header: EXR frames are that of the clip's, and without --hdr it is refused."""
    lora = tmp_path / "hdr.safetensors"
    metadata = {"reference_downscale_factor": "2", "hdr_transform": "logc3"}
    save_file(load_file(half), lora, metadata)
    assert hdr_log([half]) == "acescct" and hdr_log([half, lora]) == "logc3"
    words = [*FLAGS, "--lora", lora, "--video-conditioning", files[0], "--no-audio"]
    run = generate("cuda", model, *words)
    assert run.status == 2 and "--hdr: not given, but the LoRA makes high" in run.stderr
    save_file(load_file(half), lora, metadata | {"hdr_transform": "pq"})
    with refused(r"makes 'pq' .*expected logc3 or acescct"):
        hdr_log([lora])
