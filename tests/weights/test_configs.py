"""Configs: both spellings round-trip, equal the released values; traps are refused by key."""

import contextlib
import copy
import json
from dataclasses import replace
from functools import cache, partial
from math import nan

import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from hypothesis import given, settings
from hypothesis import strategies as st

from ltx2rt.errors import InputError
from ltx2rt.release import version_tuple
from ltx2rt.weights import configs
from ltx2rt.weights.configs import (
    audio,
    diffusion_decoder,
    duration_head,
    gemma3,
    gemma4,
    latent_upsampler,
    transformer,
    video_vae,
)
from ltx2rt.weights.configs.keys import Keys
from ltx2rt.weights.presets import SIZES, preset
from tests.conftest import refused
from tests.weights.test_files import values

SPACE, TIME, BOTH = "spatial", "temporal", "spatiotemporal"
RELEASED_VAE = {  # AutoencoderKLLTX2Video of the released 2.0 and 2.3
    "ltx-2.0": {
        "block_out_channels": [256, 512, 1024, 2048], "layers_per_block": [4, 6, 6, 2, 2],
        "downsample_type": [SPACE, TIME, BOTH, BOTH], "upsample_type": [BOTH] * 3,
        "decoder_block_out_channels": [256, 512, 1024], "decoder_layers_per_block": [5, 5, 5, 5],
        "upsample_residual": [True] * 3, "upsample_factor": [2, 2, 2], "decoder_spatial_padding_mode": "reflect",
    },
    "ltx-2.3": {
        "block_out_channels": [256, 512, 1024, 1024], "layers_per_block": [4, 6, 4, 2, 2],
        "downsample_type": [SPACE, TIME, BOTH, BOTH], "upsample_type": [BOTH, BOTH, TIME, SPACE],
        "decoder_block_out_channels": [256, 512, 512, 1024], "decoder_layers_per_block": [4, 6, 4, 2, 2],
        "upsample_residual": [False] * 4, "upsample_factor": [2, 2, 1, 2], "decoder_spatial_padding_mode": "zeros",
    },
}  # fmt: skip


def official(name):
    """The metadata object of a preset, as JSON data independent of our tuples."""
    return copy.deepcopy(configs.official_json(preset(name).config))


@cache
def readers(name):
    """By the part of a preset: how it is read, its JSON, and its config."""
    c, data = preset(name).config, official(name)
    t, text, up = c.transformer, c.text, c.upsampler
    width = text.gemma_hidden * text.num_states
    found = {
        "transformer": (transformer.official, data["transformer"], t),
        "text": (lambda keys: transformer.official_text(keys, width), data["transformer"], text),
        "vae": (video_vae.official, data["vae"], c.video_vae),
        "audio_vae": (audio.official, data["audio_vae"], c.audio_vae),
        "vocoder": (lambda keys: audio.official_vocoder(keys, c.audio_vae), data["vocoder"], c.vocoder),
        "d.transformer": (transformer.diffusers, transformer.diffusers_json(t), t),
        "d.text": (lambda keys: transformer.diffusers_text(keys, t), transformer.diffusers_text_json(text, t), text),
        "d.vae": (video_vae.diffusers, video_vae.diffusers_json(c.video_vae), c.video_vae),
        "d.audio_vae": (audio.diffusers, audio.diffusers_json(c.audio_vae), c.audio_vae),
        "d.vocoder": (audio.diffusers_vocoder, audio.diffusers_vocoder_json(c.vocoder), c.vocoder),
    }  # fmt: skip
    for layout in ("official", "diffusers"):
        written = latent_upsampler.upsampler_json(up, layout)
        reader = partial(latent_upsampler.upsampler, rational=up.rational)
        found[f"{layout} upsampler"] = (reader, written, up)
    return found


