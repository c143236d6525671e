"""`ltx2rt probe` through the command line: exactly the tensors of the contract, equal to diffusers
on both backends."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ltx2rt.instruments import probe as instrument
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.media.sound import resample
from ltx2rt.models import diffusion_decoder
from ltx2rt.models.mel import log_mel
from ltx2rt.session.open import opened_checkpoint
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.weights.checkpoint import RenamedSource
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.presets import preset
from tests.parity import ArraySource, random_params, relative_l2, run_graph

CLOSE = 1e-4  # contract, float32; most reach 1e-6
T, TA, S, B = 12, 5, 32, 2  # video tokens (2 x 2 x 3), audio tokens, text tokens, samples
# Width of the text contexts
WIDTH = {"2.0": {"video": 64, "audio": 64}, "2.3": {"video": 128, "audio": 64}}
WIDTH["2.5"] = WIDTH["2.3"]


@pytest.fixture
def probe(tiny, probed):
    """probe(generation, component, inputs, *flags, backend) -> outputs of the tiny model, all of
    float32."""

    def call(generation, component, inputs, *flags, **how):
        found = probed(tiny(f"tiny-{generation}", "diffusers"), component, inputs, *flags, **how)
        types = {} if isinstance(found, tuple) else {k: x.dtype for k, x in found.items()}
        expected = {k: np.int32 if k == "sample_rate" else np.float32 for k in types}
        assert types == expected
        return found

    return call


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def positions(batch):
    step = np.float32([[1 / 3], [32], [32]])
    grid = np.indices((2, 2, 3), np.float32).reshape(3, -1) * step
    video = np.stack([grid, grid + step], -1)
    audio = np.stack([np.arange(TA), np.arange(TA) + 1], -1).astype(np.float32) * np.float32(0.04)
    return np.stack([video] * batch), np.stack([audio[None]] * batch)


def transformer_inputs(generation):
    video, audio = positions(B)
    sigma, rng = np.float32([0.7, 0.3]), np.random.default_rng(1)
    x = {"video_positions": video, "audio_positions": audio}
    for i, (name, tokens) in enumerate((("video", T), ("audio", TA))):
        mask = np.ones((B, tokens, 1), np.float32)
        if name == "video":
            mask[:, :3] = 0.25
        x[f"{name}_latent"] = draw(B, tokens, 128, seed=i)
        x[f"{name}_context"] = rng.standard_normal((B, S, WIDTH[generation][name]), np.float32)
        x[f"{name}_timesteps"], x[f"{name}_sigma"] = mask * sigma[:, None, None], sigma
    return x


def step_inputs(generation):
    video, audio = positions(1)
    x = {"video_positions": video, "audio_positions": audio}
    for i, (name, tokens) in enumerate((("video", T), ("audio", TA))):
        x[f"{name}_latent"] = draw(1, tokens, 128, seed=i)
        x[f"{name}_clean"] = draw(1, tokens, 128, seed=i + 5)
        x[f"{name}_mask"] = np.ones((1, tokens, 1), np.float32)
        x[f"{name}_context"] = draw(2, S, WIDTH[generation][name], seed=9)
    x["video_mask"][:, :3] = 0.25
    x |= {"sigmas": np.float32([0.8, 0.5]), "stg_blocks": np.float32([0, 1, 0])}
    return x | {"guidance": np.float32([[2.5, 0.8, 2.0, 0.6], [5.0, 1.3, 2.6, 0.4]])}


def diffusers_part(cls, folder: Path, **changes):
    return cls.from_pretrained(folder, **changes).eval()


@pytest.mark.parametrize(
    "generation", ["2.3", *(pytest.param(g, marks=pytest.mark.long) for g in ("2.0", "2.5"))]
)
def test_transformer_equals_diffusers(generation, probe, tiny):
    from diffusers import LTX2VideoTransformer3DModel

    x, keyframes = transformer_inputs(generation), {}
    if generation == "2.5":
        mask = np.broadcast_to(np.arange(T)[:, None] < 3, (B, T, 1)).astype(np.float32)
        x["video_keyframes_mask"] = mask
        keyframes = {"video_keyframes_mask": torch.from_numpy(mask)}
    found = probe(generation, "transformer", x, "--cross-timestep-rule", "B")
    assert found.keys() == {"video_velocity", "audio_velocity"}
    folder = tiny(f"tiny-{generation}", "diffusers") / "transformer"
    model = diffusers_part(LTX2VideoTransformer3DModel, folder)
    t, given = {k: torch.from_numpy(v) for k, v in x.items()}, {}
    for m, prefix in (("video", ""), ("audio", "audio_")):
        given |= {f"{prefix}hidden_states": t[f"{m}_latent"], f"{m}_coords": t[f"{m}_positions"]}
        given |= {f"{prefix}encoder_hidden_states": t[f"{m}_context"]}
        given |= {f"{prefix}timestep": t[f"{m}_timesteps"][:, :, 0] * 1000}
        given |= {f"{prefix}sigma": t[f"{m}_sigma"] * 1000}
    given |= {"num_frames": 2, "height": 2, "width": 3, "audio_num_frames": TA, **keyframes}
    with torch.no_grad():
        video, audio = model(**given, use_cross_timestep=True, return_dict=False)
    assert relative_l2(found["video_velocity"], video) <= CLOSE
    assert relative_l2(found["audio_velocity"], audio) <= CLOSE


def test_optional_inputs_of_the_transformer_reach_it(probe):
    x = transformer_inputs("2.3")
    plain = probe("2.3", "transformer", x)
    moves = {"video_self_keep": "video", "audio_self_keep": "audio"}
    moves |= {"a2v_keep": "video", "v2a_keep": "audio"}
    ones, mask = np.ones((B, 3), np.float32), np.ones((B, T, T), np.float32)
    every = dict.fromkeys(moves, ones) | {"video_attention_mask": mask}
    kept = probe("2.3", "transformer", x | every)
    for name in plain:
        assert relative_l2(kept[name], plain[name]) <= 1e-5
    for name, moved in moves.items():
        gone = ones.copy()
        gone[1, 1] = 0
        changed = probe("2.3", "transformer", x | {name: gone})[f"{moved}_velocity"]
        assert relative_l2(changed[0], plain[f"{moved}_velocity"][0]) <= 1e-5
        assert relative_l2(changed[1], plain[f"{moved}_velocity"][1]) > 1e-3, name
    mask[0, :, :4] = 0.01
    masked = probe("2.3", "transformer", x | {"video_attention_mask": mask})
    assert relative_l2(masked["video_velocity"][0], plain["video_velocity"][0]) > 1e-3


def text_inputs():
    ids = np.random.default_rng(3).integers(10, 200, (B, S)).astype(np.int64)
    mask = np.ones((B, S), np.int64)
    mask[0, :20] = 0
    mask[1, :3] = 0
    return {"token_ids": ids, "mask": mask}


@pytest.mark.parametrize("generation", ["2.0", "2.3", "2.5"])
def test_text_encoder_equals_diffusers(generation, probe, tiny):
    import transformers
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    x, folder = text_inputs(), tiny(f"tiny-{generation}", "diffusers")
    found = probe(generation, "text-encoder", x)
    assert found.keys() == {"hidden_states", "video_context", "audio_context"}
    gemma = "Gemma4Unified" if generation == "2.5" else "Gemma3"
    reference = getattr(transformers, f"{gemma}ForConditionalGeneration")
    gemma = reference.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()
    connectors = diffusers_part(LTX2TextConnectors, folder / "connectors")
    ids, mask = torch.from_numpy(x["token_ids"]), torch.from_numpy(x["mask"])
    with torch.no_grad():
        seen = gemma(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        states = torch.stack(seen.hidden_states, -1)
        video, audio, _ = connectors(states.flatten(2), mask, padding_side="left")
    real = x["mask"].astype(bool)  # padded positions attend to nothing: their states mean nothing
    assert found["hidden_states"].shape == states.shape
    assert relative_l2(found["hidden_states"][real], states.numpy()[real]) <= CLOSE
    assert relative_l2(found["video_context"], video) <= CLOSE
    assert relative_l2(found["audio_context"], audio) <= CLOSE


@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_a_lora_changes_gemma_and_the_connectors(backend, tiny, probed, tmp_path):
    """As weights do that have the change already."""
    whole, changed, rng = tiny("tiny-2.3", "official"), tmp_path / "model", np.random.default_rng(3)
    shutil.copytree(whole, changed)
    pairs = {}
    for file, end, module in (
        ("gemma-3/model.safetensors", "layers.2.self_attn.q_proj.weight", "lora_te_model_layers_2_self_attn_q_proj"),
        ("tiny-2.3.safetensors", "video_embeddings_connector.transformer_1d_blocks.0.attn1.to_v.weight",
         "diffusion_model.video_embeddings_connector.transformer_1d_blocks.0.attn1.to_v"),
    ):  # fmt: skip
        source = TensorFile(whole / file)
        (name,) = (name for name in source.names() if name.endswith(end))
        out, into = source.info(name).shape
        down, up = (rng.standard_normal(s).astype(np.float32) / 4 for s in ((3, into), (out, 3)))
        pairs |= {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}
        arrays = {each: source.read(each) for each in source.names()}
        arrays[name] = arrays[name].astype(np.float32) + up @ down
        write_arrays(changed / file, arrays, source.metadata)
    write_arrays(tmp_path / "lora.safetensors", pairs)
    lora = ("--lora", tmp_path / "lora.safetensors")
    plain, merged, expected = (
        probed(model, "text-encoder", text_inputs(), *flags, backend=backend)
        for model, flags in ((whole, ()), (whole, lora), (changed, ()))
    )
    for name in ("hidden_states", "video_context", "audio_context"):
        moved = np.abs(plain[name] - expected[name]).max()
        assert moved > 1e-2
        assert np.abs(merged[name] - expected[name]).max() < 1e-5 * moved


@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_decoders_encoder_and_upsampler_equal_diffusers(generation, probe, tiny):
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video
    from diffusers.pipelines.ltx2 import LTX2Vocoder, LTX2VocoderWithBWE
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    folder, latent = tiny(f"tiny-{generation}", "diffusers"), draw(1, 128, 2, 2, 3)
    vae = diffusers_part(AutoencoderKLLTX2Video, folder / "vae")
    mean, std = (x.view(1, -1, 1, 1, 1) for x in (vae.latents_mean, vae.latents_std))
    raw = torch.from_numpy(latent) * std + mean
    frames = np.tanh(draw(1, 3, 9, 64, 96))
    with torch.no_grad():
        decoded = vae.decode(raw, None, return_dict=False)[0]
        encoded = (vae.encode(torch.from_numpy(frames)).latent_dist.mode() - mean) / std
        upsampler = diffusers_part(LTX2LatentUpsamplerModel, folder / "latent_upsampler")
        upsampled = (upsampler(raw) - mean) / std
    expected = {
        "video-decoder": ({"latent": latent}, {"frames": decoded}),
        "video-encoder": ({"frames": frames}, {"latent": encoded}),
        "upsampler": ({"latent": latent}, {"latent": upsampled}),
    }
    sound = draw(1, 8, 7, 16, seed=2)
    audio_vae = diffusers_part(AutoencoderKLLTX2Audio, folder / "audio_vae")
    kind = LTX2VocoderWithBWE if generation == "2.3" else LTX2Vocoder
    vocoder = diffusers_part(kind, folder / "vocoder")
    if generation == "2.3":  # the official rule, whatever a diffusers config says
        vocoder.vocoder.final_act_fn = "clamp"
    with torch.no_grad():
        packed = torch.from_numpy(sound).transpose(1, 2).flatten(2)
        packed = packed * audio_vae.latents_std + audio_vae.latents_mean
        mel = audio_vae.decode(packed.unflatten(2, (8, 16)).transpose(1, 2), return_dict=False)[0]
        expected["audio-decoder"] = ({"latent": sound}, {"mel": mel, "waveform": vocoder(mel)})
        heard = {"waveform": draw(1, 2, 7001, seed=3), "sample_rate": np.int32([24000])}
        config = preset(f"tiny-{generation}").config.audio_vae
        spectrum = log_mel(resample(heard["waveform"], 24000, 16000), config)
        z = audio_vae.encode(torch.from_numpy(spectrum)).latent_dist.mode()
        packed = (z.transpose(1, 2).flatten(2) - audio_vae.latents_mean) / audio_vae.latents_std
        encoded = packed.unflatten(2, (8, 16)).transpose(1, 2)
        expected["audio-encoder"] = (heard, {"mel": spectrum, "latent": encoded})
    for component, (inputs, outputs) in expected.items():
        found = probe(generation, component, inputs)
        if component == "audio-decoder":
            assert mel.shape == (1, 2, 25, 64) and encoded.shape == (1, 8, 8, 16)
            assert found.pop("sample_rate") == [48000 if generation == "2.3" else 24000]
        assert found.keys() == outputs.keys()
        for name, value in outputs.items():
            assert relative_l2(found[name], value) <= CLOSE, f"{component} {name}"


@pytest.mark.parametrize(
    ("kind", "grid"),
    [pytest.param("x1.5", (3, 5, 8), marks=pytest.mark.long), ("temporal", (5, 3, 5))],
)
def test_an_upsampler_of_any_kind_equals_diffusers(kind, grid, probe, tiny, tmp_path):
    from diffusers import AutoencoderKLLTX2Video
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    make_checkpoint("tiny-2.3", "official", tmp_path / kind, upsampler=kind)
    make_checkpoint("tiny-2.3", "diffusers", tmp_path / f"{kind}-diffusers", upsampler=kind)
    (file,) = (tmp_path / kind).glob("*upsampler*")
    folder = tmp_path / f"{kind}-diffusers" / "latent_upsampler"
    vae = diffusers_part(AutoencoderKLLTX2Video, tiny("tiny-2.3", "diffusers") / "vae")
    mean, std = (x.view(1, -1, 1, 1, 1) for x in (vae.latents_mean, vae.latents_std))
    latent = draw(1, 128, 3, 3, 5)
    with torch.no_grad():
        reference = diffusers_part(LTX2LatentUpsamplerModel, folder)
        expected = (reference(torch.from_numpy(latent) * std + mean) - mean) / std
    assert expected.shape[2:] == grid
    for path in (file, folder):
        found = probe("2.3", "upsampler", {"latent": latent}, "--upsampler", path)["latent"]
        assert relative_l2(found, expected) <= CLOSE


DIFFUSION = diffusion_decoder.DiffusionDecoderConfig(
    latent_channels=128, patch_size=4, head_dim=8, channels=(32, 16, 16, 16, 8),
    depths=(1, 1, 1, 1, 1), windows=((3, 3, 3),) * 5,
    strides=((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2)), timestep_width=16, timestep_scale=1000.0,
)  # fmt: skip


@pytest.fixture
def diffusion_params(monkeypatch):
    """Parameters of a small diffusion decoder, which every checkpoint then has."""
    shape = diffusion_decoder.whole(DIFFUSION, 1, (3, 3, 3))
    features = diffusion_decoder.trace_features(DIFFUSION, 1, 3, 3, 3, "float32")
    decoder = diffusion_decoder.trace(DIFFUSION, shape, "float32")
    params = random_params(features, seed=1) | random_params(decoder, seed=2)

    def opened(options):
        found, source = opened_checkpoint(options), ArraySource(params)
        part = RenamedSource(found.path, {name: (source, name) for name in params})
        config = replace(found.config, parts={"diffusion_decoder": DIFFUSION})
        return replace(found, config=config, sources={**found.sources, "diffusion_decoder": part})

    monkeypatch.setattr(instrument, "opened_checkpoint", opened)
    return params


@pytest.mark.parametrize(
    "backend, border",
    [("cuda", "plain"), ("cuda", "chunked"), pytest.param("tpu", None, marks=pytest.mark.long)],
)
def test_diffusion_decoder_is_both_networks_cut_to_the_clip(
    backend, border, probe, diffusion_params
):
    latent, noise = draw(1, 128, 2, 3, 3), draw(1, 3, 17, 96, 96)
    flags, x = ("--border-mode", border) if border else (), {"latent": latent, "noise": noise}
    found = probe("2.3", "diffusion-decoder", x, *flags, backend=backend)
    graph = diffusion_decoder.trace_features(DIFFUSION, 1, 2, 3, 3, "float32")
    x = run_graph("cuda", graph, diffusion_params, {"latent": latent})
    shape = diffusion_decoder.whole(DIFFUSION, 1, (2, 3, 3), border or "chunked")
    graph = diffusion_decoder.trace(DIFFUSION, shape, "float32")
    whole = run_graph("cuda", graph, diffusion_params, x | {"noise": noise})
    assert found.keys() == {"frames"} and found["frames"].shape == (1, 3, 9, 96, 96)
    assert relative_l2(found["frames"], whole["frames"][:, :, :9]) <= 1e-5  # summation order
    short = {"latent": latent, "noise": noise[:, :, :9]}
    status, stderr = probe("2.3", "diffusion-decoder", short, backend=backend)
    said = "noise has shape [1, 3, 9, 96, 96], expected [1, 3, 17, 96, 96] for this latent"
    assert status == 2 and said in stderr


def test_guided_step_is_a_step_of_the_transformer(probe):
    """Neutral guidance: x + v * mask-aware Euler of the transformer's own velocity."""
    x = step_inputs("2.3")
    plain = x | {"guidance": np.float32([[1, 0, 1, 0]] * 2)}
    found = probe("2.3", "guided-step", plain)
    assert found.keys() == {"video_latent", "audio_latent", "video_x0", "audio_x0"}
    sigma, after = plain["sigmas"]
    t = {"video_positions": x["video_positions"], "audio_positions": x["audio_positions"]}
    for name in ("video", "audio"):
        t |= {f"{name}_latent": x[f"{name}_latent"], f"{name}_context": x[f"{name}_context"][:1]}
        t |= {f"{name}_timesteps": x[f"{name}_mask"] * sigma, f"{name}_sigma": np.float32([sigma])}
    velocity = probe("2.3", "transformer", t)
    for name in ("video", "audio"):
        latent, mask, clean = (x[f"{name}_{part}"] for part in ("latent", "mask", "clean"))
        x0 = (latent - velocity[f"{name}_velocity"] * mask * sigma) * mask + clean * (1 - mask)
        assert relative_l2(found[f"{name}_x0"], x0) <= CLOSE
        stepped = latent + (latent - x0) / sigma * (after - sigma)
        assert relative_l2(found[f"{name}_latent"], stepped) <= CLOSE
    assert relative_l2(probe("2.3", "guided-step", x)["video_x0"], found["video_x0"]) > 1e-2


