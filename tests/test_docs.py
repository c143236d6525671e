"""README.md and docs/: every Python block and every command that a CPU can run is run as it stands.

Convention of the documents. The info string of a block says what it is:

    python, sh          run here; with "long" after it by `make test-long`, with "slow" by
                        `make test-full`
    sh gpu, tpu, ...    not run, and why (`NOT_RUN`): its `ltx2rt` commands must still be ones that
                        the program takes
    js                  run in a browser by tests/serve/test_page.py
    text                shown only; "text output": lines that the `sh` block before it prints, in
                        this order

Blocks run in a folder that has what the documents speak of: MODEL_DIR, a tiny checkpoint under the
released files' names, and as examples/tiny-trained, demo/, .venv/bin, pictures, a sound, clips,
style.safetensors. Commands in running text are checked too.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ltx2rt import cli
from ltx2rt.commands import generate
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.media.output import write_wav
from ltx2rt.run.plan import make_plan
from ltx2rt.session.open import open_session

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted(ROOT.glob("docs/*.md"))
README = (ROOT / "README.md").read_text()
NOT_RUN = {
    "gpu": "needs NVIDIA GPUs and a released checkpoint",
    "tpu": "needs TPUs and a released checkpoint",
    "network": "downloads or installs",
    "clone": "works on the clone itself, for minutes",
    "hours": "takes hours, or writes tens of gigabytes",
}
RELEASED = {  # name of a released file -> what stands for it
    "ltx-2.3-22b-dev.safetensors": "tiny-2.3.safetensors",
    "ltx-2.3-spatial-upscaler-x2-1.1.safetensors": "tiny-2.3-spatial-upsampler-x2.safetensors",
    "ltx-2.3-22b-distilled-lora-384-1.1.safetensors": "tiny-2.3-distilled-lora.safetensors",
    "gemma-3": "gemma-3",
}
HOMES = ("checkpoints", "latent_upscale_models", "loras", "text_encoders")  # of ComfyUI
PROGRAMS = {"ltx2rt": "-m ltx2rt", "torchrun": "-m torch.distributed.run"}
PROGRAMS |= {"python": "", "python3": ""}
# commands that are run wherever they stand
QUICK = ("graph", "plan", "weights", "devices", "compare")


@dataclass(frozen=True)
class Block:
    """A fenced block. number: among the document's; line: of its fence; info: its info string;
    output: what the `text output` after it says."""

    document: Path
    number: int
    line: int
    info: str
    text: str
    output: str = ""

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def name(self) -> str:
        """One that stays when lines are added, as tests/long_tests.txt has it."""
        return f"{self.document.relative_to(ROOT)} {self.number}"

    @property
    def why(self) -> str:
        return self.info.partition(" ")[2]

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    found, start, info = [], None, ""
    lines = document.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if start is None:
            start, info = number, line[3:].strip()
            continue
        text = "\n".join(lines[start : number - 1]) + "\n"
        block = Block(document, len(found) + 1, start, info, text)
        if info == "text output":
            found[-1] = replace(found[-1], output=block.text)
        found.append(block)
        start = None
    assert start is None, f"{document}:{start}: the block has no end"
    return found


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


ALL = [block for document in DOCUMENTS for block in blocks(document)]
JAX = re.compile(r"ltx2rt_tpu|--backend tpu")
NO_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")


def params(*whys: str) -> list:
    """Blocks of Python and shell with one of these words after the language."""
    found = [block for block in ALL if block.language in ("python", "sh") and block.why in whys]
    marks = {word: [getattr(pytest.mark, word)] for word in ("long", "slow")}
    jax = [[NO_JAX] * bool(JAX.search(block.text)) for block in found]
    return [
        pytest.param(block, id=block.name, marks=[*marks.get(block.why, ()), *more])
        for block, more in zip(found, jax, strict=True)
    ]


@pytest.fixture(scope="session")
def clone(tmp_path_factory, tiny, half, user_lora) -> Path:
    """A folder that looks like a clone after `make demo`, with a checkpoint and a picture of the
    reader's in it."""
    folder, made = tmp_path_factory.mktemp("clone"), tiny("tiny-2.3", "official")
    (folder / "MODEL_DIR").mkdir()
    for name, stand_in in RELEASED.items():
        (folder / "MODEL_DIR" / name).symlink_to(made / stand_in)
    for name, home in zip(RELEASED, HOMES, strict=True):
        (folder / "ComfyUI" / "models" / home).mkdir(parents=True)
        (folder / "ComfyUI" / "models" / home / name).symlink_to(made / RELEASED[name])
    (folder / "demo").mkdir()
    (folder / "examples").mkdir()
    (folder / "examples" / "tiny-trained").symlink_to(made)
    (folder / "style.safetensors").symlink_to(user_lora)
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=compiled)
    Image.linear_gradient("L").resize((64, 64)).save(folder / "mask.png")
    for name in ("fox", "dawn", "dusk"):
        Image.linear_gradient("L").resize((320, 180)).convert("RGB").save(folder / f"{name}.png")
    for name in ("depth", "dubit", "hdr", "ingredients"):
        (folder / f"{name}.safetensors").symlink_to(folder / "style.safetensors")
    (folder / "upscaler.safetensors").symlink_to(half)
    write_wav(folder / "song.wav", np.zeros((2, 20 * 8000), np.float32), 8000)
    (folder / "song.wav").rename(folder / "song.mp3")  # what it is stands in the file
    heard = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 20000)).astype(np.float32)
    shown = [np.zeros((3, 57, 64, 64), np.float32)]
    how = {"num_frames": 57, "fps": Fraction(24), "waveform": heard, "sample_rate": 8000}
    for name in ("clip", "depth", "talk"):
        write_mp4(folder / f"{name}.mp4", shown, **how)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, arguments in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