@pytest.mark.parametrize("name", SIZES)
def test_json_of_both_layouts_round_trips(name):
    config = preset(name).config
    for read, written, expected in readers(name).values():
        assert read(Keys(written, "config")) == expected
    if head := config.part("duration_head"):
        keys = Keys(duration_head.to_json(head, "diffusers"), "d")
        sizes = head.video_width, head.audio_width
        assert duration_head.duration_head(keys, "diffusers", *sizes) == head
        assert configs.gemma(Keys(gemma4.gemma4_json(config.gemma, {}), "g")) == config.gemma
        return
    gemma = configs.gemma(Keys(gemma3.gemma_json(config.gemma, {}), "g"))
    assert replace(gemma, query_scale=0) == replace(config.gemma, query_scale=0)
    assert gemma.query_scale == pytest.approx(config.gemma.query_scale, rel=1e-15)


@pytest.mark.parametrize("name", ["ltx-2.0", "ltx-2.3"])
def test_full_size_equals_the_released_tables(name):
    config = preset(name).config
    vae = video_vae.diffusers_json(config.video_vae)
    assert {key: vae[key] for key in RELEASED_VAE[name]} == RELEASED_VAE[name]
    assert (config.video_vae.time_factor, config.video_vae.space_factor) == (8, 32)
    connector = (32, 128, 8) if name == "ltx-2.3" else (30, 128, 2)
    video = config.text.video
    assert (video.num_heads, video.head_dim, video.num_layers) == connector
    assert config.release.name == name[-3:]
    blocks = official(name)["vae"]["decoder_blocks"]
    first = ["res_x", {"num_layers": 4 if name == "ltx-2.3" else 5}]
    second = {"ltx-2.0": ["compress_all", {"multiplier": 2, "residual": True}]}
    assert blocks[0] == first
    assert blocks[1] == second.get(name, ["compress_space", {"multiplier": 2}])
    assert ("spatial_padding_mode" in official(name)["vae"]) == (name == "ltx-2.3")


def test_bare_integers_and_default_multipliers_in_block_lists():
    data = official("ltx-2.3")["vae"]
    for blocks in (data["encoder_blocks"], data["decoder_blocks"]):
        for block in blocks[::2]:
            block[1] = block[1]["num_layers"]
    del data["encoder_blocks"][1][1]["multiplier"], data["decoder_blocks"][5][1]["multiplier"]
    assert video_vae.official(Keys(data, "vae")) == preset("ltx-2.3").config.video_vae


NEEDED = """
av_ca_timestep_scale_multiplier frequencies_precision connector_positional_embedding_max_pos
connector_num_attention_heads connector_num_layers rope_type positional_embedding_max_pos
use_middle_indices_grid causal_temporal_positioning num_layers norm_eps qk_norm
"""


@pytest.mark.parametrize("key", NEEDED.split())
@pytest.mark.parametrize("name", ["tiny-2.0", "tiny-2.3"])
def test_an_absent_key_is_named(name, key):
    data = official(name)["transformer"]
    del data[key]
    with refused(f"required key {key} is absent"):
        keys = Keys(data, "transformer")
        transformer.official(keys)
        transformer.official_text(keys, 448)


@pytest.mark.parametrize("key", ["upsample_kernel_sizes", "resblock_dilation_sizes"])
def test_a_vocoders_lists_go_together(key):
    data = official("tiny-2.3")
    data["vocoder"]["vocoder"][key] = data["vocoder"]["vocoder"][key][:-1]
    sound = audio.official(Keys(data["audio_vae"], "audio_vae"))
    with refused(r"vocoder\.vocoder: \d .* and \d .*, expected as many"):
        audio.official_vocoder(Keys(data["vocoder"], "vocoder"), sound)


UNSUPPORTED = {  # by part of 2.3's metadata: keys and values
    "transformer": [
        ("rope_type", "interleaved"), ("frequencies_precision", "bfloat16"), ("num_layers", "48"),
        ("num_layers", 0), ("num_layers", True), ("dropout", 0.1), ("caption_proj_input_norm", True),
        ("use_keyframes_abs_pos_embedding", 1), ("cross_attention_dim", 100),
        ("positional_embedding_max_pos", [20]), ("audio_num_attention_heads", 2),
    ],
    "vae": [
        ("timestep_conditioning", True), ("causal_decoder", True), ("latent_log_var", "constant"),
        ("spatial_padding_mode", "replicate"), ("encoder_blocks", [["res_x", 1], ["res_x", 1]]),
        ("encoder_blocks", [["res_x", 1], ["attn", 1], ["res_x", 1]]),
    ],
    "stft": [("filter_length", 512), ("win_length", 400)], "mel": [("mel_fmin", 20), ("mel_fmax", 7600)],
}  # fmt: skip


