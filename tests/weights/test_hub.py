"""Repositories of the hub, served by a stand-in on the loopback: what is fetched, what is not."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.files import TensorFile, write_arrays
from ltx2rt.weights.hub import Repo, parse_repo
from tests.gguf_files import arrays_of, linked
from tests.released import FORMS, path_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLIP = "--backend cuda --device cpu --width 64 --height 64 --num-frames 9 --steps 1 --seed 1"
CLIP += " --no-audio --prompt x"
HEADERS = ("bytes=0", "bytes=8")  # ranges that begin so


class Hub:
    """repositories: folders by name. gated: names whose files need a login. cut: a file whose first
    whole answer ends in the middle. got: (method, path, range) of every request."""

    def __init__(self):
        self.repositories: dict[str, Path] = {}
        self.gated: dict[str, int] = {}
        self.cut, self.got = None, []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            do_GET = do_HEAD = lambda to: self.answer(to)
            log_message = lambda *_: None  # noqa: E731

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def files(self, name: str) -> dict[str, int]:
        folder = self.repositories[name]
        found = [Path(at) / n for at, _, names in os.walk(folder, followlinks=True) for n in names]
        return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(found)}

    def answer(self, to) -> None:
        path, asked = to.path.partition("?")[0], to.headers.get("Range")
        self.got.append((to.command, path, asked))
        api, words = path.startswith("/api/models/"), path.removeprefix("/api/models").split("/")
        name = "/".join(words[1:3])
        if name not in self.repositories:
            return self.send(to, 401, {"X-Error-Code": "RepoNotFound"})
        revision = words[4] if len(words) > 4 else "main"
        if revision not in ("main", COMMIT):
            return self.send(to, 404, {"X-Error-Code": "RevisionNotFound"})
        if api:
            sizes = self.files(name).items()
            tree = [{"type": "file", "path": p, "size": n, "oid": p} for p, n in sizes]
            siblings = [{"rfilename": path, "size": size} for path, size in sizes]
            about = {"id": name, "sha": COMMIT, "siblings": siblings}
            data = json.dumps(tree if words[3:4] == ["tree"] else about).encode()
            return self.send(to, 200, {"Content-Type": "application/json"}, data)
        if name in self.gated:
            return self.send(to, self.gated[name], {"X-Error-Code": "GatedRepo"})
        file = self.repositories[name] / "/".join(words[5:])
        if not file.is_file():
            return self.send(to, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        size, status = file.stat().st_size, 200
        headers = {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        headers["ETag"] = f'"{hashlib.sha256(f"{file.resolve()} {size}".encode()).hexdigest()}"'
        start, stop = 0, size
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last or size), size - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            status = 206
        with file.open("rb") as opened:  # which may be sparse, and larger than memory
            opened.seek(start)
            data = opened.read(stop - start)
        if self.cut == words[-1] and to.command == "GET" and not asked:
            self.cut, headers["Content-Length"] = None, str(len(data))
            self.send(to, status, headers, data[: len(data) // 2])
            to.wfile.flush()
            return to.connection.close()
        return self.send(to, status, headers, data)

    def send(self, to, status, headers, data=b"") -> None:
        to.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            to.send_header(key, value)
        to.end_headers()
        if to.command != "HEAD":
            to.wfile.write(data)

    def fetched(self) -> Counter:
        """How often files were asked for by name, their headers alone not counted."""
        whole = [(kind, path) for kind, path, part in self.got if (part or "")[:7] not in HEADERS]
        got = [path for kind, path in whole if kind == "GET" and "/resolve/" in path]
        return Counter(path.split("/", 5)[-1] for path in got)


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    """A repository like 2.0's: both layouts, two checkpoints, two upsamplers."""
    folder, made = tmp_path_factory.mktemp("hub"), tiny("tiny-2.3", "official")
    plain = linked(made, folder / "plain", "gemma-3")
    (plain / "README.md").write_text("a picture of a cat")
    (plain / "strange.safetensors").symlink_to(made / "gemma-3" / "model.safetensors")
    lora = "tiny-2.3-distilled-lora.safetensors"
    mixed = linked(tiny("tiny-2.3", "diffusers"), folder / "mixed", lora)
    for path in plain.glob("tiny*"):
        (mixed / path.name).symlink_to(path.resolve())
        if "lora" not in path.name:
            (mixed / f"second-{path.name}").symlink_to(path.resolve())
    hub = Hub()
    hub.repositories = {
        "lab/plain": plain, "lab/mixed": mixed, "lab/gemma": made / "gemma-3", "lab/gated": plain,
    }  # fmt: skip
    hub.gated = {"lab/gated": 403}
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


