"""Whole runs of `ltx2rt generate`: what they write, what decides it, and what must not change
it."""

import json
import os
import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
from ltx2rt_cuda.backend import CudaBackend
from PIL import Image
from safetensors.numpy import load_file, save_file

from ltx2rt.instruments.compare import compare
from ltx2rt.media.mp4 import write_mp4
from ltx2rt.session.session import Session
from ltx2rt.stages.noise import standard_normal
from tests.conftest import assert_near, assert_same, words_of
from tests.parity import relative_l2

# Frames, rows and columns of 17 frames at 128 x 64 pixels
LATENT = {"stage1": (3, 1, 2), "stage2": (3, 2, 4)}
AUDIO = 9  # round(17 / 48 s * 25)
QUICK = "--pipeline one-stage --num-frames 9 --steps 1".split()


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture(scope="module")
def run(generate, model):
    """run(*flags) -> Run, silent unless a test wants sound."""

    def call(*flags, sound=False):
        done = generate("cuda", model, "--seed", 7, *([] if sound else ["--no-audio"]), *flags)
        assert done.status == 0, done.stderr
        return done

    return call


@pytest.fixture(scope="module")
def base(run):
    return run(sound=True)


def assert_bitwise(found, expected, of=""):
    """The same latents, of a stage or all that both have."""
    names = expected.latents.keys() & found.latents.keys()
    names = {name for name in names if name.startswith(of)}
    assert names & {"stage1.video.steps", "stage2.video.steps"}
    for name in names:
        np.testing.assert_array_equal(found.latents[name], expected.latents[name], name)


def streams(path):
    """(seconds of the video, how many streams of sound, comment or None) of a file."""
    with av.open(str(path)) as container:
        (video,), comment = container.streams.video, container.metadata.get("comment")
        return float(video.frames / video.average_rate), len(container.streams.audio), comment


def test_a_run_imports_nothing_of_training_instruments_or_estimates(model, tmp_path):
    words = "generate --backend cuda --device cpu --pipeline one-stage --width 64 --height 64"
    words += f" --num-frames 1 --steps 1 --prompt x --no-audio --model {model}"
    script = "import sys; from ltx2rt import cli; cli.main(sys.argv[1:]); print(*sys.modules)"
    argv = [sys.executable, "-c", script, *words.split(), "--output", str(tmp_path / "x.mp4")]
    ran = subprocess.run(argv, capture_output=True, text=True)
    found = ran.stdout.split()
    assert "ltx2rt.run.plan" in found, ran.stderr
    rooms = ("ltx2rt.train", "ltx2rt.instruments", "ltx2rt.run.estimate", "ltx2rt.serve")
    assert [name for name in found if name.startswith(rooms)] == []


def test_latents_have_the_names_and_shapes_of_the_contract(base):
    expected = dict.fromkeys(("upsampled", "video_latent"), (1, 128, *LATENT["stage2"]))
    expected |= {"audio_latent": (1, 8, AUDIO, 16)}
    for name, grid in LATENT.items():
        for modality, tokens in (("video", int(np.prod(grid))), ("audio", AUDIO)):
            key = f"{name}.{modality}"
            expected |= {f"{key}.noise": (1, tokens, 128), f"{key}.start": (1, tokens, 128)}
            expected |= {f"{key}.steps": (3, tokens, 128), f"{key}.x0": (3, tokens, 128)}
    shapes = {name: x.shape for name, x in base.latents.items()}
    waveform = shapes.pop("waveform")
    assert shapes == expected
    assert waveform[0] == 2 and abs(waveform[1] / 48000 - 17 / 48) < 0.05
    assert all(x.dtype == np.float32 and np.isfinite(x).all() for x in base.latents.values())


def test_stages_are_joined_as_they_should_be(base):
    x, equal = base.latents, np.testing.assert_array_equal
    equal(x["video_latent"], x["stage2.video.steps"][-1].T.reshape(1, 128, *LATENT["stage2"]))
    equal(x["stage1.video.start"], x["stage1.video.noise"])
    nu = np.float32(0.909375)
    upsampled = x["upsampled"].reshape(1, 128, -1).swapaxes(1, 2)
    for name, made in (("video", upsampled), ("audio", x["stage1.audio.steps"][-1:])):
        noise = x[f"stage2.{name}.noise"]
        equal(x[f"stage2.{name}.start"], (1 - nu) * made + nu * noise)
    # The last sigma is 0: what remains is x0, but for the rounding of x + (x - x0) / s * (0 - s).
    assert relative_l2(x["stage2.video.x0"][-1], x["stage2.video.steps"][-1]) < 1e-6


