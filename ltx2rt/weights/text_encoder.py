"""Opening the text encoder: a Gemma folder, a GGUF or a safetensors file; and its tokenizer.

Reads two kinds of safetensors files: LTX-2.5's, with a `gemma_config` in the metadata; and
ComfyUI's Gemma 3 in one file, in bfloat16 or 8 bits, with sizes taken from its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ltx2rt.config import Gemma4Config, GemmaConfig
from ltx2rt.errors import InputError
from ltx2rt.weights import configs, spm
from ltx2rt.weights.configs import gemma3
from ltx2rt.weights.configs.keys import Keys, parse_json
from ltx2rt.weights.files import TensorFile, TensorFolder, open_file, open_tensors
from ltx2rt.weights.gguf import CenteredNorms, GgufFile
from ltx2rt.weights.names import GEMMA, TEXT_PROJECTION, gemma_to_canonical, llama_cpp_to_canonical
from ltx2rt.weights.part_table import GEMMA_GGUF
from ltx2rt.weights.parts import contents, file_kind, read_json, scan
from ltx2rt.weights.quant.reader import RenamedSource, renamed

TOKENIZER, SPM_FILE = "tokenizer.json", "tokenizer.model"
TOKENIZER_ASSET = "tokenizer_json"
SENTENCEPIECE = "spiece_model"  # a tensor of ComfyUI's files
EMBEDDING = "token_embd.weight"  # Gemma's, in GGUF files
VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
ASSETS = ("hf_asset__", TOKENIZER_ASSET)  # prefixes of the files that a text-encoder file carries
GEMMA_4 = "layer_scalar"  # a tensor of each layer that Gemma 3 has not


@dataclass(frozen=True)
class Asset:
    """A tokenizer in a file: `tokenizer_json`, bytes or a metadata string; a SentencePiece model as
    a tensor; a GGUF file's vocabulary. Without name: a SentencePiece file."""

    path: Path
    name: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.name}" if self.name else str(self.path)

    def read_bytes(self) -> bytes:
        """A tokenizer.json. Raises InputError."""
        if not self.name:
            return spm.of_proto(self.path.read_bytes(), str(self)).tokenizer_json()
        file = open_file(self.path)
        if self.name == VOCABULARY[0] and (gguf := _with_vocabulary(file)):
            found = gguf.arrays(*VOCABULARY)
            first = gguf.metadata.get("tokenizer.ggml.add_space_prefix", "false") == "true"
            columns = (found.get(key, []) for key in VOCABULARY)
            return spm.Vocabulary(
                *columns, where=str(gguf.path), space_first=first
            ).tokenizer_json()
        if self.name not in file.names():
            return file.metadata[self.name].encode()
        data = file.read(self.name).tobytes()
        if self.name.endswith(SENTENCEPIECE):
            return spm.of_proto(data, str(self)).tokenizer_json()
        return data


def _with_vocabulary(file: TensorFile | TensorFolder) -> GgufFile | None:
    """The GGUF file, of parts the first, with a SentencePiece vocabulary; others have merges."""
    first = file.files[0] if isinstance(file, TensorFolder) and file.files else file
    return first if isinstance(first, GgufFile) and {*VOCABULARY} <= first.long_arrays else None


def gemma_keys(path: Path) -> Keys:
    """A Gemma folder's config.json, or the one that a file would have. Raises InputError."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"{path}: no Gemma folder (it must hold config.json, or one text-encoder "
                "file); pass one with --text-encoder"
            )
        return read_json(path / "config.json")
    file = open_file(path)
    if file_kind(file) != "gemma":
        raise InputError(
            f"{path}: no text encoder ({contents(file)}); pass a Gemma 3 folder or GGUF file, "
            "or a file of LTX-2.5"
        )
    if file.architecture == GEMMA_GGUF:
        shape = file.info(EMBEDDING).shape if EMBEDDING in file.names() else ()
        if len(shape) != 2:
            raise InputError(f"{path}: no matrix {EMBEDDING}; pass a complete GGUF file of Gemma 3")
        return gemma3.gguf_gemma3(file.metadata, shape[0], str(path))
    if "gemma_config" in file.metadata:
        return parse_json(file.metadata["gemma_config"], f"{path}: gemma_config")
    if not plain_gemma3(file):
        raise InputError(
            f"{path}: its metadata has no `gemma_config`; pass the original file, not a "
            "re-saved one"
        )
    shapes = {gemma_to_canonical(name): file.info(name).shape for name in file.names()}
    own = [name for name in shapes if name.startswith(GEMMA)]
    return gemma3.plain_gemma3({name.removeprefix(GEMMA): shapes[name] for name in own}, str(path))


def lone_gemma(path: Path, flag: str = "--text-encoder") -> Path:
    """The text-encoder file of a folder without config; other paths as they are. Or InputError."""
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    found = scan(path).files["gemma"]
    if len(found) > 1:
        raise InputError(
            f"{flag}: {path} has {len(found)} text encoders, {', '.join(map(str, found))}; "
            "name one of them"
        )
    return found[0] if found else path


def plain_gemma3(file: TensorFile | TensorFolder) -> bool:
    """Whether a text-encoder file is of Gemma 3 without a config, as ComfyUI's files are."""
    plain = not file.architecture and "gemma_config" not in file.metadata
    return plain and not any(name.endswith(GEMMA_4) for name in file.names())