RELEASED = {  # as LTX-2.5 lies on the hub: folders without configs
    "transformer": "diffusion_models/distilled", "text-encoder": "text_encoders/gemma4",
    "video-vae-conv": "vae/conv", "video-vae": "vae/diffusion", "audio-vae": "vae/audio",
    "spatial-upsampler-x2": "latent_upscale_models/spatial", "distilled-lora": "loras/distilled",
    "temporal-upsampler-x2": "latent_upscale_models/temporal", "duration-head": "model_patches/duration",
}  # fmt: skip


@pytest.fixture(scope="module")
def parted(served, tmp_path_factory):
    """Repositories of tiny-2.5 by part, with two transformers; and diffusers folders."""
    folder = tmp_path_factory.mktemp("hub-2.5")
    for layout in ("official", "diffusers"):
        make_checkpoint("tiny-2.5", layout, folder / layout, empty=True)
    files, folders = folder / "files", folder / "diffusers"
    for part, name in (*RELEASED.items(), ("transformer", "diffusion_models/dev")):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        made = folder / "official" / f"tiny-2.5-{part}.safetensors"
        (files / f"{name}.safetensors").symlink_to(made)
    (folders / "transformer_full").symlink_to(folders / "transformer")
    served.repositories |= {"lab/files": files, "lab/folders": folders}
    return served


@pytest.fixture
def run(served, tmp_path):
    """run(*words, module=...) -> (status, stdout, stderr) of `ltx2rt words` with an empty cache of its own."""
    served.got.clear()
    offline = ("HF_HUB_OFFLINE", "HF_TOKEN")
    env = {name: value for name, value in os.environ.items() if name not in offline}
    env |= {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(tmp_path / "hub")}
    env |= dict.fromkeys(("HF_HUB_DISABLE_XET", "OMP_NUM_THREADS", "HF_HUB_DISABLE_TELEMETRY"), "1")

    def call(*words, module=("-m", "ltx2rt"), **more):
        argv = [sys.executable, *module, *map(str, words)]
        how = {"capture_output": True, "text": True, "timeout": 300, "cwd": tmp_path}
        ran = subprocess.run(argv, env=env | more, **how)
        return ran.returncode, ran.stdout, ran.stderr

    return call


def one_line(result) -> str:
    status, out, err = result
    assert (status, out, err.count("\n")) == (2, "", 1), result
    assert err.startswith("ltx2rt: error: "), result
    return err


def test_names_of_repositories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    host, file = "huggingface.co/lab/plain", "a.safetensors"
    plain = ("lab/plain", host, "hf://lab/plain", f"https://{host}", f"https://{host}/tree/main")
    for text, expected in {
        **dict.fromkeys((*plain, f"https://{host}#usage"), (None, "main")),
        "lab/plain@refs/pr/1": (None, "refs/pr/1"), f"lab/plain/{file}@v1": (file, "v1"),
        f"{host}/resolve/refs/pr/3/{file}": (file, "refs/pr/3"),
        f"{host}/blob/refs%2Fpr%2F3/{file}": (file, "refs/pr/3"),
        f"https://{host}/resolve/v1/sub/{file}?download=true": (f"sub/{file}", "v1"),
        "lab/plain/a.Q4_K_M.gguf": ("a.Q4_K_M.gguf", "main"),
        "lab/plain/model_index.json": ("model_index.json", "main"),
    }.items():  # fmt: skip
        assert parse_repo(Path(text)) == Repo("lab/plain", *expected), text
    for path in (
        "plain", "lab/plain/folder", "./lab/plain", "../lab", "/lab/plain", "lab/plain@", ".",
        "lab/plain.safetensors", "https://civitai.com/models/1",
    ):  # fmt: skip
        assert parse_repo(Path(path)) is None or path == "./lab/plain", path  # a Path drops "./"
    (tmp_path / "lab" / "plain").mkdir(parents=True)
    assert parse_repo(Path("lab/plain")) is None  # what exists is no repository
    assert parse_repo(Path("lab/other")) is None  # a name mistyped in a folder that is here


