"""Names: the two layouts' key sets map onto each other one to one, in both directions."""

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE

from ltx2rt.weights.configs import audio, transformer, video_vae
from ltx2rt.weights.names import gemma_to_canonical, to_diffusers, to_official
from ltx2rt.weights.presets import preset

# component, official name, name in diffusers
TABLE = """
transformer model.diffusion_model.patchify_proj.bias proj_in.bias
transformer model.diffusion_model.adaln_single.linear.weight time_embed.linear.weight
transformer model.diffusion_model.audio_adaln_single.linear.weight audio_time_embed.linear.weight
transformer model.diffusion_model.prompt_adaln_single.linear.bias prompt_adaln.linear.bias
transformer model.diffusion_model.av_ca_a2v_gate_adaln_single.linear.bias
    av_cross_attn_video_a2v_gate.linear.bias
transformer model.diffusion_model.transformer_blocks.7.scale_shift_table_a2v_ca_audio
    transformer_blocks.7.audio_a2v_cross_attn_scale_shift_table
transformer model.diffusion_model.transformer_blocks.7.attn1.q_norm.weight
    transformer_blocks.7.attn1.norm_q.weight
text text_embedding_projection.video_aggregate_embed.bias video_text_proj_in.bias
text model.diffusion_model.audio_embeddings_connector.transformer_1d_blocks.1.attn1.k_norm.weight
    audio_connector.transformer_blocks.1.attn1.norm_k.weight
video_vae vae.per_channel_statistics.mean-of-means latents_mean
video_vae vae.encoder.down_blocks.8.res_blocks.1.conv1.conv.bias
    encoder.mid_block.resnets.1.conv1.conv.bias
video_vae vae.encoder.down_blocks.5.conv.conv.bias
    encoder.down_blocks.2.downsamplers.0.conv.conv.bias
video_vae vae.encoder.down_blocks.4.res_blocks.0.conv2.conv.bias
    encoder.down_blocks.2.resnets.0.conv2.conv.bias
video_vae vae.decoder.up_blocks.0.res_blocks.3.conv1.conv.bias
    decoder.mid_block.resnets.3.conv1.conv.bias
video_vae vae.decoder.up_blocks.7.conv.conv.weight
    decoder.up_blocks.3.upsamplers.0.conv.conv.weight
video_vae vae.decoder.up_blocks.8.res_blocks.0.conv1.conv.bias
    decoder.up_blocks.3.resnets.0.conv1.conv.bias
diffusion_decoder vae.per_channel_statistics.std-of-means latents_std
diffusion_decoder vae.decoder.det_stages.3.1.attn.proj.weight
    decoder.det_stages.3.1.attn.to_out.0.weight
diffusion_decoder vae.decoder.upsamples.3.proj.bias decoder.upsamples.3.proj.bias
diffusion_decoder vae.decoder.t_embedder.mlp.2.bias
    decoder.t_embedder.timestep_embedder.linear_2.bias
audio_vae audio_vae.decoder.up.2.upsample.conv.conv.weight decoder.up.2.upsample.conv.conv.weight
audio_vae audio_vae.per_channel_statistics.std-of-means latents_std
vocoder vocoder.conv_pre.weight conv_in.weight
vocoder vocoder.vocoder.ups.3.weight vocoder.upsamplers.3.weight
vocoder vocoder.bwe_generator.resblocks.2.acts1.0.downsample.lowpass.filter
    bwe_generator.resnets.2.acts1.0.downsample.filter
vocoder vocoder.vocoder.resblocks.2.acts2.0.upsample.filter
    vocoder.resnets.2.acts2.0.upsample.filter
vocoder vocoder.vocoder.act_post.act.alpha vocoder.act_out.act.alpha
vocoder vocoder.mel_stft.stft_fn.forward_basis mel_stft.stft_fn.forward_basis
upsampler upsampler.conv.weight upsampler.conv.weight
"""
PAIRS = [*zip(*[iter(TABLE.split())] * 3, strict=True)]


@pytest.mark.parametrize("component, official, diffusers", PAIRS)
def test_names_translate_both_ways(component, official, diffusers):
    assert to_diffusers(component, official, 9) == diffusers
    assert to_official(component, diffusers, 9) == official


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.", ""])
def test_every_gemma_spelling_becomes_one(prefix):
    for name in ("layers.0.mlp.up_proj.weight", "norm.weight"):
        assert gemma_to_canonical(prefix + name) == f"language_model.model.{name}"
    for name in ("lm_head.weight", "vision_tower.layers.0", "model.vision_tower.x"):
        assert gemma_to_canonical(name) == name


@pytest.mark.parametrize("name", ["tiny-2.0", "tiny-2.3"])
def test_every_diffusers_key_round_trips(name):
    """diffusers' own modules are the oracle for the set of names."""
    config = preset(name).config
    vocoder = LTX2VocoderWithBWE if name.endswith("3") else LTX2Vocoder
    parts = {
        "transformer": (LTX2VideoTransformer3DModel,
                        transformer.diffusers_json(config.transformer)),
        "text": (LTX2TextConnectors,
                 transformer.diffusers_text_json(config.text, config.transformer)),
        "video_vae": (AutoencoderKLLTX2Video, video_vae.diffusers_json(config.video_vae)),
        "vocoder": (vocoder, audio.diffusers_vocoder_json(config.vocoder)),
    }  # fmt: skip
    stages = len(config.video_vae.encoder)
    for component, (model, data) in parts.items():
        with torch.device("meta"):
            keys = list(model.from_config(data).state_dict())
        officials = [to_official(component, key, stages) for key in keys]
        assert len(set(officials)) == len(keys)
        assert [to_diffusers(component, official, stages) for official in officials] == keys
        assert not [name for name in officials if "mid_block" in name or "norm_q" in name]