@pytest.mark.parametrize("part", UNSUPPORTED)
def test_an_unsupported_value_is_named(part):
    for key, value in UNSUPPORTED[part]:
        data, says = official("tiny-2.3"), key
        if part in data:
            data[part][key] = value
        else:
            data["audio_vae"]["preprocessing"][part][key] = value
            says = f"{part}: {key} = {value} is not supported"
        name = part if part in data else "audio_vae"
        with refused(says):
            readers("tiny-2.3")[name][0](Keys(data[name], name))


def test_a_layer_count_without_a_stage_is_refused():
    vae = video_vae.diffusers_json(preset("tiny-2.3").config.video_vae)
    for layers in (vae["layers_per_block"][:-1], [*vae["layers_per_block"], 2]):
        with refused(r"layers_per_block has \d entries, expected 5"):
            video_vae.diffusers(Keys(vae | {"layers_per_block": layers}, "v"))


def test_the_first_of_two_generators_clamps_whatever_diffusers_says():
    data = audio.diffusers_vocoder_json(preset("tiny-2.3").config.vocoder)
    assert data["final_act_fn"] is None
    vocoder = audio.diffusers_vocoder(Keys(data, "v"))
    assert vocoder.generator.final_activation == "clamp"
    assert vocoder.bandwidth_extension.final_activation == "none"