@pytest.mark.slow
def test_a_run_fetches_what_its_pipeline_reads_and_no_more(run, served):
    where = ("--model", "lab/plain@main", "--text-encoder", "lab/gemma", "--output", "a.mp4")
    words = ("generate", *where, *CLIP.split(), "--pipeline", "one-stage")
    assert "--height: 65536" in one_line(run(*words, "--height", 65536)) and not served.got
    status, _, err = run(*words)
    assert status == 0 and "lab/plain: 1 file," in err, err
    gemma = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert served.fetched() == dict.fromkeys({"tiny-2.3.safetensors", *gemma}, 1)
    served.got.clear()
    status, _, err = run(*words, "--offline")
    assert status == 0 and not served.got, err
    # What it needs more was not fetched.
    one_line(run(*words[:-1], "two-stage", HF_HUB_OFFLINE="1"))
    assert not served.got
    assert run("weights", "fetch", "lab/plain", "--pipeline", "one-stage")[0] == 0
    # a text encoder, which no flag names here; what is in the cache is not fetched again
    assert served.fetched().keys() == {"strange.safetensors"}


LOCATED = """
import sys
from ltx2rt.session.open import located
from ltx2rt.session.options import ModelOptions, parse_lora
from ltx2rt.weights.lora.file import open_lora

(spec,) = located(ModelOptions("cuda", sys.argv[1], loras=(parse_lora(sys.argv[2]),)), ()).loras
print(*(change.scale for change in open_lora(spec.path, spec.strength).changes.values()))
"""


