"""Every spelling of a module that trainers and loaders use is the tensor that it means."""

import pytest

from ltx2rt.weights.lora.names import target

BLOCK = "model.diffusion_model.transformer_blocks"
CONNECTOR = (
    "model.diffusion_model.{}_embeddings_connector.transformer_1d_blocks.1.attn1.to_q.weight"
)
GEMMA = "language_model.model.layers.5"
SPELLINGS = {
    f"{BLOCK}.10.attn1.to_q.weight": [
        "transformer_blocks.10.attn1.to_q", "diffusion_model.transformer_blocks.10.attn1.to_q",
        "model.diffusion_model.transformer_blocks.10.attn1.to_q", "transformer.transformer_blocks.10.attn1.to_q",
        "base_model.model.transformer_blocks.10.attn1.to_q", "unet.base_model.model.transformer_blocks.10.attn1.to_q",
        "base_model.model._orig_mod.transformer_blocks.10.attn1.to_q", "pipe.dit.transformer_blocks.10.attn1.to_q",
        "velocity_model.transformer_blocks.10.attn1.to_q", "transformer_blocks.10.attn1.processor.to_q",
        "lora_unet_transformer_blocks_10_attn1_to_q", "lora_unet__transformer_blocks_10_attn1_to_q",
        "lora_unet_model_transformer_blocks_10_attn1_to_q", "lycoris_transformer_blocks_10_attn1_to_q",
        "lora_transformer_transformer_blocks_10_attn1_to_q", "lora_prior_unet_transformer_blocks_10_attn1_to_q",
        "lora_unet_diffusion_model_transformer_blocks_10_attn1_to_q",
        "transformer_blocks.10._checkpoint_wrapped_module.attn1.to_q", "ema.transformer_blocks.10.attn1.to_q",
        "_fsdp_wrapped_module.transformer_blocks.10._fsdp_wrapped_module.attn1.to_q",
        "lora_unet_transformer_blocks_10__orig_mod_attn1_to_q",
    ],
    f"{BLOCK}.0.audio_to_video_attn.to_out.0.weight": [
        "lora_unet_transformer_blocks_0_audio_to_video_attn_to_out_0",
        "transformer.transformer_blocks.0.audio_to_video_attn.to_out",
    ],
    f"{BLOCK}.2.audio_ff.net.0.proj.weight": ["lora_unet_model_transformer_blocks_2_audio_ff_net_0_proj"],
    f"{BLOCK}.2.attn1.q_norm.weight": [
        "transformer.transformer_blocks.2.attn1.norm_q", "diffusion_model.transformer_blocks.2.attn1.q_norm",
    ],
    f"{BLOCK}.2.scale_shift_table": ["diffusion_model.transformer_blocks.2.scale_shift_table"],
    "model.diffusion_model.av_ca_a2v_gate_adaln_single.linear.weight": [
        "transformer.av_cross_attn_video_a2v_gate.linear", "lora_unet_av_ca_a2v_gate_adaln_single_linear",
    ],
    "model.diffusion_model.adaln_single.emb.timestep_embedder.linear_1.weight": [
        "transformer.time_embed.emb.timestep_embedder.linear_1",
    ],
    CONNECTOR.format("video"): [
        "diffusion_model.video_embeddings_connector.transformer_1d_blocks.1.attn1.to_q",
        "connectors.video_connector.transformer_blocks.1.attn1.to_q",
        "lora_unet_embeddings_connector_transformer_1d_blocks_1_attn1_to_q",
    ],
    CONNECTOR.format("audio"): [
        "lora_unet_audio_embeddings_connector_transformer_1d_blocks_1_attn1_to_q",
        "connectors.audio_connector.transformer_blocks.1.attn1.to_q",
    ],
    "text_embedding_projection.aggregate_embed.weight": [
        "connectors.text_proj_in", "text_embedding_projection.aggregate_embed",
    ],
    f"{GEMMA}.self_attn.q_proj.weight": [
        "text_encoders.gemma3_12b.transformer.model.layers.5.self_attn.q_proj",
        "text_encoders.gemma3_12b.transformer.layers.5.self_attn.q_proj",
        "text_encoder.model.layers.5.self_attn.q_proj",
        "text_encoder.model.language_model.layers.5.self_attn.q_proj", "lora_te_model_layers_5_self_attn_q_proj",
        "lora_te1_layers_5_self_attn_q_proj", "base_model.model.model.language_model.layers.5.self_attn.q_proj",
        "language_model.model.layers.5.self_attn.q_proj", "lora_te_language_model_model_layers_5_self_attn_q_proj",
    ],
    f"{GEMMA}.mlp.up_proj.weight": ["text_encoders.gemma3_12b.transformer.model.layers.5.mlp.up_proj"],
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_read(name):
    for module in SPELLINGS[name]:
        assert target(module) == name, module


def test_biases_have_the_names_of_their_modules():
    assert target("lora_unet_proj_out", "bias") == "model.diffusion_model.proj_out.bias"
    assert target("diffusion_model.transformer_blocks.0.attn1.q_norm", "bias") is None


@pytest.mark.parametrize("module", [
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", "lora_unet_double_blocks_0_img_attn_qkv",
    "lora_te_text_model_encoder_layers_0_self_attn_q_proj", "diffusion_model.blocks.0.self_attn.q", "model", "",
])  # fmt: skip
def test_modules_of_other_families_are_none(module):
    assert target(module) is None