def open_gemma(path: Path) -> tuple[GemmaConfig | Gemma4Config, RenamedSource]:
    """The language model of a Gemma folder or of a text-encoder file. Raises InputError."""
    config = configs.gemma(gemma_keys(path))
    tensors = open_tensors(path)
    if tensors.architecture == GEMMA_GGUF:
        centered = CenteredNorms({name: (tensors, name) for name in tensors.names()})
        return config, renamed(centered, path, llama_cpp_to_canonical)
    # Not read are assets, and in ComfyUI's files the image tower.
    only = GEMMA if path.is_file() and plain_gemma3(tensors) else ""
    assets = (TEXT_PROJECTION, *ASSETS) if path.is_file() else ()

    def canonical(name: str) -> str | None:
        ours = gemma_to_canonical(name)
        return ours if ours.startswith(only) and not name.startswith(assets) else None

    return config, renamed(tensors, path, canonical)


def has_tokenizer(path: Path) -> bool:
    """Whether a text encoder has a tokenizer of its own, in it or beside it."""
    return (_in_folder(path) if path.is_dir() else _own_tokenizer(path)) is not None


def _own_tokenizer(path: Path) -> Path | Asset | None:
    """The tokenizer in a text-encoder file, or beside one that may have it there."""
    file = open_file(path)
    if _with_vocabulary(file):
        return Asset(path, VOCABULARY[0])
    inside = {*file.names(), *file.metadata}
    if TOKENIZER_ASSET in inside:
        return Asset(path, TOKENIZER_ASSET)
    beside = _in_folder(path.parent) if _needs_one(file) else None
    inner = next((name for name in inside if name.endswith(SENTENCEPIECE)), None)
    return beside or (Asset(path, inner) if inner else None)


def _in_folder(folder: Path) -> Path | Asset | None:
    """The tokenizer in a folder, in either format."""
    if (folder / TOKENIZER).is_file():
        return folder / TOKENIZER
    return Asset(folder / SPM_FILE) if (folder / SPM_FILE).is_file() else None


def _needs_one(file: TensorFile | TensorFolder) -> bool:
    """Whether a text-encoder file is of a kind that has its tokenizer beside it."""
    return bool(file.architecture) or plain_gemma3(file)


def find_tokenizer(gemma: Path | None, found: list[Path]) -> Path | Asset | None:
    """The text encoder's own, or its neighbour's, or the only other one found."""
    if gemma is not None and gemma.is_file():
        if own := _own_tokenizer(gemma):
            return own
        found = found if _needs_one(open_file(gemma)) else []
    elif gemma is not None:
        if own := _in_folder(gemma):
            return own
        beside = [path / TOKENIZER for path in sorted(gemma.parent.iterdir())]
        found = [path for path in beside if path.is_file()] or found
    return found[0] if len(found) == 1 else None


def no_tokenizer(model: Path, gemma: Path | None, found: Iterable[Path]) -> InputError:
    """The refusal. model: the path that was passed. found: tokenizers that may be another's."""
    file = open_file(gemma) if gemma is not None and gemma.is_file() else None
    if file is None or not _needs_one(file):
        return InputError(
            f"{model}: no tokenizer.json was found; pass a Gemma folder with one by --text-encoder"
        )
    several = list(map(str, found))
    said = f" ({len(several)} elsewhere: {', '.join(several)})" if several else ""
    said = f"{file.path}: no tokenizer.json beside it{said}; put the one of google/gemma-3-12b-it"
    return InputError(f"{said} there, as {file.path.parent / TOKENIZER}")