def test_sound_is_that_of_the_first_stage_unless_the_second_is_asked_for(base, run):
    def tokens(found):
        return found.latents["audio_latent"].swapaxes(1, 2).reshape(AUDIO, 128)

    second = run("--audio-from", "stage2")
    np.testing.assert_array_equal(tokens(base), base.latents["stage1.audio.steps"][-1])
    np.testing.assert_array_equal(tokens(second), base.latents["stage2.audio.steps"][-1])
    assert_bitwise(second, base, "stage")


def test_report_messages_and_settings_in_the_clip(base, model):
    keys = {*"seed stages warmup_s load_s peak_bytes versions device mesh lora".split()}
    assert keys <= base.report.keys() and base.report["seed"] == 7
    stages = base.report["stages"]
    steps = {s["name"]: len(s["steps_s"]) for s in stages if s["name"].startswith("stage")}
    assert steps == {"stage1": 3, "stage2": 3}
    assert all(s["time_s"] >= sum(s["steps_s"]) > 0 or not s["steps_s"] for s in stages)
    lora = str(model / "tiny-2.3-distilled-lora.safetensors")
    assert base.report["lora"] == [{"file": lora, "matched": 130, "total": 130}]
    assert "stage2, distilled: merged 130/130 modules" in base.stderr and "seed 7" in base.stderr
    assert str(base.clip) in base.stdout and "seed 7" in base.stdout
    assert base.stdout.count("\n") == 1
    comment = json.loads(streams(base.clip)[2])
    assert comment["prompt"] == "a robot dancing" and comment["seed"] == 7
    assert comment["model"]["generation"] == "2.3"
    assert {"ltx2rt", "torch"} <= comment["versions"].keys()
    size = {"width": 128, "height": 64, "num_frames": 17, "steps": 3, "pipeline": "two-stage"}
    guided = {"video_cfg": 3.0, "video_stg": 1.0, "video_modality": 3.0, "video_rescale": 0.7}
    assert (size | guided | {"stg_blocks": [1]}).items() <= comment["settings"].items()


def test_no_metadata_and_no_audio_leave_both_out(run, base):
    silent = run("--no-metadata")
    video, sound, comment = streams(silent.clip)
    assert comment is None and sound == 0 and video == 17 / 48
    assert "waveform" not in silent.latents
    assert_bitwise(silent, base)


def test_frames_and_sound_of_their_own_files(run, base, tmp_path):
    found = run("--output", tmp_path / "fox-%05d.png", sound=True)
    assert "fox-%05d.png: " in found.stdout and not found.clip.exists()
    names = [f"fox-{i:05}.png" for i in range(17)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "fox.wav"]
    pictures = [Image.open(tmp_path / name) for name in names]
    write_mp4(tmp_path / "a.mp4", [np.stack(pictures)], num_frames=17, fps=Fraction(48))
    # the frames of the clip, before its encoder
    assert compare(base.clip, tmp_path / "a.mp4")["identical"]
    assert json.loads(pictures[0].text["Comment"])["seed"] == 7
    with av.open(str(tmp_path / "fox.wav")) as container:
        stream = container.streams.audio[0]
        assert (stream.rate, stream.duration) == (48000, 17 * 1000)
        assert "comment" in container.metadata


def test_latents_alone_are_made_without_decoding(command, model, tmp_path):
    latents, report = tmp_path / "latents.safetensors", tmp_path / "report.json"
    words = (
        f"generate --backend cuda --device cpu --model {model} --width 64 --height 64 --prompt x"
    )
    files = "--latents-out", latents, "--report", report
    status, out, err = command(*words.split(), *QUICK, *files)
    assert status == 0 and out.startswith(f"{latents}: "), err
    assert "decode" not in [stage["name"] for stage in json.loads(report.read_text())["stages"]]
    assert {path.name for path in tmp_path.iterdir()} == {"latents.safetensors", "report.json"}