def test_the_schedule(probe):
    found = probe("2.0", "schedule", {"steps": np.int32([7])})
    np.testing.assert_array_equal(found["sigmas"], shifted_sigmas(7))


def test_the_tokenizer_in_a_text_encoder_file_adds_no_bos_and_prompts_have_one(tiny, probed):
    """Gemma 4's tokenizer leaves it out, unlike Gemma 3's; without it the text means something
    else."""
    from tokenizers import Tokenizer

    (file,) = tiny("tiny-2.5", "official").glob("*text-encoder*")
    raw = Tokenizer.from_buffer(TensorFile(file).read("tokenizer_json").tobytes())
    bos, prompt = raw.token_to_id("<bos>"), "a robot dancing"
    own = raw.encode(prompt).ids
    assert bos == 2 and own[0] != bos
    prompts = (prompt, "", "rain " * 2000)
    tokens = probed(file.parent, "tokenizer", None, "--prompt", *prompts)
    ids, mask = tokens["token_ids"], tokens["mask"]
    assert ids[0, mask[0] == 1].tolist() == [bos, *own] and ids[1, mask[1] == 1].tolist() == [bos]
    assert mask[2].all()
    assert ids[2].tolist() == [bos, *raw.encode(("rain " * 2000).strip()).ids[:1023]]


