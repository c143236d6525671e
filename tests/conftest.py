"""Tiny checkpoints and whole runs, for every test that concerns more than one network."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ltx2rt.errors import InputError
from ltx2rt.flags import flagged
from ltx2rt.pipelines import FIRST, pipeline
from tests.gguf_files import linked
from tests.parity import relative_l2
from tests.virtual import xla_flags

# jaxlib says at the very end what it leaks, over the results
atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SOURCE_DATE_EPOCH", "1767323045")  # files of equal clips are equal
# Programs that JAX compiled for one test are read by every other process, of this run and of later
# ones: xdist's workers and commands that tests start inherit this.
BETWEEN_RUNS = Path(sys.prefix if os.access(sys.prefix, os.W_OK) else tempfile.gettempdir())
COMPILED = Path(
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(BETWEEN_RUNS / "jax-compiled"))
)
KEPT_BYTES = 4 * 10**9  # size of all programs when a run begins; the oldest are removed
LASTED = BETWEEN_RUNS / "test-durations.json"  # seconds of each test file in the last run with it
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

KNOWN_TIMES = tempfile.TemporaryDirectory()  # commands keep the times of their runs there
os.environ["XDG_CACHE_HOME"] = KNOWN_TIMES.name

SMALL = {"--width": 128, "--height": 64, "--num-frames": 17, "--fps": 48, "--steps": 3}
SMALL["--image-crf"] = 0
LATENTS = "latents.safetensors"


def read_by(flags: Iterable[object], defaults: dict[str, object]) -> list[object]:
    """The defaults as words: those that the pipeline which the flags name reads."""
    words = [str(word) for word in flags]
    named = words[words.index("--pipeline") + 1] if "--pipeline" in words else FIRST
    read = {f"--{field.replace('_', '-')}" for field in flagged(pipeline(named))}
    return [x for flag, value in defaults.items() if flag in read for x in (flag, value)]


@dataclass(frozen=True)
class Run:
    """What one `ltx2rt generate` left behind. status: its exit status; the files lie in
    `folder`."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def clip(self) -> Path:
        return self.folder / "clip.mp4"

    @property
    def latents_file(self) -> Path:
        return self.folder / LATENTS

    @cached_property
    def latents(self) -> dict[str, np.ndarray]:
        return load_file(self.latents_file)

    @cached_property
    def report(self) -> dict:
        return json.loads((self.folder / "report.json").read_text())


LONG_FILES = """
    test_unchanged weights/test_gguf run/test_preview weights/test_checkpoint commands/test_generate
    models/test_audio_vae media/test_video benchmarks/test_quality serve/test_webhooks test_cli
    models/test_video_vae models/test_guided_step train/test_precomputed train/test_run media/test_output
    commands/test_probe models/test_samplers test_counts commands/test_natural stages/test_denoise
    models/test_vocoder models/test_transformer kernels/test_kernels test_docs pipelines/test_refusals
    backends/test_decode_on_devices serve/test_batch serve/test_comfyui_nodes
    models/test_diffusion_decoder backends/test_tensor_parallel serve/test_app serve/test_page
""".split()  # longer than their number of tests tells, the longest last


class LongestFirst:
    """The order of test files: the longest of the last run first, so that no worker is left with it
    at the end."""

    def __init__(self, lasted: dict[str, float]):
        self.lasted = {f"tests/{name}.py": 1000 + i for i, name in enumerate(LONG_FILES)} | lasted
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        node.workerinput["lasted"] = self.lasted  # workers must agree, also while another run ends

    def pytest_collection_modifyitems(self, items) -> None:
        lasted = dict(Counter(file_of(item.nodeid) for item in items)) | self.lasted
        items.sort(key=lambda item: -lasted[file_of(item.nodeid)])

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session) -> None:
        worker = hasattr(session.config, "workerinput")
        if session.testscollected and not worker and not session.shouldstop:
            LASTED.write_text(json.dumps(self.lasted | self.seconds, indent=1))