def test_same_seed_same_run_whatever_ran_before(base, run):
    other = run("--seed", 8, "--prompt", "a red fox walks", "--video-cfg", 2)
    moved, kept = (found.latents["stage1.video.steps"] for found in (other, base))
    assert relative_l2(moved, kept) > 0.1
    assert_bitwise(run(), base)


@pytest.mark.long
def test_two_jobs_in_one_process_equal_a_job_alone(base, run, model, tmp_path):
    """`base` ran among others; here the same job has a process to itself."""
    argv = [sys.executable, "-m", "ltx2rt.cli", *words_of(tmp_path, "cuda", model, "--seed", 7)]
    subprocess.run(argv, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert_same(load_file(tmp_path / "latents.safetensors"), base.latents)


def test_seed_decides_the_noise_and_a_missing_one_is_drawn_and_reported(base, generate, model):
    for name in ("stage1.video", "stage2.audio"):
        noise = base.latents[f"{name}.noise"]
        np.testing.assert_array_equal(noise, standard_normal(7, name, noise.shape))
    first, second = (generate("cuda", model, "--no-audio", *QUICK) for _ in range(2))
    seed, noise = first.report["seed"], first.latents["stage1.video.noise"]
    assert seed != second.report["seed"] and f"seed {seed}" in first.stdout
    np.testing.assert_array_equal(noise, standard_normal(seed, "stage1.video", noise.shape))


def test_recorded_noise_reproduces_the_run(base, run, tmp_path):
    """By the names of its streams, or as `--latents-out` wrote it, with everything else."""
    names = {name: name.removesuffix(".noise") for name in base.latents if name.endswith(".noise")}
    noise = {short: base.latents[name] for name, short in names.items()}
    save_file(noise, tmp_path / "noise.safetensors")
    for file in (tmp_path / "noise.safetensors", base.latents_file):
        assert_bitwise(run("--seed", 99, "--noise-in", file), base)


@pytest.mark.parametrize("flags, how", [
    pytest.param(["--warmup"], {}, marks=pytest.mark.long), (["--warmup"], {"reload": True}),
    ([], {"offload": True}), (["--vae-tiling", "off"], {}),
], ids=str)  # fmt: skip
def test_how_a_run_is_made_changes_no_bit(flags, how, base, run, kept):
    """A warm-up runs both stages first, so the run after it sees stage-1 weights that stage 2 has
    passed by."""
    kept(**how)
    found = run(*flags)
    assert_bitwise(found, base)
    assert (found.report["warmup_s"] > 0) == ("--warmup" in flags)


def test_a_warm_up_runs_the_programs_of_the_run_itself(run, monkeypatch):
    """Nine steps take a loop with more room than one step would."""
    lowered, lower_loop = [], CudaBackend.lower_loop

    def noted(*args):
        lowered.append(args[1].inputs["sigmas"].type.shape)
        return lower_loop(*args)

    monkeypatch.setattr(CudaBackend, "lower_loop", noted)
    run("--warmup", "--steps", 9)
    assert lowered == [(16, 2), (8, 2)]


@pytest.mark.parametrize("encoding, backend, generation, least, most", [
    pytest.param("float8", "cuda", "2.0", 2**-8, 2**-4, marks=pytest.mark.slow),
    pytest.param("float8", "cuda", "2.3", 2**-8, 2**-4, marks=pytest.mark.long),
    ("int8", "cuda", "2.3", 2**-9, 2**-5),
    pytest.param("int8", "tpu", "2.3", 2**-9, 2**-5, marks=pytest.mark.slow),
])  # fmt: skip
def test_weights_of_8_bits_make_almost_the_same_clip(
    encoding, backend, generation, least, most, generate, tiny, command
):
    """One block of three is quantised. `compare` puts a number on it; the bound is a step of e4m3,
    2^-4, and half of it for int8, which rounds weights alone."""
    model = tiny(f"tiny-{generation}", "official")
    words = ("--seed", 7, "--no-audio", "--weights-dtype")
    runs = [generate(backend, model, *words, dtype) for dtype in ("bfloat16", encoding)]
    assert [found.status for found in runs] == [0, 0]
    assert [f"weights in {encoding}" in found.stderr for found in runs] == [False, True]
    a, b = (found.latents["video_latent"] for found in runs)
    assert least < relative_l2(b, a) <= most
    status, out, _ = command("compare", *(found.clip for found in runs), "--json")
    assert status == 0 and 20 < json.loads(out)["psnr_db"] < 60


def test_unrolled_layers_agree(base, run):
    found = run("--layers", "unrolled")
    made = {name: x for name, x in base.latents.items() if name.startswith("stage")}
    assert_near({name: found.latents[name] for name in made}, made, 1e-5)


@pytest.mark.parametrize("reload", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_lora_for_one_stage_leaves_the_other_alone(reload, base, run, user_lora, kept):
    kept(reload=reload)

    def moved(found, stage):
        steps = f"{stage}.video.steps"
        return relative_l2(found.latents[steps], base.latents[steps]) > 1e-3

    late = run("--lora", f"{user_lora}:0.5:stage2")
    assert_bitwise(late, base, "stage1")
    assert moved(late, "stage2") and late.stderr.count("merged 130/130 modules") == 2
    assert moved(run("--lora", f"{user_lora}:0.5:stage1"), "stage1")


@pytest.mark.long
def test_reloaded_weights_equal_resident_ones(run, user_lora, kept):
    flags = ("--lora", f"{user_lora}:0.5", "--pipeline", "two-stage", "--num-frames", 9)
    found = []
    for reload in (True, False):
        kept(reload=reload)
        found.append(run(*flags))
    assert_bitwise(*found)


def test_an_image_at_full_strength_stays_exactly(run, images):
    first, later = images
    x = run("--image", f"{first}:0", f"{later}:5:0.4").latents
    for name, (frames, rows, columns) in LATENT.items():
        space = rows * columns
        start, steps = x[f"{name}.video.start"], x[f"{name}.video.steps"]
        assert steps.shape[1] == (frames + 1) * space  # one frame of tokens appended
        for latent in steps:
            # x + (x - x) / s * ds
            np.testing.assert_allclose(latent[:space], start[0, :space], atol=1e-6)
        assert relative_l2(steps[-1][-space:], start[0, -space:]) > 1e-2
    assert x["video_latent"].shape == (1, 128, *LATENT["stage2"])


@pytest.mark.long
def test_cross_timestep_rules_differ_with_an_image_and_the_default_is_c(run, images):
    flags = (*"--pipeline one-stage --num-frames 9 --steps 2 --image".split(), f"{images[0]}:0:0.5")
    found = {rule: run(*flags, "--cross-timestep-rule", rule) for rule in "ABC"}
    for one, other in ("AB", "BC", "AC"):
        a, b = (found[rule].latents["stage1.video.steps"] for rule in (one, other))
        assert relative_l2(a, b) > 1e-5, one + other
    assert_bitwise(run(*flags), found["C"])


def test_a_neutral_branch_is_not_run(run, monkeypatch):
    batches = []
    original = Session.denoise

    def counted(self, call, *args):
        batches.append(call.sizes.branches.names)
        return original(self, call, *args)

    monkeypatch.setattr(Session, "denoise", counted)
    run(*"--pipeline one-stage --num-frames 9 --steps 1 --video-stg 0 --audio-stg 0".split())
    assert batches and set(batches) == {("cond", "uncond", "isolated")}


@pytest.mark.parametrize("where,raised,status", [
    ("session.session.Session.denoise", RuntimeError("no luck"), 1),
    ("stages.sound.decode_sound", KeyboardInterrupt(), 130),
    ("stages.frames.Frames._calls", SystemExit(143), 143),
    ("run.write.write_arrays", OSError("No space left on device"), 1),
    pytest.param("run.write.write_report", OSError("No space left on device"), 1, marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_that_fails_leaves_no_file(where, raised, status, generate, model, monkeypatch):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(f"ltx2rt.{where}", fail)
    found = generate("cuda", model, "--seed", 1, *QUICK)
    assert (found.status, found.stdout) == (status, "") and "Traceback" not in found.stderr
    assert list(found.folder.iterdir()) == []
    errors = [line for line in found.stderr.splitlines() if line.startswith("ltx2rt: error: ")]
    assert len(errors) == (status != 143)  # SIGTERM unwinds as SystemExit, which says nothing
    assert status != 1 or str(raised) in errors[0]


def test_quiet_says_where_the_file_is_and_verbose_what_is_built(generate, model, tmp_path):
    """Also not that a flag is unread, a prompt cut or an image's alpha dropped."""
    words = "--seed 1 --num-frames 9 --pipeline distilled --distilled-lora none --no-audio"

    def made(*more):
        return generate("cuda", model, *words.split(), *more)

    quiet = made("--quiet", "--prompt", "word " * 2000)
    assert (quiet.status, quiet.stderr) == (0, "") and quiet.stdout.count("\n") == 1
    (tmp_path / "old.json").write_text("{}")
    loud = made("--verbose", "--report", tmp_path / "old.json")
    assert loud.status == 0 and f"will be replaced: {tmp_path}/old.json\n" in loud.stderr
    assert "building video-decoder" in loud.stderr
    assert "loading the weights of guided-step ...\n" in loud.stderr
    assert "decode: 9 frames ...\n" in loud.stderr and "\r" not in loud.stderr
    both = made("--quiet", "--verbose")
    assert both.status == 2 and "contradict each other" in both.stderr


def test_the_room_that_is_asked_for_holds_the_files(run, monkeypatch):
    """Latents to a few percent, beside 64 KiB of headers."""
    asked = {}
    monkeypatch.setattr("ltx2rt.commands.generate.require_space", asked.update)
    made = run("--num-videos", 2, "--steps", 2, sound=True)
    for path, most in asked.items():
        size = path.stat().st_size
        assert size <= most, path
        if path == made.latents_file:
            assert most - 2**16 < 1.1 * size
    assert len(asked) == 3


def test_a_clip_without_a_name_gets_a_free_one(command, model, tmp_path, monkeypatch):
    """The name has the seed, nothing is replaced, and folders are made."""
    monkeypatch.chdir(tmp_path)
    words = ["generate", "--backend", "cuda", "--device", "cpu", "--model", model, "--prompt", "x"]
    words += ["--steps", 1, "--seed", 5]
    small = [*words, "--pipeline", "one-stage", "--width", 64, "--height", 64]

    def made(*more):
        before = set(tmp_path.rglob("*.*"))
        status, out, err = command(*more)
        assert status == 0, err
        paths = {*tmp_path.rglob("*.*")} - before
        found = sorted(str(path.relative_to(tmp_path)) for path in paths)
        several = [path for path in found if path.startswith("many/")]
        assert all(path in out for path in found if path not in several)
        return found, err

    (tmp_path / "ltx2rt-5.mp4").touch()
    found, err = made(*small, "--num-frames", 9)
    assert found == ["ltx2rt-5-1.mp4"] and "--output names no file: the clip will be" in err
    several, _ = made(*small, "--num-frames", 9, "--num-videos", 2, "--no-audio", "--output", ".")
    assert several == ["ltx2rt-1-5.mp4", "ltx2rt-1-6.mp4"]
    sound, _ = made(*words, "--pipeline", "t2a", "--num-frames", 9)
    assert sound == ["ltx2rt-5.wav"]
    names = ["many/%05d.png", "many/last.png", "many/c.mov", "many/c.wav", "many/c.mp4"]
    found, _ = made(*small, "--num-frames", 9, "--output", *names)  # in any order
    frames = [f"many/{n:05d}.png" for n in range(9)]
    assert found == [
        *frames,
        *"many/c.mov many/c.mp4 many/c.wav many/last.png many/sound.wav".split(),
    ]
    last = [np.asarray(Image.open(path)) for path in ("many/00008.png", "many/last.png")]
    np.testing.assert_array_equal(*last)
    found, err = made(*small, "--output", "new/deep/im.jpg")
    assert found == ["new/deep/im.jpg"] and "one frame is made, and no sound" in err
    found, _ = made(*small, "--output", "im.webp", "--num-frames", 1)  # else it is a moving one
    with Image.open("im.webp") as image:
        about = json.loads(image.getexif().get_ifd(0x8769)[0x9286][8:])
    assert image.size == (64, 64) and about["settings"]["num_frames"] == 1
