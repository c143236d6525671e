"""Opening checkpoints: parts are found by content, and whatever does not fit is refused."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.stages.frames import video_decoder
from ltx2rt.weights.audit import audit, networks
from ltx2rt.weights.checkpoint import Asset, open_checkpoint
from ltx2rt.weights.files import (
    DTYPES,
    TensorFile,
    TensorFolder,
    TensorInfo,
    open_tensors,
    write_arrays,
)
from ltx2rt.weights.lora.file import check_lora, open_lora
from ltx2rt.weights.presets import preset
from tests.conftest import refused
from tests.gguf_files import arrays_of, linked

MAIN, UP = "tiny-2.3.safetensors", "tiny-2.3-spatial-upsampler-x2.safetensors"
LORA = "tiny-2.3-distilled-lora.safetensors"
F32 = np.dtype(np.float32)
FLAGS = ((UP, "--upsampler"), ("gemma-3", "--text-encoder"), (LORA, "--distilled-lora"))


@pytest.fixture
def official(tiny, tmp_path):
    return linked(tiny("tiny-2.3", "official"), tmp_path / "official")


@pytest.fixture
def diffusers(tiny, tmp_path):
    return linked(tiny("tiny-2.3", "diffusers"), tmp_path / "diffusers")


def rewrite(path: Path, rename=str, metadata=None, **extra):
    """Replace a safetensors file by a changed copy."""
    arrays = {rename(name): array for name, array in arrays_of(path).items()}
    metadata = TensorFile(path).metadata if metadata is None else metadata
    write_arrays(path, arrays | extra, metadata)


def edit(path: Path, **keys):
    """Replace a JSON file by one with other keys."""
    text = json.dumps(json.loads(path.read_text()) | keys)
    path.unlink()
    path.write_text(text)


def test_a_file_finds_its_parts_beside_it(official):
    checkpoint = open_checkpoint(official / MAIN)
    assert {"gemma", "upsampler"} <= checkpoint.sources.keys()
    assert checkpoint.tokenizer == official / "gemma-3" / "tokenizer.json"
    assert checkpoint.loras_found == (official / LORA,)
    assert checkpoint.config.version == (2, 3, 0)


@pytest.mark.parametrize("layout", ["official", pytest.param("diffusers", marks=pytest.mark.long)])
def test_upsamplers_are_told_apart(tiny, tmp_path, layout):
    """An x1.5 one beside the x2 one is no second candidate: it is used where it is named."""
    folder = linked(tiny("tiny-2.3", layout), tmp_path / layout)
    for kind in ("x1.5", "temporal"):
        make_checkpoint("tiny-2.3", layout, tmp_path / kind, upsampler=kind)
        names = "latent_upsampler" if layout == "diffusers" else "*upsampler*"
        made = next((tmp_path / kind).glob(names))
        (folder / f"{kind}.safetensors").symlink_to(made)
    x15, temporal = (folder / f"{kind}.safetensors" for kind in ("x1.5", "temporal"))
    found = open_checkpoint(folder)
    assert found.config.upsampler.kind == "x2 spatial"
    assert found.config.part("temporal_upsampler").kind == "x2 temporal"
    assert open_checkpoint(folder, upsampler=x15).config.upsampler.kind == "x1.5 spatial"
    # A stage refuses it, `probe` runs it.
    assert open_checkpoint(folder, upsampler=temporal).config.upsampler.temporal
    for checkpoint in (found, open_checkpoint(folder, upsampler=x15)):
        shapes = networks(checkpoint.config)
        for part in ("upsampler", "temporal_upsampler"):
            parameters = {name: TensorInfo(shape, F32) for name, shape in shapes[part].items()}
            audit(parameters, checkpoint.source(part), part)
    with refused(r"--temporal-upsampler: .*x1\.5 spatial.*expected a temporal one"):
        open_checkpoint(folder, temporal_upsampler=x15)
    (folder / "again.safetensors").symlink_to(temporal)
    with refused(r"2 candidates for the x2 temporal upsampler.*--temporal-upsampler"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("part", "flag"), FLAGS)
def test_two_candidates_name_the_flag_that_decides(official, part, flag):
    second = official / f"second-{part}"
    copy = shutil.copytree if (official / part).is_dir() else shutil.copy
    copy(official / part, second)
    with refused(rf"2 candidates.*{flag}"):
        open_checkpoint(official).distilled_lora()
    chosen = {"text_encoder": official / "gemma-3", "upsampler": official / UP}
    assert len(open_checkpoint(official, **chosen).sources) == 7


def test_a_pointer_in_place_of_a_part_is_named(official):
    for part in (UP, MAIN):
        (official / part).unlink()
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        (official / part).write_text(pointer)
        if part == UP:
            with refused(r"--upsampler; not readable: .*git-lfs"):
                open_checkpoint(official).source("upsampler")
    with refused("git-lfs pointer"):
        open_checkpoint(official)


def test_what_is_no_checkpoint_is_refused(official, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, says in [
        (tmp_path / "nothing", "no such file"),
        (tmp_path / "empty", "no checkpoint.*nothing of LTX-2"),
        (official / "gemma-3", "Gemma folder, which --text-encoder takes"),
        (official / UP, "it is a x2 spatial upsampler"),
        (official / LORA, "it is a LoRA"),
        (official / "gemma-3" / "model.safetensors", "no LTX-2 checkpoint"),
    ]:
        with refused(says):
            open_checkpoint(path)
    for arguments, says in [
        ({"text_encoder": tmp_path}, "no Gemma folder"),
        ({"upsampler": official / LORA}, "no latent upsampler"),
        ({"upsampler": official / "gemma-3"}, "no latent upsampler folder"),
    ]:
        with refused(says):
            open_checkpoint(official, **arguments)


def test_damaged_metadata_and_later_generations_are_refused(official):
    expected, original = open_checkpoint(official).config, TensorFile(official / MAIN).metadata
    silent = json.loads(original["config"]) | {"vocoder": None}
    for metadata, says in [
        ({"config": "{"}, "not valid JSON"),
        ({"config": "[]"}, "expected a JSON object"),
        ({"config": "{}"}, "required key transformer is absent|required key audio_vae is absent"),
        (original | {"gemma_source_checkpoint": "{}"}, "required key gemma_version is absent"),
        (original | {"config": json.dumps(silent)}, "required key vocoder is absent"),
    ]:
        rewrite(official / MAIN, metadata=metadata)
        with refused(says):
            open_checkpoint(official)
    rewrite(official / MAIN, metadata={})  # names and shapes tell the release
    assert open_checkpoint(official).config == expected


def test_a_tensor_of_no_component_is_refused(official):
    rewrite(official / MAIN, **{"duration_head.0.weight": np.ones(2, F32)})
    with refused(r"1 tensor belongs to no component: duration_head\.\*\.weight"):
        open_checkpoint(official)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_gemma_folders_of_every_spelling_open(official, prefix):
    before = set(open_checkpoint(official).source("gemma").names())
    path = official / "gemma-3" / "model.safetensors"
    rewrite(path, rename=lambda name: name.replace("language_model.model.", prefix))
    assert set(open_checkpoint(official).source("gemma").names()) == before


def test_a_diffusers_folder_is_read_by_config_not_by_name(diffusers):
    (diffusers / "transformer").rename(diffusers / "anything")
    (diffusers / "model_index.json").unlink()
    assert open_checkpoint(diffusers).layout == "diffusers"
    (diffusers / "vae" / "config.json").unlink()
    with refused("video VAE was found"):
        open_checkpoint(diffusers)


def test_both_layouts_in_one_folder_are_ambiguous(official, diffusers):
    (diffusers / MAIN).symlink_to(official / MAIN)
    says = r"2 candidates for the checkpoint: .*tiny-2\.3\.safetensors, .*model_index\.json;"
    with refused(says):
        open_checkpoint(diffusers)
    assert open_checkpoint(diffusers / MAIN).layout == "official"
    assert open_checkpoint(diffusers / "model_index.json").layout == "diffusers"


@pytest.mark.parametrize(("name", "other"), [("tiny-2.3", "tiny-2.0"), ("tiny-2.0", "tiny-2.3")])
def test_connectors_of_another_generation_are_refused(tiny, tmp_path, name, other):
    folder = linked(tiny(name, "diffusers"), tmp_path / "mixed")
    shutil.rmtree(folder / "connectors")
    shutil.copytree(tiny(other, "diffusers") / "connectors", folder / "connectors")
    with refused(r"connectors.*another generation|video_hidden_dim"):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["I8", "U8"])
def test_a_quantised_file_without_known_scales_is_refused_when_it_is_opened(official, dtype):
    name = "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"
    changed = {name: np.zeros((128, 128), DTYPES[dtype])}
    rewrite(official / MAIN, **changed | ({f"{name}_scale": F32.type(0)} if dtype == "U8" else {}))
    with refused(r"1 tensor is .* without the scales.*bfloat16 file.*--weights-dtype float8"):
        open_checkpoint(official)


def camera_control(path: Path, checkpoint, rank: int, kinds: str) -> None:
    """A LoRA of another kind: of the modules that match, at this rank."""
    arrays, source = {}, checkpoint.source("transformer")
    for name in source.names():
        shape = source.info(name).shape
        if re.search(kinds, name) and len(shape) == 2:
            module = name.removeprefix("model.").removesuffix(".weight")
            arrays[f"{module}.lora_A.weight"] = np.ones((rank, shape[1]), F32)
            arrays[f"{module}.lora_B.weight"] = np.ones((shape[0], rank), F32)
    write_arrays(path, arrays)


@pytest.mark.parametrize(
    ("rank", "kinds"),
    [(8, r"\d\.attn[12]\.to_"), (8, r"attn.*\.to_"), (2, r"weight$")],
    ids=["video attention", "all attention", "everything at a small rank"],
)
def test_a_lora_is_not_the_distilled_one_because_it_is_alone(official, rank, kinds):
    (official / LORA).rename(official / "distilled")
    camera = official / "ltx-2-19b-distilled-lora-384.safetensors"  # its name says what it is not
    camera_control(camera, open_checkpoint(official), rank, kinds)
    with refused(rf"no LoRA.*distilled.*{camera.name}.*--distilled-lora"):
        open_checkpoint(official).distilled_lora()
    (official / "distilled").rename(official / "another-name.safetensors")
    assert open_checkpoint(official).distilled_lora().name == "another-name.safetensors"


def test_a_pipe_in_the_folder_does_not_hang(official):
    os.mkfifo(official / "pipe.safetensors")
    (unreadable,) = open_checkpoint(official).unreadable
    assert "pipe.safetensors: not a regular file" in unreadable


# ---- audit ---------------------------------------------------------------------------------------

PARAMETERS = {f"model.diffusion_model.transformer_blocks.{i}.{name}.weight": TensorInfo((4, 3), F32)
              for i in range(3) for name in ("attn1.to_q", "attn1.to_k", "ff.net.2")}  # fmt: skip


def header(infos):
    """A source that has names and shapes only: an audit must not read data."""
    return SimpleNamespace(names=infos.keys, info=infos.__getitem__)


def test_an_exact_source_passes_and_known_unused_tensors_are_no_matter():
    statistics = ("channel", "mean-of-stds_over_std-of-means")
    unused = [f"vae.per_channel_statistics.{name}" for name in statistics]
    unused += ["lm_head.weight", "language_model.lm_head.weight"]
    unused += ["vision_tower.encoder.layers.0.mlp.fc1.bias"]
    unused += ["vocoder.mel_stft.stft_fn.inverse_basis", "upsampler.blur_down.kernel"]
    unused += ["vae.encoder.conv_in.conv.weight"]  # the other half: no parameter is of the encoder
    audit(PARAMETERS, header(PARAMETERS | {name: TensorInfo((1,), F32) for name in unused}), "x")


def test_the_error_collapses_layers_and_offers_the_nearest_name():
    infos = {name.replace("to_q", "to_query"): info for name, info in PARAMETERS.items()}
    stem = "model.diffusion_model.transformer_blocks.*.attn1.to_q"
    says = f"m.safetensors: 3 parameters have no tensor: {stem}.weight (3) (nearest in the file: "
    with refused(f"^{re.escape(says)}{re.escape(stem)}uery.weight.*$"):
        audit(PARAMETERS, header(infos), "m.safetensors")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(PARAMETERS)),
    change=st.sampled_from(["missing", "extra", "misshapen"]),
    data=st.data(),
)
def test_every_missing_extra_or_misshapen_tensor_is_refused(name, change, data):
    infos = dict(PARAMETERS)
    if change == "missing":
        del infos[name]
    elif change == "extra":
        infos[name + data.draw(st.text("abc.", min_size=1, max_size=5))] = TensorInfo((1,), F32)
    else:
        shape = data.draw(st.lists(st.integers(1, 5), max_size=3).filter(lambda s: s != [4, 3]))
        infos[name] = TensorInfo(tuple(shape), F32)
    with refused("^x: "):
        audit(PARAMETERS, header(infos), "x")


def test_an_upsampler_for_other_latents_is_refused(official):
    sizes = {"initial_conv": (32, 16, 3), "final_conv": (16, 32, 3), "upsampler.0": (128, 32, 3, 3)}
    arrays = {f"{name}.weight": np.ones(size, F32) for name, size in sizes.items()}
    config = json.loads(TensorFile(official / UP).metadata["config"]) | {"in_channels": 16}
    write_arrays(official / "other.safetensors", arrays, {"config": json.dumps(config)})
    with refused(r"16 channels.*128"):
        open_checkpoint(official, upsampler=official / "other.safetensors")


# ---- LTX-2.5: a file for each part ---------------------------------------------------------------

FOUND = {
    "transformer", "text", "gemma", "video_vae", "audio_vae", "vocoder", "upsampler",
    "temporal_upsampler", "duration_head", "diffusion_decoder",
}  # fmt: skip


def part(folder: Path, name: str) -> Path:
    return folder / f"tiny-2.5-{name}.safetensors"


def without(keys, gone: str):
    return {key: value for key, value in keys.items() if key != gone}


@pytest.fixture
def parts(tiny, tmp_path):
    return linked(tiny("tiny-2.5", "official"), tmp_path / "parts")


def test_parts_in_files_of_their_own_are_told_by_their_headers(parts):
    expected = preset("tiny-2.5").config
    for i, path in enumerate(sorted(parts.iterdir())):
        path.rename(parts / f"{i}.safetensors")
    checkpoint = open_checkpoint(parts)
    assert checkpoint.config == expected and checkpoint.sources.keys() == FOUND
    assert checkpoint.config.release.name == "2.5"
    assert video_decoder(checkpoint.config, None) == "diffusion"
    assert checkpoint.distilled_lora() in checkpoint.loras_found
    assert isinstance(checkpoint.tokenizer, Asset) and b"<bos>" in checkpoint.tokenizer.read_bytes()
    assert len(list(checkpoint.source("text").names())) == 66 + 4


def test_every_part_may_be_named_by_its_flag(parts, tmp_path):
    flags = {
        "text_encoder": "text-encoder", "video_vae": "video-vae-conv", "audio_vae": "audio-vae",
        "upsampler": "spatial-upsampler-x2", "temporal_upsampler": "temporal-upsampler-x2",
        "duration_head": "duration-head",
    }  # fmt: skip
    alone = tmp_path / "alone" / "deep"
    alone.mkdir(parents=True)
    main = alone / "x.safetensors"
    part(parts, "transformer").rename(main)
    given = {flag: part(parts, name) for flag, name in flags.items()}
    assert open_checkpoint(main, **given).sources.keys() == FOUND - {"diffusion_decoder"}
    for flag, what in {"text_encoder": "text encoder", "video_vae": "video VAE", "audio_vae": "audio VAE",
                       "upsampler": "", "temporal_upsampler": "", "duration_head": ""}.items():  # fmt: skip
        rest = {name: path for name, path in given.items() if name != flag}
        found = f"no {what} was found; pass one with " if what else ""
        with refused(f"{found}--{flag.replace('_', '-')}"):
            open_checkpoint(main, **rest).source(flag)
    with refused(r"no video VAE \(it is a duration head\); pass one with --video-vae"):
        open_checkpoint(main, **given | {"video_vae": given["duration_head"]})
    with refused("--video-decoder: diffusion, but no video VAE with that decoder"):
        video_decoder(open_checkpoint(main, **given).config, "diffusion")


def test_one_file_with_the_whole_model_and_a_gemma_folder(parts, tiny, tmp_path):
    """As older releases come, the names of the video VAE prefixed; one that is named takes its
    place."""
    kinds = ("transformer", "video-vae-conv", "audio-vae", "text-encoder")
    config, arrays = {}, {}
    for kind in kinds:
        file = TensorFile(part(parts, kind))
        own = json.loads(file.metadata.get("config", "{}"))
        config |= {key: value for key, value in own.items() if value is not None}
        prefix = "vae." if kind == "video-vae-conv" else ""
        start = "text_embedding_projection." if kind == "text-encoder" else ""
        found = arrays_of(file.path, lambda name, start=start: name.startswith(start))
        arrays |= {prefix + name: array for name, array in found.items()}
    folder = linked(tiny("tiny-2.5", "diffusers") / "text_encoder", tmp_path / "whole" / "gemma")
    metadata = TensorFile(part(parts, "transformer")).metadata | {"config": json.dumps(config)}
    write_arrays(tmp_path / "whole" / "model.safetensors", arrays, metadata)
    with refused(r"gemma_version None.*'gemma4-tiny-2\.5'.*--text-encoder"):
        open_checkpoint(tmp_path / "whole")
    edit(folder / "config.json", gemma_version="gemma4-tiny-2.5")
    checkpoint = open_checkpoint(tmp_path / "whole")
    apart = {"upsampler", "temporal_upsampler", "duration_head", "diffusion_decoder"}
    assert checkpoint.sources.keys() == FOUND - apart
    assert checkpoint.source("video_vae").where == tmp_path / "whole" / "model.safetensors"
    named = open_checkpoint(tmp_path / "whole", video_vae=part(parts, "video-vae-conv"))
    assert named.source("video_vae").where == part(parts, "video-vae-conv")
    own, other = (set(found.source("video_vae").names()) for found in (checkpoint, named))
    assert own == other


@pytest.mark.parametrize("source, own, says", [
    ("gemma4-other", "gemma4-tiny-2.5",
     r"gemma_version 'gemma4-tiny-2\.5'.*'gemma4-other'.*--text-encoder"),
    ("gemma4-tiny-2.5", None, r"gemma_version None.*'gemma4-tiny-2\.5'"),
    (None, "gemma4-tiny-2.5", "names none; pass the original files of one release"),
    (None, None, None),
])  # fmt: skip
def test_a_text_encoder_of_another_release_is_refused(parts, capsys, source, own, says):
    main, text = TensorFile(part(parts, "transformer")), TensorFile(part(parts, "text-encoder"))
    stated = {"gemma_source_checkpoint": json.dumps({"gemma_version": source})} if source else {}
    rewrite(main.path, metadata=without(main.metadata, "gemma_source_checkpoint") | stated)
    config = without(json.loads(text.metadata["gemma_config"]), "gemma_version")
    config |= {"gemma_version": own} if own else {}
    rewrite(text.path, metadata=text.metadata | {"gemma_config": json.dumps(config)})
    if says is None:
        open_checkpoint(parts)
        assert "whether they fit is not known" in capsys.readouterr().err
        return
    with refused(says):
        open_checkpoint(parts)


def test_gemma_4_is_refused_where_it_does_not_belong(parts, official, tiny):
    stock = tiny("tiny-2.5", "diffusers") / "text_encoder"
    path = part(parts, "transformer")
    rewrite(path, metadata=without(TensorFile(path).metadata, "gemma_source_checkpoint"))
    with refused(r"without LTX-2\.5's text projection.*--text-encoder"):
        open_checkpoint(parts, text_encoder=stock)
    with refused(r"model_type 'gemma4_unified', but LTX-2\.3\.0 was trained with Gemma 3"):
        open_checkpoint(official, text_encoder=stock)
    rewrite(part(parts, "text-encoder"), metadata={})
    with refused("has no `gemma_config`"):
        open_checkpoint(parts)


def test_files_of_another_release_are_refused(parts, official):
    with refused(r"states no model_version beside LTX-2\.5\.0.*--upsampler"):
        open_checkpoint(parts, upsampler=official / UP)
    with refused(r"of LTX-2\.5\.0 beside LTX-2\.3\.0.*--upsampler"):
        open_checkpoint(official, upsampler=part(parts, "spatial-upsampler-x2"))
    for lora, model, says in [
        (official / LORA, parts, r"a LoRA of LTX-2\.3\.0, the model is LTX-2\.5\.0"),
        (part(parts, "distilled-lora"), official,
         r"a LoRA of LTX-2\.5\.0, the model is LTX-2\.3\.0"),
    ]:  # fmt: skip
        with refused(says):
            check_lora(open_lora(lora), open_checkpoint(model).config.version)


def test_the_version_that_decides_is_the_transformers_and_of_images_the_video_vaes(parts):
    assert open_checkpoint(parts).config.image_crf == 18
    file = TensorFile(part(parts, "video-vae-conv"))
    rewrite(file.path, metadata=file.metadata | {"model_version": "2.3.0"})
    config = open_checkpoint(parts).config
    assert config.version == (2, 5, 0) and config.image_crf == 33


def test_a_diffusers_folder_runs_what_its_index_lists_or_the_transformer_that_is_named(
    tiny, tmp_path
):
    folder = linked(tiny("tiny-2.5", "diffusers"), tmp_path / "diffusers")
    linked(folder / "transformer", folder / "transformer_full")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.source("transformer").where == folder / "transformer"
    assert checkpoint.config.release.name == "2.5" and checkpoint.config.image_crf == 18
    full = open_checkpoint(folder / "transformer_full")
    assert full.source("transformer").where == folder / "transformer_full"
    assert full.sources.keys() == checkpoint.sources.keys() == FOUND
    (folder / "model_index.json").unlink()
    with refused("2 candidates for the transformer"):
        open_checkpoint(folder)  # its scheduler says that the other is dev, too


def test_either_video_vae_will_do_and_the_decoder_is_chosen(parts):
    """Both files hold the same encoder; the diffusion one has no convolutional decoder."""
    both = open_checkpoint(parts)
    chosen = [video_decoder(both.config, asked) for asked in (None, "conv", "diffusion")]
    assert chosen == ["diffusion", "conv", "diffusion"]
    part(parts, "video-vae-conv").unlink()
    alone = open_checkpoint(parts)
    vae = both.config.video_vae
    assert replace(alone.config.video_vae, decoder=vae.decoder) == vae
    assert alone.config.image_crf == 18 and video_decoder(alone.config, None) == "diffusion"
    with refused(r"--video-decoder: conv, but no video VAE with that decoder.*--video-vae"):
        video_decoder(alone.config, "conv")
    key = "vae.encoder.conv_in.conv.weight"
    first, second = (one.source("video_vae").read(key) for one in (alone, both))
    np.testing.assert_array_equal(first, second)
    for checkpoint in (both, alone):
        shapes = networks(both.config)["diffusion_decoder"]
        parameters = {name: TensorInfo(shape, F32) for name, shape in shapes.items()}
        audit(parameters, checkpoint.source("diffusion_decoder"), "x")


def test_a_shard_that_is_cut_short_is_named_and_the_others_are_no_models(tmp_path):
    linked(Path(__file__).parents[2] / "examples" / "tiny-trained", tmp_path)
    assert open_checkpoint(tmp_path).layout == "official"
    shard = sorted(tmp_path.glob("*-of-*.safetensors"))[1]
    cut = shard.read_bytes()[:-1]
    shard.unlink()
    with refused(shard.name):
        open_checkpoint(tmp_path)
    shard.write_bytes(cut)
    with refused(f"{shard.name}: truncated"):
        open_checkpoint(tmp_path)


def test_a_part_of_either_layout_takes_the_place_of_the_checkpoints(tiny, official, diffusers):
    """A folder, a file in it, the whole model, or a complete file; the vocoder comes along."""
    expected = open_checkpoint(official)
    file = diffusers / "vae" / "diffusion_pytorch_model.safetensors"
    for video, audio in ((diffusers / "vae", diffusers / "audio_vae"), (file, diffusers)):
        found = open_checkpoint(official, video_vae=video, audio_vae=audio)
        assert found.config == expected.config
        places = [found.source(part).where for part in ("video_vae", "audio_vae", "vocoder")]
        assert places == [diffusers / name for name in ("vae", "audio_vae", "vocoder")]
    found = open_checkpoint(diffusers, video_vae=official / MAIN)
    assert found.source("video_vae").where == official / MAIN
    assert found.source("vocoder").where == diffusers / "vocoder"
    one = open_checkpoint(diffusers / "transformer" / "diffusion_pytorch_model.safetensors")
    assert one.sources.keys() == open_checkpoint(diffusers).sources.keys()
    with refused("no video VAE folder; pass one, or a file"):
        open_checkpoint(official, video_vae=diffusers / "connectors")


STEM = "diffusion_pytorch_model"
# As three versions of diffusers have named it, and none.
INDICES = ("safetensors.index.bf16.json", "bf16.safetensors.index.json",
           "safetensors.bf16.index.json", "")  # fmt: skip


@pytest.mark.parametrize("index", INDICES)
def test_variants_and_their_shards_are_read(diffusers, index):
    """Hidden files are passed over, and of several variants the plain one is read."""
    folder = diffusers / "transformer"
    whole, expected = folder / f"{STEM}.safetensors", open_checkpoint(diffusers)
    arrays, home = arrays_of(whole), {}
    names = [f"{STEM}{'.bf16' if index else ''}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        own = sorted(arrays)[i::2]
        write_arrays(folder / name, {tensor: arrays[tensor] for tensor in own})
        home |= dict.fromkeys(own, name)
    if index:
        (folder / f"{STEM}.{index}").write_text(json.dumps({"weight_map": home}))
    for hidden in (f"._{whole.name}", ".DS_Store", f"._{STEM}.safetensors.index.json"):
        (folder / hidden).write_bytes(b"\0\5\x16\7")
    (diffusers / ".ipynb_checkpoints").mkdir()
    if index:
        assert TensorFolder not in {type(open_tensors(folder))}
        write_arrays(folder / f"{STEM}.fp16.safetensors", {"x": np.ones(2, np.float16)})
    whole.unlink()
    found = open_checkpoint(diffusers)
    assert found.config == expected.config and not found.unreadable
    assert {*found.source("transformer").names()} == {*expected.source("transformer").names()}
    (folder / names[1]).unlink()
    with refused(r"00002-of-00002|1 of 2 shards"):
        open_checkpoint(diffusers)