class CompiledOnce:
    """In an empty clone the first worker collects before the others, which find the test files
    compiled: asserts are rewritten, which takes each of them ten seconds."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        if sys.dont_write_bytecode or any(here.glob("__pycache__/test_*-pytest-*.pyc")):
            self.mark = None
        else:
            self.mark = Path(tempfile.mkdtemp()) / "collected"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        node.workerinput["collected"] = self.mark and str(self.mark)

    def pytest_sessionfinish(self) -> None:
        if self.mark:
            shutil.rmtree(self.mark.parent)


class CollectsInTurn:
    """A worker of a run that is `CompiledOnce`. mark: the file that says that the first has
    collected."""

    def __init__(self, worker: str, mark: Path):
        self.first, self.mark = worker == "gw0", mark

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        end = time.monotonic() + 60
        while not (self.first or self.mark.exists()) and time.monotonic() < end:
            time.sleep(0.1)

    def pytest_collection_finish(self) -> None:
        if self.first:
            self.mark.touch()


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


ROOT = Path(__file__).parents[1]


def refuse_two_trees() -> None:
    """A clone that borrows an environment would test the other tree's backends. Raises
    UsageError."""
    for name in ("ltx2rt", "ltx2rt_cuda", "ltx2rt_tpu", "ltx2rt_kernels"):
        spec = find_spec(name)
        if spec and spec.origin and ROOT not in Path(spec.origin).resolve().parents:
            raise pytest.UsageError(
                f"{name} comes from {Path(spec.origin).parent}, the tests are of {ROOT}; "
                "`make test` makes an environment of this tree"
            )


def pytest_configure(config) -> None:
    # rarely, from the collection on: with torch and jax imported that takes a quarter of a run's time
    gc.set_threshold(100_000, 20, 20)
    refuse_two_trees()
    if hasattr(config, "workerinput"):
        lasted, mark = config.workerinput["lasted"], config.workerinput["collected"]
        if mark:
            config.pluginmanager.register(
                CollectsInTurn(config.workerinput["workerid"], Path(mark))
            )
    else:
        config.pluginmanager.register(CompiledOnce())
        with contextlib.suppress(OSError):
            newest_first = sorted(COMPILED.iterdir(), key=lambda file: -file.stat().st_mtime)
            sizes = list(accumulate(file.stat().st_size for file in newest_first))
            for file in newest_first[bisect_right(sizes, KEPT_BYTES) :]:
                file.unlink()
        lasted = {}
        with contextlib.suppress(OSError, ValueError):
            lasted = json.loads(LASTED.read_text())
    config.pluginmanager.register(LongestFirst(lasted))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    """Mark the tests of long_tests.txt, which `tests.choose` writes, as `long`. Without jax, tests
    are skipped that name it or its backend: in parameters, their text or that of a fixture."""
    long = set((ROOT / "tests" / "long_tests.txt").read_text().splitlines())
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.long)
    if find_spec("jax"):
        return
    for item in items:
        info = item._fixtureinfo
        used = {name for mark in item.iter_markers("usefixtures") for name in mark.args}
        every = set(info.initialnames) - set(info.argnames) - used  # fixtures of every test
        fixtures = [
            definitions[-1].func
            for name, definitions in info.name2fixturedefs.items()
            if name not in every
        ]
        sources = map(inspect.getsource, (item.function, *fixtures))
        text = " ".join([item.name, *(source.partition("def ")[2] for source in sources)])
        if re.search(r"jax|\btpu\b|ltx2rt_tpu|ON_HOSTS", text, re.IGNORECASE):
            item.add_marker(pytest.mark.skip(reason="jax is not installed"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors, and as many test processes as cores."""
    import torch  # not in the process that only deals tests to workers

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def few_collections() -> None:
    """Cycles are not looked for among what is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> None:
    """In the folder of this process, too, that `ltx2rt generate` chooses in others."""
    from ltx2rt.backend import keep_compiled

    if find_spec("jax"):
        keep_compiled("tpu", Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))


@pytest.fixture
def install_backend(tmp_path, monkeypatch) -> Callable[[str, str], None]:
    """install_backend(name, source): a backend of that name is installed, a module with an entry
    point."""

    def install(name: str, source: str) -> None:
        (tmp_path / f"{name}_backend.py").write_text(source)
        metadata = tmp_path / f"{name}_backend-1.0.dist-info"
        metadata.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}-backend\nVersion: 1.0\n"
        (metadata / "METADATA").write_text(head)
        entry = f"[ltx2rt.backends]\n{name} = {name}_backend:FACTORY\n"
        (metadata / "entry_points.txt").write_text(entry)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    return install


@pytest.fixture(scope="session")
def half(folder, tmp_path_factory) -> Path:
    """A LoRA for references of half the size."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("lora") / "half.safetensors"
    tensors = load_file(folder / "tiny-2.3-distilled-lora.safetensors")
    save_file(tensors, path, {"reference_downscale_factor": "2"})
    return path


@pytest.fixture(scope="module")
def following(on_both, half) -> dict:
    """Sessions with that LoRA at no strength, on weights that count as distilled."""
    from ltx2rt.session.options import NO_LORA, LoraSpec

    how = {"distilled_lora": NO_LORA, "loras": (LoraSpec(half, 0.0),), "assume": "distilled"}
    return on_both("tiny-2.3", **how)