def run(block: Block, clone: Path) -> str:
    """What the block prints. Its warnings are no errors: a reader has no such setting."""
    path = [str(ROOT / name) for name in ("", "backends", "kernels")]
    path += filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    env = os.environ | {"PATH": f"{clone}/.venv/bin:{os.environ['PATH']}"}
    env |= {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-"] if block.language == "python" else ["bash", "-euo", "pipefail"]
    pipes = {"stdin": -1, "stdout": -1, "stderr": -1, "text": True}
    ran = subprocess.Popen(words, cwd=clone, env=env, start_new_session=True, **pipes)
    try:
        stdout, stderr = ran.communicate(block.text, timeout=1500)
    finally:  # a block that fails may leave a server
        with suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
    assert ran.returncode == 0, f"{block}\n{stdout[-2000:]}\n{stderr[-4000:]}"
    return stdout


@pytest.mark.parametrize("block", params("", "long", "slow"))
def test_block_runs_as_it_stands(block, clone):
    printed = iter([line.strip() for line in run(block, clone).splitlines()])
    for line in filter(None, map(str.strip, block.output.splitlines())):
        assert line in printed, f"{block}: does not print, in this order: {line}"


@pytest.mark.parametrize("block", ALL, ids=str)
def test_block_says_what_it_is_and_why_it_is_not_run(block):
    when = ("", "long", "slow")
    languages = {"python": when, "sh": (*when, *NOT_RUN), "text": ("", "output")}
    languages["js"] = ("",)  # run by tests/serve/test_page.py
    assert block.language in languages, f"{block}: {block.info!r}, expected a language"
    known = languages[block.language]
    assert block.why in known, f"{block}: {block.why!r} is no reason; known: {', '.join(known[1:])}"
    if block.language == "text":
        command = r"^\s*(\$ |(\.venv/bin/)?(ltx2rt|python3?|make|pip) )"
        assert not re.search(command, block.text, re.MULTILINE), block


def commands(text: str) -> list[list[str]]:
    """The words of each `ltx2rt` command of shell text; of a pipe the first."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        starts = [i for i, word in enumerate(words) if word in ("ltx2rt", ".venv/bin/ltx2rt")]
        pairs = enumerate(pairwise(words), 1)
        starts += [i for i, pair in pairs if pair == ("-m", "ltx2rt")]
        for start in starts:
            rest = words[start + 1 :]
            ends = [i for i, word in enumerate(rest) if word in ("|", ">", "&&", ";")]
            found.append(rest[: ends[0] if ends else None])
    return found


CHECKED: list[list[str]] = []


def check(argv: list[str], where: object, capsys) -> None:
    """The program takes the command; a request and what it needs of the checkpoint are refused
    nothing."""
    argv = argv if len(argv) > 1 else [*argv, "--help"]  # a command's name alone
    on_many = argv[0] == "plan" and {"--mesh", "v6e-8"} & {*argv}  # tests/session/test_arrange.py
    if argv[0] == "plan" and not on_many:  # its flags are what counts
        argv = [re.sub(r"^ltx-2\.", "tiny-2.", word) for word in argv]
    if argv in CHECKED:  # several documents have it
        return
    CHECKED.append(argv)
    try:
        if (argv[0] in QUICK and not on_many) or argv[-1] == "--help":
            assert not cli.main(argv)
            return
        args = cli.parser().parse_args(argv)
    except (SystemExit, AssertionError) as end:
        if getattr(end, "code", 1):
            pytest.fail(f"{where}: ltx2rt {shlex.join(argv)}\n{capsys.readouterr().err}")
        return
    if argv[0] == "generate":
        options, request, files = generate.asked(args)
        for given in (options, request, files):
            given.check()
        make_plan(open_session(replace(options, device="cpu", mesh={}, profile=None)), request)


@pytest.mark.parametrize("block", params(*NOT_RUN))
def test_commands_of_a_block_that_is_not_run_are_known(block, clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    for argv in commands(block.text):
        check(argv, block, capsys)
    for target in re.findall(r"^make ([\w-]+)", block.text, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"{block}: make {target}"
    check_benchmarks(block.text, block)


def check_benchmarks(text: str, where: object) -> None:
    """Benchmarks and their parts exist; tests run the benchmarks themselves."""
    for module in re.findall(r"python3? -m (benchmarks\.\w+|tests\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), f"{where}: {module}"
    script = (ROOT / "benchmarks" / "on_gpu.sh").read_text()
    parts = re.search(r'^known="(.*)"', script, re.MULTILINE)
    assert parts is not None, "on_gpu.sh lists no parts"
    for part in re.findall(r"on_gpu\.sh ([a-z0-9-]+)", text):
        assert part in {*parts[1].split(), "all"}, f"{where}: on_gpu.sh {part}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_running_text_are_known(document, clone, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    for command in re.findall(r"`(ltx2rt [^`]+)`", prose(document)):
        for argv in commands(" ".join(command.split())):
            check(argv, document.name, capsys)
    check_benchmarks(prose(document), document.name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document):
    text = prose(document)
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not link.startswith(("http://", "https://")):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
    for path in re.findall(r"`((?:ltx2rt|backends|kernels|tests|benchmarks|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"{document.name}: {path}"
    titles = [re.sub(r"[^\w -]", "", x.lower()) for x in re.findall(r"^#+ (.+)$", text, re.M)]
    for anchor in re.findall(r"\]\(#([^)]+)\)", text):
        assert anchor in {title.replace(" ", "-") for title in titles}, anchor
    assert not re.findall(r"ltx2rt[./]pipeline\b[./]?", document.read_text())  # is no more


def test_the_face_is_short_and_links_every_document():
    assert len(README.splitlines()) <= 150
    assert all(f"](docs/{path.name})" in README for path in ROOT.glob("docs/*.md"))


def test_every_flag_of_generate_is_in_its_help_only_once(capsys):
    """The documents send the reader there."""
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help-all"])
    found = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(found) == len(set(found)) > 40


def test_the_cards_of_the_face_have_the_seconds_of_the_plan_and_their_cents():
    """docs/gpus.md is the figures' home, which `tests/placement/test_stream.py` compares with the
    plan."""
    seconds = r"^\| (\S+) \| (\d+) s[^|]* \| (\d+) s"
    rows = re.findall(seconds + r" \| ([\d.]+) \| ([\d.]+) cents \|$", README, re.M)
    text = (ROOT / "docs/gpus.md").read_text()
    planned = {card: found for card, *found in re.findall(seconds, text, re.M)}
    assert len(rows) == 5
    for card, newest, older, price, cents in rows:
        assert [newest, older] == planned[card]
        assert f"{int(newest) * float(price) / 36:.1f}" == cents, card
    for time, kind in re.findall(r"([\d.]+ s) \((v\d\w-8)\)", README):
        assert f"| {kind} | {time} |" in text
