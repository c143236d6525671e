"""Made checkpoints: the released counts, the same weights in both layouts, and diffusers loads them
strictly."""

import json
from collections import Counter
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ltx2rt.errors import InputError
from ltx2rt.instruments import filters
from ltx2rt.instruments.make import SINGLE_FILE, make_checkpoint, plan_checkpoint, tokenizer_json
from ltx2rt.stages.tokenizer import tokenize
from ltx2rt.weights.audit import audit, networks
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.configs import transformer
from ltx2rt.weights.files import TensorInfo
from ltx2rt.weights.lora.file import MergedSource, open_lora
from ltx2rt.weights.names import component_of
from ltx2rt.weights.presets import preset

TINY = ["tiny-2.0", "tiny-2.3", "tiny-2.5"]
GEMMA = "vision_ multi_modal_projector. audio_projector. model.vision_ model.embed_"
# what one layout of LTX-2.5 has and no network reads
UNLIKE = {"gemma": (*GEMMA.split(),), "diffusion_decoder": ("vae.encoder.", "vae.decoder.type_emb")}
LAYOUTS = ["official", "diffusers"]
RELEASED = {  # tensors and elements per component of the released files
    "ltx-2.0": {
        "transformer": (3510, 18_876_174_592), "text": (59, 1_431_475_200),
        "video_vae": (184, 1_222_479_857), "audio_vae": (102, 53_248_402), "vocoder": (194, 55_592_802),
    },
    "ltx-2.3": {
        "transformer": (4186, 18_988_838_144), "text": (262, 3_172_227_584),
        "video_vae": (170, 726_106_225), "audio_vae": (102, 53_248_402), "vocoder": (1227, 129_085_032),
    },
}  # fmt: skip


@pytest.mark.parametrize("name, total, tables, modules, upsampler", [
    ("ltx-2.0", 4049, 194, 1371, (73, 497_867_929)), ("ltx-2.3", 5947, 290, 1660, (72, 497_867_904)),
])  # fmt: skip
def test_full_size_manifest_equals_the_released_counts(name, total, tables, modules, upsampler):
    plan = plan_checkpoint(preset(name), name, "official")
    main = plan.tensors[f"{name}.safetensors"]
    assert len(main) == total
    found = dict.fromkeys(SINGLE_FILE, (0, 0))
    for key, tensor in main.items():
        count, elements = found[component_of(key)]
        found[component_of(key)] = (count + 1, elements + prod(tensor.info.shape))
    assert found == RELEASED[name]
    assert sum(tensor.info.dtype == np.float32 for tensor in main.values()) == tables
    lora = plan.tensors[f"{name}-distilled-lora.safetensors"]
    assert len(lora) == 2 * modules
    ranks = Counter(t.info.shape[0] for key, t in lora.items() if key.endswith("lora_A.weight"))
    # narrower layers: 8 of timesteps, 4 patch projections, 288 gates
    assert name == "ltx-2.0" or ranks == {384: 1360, 256: 8, 128: 4, 32: 288}
    x2 = plan.tensors[f"{name}-spatial-upsampler-x2.safetensors"]
    assert (len(x2), sum(prod(tensor.info.shape) for tensor in x2.values())) == upsampler
    text = make_checkpoint(name, "official", "nowhere", dry_run=True)
    assert f"{name}.safetensors: {total} tensors" in text
    assert f"  transformer: {found['transformer'][0]} tensors" in text