def denoised(session, request):
    """The plan of a request, and the state of its run up to its decoders."""
    from ltx2rt.run.plan import make_plan
    from ltx2rt.run.run import produce
    from ltx2rt.stages.frames import Frames
    from ltx2rt.stages.inset import Cut
    from ltx2rt.stages.joined import Join, JoinFrames
    from ltx2rt.stages.segments import JoinSegments, Keep
    from ltx2rt.stages.sound import Sound

    plan, ends = (
        make_plan(session, request),
        (Frames, Sound, Cut, Join, JoinFrames, Keep, JoinSegments),
    )
    kept = tuple(stage for stage in plan.stages if not isinstance(stage, ends))
    return plan, produce(session, replace(plan, stages=kept), keep=True)[0]


def normal(*shape: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_near(found, expected, close: float) -> None:
    """Arrays by name: the same names, each within this relative distance."""
    assert found.keys() == expected.keys()
    distances = {name: relative_l2(found[name], x) for name, x in expected.items()}
    assert all(distance <= close for distance in distances.values()), distances


def assert_same(found, expected) -> None:
    """Arrays by name: the same names and numbers."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, name)


def assert_ran(*runs) -> None:
    assert not any(run.status for run in runs), runs


def refused(says: str):
    """A block that has to raise InputError, with a sentence that this pattern finds."""
    return pytest.raises(InputError, match=says)


def run_cli(argv: list[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `ltx2rt argv`, in this process."""
    from ltx2rt import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(argv)
        except SystemExit as exit_:  # argparse
            status = int(exit_.code or 0)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="session")
def command() -> Callable[..., tuple[int, str, str]]:
    """command(*argv) -> (exit status, stdout, stderr) of `ltx2rt argv`."""
    return lambda *argv: run_cli([str(word) for word in argv])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[..., Path]:
    """(preset, layout, seed=0) -> folder. Tests must not change what lies there."""
    from ltx2rt.instruments.make import make_checkpoint

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # of all workers

    def get(name: str, layout: str, seed: int = 0) -> Path:
        make = partial(make_checkpoint, name, layout, seed=seed)
        return once(root / f"{name}-{layout}-{seed}", make)

    return get


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """The folder, made by the first of all workers that asks."""
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        make(made)
        with contextlib.suppress(OSError):  # another worker was quicker
            made.rename(folder)
    return folder


@pytest.fixture(scope="session")
def released(tmp_path_factory) -> Callable[..., Path]:
    """released(*words, preset=..., empty=...): a new folder with files of LTX-2.5 under their
    released names, `tests.released.BASE` and those of these words, such as "distilled", "dev",
    "lora", "dev int8"; released("diffusers") is the repository of diffusers folders. empty: only
    headers, of the sizes of the preset."""
    from tests.released import BASE, folder_of, make_diffusers, make_released

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # of all workers

    def get(
        *words: str,
        preset: str = "tiny-2.5",
        empty: bool = False,
        base: Iterable[str] = BASE,
        out: Path | None = None,
    ) -> Path:
        folders = words == ("diffusers",)
        make = partial(make_diffusers if folders else make_released, preset=preset, empty=empty)
        made = once(root / f"released-{preset}-{empty}-{folders}", make)
        out = out or tmp_path_factory.mktemp("ltx-2.5")
        return linked(made, out) if folders else folder_of(made, out, *words, base=base)

    return get


def words_of(folder: Path, backend: str, model: Path, *flags: object) -> list[str]:
    """One small clip on the CPU, with every file that can be asked for; flags win over the
    defaults."""
    files = {"--output": "clip.mp4", "--report": "report.json", "--latents-out": LATENTS}
    words = ["generate", "--backend", backend, "--device", "cpu", "--model", model]
    words += ["--prompt", "a robot dancing"]
    of_clips = read_by(flags, {"--video-path": 0})  # size, length and rate are the file's
    words += [] if of_clips else read_by(flags, SMALL)
    for flag in files.keys() - set(flags):
        words += [flag, folder / files[flag]]
    return [str(word) for word in (*words, *flags)]


@pytest.fixture(scope="module")
def on_both(tiny) -> Iterator[Callable[..., dict]]:
    """on_both(preset, **options) -> sessions by backend, in float32 on the CPU, of a diffusers
    folder; each is opened once for a module."""
    from ltx2rt.session.open import open_session
    from ltx2rt.session.options import ModelOptions

    opened: dict[tuple, Any] = {}

    def get(preset: str, **options: Any) -> dict:
        found: dict[str, Any] = {}
        for backend in ("cuda", "tpu"):
            if (key := (backend, preset, *sorted(options.items()))) not in opened:
                how = {"device": "cpu", "dtype": "float32", **options}
                opened[key] = open_session(ModelOptions(backend, tiny(preset, "diffusers"), **how))
            found[backend] = opened[key]
        return found

    yield get
    for session in opened.values():
        session.close()