def test_a_lora_comes_with_the_config_that_has_its_scale(run, served, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    module = "base_model.model.transformer_blocks.0.attn1.to_q"
    halves = {f"{module}.lora_{half}.weight": np.ones((128, 128), np.float32) for half in "AB"}
    write_arrays(adapter / "adapter_model.safetensors", halves)
    (adapter / "adapter_config.json").write_text('{"r": 128, "lora_alpha": 8}')
    served.repositories["lab/adapter"] = adapter
    model = served.repositories["lab/gemma"].parent / "tiny-2.3.safetensors"
    status, out, err = run("-c", LOCATED, model, "lab/adapter:0.5", module=())
    assert (status, float(out)) == (0, 0.5 * 8 / 128), err
    assert served.fetched().keys() == {"adapter_model.safetensors", "adapter_config.json"}
    _, _, err = run("-c", LOCATED, model, "lab/adapter/b.safetensors", module=())
    assert "InputError: lab/adapter: no b.safetensors; " in err


@pytest.mark.slow
def test_fetch_takes_all_that_two_stages_need_and_goes_on_where_it_was_cut(run, served):
    served.cut = "tiny-2.3.safetensors"
    status, out, err = run("weights", "fetch", "lab/plain")
    assert status == 0, err
    ends = ("", "-spatial-upsampler-x2", "-distilled-lora")
    names = {f"tiny-2.3{end}.safetensors" for end in ends} | {"strange.safetensors"}  # a Gemma
    assert served.fetched().keys() == names and served.fetched()["tiny-2.3.safetensors"] == 2
    end = "/tiny-2.3.safetensors"
    asked = [part for kind, path, part in served.got if kind == "GET" and path.endswith(end)]
    # Of 36 MB, cut in the middle.
    assert int(re.fullmatch(r"bytes=(\d+)-", asked[-1])[1]) >= 10_000_000
    path = Path(out.strip())
    assert path.read_bytes() == Path(f"{served.repositories['lab/plain']}{end}").read_bytes()


SCANNED = """
import json, sys
from pathlib import Path
from huggingface_hub import model_info
from ltx2rt.weights.hub import Repo, Repository
from ltx2rt.weights.parts import DISK, scan

def found(folder, listing, deep):
    parts = scan(folder, listing, deep)
    names = lambda paths: sorted(str(getattr(p, "path", p).relative_to(folder)) for p in paths)
    kinds = {kind: names(paths) for kind, paths in (*parts.files.items(), *parts.diffusers.items())}
    return kinds | {"tokenizer": names(parts.tokenizer)}

for name, folder in json.loads(sys.argv[1]).items():
    sizes = {file.rfilename: 1 for file in model_info(name).siblings}
    for deep in (False, True):
        hub = found(Path(), Repository(Repo(name), sizes, "main"), deep)
        print(json.dumps([name, deep, found(Path(folder), DISK, deep), hub]))
"""


def test_a_repository_is_scanned_as_a_folder_is(run, parted):
    """The same parts in the same files and folders, for every repository of this module."""
    folders = {n: str(p) for n, p in parted.repositories.items() if n != "lab/gated"}
    status, out, err = run("-c", SCANNED, json.dumps(folders), module=())
    assert status == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 2 * len(folders)
    for name, deep, disk, hub in rows:
        assert hub == disk, (name, deep)
    kinds = {kind for _, _, disk, _ in rows for kind, paths in disk.items() if paths}
    assert {"main", "lora", "upsampler", "gemma", "transformer", "duration_head"} <= kinds


def test_shards_of_a_repository_are_one_checkpoint(run, served, tmp_path):
    """Two shards under an index, beside a file that the run does not read."""
    made = TensorFile(served.repositories["lab/plain"] / "tiny-2.3.safetensors")
    names, repository, home = sorted(made.names()), tmp_path / "shards", {}
    repository.mkdir()
    for i, part in enumerate((names[::2], names[1::2])):
        arrays = arrays_of(made.path, set(part).__contains__)
        write_arrays(repository / f"tiny-{i}.safetensors", arrays, made.metadata)
        home |= dict.fromkeys(part, f"tiny-{i}.safetensors")
    (repository / "tiny.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    upsampler = served.repositories["lab/plain"] / "tiny-2.3-spatial-upsampler-x2.safetensors"
    (repository / "other.safetensors").symlink_to(upsampler)
    served.repositories["lab/shards"] = repository
    fetch = ("weights", "fetch", "lab/shards", "--pipeline", "one-stage")
    status, out, err = run(*fetch)
    assert status == 0, err
    shards = {"tiny-0.safetensors", "tiny-1.safetensors"}
    assert {name for name in served.fetched() if name.endswith(".safetensors")} == shards
    found, expected = open_checkpoint(out.strip()).config, open_checkpoint(made.path).config
    assert found.transformer == expected.transformer and found.vocoder == expected.vocoder
    (repository / "tiny-1.safetensors").unlink()
    assert "no file tiny-1.safetensors, which a shard index lists" in one_line(run(*fetch))


def test_all_that_is_ambiguous_is_said_in_one_line(run, served):
    error = one_line(run("weights", "fetch", "lab/mixed"))
    for name in ("second-tiny-2.3.safetensors", "tiny-2.3.safetensors", "model_index.json"):
        assert f"lab/mixed/{name}" in error
    assert "3 candidates for the checkpoint" in error and "choose with --model" in error
    assert "2 candidates for the x2 spatial upsampler" in error
    assert "choose with --upsampler" in error
    assert not any(name.endswith(".safetensors") for name in served.fetched())


def test_of_a_repository_of_parts_come_those_that_the_run_reads(run, parted):
    main = "diffusion_models/distilled.safetensors"
    parts = ("text-encoder", "audio-vae", "duration-head")
    always = {main, *(f"{RELEASED[part]}.safetensors" for part in parts)}
    more = {f"{RELEASED['spatial-upsampler-x2']}.safetensors"}  # the weights are distilled already
    words = ("weights", "fetch", f"lab/files/{main}", "--pipeline")
    for pipeline, decoder, expected in (
        ("one-stage", (), always | {"vae/diffusion.safetensors"}),
        # The rest is there.
        ("two-stage", ("--video-decoder", "conv"), more | {"vae/conv.safetensors"}),
    ):
        parted.got.clear()
        status, out, err = run(*words, pipeline, *decoder)
        assert status == 0, err
        assert set(parted.fetched()) == expected
    config = open_checkpoint(out.strip()).config
    assert config.part("diffusion_decoder") and config.video_vae.decoder
    assert config.part("duration_head") and config.gemma
    assert config.upsampler and config.part("temporal_upsampler") is None


@pytest.mark.long
def test_each_part_of_a_repository_is_a_file_that_a_flag_can_name(run, parted):
    """What the repository has of them as well is not looked at."""
    parts = ("text-encoder", "audio-vae", "duration-head")
    flags = {f"--{part}": f"lab/files/{RELEASED[part]}.safetensors" for part in parts}
    flags["--video-vae"] = "lab/files/vae/diffusion.safetensors"
    flags["--model"] = "lab/files/diffusion_models/dev.safetensors"
    words = (*CLIP.split(), "--pipeline", "one-stage", "--output", "a.mp4")
    status, _, err = run("generate", *words, *(x for pair in flags.items() for x in pair))
    assert status == 0, err
    expected = {name.removeprefix("lab/files/") for name in flags.values()}
    assert set(parted.fetched()) == expected


@pytest.mark.parametrize("pipeline, kind, beside", [
    ((), "distilled", {"transformer"}),
    pytest.param(("--pipeline", "two-stage"), "dev", {"transformer_full"}, marks=pytest.mark.long),
])  # fmt: skip
def test_transformers_of_one_repository_are_chosen_by_the_pipeline(
    run, parted, pipeline, kind, beside
):
    status, _, err = run("weights", "fetch", "lab/files", *pipeline)
    assert status == 0 and re.search(r"GB are not in the cache .* GB free", err), err
    found = parted.fetched().keys()
    assert [name for name in found if "diffusion_models" in name] == [
        f"diffusion_models/{kind}.safetensors"
    ]
    assert ("loras/distilled.safetensors" in found) == (kind == "dev")
    parted.got.clear()
    status, out, err = run("weights", "fetch", "lab/folders", *pipeline)
    assert status == 0, err
    found = {name.partition("/")[0] for name in parted.fetched() if name.endswith(".safetensors")}
    lora = {name for name in found if "lora" in name}
    assert found - lora == beside | {
        "connectors", "vae", "audio_vae", "vocoder", "text_encoder", "duration_head",
        "latent_upsampler", "diffusion_decoder",
    }  # fmt: skip
    assert bool(lora) == (kind == "dev") and open_checkpoint(out.strip()).config.part(
        "duration_head"
    )


NEEDED = """
import json, sys
from pathlib import Path
from huggingface_hub import model_info
from ltx2rt.weights import hub
from ltx2rt.weights.forms import Room
from ltx2rt.weights.near import Chooser
from ltx2rt.weights.part_table import files_beside

sizes = {file.rfilename: file.size for file in model_info("lab/full", files_metadata=True).siblings}
for kind, room in json.loads(sys.argv[1]):
    listing = hub.Repository(hub.Repo("lab/full"), sizes, "main")
    chooser = Chooser(room and (lambda: Room(room * 10**9, "a GPU")), kind)
    wanted = (*files_beside(None), "upsampler", "lora")
    parts = hub.look_into(Path(), listing)
    names, main = hub._needed(listing, parts, wanted, chooser)
    print(json.dumps([sorted(names), main, sum(map(sizes.get, names))]))
"""


def test_files_of_the_released_repository(run, served, released):
    """By the released names and sizes: 70 GB of distilled files; 37 GB on cards below 48 GB."""
    words = [f"{kind} {form}" for kind in ("distilled", "dev") for form in FORMS]
    served.repositories["lab/full"] = released(
        *words, "text int8", "lora", preset="ltx-2.5", empty=True
    )
    asked = [
        ("distilled", None),
        ("distilled", 44),
        ("distilled", 28),
        ("distilled", 20),
        ("dev", 75),
    ]
    status, out, err = run("-c", NEEDED, json.dumps(asked), module=())
    assert status == 0, err
    plain, int8 = (("distilled bf16", "text"), ("distilled int8", "text int8"))
    expected = [plain, plain, int8, int8, ("dev bf16", "text", "lora")]
    for line, (main, *rest) in zip(out.splitlines(), expected, strict=True):
        names, opened, size = json.loads(line)
        also = ("vae", "audio", "spatial", "duration")
        assert opened == path_of(main)
        assert names == sorted(map(path_of, (main, *rest, *also)))
        size -= 995_743_592  # the upsampler
        assert round(size / 1e9) == {"distilled bf16": 70, "distilled int8": 39}.get(main, 79)


@pytest.mark.long
def test_one_of_several_is_chosen_by_its_file(run, served):
    words = ("weights", "fetch", "lab/mixed/model_index.json", "--pipeline", "one-stage")
    status, out, _ = run(*words)
    assert status == 0 and out.strip().endswith("model_index.json")
    end = "/diffusion_pytorch_model.safetensors"
    found = {name.removesuffix(end) for name in served.fetched() if name.endswith(end)}
    assert found == {"transformer", "connectors", "vae", "audio_vae", "vocoder"}
    assert {"text_encoder/model.safetensors", "tokenizer/tokenizer.json"} <= served.fetched().keys()
    status, out, err = run("weights", "inspect", out.strip())
    assert status == 0 and "diffusers checkpoint" in out, err
    assert "missing: x2 spatial upsampler" in out, err


REFUSED = {
    "lab/gated": "lab/gated is gated: accept its terms on its page of the hub, then log in",
    "lab/none": "lab/none is neither a path nor a repository of the hub .*log in",
    "lab/plain --revision v9": "lab/plain has no revision v9",
    "lab/plain/no.safetensors": "no.safetensors is no checkpoint in it; found: tiny-2.3.safetensors",
    "lab/gemma": "no checkpoint of LTX-2 in it",
    "nothing": "expected ORG/NAME",
}
FETCHED = """
import sys
from ltx2rt import cli

print([cli.main(["weights", "fetch", *words.split()]) for words in sys.argv[1:]])
"""


def test_what_the_hub_refuses_is_one_line(run):
    _, out, err = run("-c", FETCHED, *REFUSED, module=())
    assert out == f"{[2] * len(REFUSED)}\n"
    for line, says in zip(err.splitlines(), REFUSED.values(), strict=True):
        assert re.fullmatch(f"ltx2rt: error: .*{says}.*", line)


def test_what_begins_with_a_dot_is_never_asked_of_the_hub(run, served):
    error = one_line(run("plan", "--model", "./lab/plain", "--device-kind", "h100"))
    assert "lab/plain does not exist" in error and not served.got


def test_a_hub_that_does_not_answer_is_one_line(run):
    said = "lab/plain is no path here, and could not be fetched from the hub"
    assert said in one_line(run("weights", "fetch", "lab/plain", HF_ENDPOINT="http://127.0.0.1:9"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        more = {"HF_ENDPOINT": endpoint, "HF_HUB_ETAG_TIMEOUT": "1"}
        said = "lab/plain is no path here, and the hub does not answer; run it again"
        assert said in one_line(run("weights", "fetch", "lab/plain", **more))


def test_a_list_of_files_that_is_none_is_one_line(run, served, monkeypatch):
    files = [{"rfilename": a, "size": size} for a, size in ((3, 1), ("a", "12"), ("a", -5))]

    def answer(to, send=served.send):
        about = {"id": "lab/plain", "sha": COMMIT, "siblings": [files.pop()]}
        send(to, 200, {}, json.dumps(about).encode())

    monkeypatch.setattr(served, "answer", answer)
    _, out, err = run("-c", FETCHED, "lab/a", "lab/b", "lab/c", module=())
    assert (out, files, err.count("its list on the hub holds")) == ("[2, 2, 2]\n", [], 3)