def test_full_size_component_files_are_those_of_the_release():
    """Tensors and bytes of LTX-2.5's files, less their headers of at most a megabyte."""
    name = "ltx-2.5"
    plan = plan_checkpoint(preset(name), name, "official")
    found = {path.removeprefix(f"{name}-"): tensors for path, tensors in plan.tensors.items()}
    sizes = {path: sum(t.info.nbytes for t in tensors.values()) for path, tensors in found.items()}
    released = {  # the text encoder with 32 MB of tokenizer, in place of a small one
        "transformer": (4349, 42.02e9), "text-encoder": (686, 26.3e9),
        "video-vae-conv": (170, 1_452_269_922), "video-vae": (396, 1_472_223_346),
        "audio-vae": (1329, 364_866_540), "spatial-upsampler-x2": (72, 995_778_752),
        "temporal-upsampler-x2": (72, 261_944_000), "distilled-lora": (3320, None),
        "duration-head": (15, 3.8e6),
    }  # fmt: skip
    counts = {path.removesuffix(".safetensors"): len(tensors) for path, tensors in found.items()}
    assert counts == {part: count for part, (count, _) in released.items()}
    for part, (_, size) in released.items():
        assert size is None or sizes[f"{part}.safetensors"] == pytest.approx(size, rel=0.003), part
    main = found["transformer.safetensors"]
    assert sum(tensor.info.dtype == np.float32 for tensor in main.values()) == 290
    own = {key: tensor for key, tensor in main.items() if component_of(key) == "transformer"}
    assert (len(own), sum(prod(t.info.shape) for t in own.values())) == (4091, 18_987_859_200)
    lora = found["distilled-lora.safetensors"]
    assert max(t.info.shape[0] for key, t in lora.items() if key.endswith("lora_A.weight")) == 450


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TINY)
def test_tiny_checkpoints_are_complete_and_small(tiny, name, layout):
    folder = tiny(name, layout)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 52_000_000
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layout == layout
    expected = preset(name).config
    assert replace(checkpoint.config, version=()) == replace(expected, version=())
    assert checkpoint.config.release.name == name[-3:]
    for component, shapes in networks(expected).items():
        if component == "transformer" and expected.transformer.keyframe_vector:
            shapes[transformer.KEYFRAME_VECTOR] = (1, expected.transformer.width)
        infos = {key: TensorInfo(shape, np.dtype(np.float32)) for key, shape in shapes.items()}
        audit(infos, checkpoint.source(component), "x")
    loras = [open_lora(checkpoint.distilled_lora())]
    merged = MergedSource(checkpoint.source("transformer"), loras, "bfloat16")
    shapes = networks(expected)["transformer"]
    total = sum(len(shape) == 2 and key.endswith("weight") for key, shape in shapes.items())
    assert merged.merges[0].line().startswith(f"merged {total}/{total} modules")
    assert merged.merges[0].skipped == (name == "tiny-2.0")


@pytest.mark.parametrize("name", TINY)
def test_both_layouts_hold_the_same_weights(tiny, name):
    official, diffusers = (open_checkpoint(tiny(name, layout)) for layout in LAYOUTS)
    assert official.sources.keys() == diffusers.sources.keys()
    for component in official.sources:
        ours, theirs = official.source(component), diffusers.source(component)
        unlike = UNLIKE.get(component, ()) if name == "tiny-2.5" else ()
        keys = {key for key in ours.names() if not key.startswith(unlike)}
        assert keys == {key for key in theirs.names() if not key.startswith(unlike)}
        for key in keys:
            assert ours.info(key) == theirs.info(key)
            np.testing.assert_array_equal(ours.read(key), theirs.read(key))


def test_the_seed_decides_every_random_tensor(tiny, tmp_path):
    make_checkpoint("tiny-2.3", "official", tmp_path / "same")
    make_checkpoint("tiny-2.3", "official", tmp_path / "other", seed=1)
    for path in sorted(tiny("tiny-2.3", "official").rglob("*.*")):
        relative = path.relative_to(tiny("tiny-2.3", "official"))
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "same" / relative).read_bytes(), relative
    a, b = (open_checkpoint(tmp_path / which).source("transformer") for which in ("same", "other"))
    assert not [key for key in a.names() if np.array_equal(a.read(key), b.read(key))]


@pytest.mark.parametrize("name", TINY)
def test_no_tensor_is_zero_or_extreme(tiny, name):
    checkpoint = open_checkpoint(tiny(name, "official"))
    for source in checkpoint.sources.values():
        for key in source.names():
            array = source.read(key).astype(np.float32)
            assert np.isfinite(array).all() and 0 < np.abs(array).max() < 8, key