@pytest.fixture(scope="session")
def user_lora(tiny) -> Path:
    """A LoRA unlike the model's own one."""
    return tiny("tiny-2.3", "official", 1) / "tiny-2.3-distilled-lora.safetensors"


@pytest.fixture(scope="session")
def folder(tiny) -> Path:
    return tiny("tiny-2.3", "diffusers")


@pytest.fixture(scope="module")
def sessions(on_both, folder) -> dict:
    """With a LoRA of no strength: guided and distilled steps on the same weights."""
    from ltx2rt.session.options import LoraSpec

    lora = LoraSpec(folder / "tiny-2.3-distilled-lora.safetensors", 0.0)
    return on_both("tiny-2.3", distilled_lora=lora, assume="dev")


@pytest.fixture(scope="session")
def generate(tmp_path_factory) -> Callable[..., Run]:
    """generate(backend, model, *flags) -> Run, in this process."""

    def call(backend: str, model: Path, *flags: object) -> Run:
        folder = tmp_path_factory.mktemp("run")
        return Run(*run_cli(words_of(folder, backend, model, *flags)), folder)

    return call


@pytest.fixture
def kept(monkeypatch) -> Callable[..., None]:
    """kept(**residence): every run keeps its weights like this, whatever there is room for."""
    from ltx2rt.session.memory import Memory
    from ltx2rt.session.weights import Residence

    def call(**how: Any) -> None:
        way = Residence(**how)
        monkeypatch.setattr(Memory, "_ways", lambda self, stages: [(self.session.asked, way)])

    return call


@pytest.fixture(scope="session")
def started(tmp_path_factory) -> Callable[..., Callable[[], Run]]:
    """started(backend, model, *flags, **environment): start a process of its own; the result waits
    for its end."""

    def start(backend: str, model: Path, *flags: object, **environment: str) -> Callable[[], Run]:
        folder = tmp_path_factory.mktemp("run")
        argv = [sys.executable, "-m", "ltx2rt", *words_of(folder, backend, model, *flags)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = os.environ | environment | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(argv, env=env, **pipes)

        def end() -> Run:
            out, err = process.communicate(timeout=600)
            return Run(process.returncode, out, err, folder)

        return end

    return start


@pytest.fixture(scope="session")
def generate_on_both(started) -> Callable[..., tuple[Run, Run]]:
    """generate_on_both(model, *flags) -> (cuda, tpu), side by side."""

    def call(model: Path, *flags: object) -> tuple[Run, Run]:
        first, second = (started(backend, model, *flags) for backend in ("cuda", "tpu"))
        return first(), second()

    return call


@pytest.fixture(scope="session")
def generate_on_ranks(started) -> Callable[..., Run]:
    """generate_on_ranks(ranks, model, *flags) -> Run of torch processes on gloo."""
    return lambda ranks, model, *flags: started("cuda", model, *flags, "--num-gpus", ranks)()


@pytest.fixture(scope="session")
def generate_on_devices(started) -> Callable[..., Run]:
    """generate_on_devices(count, model, *flags) -> Run of JAX on virtual CPU devices."""

    def call(count: int, model: Path, *flags: object) -> Run:
        environment = {"XLA_FLAGS": xla_flags(count), "JAX_PLATFORMS": "cpu"}
        return started("tpu", model, *flags, **environment)()

    return call


@pytest.fixture(scope="session")
def film(tmp_path_factory) -> Path:
    """17 frames of 64x64 at 24 fps, and noise in two channels."""
    from ltx2rt.media.mp4 import write_mp4

    f, y, x = np.mgrid[:17, :64, :64].astype(np.float32)
    sound = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 40000)).astype(np.float32)
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    frames = [np.stack([np.sin(x / 7 + f), np.cos(y / 5 + f), np.sin(x * y / 200)])]
    write_mp4(path, frames, num_frames=17, fps=Fraction(24), waveform=sound, sample_rate=44100)
    return path


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> tuple[Path, Path]:
    """Two unlike images, neither of a clip's size."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    y, x = np.mgrid[0:100, 0:210]
    first = np.stack([x, y * 2, (x + y) * 5 % 256], -1).astype(np.uint8)
    Image.fromarray(first).save(folder / "first.png")
    Image.fromarray(first[::-1, ::-1, ::-1].copy()).save(folder / "later.png")
    return folder / "first.png", folder / "later.png"