@pytest.mark.parametrize("layout", ["official", "diffusers"])
@pytest.mark.parametrize("backend", ["cuda", "tpu"])
def test_the_duration_head_equals_diffusers(layout, backend, tiny, probed):
    from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

    x = {f"{m}_context": draw(B, S, width) for m, width in WIDTH["2.5"].items()}
    found = probed(tiny("tiny-2.5", layout), "duration-head", x, backend=backend)
    folder = tiny("tiny-2.5", "diffusers") / "duration_head"
    reference = diffusers_part(LTX2DurationHead, folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(*(torch.from_numpy(x[f"{m}_context"]) for m in ("video", "audio")))
    assert relative_l2(found["seconds"], expected) <= 1e-5


@pytest.mark.parametrize("component,inputs", [
    pytest.param("transformer", transformer_inputs("2.0"), marks=pytest.mark.long),
    ("text-encoder", text_inputs()),
    ("video-decoder", {"latent": draw(1, 128, 2, 2, 3)}),
    ("video-encoder", {"frames": draw(1, 3, 9, 64, 32)}),
    ("audio-decoder", {"latent": draw(1, 8, 5, 16)}),
    ("audio-encoder", {"waveform": draw(1, 2, 2000), "sample_rate": np.int32([44100])}),
    ("upsampler", {"latent": draw(1, 128, 2, 2, 3)}),
    ("guided-step", step_inputs("2.0")),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_both_backends_give_the_same(component, inputs, probe):
    one, other = (probe("2.0", component, inputs, backend=backend) for backend in ("cuda", "tpu"))
    assert one.keys() == other.keys()
    for name in one:
        a, b = one[name], other[name]
        if name == "hidden_states":
            a, b = (x[inputs["mask"].astype(bool)] for x in (a, b))
        assert relative_l2(b, a) <= CLOSE, name


def test_flags_of_generate_reach_the_probe(probe, tiny):
    lora = tiny("tiny-2.3", "diffusers") / "tiny-2.3-distilled-lora.safetensors"
    x = transformer_inputs("2.3")
    plain = probe("2.3", "transformer", x)
    none = probe("2.3", "transformer", x, "--distilled-lora", f"{lora}:0")
    merged = probe("2.3", "transformer", x, "--distilled-lora", f"{lora}:1")
    narrow = probe("2.3", "transformer", x, "--dtype", "bfloat16")
    for name, value in plain.items():
        np.testing.assert_array_equal(none[name], value)
        assert relative_l2(merged[name], value) > 1e-2
        assert 1e-4 < relative_l2(narrow[name], value) < 0.1  # bfloat16 keeps 8 bits


def heard(channels, length, rate):
    return {"waveform": draw(1, channels, length), "sample_rate": np.int32([rate])}


@pytest.mark.parametrize("component,change,message", [
    ("transformer", {"extra": draw(2)}, "has no input extra"),
    ("transformer", {"audio_sigma": None}, "misses audio_sigma"),
    ("transformer", {"video_sigma": draw(3)}, "video_sigma has shape [3]"),
    ("transformer", {"a2v_keep": draw(B, 4)}, "a2v_keep has shape [2, 4]"),
    ("transformer", {"video_latent": draw(B, T, 64)}, "video_latent has shape [2, 12, 64]"),
    ("transformer", {"audio_latent": np.full((B, TA, 128), np.nan, np.float32)}, "holds NaN"),
    ("guided-step", {"stg_blocks": draw(4)}, "stg_blocks has shape [4]"),
    ("video-encoder", {"frames": draw(1, 3, 8, 64, 64)}, "8k+1 frames"),
    ("video-decoder", {"latent": draw(1, 64, 2, 2, 2)}, "latent has shape [1, 64, 2, 2, 2]"),
    ("audio-encoder", heard(1, 9, 8000), "has shape [1, 1, 9]"),
    ("audio-encoder", heard(2, 256, 8000), "expected more than 512"),
    ("audio-encoder", heard(2, 9999, 0), "a sample rate of 0 Hz"),
    ("diffusion-decoder", {"latent": draw(2), "noise": draw(2)},
     "no diffusion video decoder was found"),
    ("duration-head", {f"{m}_context": draw(B, S, width) for m, width in WIDTH["2.3"].items()},
     "no duration head was found; pass one with --duration-head"),
    ("schedule", {"steps": np.int32([0])}, "steps is 0"),
    ("schedule", {"steps": np.int64([2**40 + 3])}, "steps holds 1099511627779, expected"),
    ("schedule", {"steps": np.uint64([2**32 + 5])}, "steps holds 4294967301, expected"),
    ("schedule", {"steps": np.float32([2.7])}, "steps is 2.7, expected a whole number"),
    ("schedule", {"steps": np.int32([10**9])}, "steps is 1e+09, expected"),
    ("text-encoder", {"mask": np.ones((B, S + 1), np.int64)}, "mask has shape"),
    ("text-encoder", dict.fromkeys(("token_ids", "mask"), np.ones((B, 9), np.int64)),
     "multiple of the 16 registers"),
    ("teleporter", {}, "unknown component 'teleporter'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(component, change, message, probe, monkeypatch):
    inputs = {"transformer": transformer_inputs("2.3"), "guided-step": step_inputs("2.3")}
    inputs["text-encoder"] = text_inputs()
    x = {k: v for k, v in (inputs.get(component, {}) | change).items() if v is not None}
    read = TensorFile.read

    def only_inputs(self, name):
        assert self.path.name == "in.safetensors", "a weight was read"
        return read(self, name)

    monkeypatch.setattr(TensorFile, "read", only_inputs)
    status, stderr = probe("2.3", component, x or {"x": draw(1)})
    assert status == 2 and stderr.startswith("ltx2rt: error: ") and message in stderr, stderr


@pytest.mark.parametrize(("generation", "layout", "component", "parts"), [
    ("2.3", "diffusers", "video-decoder", ("vae",)),
    ("2.3", "diffusers", "audio-decoder", ("audio_vae", "vocoder")),
    ("2.3", "diffusers", "upsampler", ("vae", "latent_upsampler")),
    ("2.3", "diffusers", "text-encoder", ("transformer", "connectors", "text_encoder")),
    ("2.5", "official", "diffusion-decoder", ("tiny-2.5-video-vae.safetensors",)),
    ("2.5", "official", "duration-head", ("tiny-2.5-duration-head.safetensors",)),
    *(
        pytest.param("2.5", "official", part, (f"tiny-2.5-{f}.safetensors",), marks=pytest.mark.long)
        for part, f in (("video-decoder", "video-vae-conv"), ("audio-decoder", "audio-vae"))
    ),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_component_needs_its_own_parts_alone(
    generation, layout, component, parts, tiny, probed, tmp_path
):
    """The whole checkpoint and those parts give the same bits; a part less is named."""
    whole, some = tiny(f"tiny-{generation}", layout), tmp_path / "some"
    some.mkdir()
    for part in parts:
        (some / part).symlink_to(whole / part)
    flags, grid = (), (8, 5, 16) if component == "audio-decoder" else (128, 2, 2, 2)
    inputs = {"latent": draw(1, *grid)}
    if component == "text-encoder":
        inputs = {"token_ids": np.ones((1, S), np.int32), "mask": np.ones((1, S), np.int32)}
    if component == "duration-head":
        inputs = {f"{m}_context": draw(1, S, width) for m, width in WIDTH["2.5"].items()}
    if component == "diffusion-decoder":
        flags = ("--video-decoder", "diffusion")
        config = opened_checkpoint(ModelOptions("cuda", whole, device="cpu")).config
        decoder = diffusion_decoder.config_of(config)
        shape = diffusion_decoder.whole(decoder, 1, grid[1:], "replicate")
        inputs["noise"] = draw(1, 3, *shape.pixels(decoder))
    expected = probed(whole, component, inputs, *flags)
    for model in (some, *([some / parts[0]] if len(parts) == 1 else [])):
        found = probed(model, component, inputs, *flags)
        assert isinstance(found, dict), found
        assert found.keys() == expected.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name])
    (some / parts[0]).unlink()
    assert "no checkpoint" in probed(some, component, inputs, *flags)[1]


@pytest.fixture
def probed(command, tmp_path):
    """probed(model, component, inputs, *flags, backend) -> outputs, or (status, stderr) if it was
    refused."""

    def call(model, component, inputs, *flags, backend="cuda"):
        file, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
        out.unlink(missing_ok=True)
        given = ()
        if inputs is not None:
            save_file({k: np.ascontiguousarray(v) for k, v in inputs.items()}, file)
            given = ("--inputs", file)
        words = ["probe", "--backend", backend, "--device", "cpu", "--component", component]
        status, stdout, stderr = command(*words, "--model", model, *given, "--outputs", out, *flags)
        if status:
            assert not out.exists() and stdout == "" and stderr.count("\n") == 1
            return status, stderr
        return load_file(out)

    return call


def test_a_tokenizer_equals_transformers(tiny, probed):
    from transformers import AutoTokenizer

    folder, prompts = tiny("tiny-2.0", "diffusers"), ["a robot dancing", "remains static: 'so.'"]
    tokens = probed(folder, "tokenizer", None, "--prompt", *prompts)
    how = {"padding": "max_length", "max_length": 1024, "truncation": True, "return_tensors": "np"}
    reference = AutoTokenizer.from_pretrained(folder / "tokenizer")(prompts, **how)
    for name, theirs in (("token_ids", "input_ids"), ("mask", "attention_mask")):
        assert tokens[name].dtype == np.int32
        np.testing.assert_array_equal(tokens[name], reference[theirs])


@pytest.mark.parametrize("component, some", [
    ("transformer", ("video_positions float32[B, 3, video_tokens, 2]",
                     "video_attention_mask float32[B, video_tokens, video_tokens], optional")),
    ("text-encoder", ("token_ids int32[B, S]", "mask int32[B, S]")),
    ("train-step", ("audio_noise float32[B, audio_tokens, 128]",)),
    ("guided-step", ("guidance float32[2, 4]", "sigmas float32[2]")),
    ("video-encoder", ("frames float32[B, 3, F, H, W]",)),
    ("audio-encoder", ("waveform float32[B, 2, N]", "sample_rate int32[1]")),
    ("audio-decoder", ("latent float32[B, C, n, bins]",)),
    ("diffusion-decoder", ("noise float32[B, 3, F, H, W]",)),
    ("schedule", ("steps int32[1]",)),
])  # fmt: skip
def test_a_mark_lists_the_inputs(command, tiny, component, some):
    model = tiny("tiny-2.5" if component == "diffusion-decoder" else "tiny-2.3", "official")
    where = ("--backend", "cuda", "--device", "cpu", "--model", model)
    status, out, err = command("probe", *where, "--component", component, "--inputs", "?")
    assert status == 0 and not set(some) - set(out.splitlines()), (out, err)
    status, _, err = command("probe", *where, "--component", component, "--inputs", model)
    assert status == 2 and "probe writes --outputs FILE" in err