@pytest.mark.parametrize("name", TINY)
def test_diffusers_loads_every_folder_strictly(tiny, name):
    """The oracle for configs and names: no missing, unexpected or misshapen key in any network."""
    import diffusers
    import transformers
    from diffusers.pipelines import ltx2
    from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    folder = tiny(name, "diffusers")
    models = {
        "transformer": diffusers.LTX2VideoTransformer3DModel,
        "connectors": ltx2.LTX2TextConnectors,
        "vae": diffusers.AutoencoderKLLTX2Video,
        "audio_vae": diffusers.AutoencoderKLLTX2Audio,
        "vocoder": ltx2.LTX2Vocoder if name.endswith("2.0") else ltx2.LTX2VocoderWithBWE,
        "latent_upsampler": LTX2LatentUpsamplerModel,
        "text_encoder": transformers.Gemma3ForConditionalGeneration,
    }
    if name == "tiny-2.5":
        models["diffusion_decoder"] = diffusers.LTX2VideoDiffusionDecoderModel
        models["text_encoder"] = transformers.Gemma4UnifiedForConditionalGeneration
        models["duration_head"] = LTX2DurationHead
        models["latent_upsampler_temporal"] = LTX2LatentUpsamplerModel
    for part, model in models.items():
        how = {"output_loading_info": True, "dtype": torch.float32}
        loaded, info = model.from_pretrained(folder / part, **how)
        wrong = [info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")]
        assert not any(wrong), (part, info)
        if part != "text_encoder":
            ours = json.loads((folder / part / "config.json").read_text())
            defaults = {key for key in loaded.config if key not in ours and not key.startswith("_")}
            assert not defaults & {"rope_type", "decoder_causal", "final_act_fn", "upsample_factor"}


def test_the_diffusers_pipeline_opens_the_folder(tiny):
    from diffusers import LTX2Pipeline

    folder = tiny("tiny-2.3", "diffusers")
    pipe = LTX2Pipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    prompts = ["a robot dancing in the rain", "Émile!"]
    how = {"padding": "max_length", "max_length": 64, "truncation": True}
    theirs = pipe.tokenizer(prompts, return_tensors="np", **how)
    ids, mask = tokenize(folder / "tokenizer" / "tokenizer.json", prompts, 64)
    np.testing.assert_array_equal(ids, theirs.input_ids)
    np.testing.assert_array_equal(mask, theirs.attention_mask)


def test_tokenizer_fits_the_vocabulary_and_is_the_same_every_time():
    config = preset("tiny-2.3").config.gemma
    text = tokenizer_json(config)
    assert max(json.loads(text)["model"]["vocab"].values()) < config.vocab_size
    assert tokenizer_json(config) == text


def test_filters_have_the_documented_values():
    taps = [0.00202896, 0.00938947, -0.02554346, -0.05765738, 0.12857258, 0.44320980]
    # eight printed digits
    np.testing.assert_allclose(filters.antialias_taps(), taps + taps[::-1], atol=1e-7)
    spectrum = filters.stft_basis(512)[:, 0] @ np.sin(2 * np.pi * 40 * np.arange(512) / 512)
    assert np.hypot(spectrum[:257], spectrum[257:]).argmax() == 40


def test_bad_requests_are_refused(tiny, tmp_path):
    made = tiny("tiny-2.3", "official")
    (tmp_path / "other.safetensors").write_bytes(b"")
    for arguments, says in [
        (("tiny-2.4", "official", tmp_path), "unknown preset"),
        (("tiny-2.3", "comfy", tmp_path), "unknown layout"),
        (("tiny-2.3", "official", tmp_path, -1), "negative"),
        (("tiny-2.3", "official", made), "exists"),
        (("tiny-2.3", "official", made / "tiny-2.3.safetensors" / "x"), "is a file"),
        (("tiny-2.3", "official", tmp_path),
         r"holds files of another model, such as other\.safetensors; pass an empty"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=says):
            make_checkpoint(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["other.safetensors"]


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(InputError, match=r"needs 79\.1 GB, 0\.0 GB are free"):
        make_checkpoint("ltx-2.3", "official", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_empty_checkpoint_has_headers_and_a_tokenizer(tmp_path):
    make_checkpoint("tiny-2.5", "official", tmp_path, empty=True)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == preset("tiny-2.5").config
    assert tokenize(checkpoint.require_tokenizer(), ["a robot"], 8)[1].sum() > 1


def test_full_size_sums_are_the_published_ones():
    """Of LTX-2.5's four main files, and of the transformer in LTX-2.0's index (all in bfloat16)."""
    plan = plan_checkpoint(preset("ltx-2.5"), "ltx-2.5", "official")
    main = ("transformer", "text-encoder", "video-vae", "audio-vae")
    infos = [t.info for name in main for t in plan.tensors[f"ltx-2.5-{name}.safetensors"].values()]
    count = Counter[str]()
    for info in infos:
        count[str(info.dtype)] += prod(info.shape)
    assert round(count["bfloat16"] / 1e9, 2) == 35.03
    assert count["float32"] == pytest.approx(4.73e6, rel=0.004)  # 15,216 numbers more
    tokenizer = 32.19e6 - count["uint8"]  # here a small one
    assert round((sum(info.nbytes for info in infos) + tokenizer) / 1e9, 2) == 70.12
    older = plan_checkpoint(preset("ltx-2.0"), "ltx-2.0", "diffusers")
    transformer = older.tensors["transformer/diffusion_pytorch_model.safetensors"].values()
    assert 2 * sum(prod(tensor.info.shape) for tensor in transformer) == 37_752_349_184