def test_gemma_reads_the_released_sparse_spelling():
    released = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {"hidden_size": 3840, "intermediate_size": 15360,
                        "model_type": "gemma3_text", "num_attention_heads": 16,
                        "num_hidden_layers": 48, "num_key_value_heads": 8,
                        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
    }  # fmt: skip
    expected = preset("ltx-2.3").config.gemma
    assert configs.gemma(Keys(released, "g")) == expected
    flat = released["text_config"] | {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    flat["sliding_window_pattern"] = 6
    assert configs.gemma(Keys(flat, "g")) == expected


def test_a_gemma_of_another_size_or_kind_is_refused():
    small, text = preset("tiny-2.3").config.gemma, preset("ltx-2.3").config.text
    with refused(r"hidden size 64 with 6 layers.*3840 with 48 layers.*--text-encoder"):
        gemma3.check(small, text, "gemma")
    with refused("gemma2"):
        configs.gemma(Keys({"model_type": "gemma2"}, "g"))


def test_other_upsamplers_are_refused():
    tiny = latent_upsampler.upsampler_json(preset("tiny-2.0").config.upsampler, "official")
    both = {"spatial_upsample": True, "temporal_upsample": True}
    others = {"spatial_scale": 4.0}, {"rational_resampler": False}
    for change in (both, {"spatial_upsample": False}, *others):
        data = tiny | change
        with refused(next(iter(change))):
            latent_upsampler.upsampler(Keys(data, "u"), rational=True)


@pytest.mark.parametrize("layout", ["official", "diffusers"])
@pytest.mark.parametrize("kind", ["x2", "x1.5", "temporal"])
def test_every_upsamplers_config_is_read_as_it_was_written(kind, layout):
    config = preset("tiny-2.3", kind).config.upsampler
    data = latent_upsampler.upsampler_json(config, layout)
    assert latent_upsampler.upsampler(Keys(data, "u"), config.rational) == config
    if layout == "diffusers":
        from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

        LTX2LatentUpsamplerModel.from_config(data)


def test_versions_are_their_leading_integers():
    assert version_tuple("2.3.0") == (2, 3, 0)
    assert version_tuple("2-3-rc1.4") == (2, 3)
    assert version_tuple(None) == ()


def test_the_first_released_diffusers_configs_have_fewer_keys():
    """2.0's were written before these keys existed; the classes then meant one thing."""
    later = {
        "vae": "upsample_type",
        "vocoder": "act_fn final_act_fn final_bias antialias antialias_ratio antialias_kernel_size",
        "transformer": "gated_attn audio_gated_attn cross_attn_mod audio_cross_attn_mod ff_bias "
        "use_prompt_embeddings perturbed_attn audio_ff_bias use_prompt_adaln_single",
    }
    for part, keys in later.items():
        read, data, expected = readers("ltx-2.0")[f"d.{part}"]
        assert data.keys() >= {*keys.split()}
        fewer = {key: value for key, value in data.items() if key not in keys.split()}
        assert read(Keys(fewer, part)) == expected


# The header of the released diffusion decoder.
DIFFUSION = {
    "_class_name": "CausalDiffusionVAE",
    "model_output_type": "x0",
    "decoder": {"_class_name": "NADiffusionDecoder", "in_channels": 128, "out_channels": 3,
                "patch_size": 4, "head_dim": 64, "stage_channels": [2048, 1024, 512, 512, 256],
                "stage_depths": [4, 6, 4, 2, 8],
                "stage_kernels": [[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5], [11, 11, 11]],
                "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 2]],
                "stage5_kernel": [11, 11, 11], "timestep_scale_multiplier": 1000.0,
                "default_num_inference_steps": 1, "resampler_kind": "linear",
                "spatial_padding_mode": "zeros"},
}  # fmt: skip


def test_the_diffusion_decoders_header_is_read_and_written():
    config = diffusion_decoder.official(Keys(DIFFUSION, "vae"))
    assert (config.time_factor, config.space_factor, config.timestep_width) == (8, 32, 384)
    assert diffusion_decoder.official_json(config) == DIFFUSION
    diffusers = diffusion_decoder.diffusers_json(config)
    assert diffusion_decoder.diffusers(Keys(diffusers, "d")) == config
    with torch.device("meta"):
        defaults = json.loads(LTX2VideoDiffusionDecoderModel().to_json_string())
    assert diffusers == {key: defaults[key] for key in defaults if key != "_diffusers_version"}


@pytest.mark.parametrize("change, message", [
    ({"default_num_inference_steps": 2},
     "default_num_inference_steps = 2 is not supported, expected 1"),
    ({"stage_depths": [4, 6, 4, 2]},
     r"lists are of \[5, 4, 5, 5, 5\] stages, expected 5 in each"),
    ({"stage_channels": [2048, 1024, 512, 256, 256]}, "do not shrink by the factors"),
    ({"head_dim": 48}, "2048 channels, expected a multiple of a head's 48"),
    ({"stage5_kernel": [11, 11]}, "expected triples"),
    ({"upsamples": [[1, 2, 2], 2]}, r"expected a list of \[stride, channel factor\]"),
])  # fmt: skip
def test_a_diffusion_decoder_that_no_release_has_is_refused(change, message):
    changed = {**DIFFUSION, "decoder": DIFFUSION["decoder"] | change}
    with refused(message):
        diffusion_decoder.official(Keys(changed, "vae"))
    with refused("model_output_type = 'v' is not supported, expected 'x0'"):
        diffusion_decoder.official(Keys(DIFFUSION | {"model_output_type": "v"}, "vae"))


def places(data, path=()):
    """Every place in a JSON value, as a path of keys."""
    pairs = enumerate(data) if isinstance(data, list) else ()
    pairs = data.items() if isinstance(data, dict) else pairs
    return [path, *(place for key, value in pairs for place in places(value, (*path, key)))]


READERS = readers("tiny-2.3") | {
    "gemma": (configs.gemma, gemma3.gemma_json(preset("tiny-2.3").config.gemma, {}), None),
    "diffusion": (diffusion_decoder.official, DIFFUSION, None),
}


@settings(max_examples=200, deadline=None)
@given(
    reader=st.sampled_from(sorted(READERS)),
    value=values | st.sampled_from(["DELETE", nan]),
    draw=st.data(),
)
def test_no_config_makes_anything_but_a_config_or_an_input_error(reader, value, draw):
    read, data, _ = READERS[reader]
    data = copy.deepcopy(data)
    path = draw.draw(st.sampled_from(places(data)[1:]))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value == "DELETE":
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with contextlib.suppress(InputError):
        read(Keys(data, reader))
