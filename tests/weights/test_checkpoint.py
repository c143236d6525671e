"""Opening checkpoints: parts are found by content, and whatever does not fit is refused with one InputError."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ltx2rt.errors import InputError
from ltx2rt.weights.checkpoint import audit, open_checkpoint
from ltx2rt.weights.files import DTYPES, TensorFile, TensorInfo, write_arrays, write_tensors

MAIN, UP, LORA = (
    "tiny-2.3.safetensors",
    "tiny-2.3-spatial-upsampler-x2.safetensors",
    "tiny-2.3-distilled-lora.safetensors",
)
F32 = np.dtype(np.float32)


def link(folder: Path, target: Path) -> Path:
    """The same checkpoint in a folder whose entries can be replaced one by one."""
    for path in sorted(folder.rglob("*")):
        copy = target / path.relative_to(folder)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path)
    return target


@pytest.fixture
def official(tiny, tmp_path):
    return link(tiny("tiny-2.3", "official"), tmp_path / "official")


@pytest.fixture
def diffusers(tiny, tmp_path):
    return link(tiny("tiny-2.3", "diffusers"), tmp_path / "diffusers")


def rewrite(path: Path, rename=lambda name: name, drop=(), metadata=None, extra=None):
    """Replace a safetensors file by a changed copy."""
    file = TensorFile(path)
    stored = {rename(name): name for name in file.names() if name not in drop}
    infos = {new: file.info(old) for new, old in stored.items()} | (extra or {})
    new_metadata = file.metadata if metadata is None else metadata
    write_tensors(
        path, infos, lambda n: file.read(stored[n]) if n in stored else np.ones(infos[n].shape, F32), new_metadata
    )


def test_a_file_finds_its_parts_beside_it(official):
    checkpoint = open_checkpoint(official / MAIN)
    assert {"gemma", "upsampler"} <= checkpoint.sources.keys()
    assert checkpoint.tokenizer_path == official / "gemma-3" / "tokenizer.json"
    assert checkpoint.loras_found == (official / LORA,)
    assert checkpoint.config.version == (2, 3, 0)


def test_names_of_files_do_not_matter(official):
    (official / MAIN).rename(official / "a.safetensors")
    (official / UP).rename(official / "b.safetensors")
    (official / LORA).rename(official / "c.safetensors")
    (official / "gemma-3").rename(official / "d")
    checkpoint = open_checkpoint(official)
    assert len(checkpoint.sources) == 7 and checkpoint.distilled_lora().name == "c.safetensors"


@pytest.mark.parametrize(
    ("part", "flag"), [(UP, "--upsampler"), ("gemma-3", "--text-encoder"), (LORA, "--distilled-lora")]
)
def test_two_candidates_name_the_flag_that_decides(official, part, flag):
    second = official / f"second-{part}"
    shutil.copytree(official / part, second) if (official / part).is_dir() else shutil.copy(official / part, second)
    with pytest.raises(InputError, match=rf"2 candidates.*{flag}"):
        open_checkpoint(official).distilled_lora()
    chosen = {"text_encoder": official / "gemma-3", "upsampler": official / UP}
    assert len(open_checkpoint(official, **chosen).sources) == 7


@pytest.mark.parametrize(
    ("part", "flag"), [(UP, "--upsampler"), ("gemma-3", "--text-encoder"), (LORA, "--distilled-lora")]
)
def test_a_missing_part_is_asked_for_only_when_needed(official, part, flag):
    (shutil.rmtree if (official / part).is_dir() else Path.unlink)(official / part)
    checkpoint = open_checkpoint(official)
    with pytest.raises(InputError, match=flag):
        checkpoint.source("gemma")
        checkpoint.source("upsampler")
        checkpoint.distilled_lora()


def test_a_pointer_in_place_of_a_part_is_named(official):
    for part in (UP, MAIN):
        (official / part).unlink()
        (official / part).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        if part == UP:
            with pytest.raises(InputError, match=r"--upsampler; not readable: .*git-lfs"):
                open_checkpoint(official).source("upsampler")
    with pytest.raises(InputError, match="git-lfs pointer"):
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
        with pytest.raises(InputError, match=says):
            open_checkpoint(path)
    for arguments, says in [
        ({"text_encoder": official}, "no Gemma folder"),
        ({"upsampler": official / LORA}, "no x2 spatial latent upsampler"),
        ({"upsampler": official / "gemma-3"}, "no latent upsampler folder"),
    ]:
        with pytest.raises(InputError, match=says):
            open_checkpoint(official, **arguments)


def test_stripped_metadata_and_later_generations_are_refused(official):
    original = TensorFile(official / MAIN).metadata
    for metadata, says in [
        ({}, "no `config`"),
        ({"config": "{"}, "not valid JSON"),
        ({"config": "[]"}, "expected a JSON object"),
        ({"config": "{}"}, "required key transformer is absent|required key audio_vae is absent"),
        (original | {"gemma_source_checkpoint": "{}"}, "LTX-2.5"),
    ]:
        rewrite(official / MAIN, metadata=metadata)
        with pytest.raises(InputError, match=says):
            open_checkpoint(official)


def test_a_tensor_of_no_component_is_refused(official):
    rewrite(official / MAIN, extra={"duration_head.0.weight": TensorInfo((2,), F32)})
    with pytest.raises(InputError, match=r"1 tensors belong to no component: duration_head\.\*\.weight"):
        open_checkpoint(official)


def test_a_gemma_of_another_size_is_refused(official):
    path = official / "gemma-3" / "config.json"
    data = json.loads(path.read_text())
    data["text_config"]["hidden_size"] = 128
    path.unlink()
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"hidden size 128.*--text-encoder"):
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
    with pytest.raises(InputError, match="video_vae was found"):
        open_checkpoint(diffusers)


def test_both_layouts_in_one_folder_are_ambiguous(official, diffusers):
    (diffusers / MAIN).symlink_to(official / MAIN)
    with pytest.raises(
        InputError, match=r"2 candidates for the checkpoint: .*tiny-2\.3\.safetensors, .*model_index\.json;"
    ):
        open_checkpoint(diffusers)
    assert open_checkpoint(diffusers / MAIN).layout == "official"
    assert open_checkpoint(diffusers / "model_index.json").layout == "diffusers"


def test_all_parts_that_are_ambiguous_are_said_at_once(official):
    for part in (MAIN, UP):
        (official / f"second-{part}").symlink_to(official / part)
    (official / "gemma-4").symlink_to(official / "gemma-3")
    says = r"2 cand.* checkpoint: .*--model\. 2 cand.* Gemma folder: .*--text-encoder\. 2 cand.*: .*--upsampler$"
    with pytest.raises(InputError, match=says):
        open_checkpoint(official)


@pytest.mark.parametrize(("name", "other"), [("tiny-2.3", "tiny-2.0"), ("tiny-2.0", "tiny-2.3")])
def test_connectors_of_another_generation_are_refused(tiny, tmp_path, name, other):
    folder = link(tiny(name, "diffusers"), tmp_path / "mixed")
    shutil.rmtree(folder / "connectors")
    shutil.copytree(tiny(other, "diffusers") / "connectors", folder / "connectors")
    with pytest.raises(InputError, match=r"connectors.*another generation|video_hidden_dim"):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8"])
def test_a_quantised_file_without_known_scales_is_refused_when_it_is_opened(official, dtype):
    file = TensorFile(official / MAIN)
    infos = {name: file.info(name) for name in file.names()}
    name = "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"
    infos[name] = TensorInfo(infos[name].shape, DTYPES[dtype])
    if dtype in ("F8_E5M2", "U8"):
        infos[name + "_scale"] = TensorInfo((), F32)
    write_tensors(official / MAIN, infos, None, file.metadata)
    with pytest.raises(InputError, match=r"1 tensors are .* without the scales.*bfloat16 file.*--weights-dtype float8"):
        open_checkpoint(official)


def camera_control(path: Path, checkpoint, rank: int, kinds: str) -> None:
    """A LoRA of another kind: of the modules that match, at this rank."""
    arrays = {}
    for name in checkpoint.source("transformer").names():
        shape = checkpoint.source("transformer").info(name).shape
        if re.search(kinds, name) and len(shape) == 2:
            module = name.removeprefix("model.").removesuffix(".weight")
            arrays[f"{module}.lora_A.weight"] = np.ones((rank, shape[1]), np.float32)
            arrays[f"{module}.lora_B.weight"] = np.ones((shape[0], rank), np.float32)
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
    with pytest.raises(InputError, match=rf"no LoRA.*distilled.*{camera.name}.*--distilled-lora"):
        open_checkpoint(official).distilled_lora()
    (official / "distilled").rename(official / "another-name.safetensors")
    assert open_checkpoint(official).distilled_lora().name == "another-name.safetensors"


def test_a_pipe_in_the_folder_does_not_hang(official):
    os.mkfifo(official / "pipe.safetensors")
    (unreadable,) = open_checkpoint(official).unreadable
    assert "pipe.safetensors: not a regular file" in unreadable


# ---- audit ----------------------------------------------------------------------------------------------------------

PARAMETERS = {f"model.diffusion_model.transformer_blocks.{i}.{name}.weight": TensorInfo((4, 3), F32)
              for i in range(3) for name in ("attn1.to_q", "attn1.to_k", "ff.net.2")}  # fmt: skip


class Header:
    """A source that has names and shapes only: an audit must not read data."""

    def __init__(self, infos):
        self.infos = infos

    def names(self):
        return self.infos.keys()

    def info(self, name):
        return self.infos[name]


def test_an_exact_source_passes_and_known_unused_tensors_are_no_matter():
    unused = ["vae.per_channel_statistics.channel", "vae.per_channel_statistics.mean-of-stds_over_std-of-means"]
    unused += ["lm_head.weight", "language_model.lm_head.weight", "vision_tower.encoder.layers.0.mlp.fc1.bias"]
    unused += ["vocoder.mel_stft.stft_fn.inverse_basis", "upsampler.blur_down.kernel"]
    unused += ["vae.encoder.conv_in.conv.weight"]  # the other half: no parameter is of the encoder
    audit(PARAMETERS, Header(PARAMETERS | {name: TensorInfo((1,), F32) for name in unused}), "x")


def test_the_error_collapses_layers_and_offers_the_nearest_name():
    infos = {name.replace("to_q", "to_query"): info for name, info in PARAMETERS.items()}
    with pytest.raises(InputError) as caught:
        audit(PARAMETERS, Header(infos), "m.safetensors")
    text = str(caught.value)
    assert "\n" not in text and text.startswith("m.safetensors: 3 parameters have no tensor")
    assert "transformer_blocks.*.attn1.to_q.weight (3)" in text
    assert "nearest in the file: model.diffusion_model.transformer_blocks.*.attn1.to_query.weight" in text


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(PARAMETERS)), change=st.sampled_from(["missing", "extra", "misshapen"]), data=st.data()
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
    with pytest.raises(InputError):
        audit(PARAMETERS, Header(infos), "x")


def test_an_upsampler_for_other_latents_is_refused(official):
    shapes = {
        "initial_conv.weight": (32, 16, 3, 3, 3),
        "final_conv.weight": (16, 32, 3, 3, 3),
        "upsampler.0.weight": (128, 32, 3, 3),
    }
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    config = json.loads(TensorFile(official / UP).metadata["config"]) | {"in_channels": 16}
    write_arrays(official / "other.safetensors", arrays, {"config": json.dumps(config)})
    with pytest.raises(InputError, match=r"16 channels.*128"):
        open_checkpoint(official, upsampler=official / "other.safetensors")
