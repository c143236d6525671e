"""Clips in segments: beginnings, what is kept of the one before, runs that go on where they stopped."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

import ltx2rt
from ltx2rt import cli
from ltx2rt.atomic_file import NotWritten
from ltx2rt.commands import generate
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.media.mp4 import EXACT, whole_fragments, write_mp4
from ltx2rt.media.sound import read_sound
from ltx2rt.media.video import read_frames
from ltx2rt.models import vocoder
from ltx2rt.models.geometry import pack_audio, pack_video, unpack_video
from ltx2rt.pipelines import groups, make_request
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.groups.images import Images
from ltx2rt.pipelines.groups.segments import segment_seed
from ltx2rt.placement.plan import peak
from ltx2rt.run.files import Marks
from ltx2rt.run.plan import make_plan
from ltx2rt.run.recording import STREAM, recording
from ltx2rt.run.report import comment
from ltx2rt.run.run import produce
from ltx2rt.run.segments import check_records, claimed, discard, folder_of
from ltx2rt.serve.folder import segments_of
from ltx2rt.serve.worker import attempt
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.segments import JoinSegments, Keep, segment_starts
from ltx2rt.stages.sound import vocode
from ltx2rt.weights.files import write_arrays
from tests.conftest import refused
from tests.parity import relative_l2
from tests.pipelines.test_ic_lora import movie

SIZE = {"width": 64, "height": 64, "num_frames": 25, "overlap": 9, "seed": 3}


def several(given):
    """What a clip in so many `segments` of num_frames is asked for by."""
    given, size = dict(given), given["num_frames"]
    if count := given.pop("segments", None):
        frames = size + (count - 1) * max(size - given["overlap"], 1)
        given |= {"num_frames": frames + -(frames - 1) % 8, "segment_frames": size}
    return given


def asked(folder, pipeline="one-stage", **more):
    steps = {} if pipeline == "distilled" else {"steps": 2}
    given = several({"prompt": "a fox", **SIZE, **steps, "segments": 3} | more)
    return make_request(pipeline, **given).kept_in(folder)


def made(session, request):
    """Frames and waveform of a run; its parts stay in their folder."""
    request.parts_folder.mkdir(exist_ok=True)
    state, *_ = produce(session, make_plan(session, request))
    frames = np.concatenate(list(next(state.frames)))
    return frames, None if state.waveforms is None else state.waveforms[0]


def part(folder, i, count=25):
    path = folder / f"{i:04d}.mov"
    return np.stack(list(read_frames(path, "", count))), read_sound(path)[0]


def test_segments_begin_by_the_formula():
    """A minute at 24 per second, in segments of 121 frames that repeat 25; the last repeats 49."""
    starts = segment_starts(1441, 121, 25)
    assert len(starts) == 15 and starts[13] == 13 * 96 and starts[14] == 1441 - 121
    assert starts[13] + 121 - starts[14] == 49
    assert segment_starts(121 + 96, 121, 25) == (0, 96)
    for frames in range(129, 1000, 8):
        starts = segment_starts(frames, 121, 25)
        laps = [a + 121 - b for a, b in pairwise(starts)]
        assert starts[-1] + 121 == frames and set(laps[:-1]) <= {25} and 25 <= laps[-1] < 121


def test_a_part_comes_back_bit_for_bit(tmp_path):
    rng, file = np.random.default_rng(0), tmp_path / "part.mov"
    for fps, rate in ((Fraction(24), 24000), (Fraction(30000, 1001), 48000)):
        frames = rng.integers(0, 256, (9, 64, 96, 3)).astype(np.uint8)
        wave = rng.uniform(-1, 1, (2, round(9 / fps * rate))).astype(np.float32)
        sound = {"waveform": wave, "sample_rate": rate}
        write_mp4(file, [frames], num_frames=9, fps=fps, **sound, container=EXACT)
        np.testing.assert_array_equal(np.stack(list(read_frames(file, "", 9))), frames)
        np.testing.assert_array_equal(read_sound(file)[0], wave)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["one-stage", "distilled"])
def test_the_first_segment_is_the_plain_clip_and_each_goes_on(opened, tmp_path, pipeline):
    session = opened.resident
    frames, wave = made(session, asked(tmp_path, pipeline))
    parts = [part(tmp_path, i) for i in range(3)]
    steps = {} if pipeline == "distilled" else {"steps": 2}
    size = {name: value for name, value in SIZE.items() if name != "overlap"}
    plain = opened.generate("a fox", pipeline=pipeline, **size, **steps)
    np.testing.assert_array_equal(parts[0][0], plain.frames)
    heard = plain.waveform.shape[1]  # the model's sound ends 0.03 s before its frames
    np.testing.assert_array_equal(parts[0][1][:, :heard], plain.waveform)
    assert not parts[0][1][:, heard:].any() and parts[0][1].shape[1] - heard == 1520
    assert len(frames) == 25 + 16 + 16
    for (before, _), (after, _) in pairwise(parts):
        np.testing.assert_array_equal(after[0], before[16])  # 8 of 9 are blended
        assert (after[9:] != before[9:]).any()
    expected = np.concatenate([x[:16] for x, _ in parts] + [parts[2][0][16:]])
    np.testing.assert_array_equal(frames, expected)
    samples = round(Fraction(16, 24) * plain.sample_rate)
    joined = [x[:, :samples] for _, x in parts[:2]] + [parts[2][1]]
    np.testing.assert_array_equal(wave, np.concatenate(joined, axis=1))


@pytest.mark.long
@pytest.mark.parametrize(
    "generation", [pytest.param("2.0", marks=pytest.mark.slow), "2.3"], indirect=True
)
def test_the_sound_is_that_of_one_run_of_the_vocoder(opened, tmp_path):
    """Over the mel spectrogram of the whole clip: no sample tells where a segment begins."""
    session = opened.resident
    request = asked(tmp_path, num_frames=33, overlap=17, steps=1)
    _, wave = made(session, request)
    full = resolve(request, session.config)
    size = vocoder.frame_samples(session.config.vocoder)
    spans = full.segments.spans
    places = [round(Fraction(span.start, 24) * 100) for span in spans]
    assert places == [0, 67, 133]
    mels = [part.mel() for part in full.parts]
    for mel, later, a, b in zip(mels, mels[1:], places, places[1:], strict=False):
        kept = (mel.shape[2] - (b - a) - 1) // 4 * 4 + 1
        np.testing.assert_array_equal(later[:, :, :kept], mel[:, :, b - a :][:, :, :kept])
        assert (later[:, :, kept] != mel[:, :, b - a :][:, :, kept]).any()
    steps = [b - a for a, b in pairwise(places)] + [None]
    whole = np.concatenate([x[:, :, :n] for x, n in zip(mels, steps, strict=True)], 2)
    expected = vocode(session, whole, lambda: None)[0]
    assert expected.shape[1] == size * (133 + 133)
    # Sums of another length have another order, in float32.
    assert np.abs(wave[:, : expected.shape[1]] - expected).max() < 1e-4


def test_a_segment_is_an_extend_run(opened, tmp_path):
    """Of the file before, with the segment's seed."""
    more = {"segment_prompts": ("a hare",), "segments": 2, "audio": False}
    made(opened.resident, asked(tmp_path, **more))
    again = opened.generate(
        "a hare", pipeline="extend", video_path=tmp_path / "0000.mov", overlap=9, extend_frames=16,
        seed=segment_seed(3, 1), guided=True, steps=2,
    )  # fmt: skip
    frames = np.stack(list(read_frames(tmp_path / "0001.mov", "", 25)))
    np.testing.assert_array_equal(frames, again.frames[-25:])


@pytest.mark.slow
def test_both_stages_keep_the_frames_and_the_sound(opened, tmp_path, tiny):
    """At their own size, after every step; stage 2 starts from the upscaled latents elsewhere."""
    session = opened.resident
    made(session, asked(tmp_path, "distilled", segments=2))
    (tmp_path / "0001.mov").unlink()
    plan = make_plan(session, asked(tmp_path, "distilled", segments=2))
    stages = tuple(s for s in plan.stages if not isinstance(s, (Keep, JoinSegments)))
    record = produce(session, replace(plan, stages=stages), keep=True)[0].record
    clips = [s for s in stages if s.name in ("stage1", "stage2")]
    sound = pack_audio(record["source.audio"])[0]
    for stage in clips:
        grid = stage.geometry.rows * stage.geometry.columns
        clean = 2 * grid  # latent frames of 9 pixel frames
        video = record[f"{stage.name}.video.steps"]
        for step in video[1:]:
            np.testing.assert_array_equal(step[:clean], video[0][:clean])
        assert stage.geometry.mel_shape(session.config.audio_vae)[2] == 101
        known = 101 - round(Fraction(16, 24) * 100)  # mel frames that the segment repeats
        mask = (np.arange(len(sound)) >= (known - 1) // 4 + 1).astype(float)
        for step in record[f"{stage.name}.audio.steps"]:
            np.testing.assert_array_equal(step[mask == 0], sound[mask == 0])
        sigma = float(stage.sigmas[0])
        starts = {"audio": (mask, sound)}
        starts["video"] = (np.arange(len(video[0])) >= clean).astype(float), video[0]
        for m, (new, kept) in starts.items():
            noise = record[f"{stage.name}.{m}.noise"][0].astype(np.float64)
            before = np.zeros_like(noise)
            if stage.name == "stage2":
                last = {"video": record["upsampled"], "audio": record["stage1.audio.steps"][-1:]}[m]
                before = (pack_video(last) if m == "video" else last)[0]
            fresh = (1 - sigma) * before + sigma * noise
            expected = np.where(new[:, None] > 0, fresh, kept)
            start = record[f"{stage.name}.{m}.start"][0]
            assert relative_l2(start, expected) < 1e-6, (stage.name, m)
    last = record["source.tail"]  # at the size of stage 2
    np.testing.assert_array_equal(pack_video(last)[0], record["stage2.video.steps"][-1][: 2 * 4])


def test_a_long_clip_needs_two_programs_and_the_memory_of_one_segment(opened):
    session = opened.resident
    peaks = []
    for segments in (2, 9):
        plan = make_plan(session, asked(None, segments=segments))
        calls = [call for stage in plan.stages for call in stage.needs(session.config)]
        steps = [call for call in calls if call.network == "guided-step"]
        assert len(steps) == segments and len({call.program for call in steps}) == 2
        peaks.append(peak(session.memory.costs(plan.stages)).peak_bytes)
    assert peaks[0] == peaks[1]


def test_images_go_to_the_segment_that_they_are_new_in(opened, tmp_path):
    for name in ("a", "b"):
        Image.new("RGB", (64, 64), "red").save(tmp_path / f"{name}.png")
    images = [(tmp_path / "a.png", 0), (tmp_path / "b.png", 41)]
    full = resolve(asked(tmp_path, images=images), opened.resident.config)
    for part, frames in enumerate(([0], [], [41 - 32])):
        own = full[groups.Segments].segment(part, full).images
        assert [image.frame for image in own] == frames
    film = movie(tmp_path / "film.mov", 45)
    full = resolve(asked(tmp_path, images=[(film, 3)]), opened.resident.config)
    taken = []
    for part in range(3):
        own = full[groups.Segments].segment(part, full)
        given = (
            own[Images].stages(own, "stage1", own.geometry(opened.resident.config), "auto").given
        )
        taken.append([(g.spec.frame, g.source.footage.taken) for g in given])
    remarks = [*full[Images].remarks(full, opened.resident.config)]
    assert sum("guide the clip" in remark for remark in remarks) == 1
    assert [remark for remark in remarks if f"{film}: its frames 0 to 40 guide" in remark]
    assert taken == [[(3, range(17))], [(9, range(22, 31))], [(9, range(38, 45 - 6))]]
    last = asked(tmp_path, images=[(tmp_path / "a.png", 57)])
    with refused(r"frame 57 of .*, but the clip has frames 0 to 56"):
        resolve(last, opened.resident.config)


def test_a_part_keeps_its_place_in_larger_pictures(opened, tmp_path):
    """70 rows are cut out of 96; the next segment sees them there, at the size of the file."""
    rng, request = np.random.default_rng(0), asked(tmp_path, "one-stage", width=100, height=70)
    full = resolve(request, opened.resident.config)
    pixels = rng.integers(0, 256, (25, 70, 100, 3)).astype(np.uint8)
    write_mp4(full.parts[0].path, [pixels], num_frames=25, fps=Fraction(24), container=EXACT)
    plan = make_plan(opened.resident, request)
    given = next(stage.given for stage in plan.stages if isinstance(stage, Denoise))
    source = given[0].source
    seen = np.stack([source.fitted(one) for one in source.pictures()], 1)
    assert source.geometry.size_px == (96, 128)
    expected = pixels[16:].transpose(3, 0, 1, 2) / 127.5 - 1
    np.testing.assert_allclose(seen[:, :, 13:83, 14:114], expected, atol=1e-6)


def arguments(tiny, output, *more):
    size = ("--width", 64, "--height", 64, "--segment-frames", 25, "--overlap", 9, "--steps", 2)
    model = ("--model", tiny("tiny-2.3", "official"), "--backend", "cuda", "--device", "cpu")
    words = ("--pipeline", "one-stage", "--prompt", "a fox", "--seconds", 2.7, "--output", output)
    return [str(word) for word in ("generate", *model, *size, *words, *more)]


def started(words):
    """One thread, as in this process: sums of several have another order."""
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "ltx2rt", *words]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=alone)


@pytest.mark.parametrize("audio", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_goes_on_from_any_number_of_segments(tiny, command, opened, tmp_path, audio):
    """None, one, all: on the command line, in a server's worker and in Python, to the same clip."""
    session, whole, steps = opened.resident, tmp_path / "whole", {"steps": 1, "audio": audio}
    request = asked(whole, num_frames=17, segments=2, **steps)
    with claimed(session, make_plan(session, request), whole):
        frames, wave = made(session, request)

    def left(folder, count):
        folder.mkdir()
        for name in ["request.json", *(f"{i:04d}.*" for i in range(count))]:
            for path in whole.glob(name):
                shutil.copy(path, folder)
        return folder

    clip = several(SIZE | {"prompt": "a fox", "num_frames": 17, "segments": 2, **steps})
    files = set()
    for count in range(3):
        parts = left(tmp_path / str(count), count)
        again = opened.generate(pipeline="one-stage", parts=parts, **clip)
        np.testing.assert_array_equal(again.frames, frames)
        np.testing.assert_array_equal(again.waveform, wave)
        if count != 1:
            continue
        job = {"id": f"j{count}", "epoch": 1, "stem": str(tmp_path / f"j{count}.1")}
        job |= {"pipeline": "one-stage", "clip": clip, "images": [], "loras": []}
        left(segments_of(job), count)
        event, facts = attempt(session, (), job, None)
        assert event == "done", facts
        files.add((tmp_path / f"j{count}.1.mp4").read_bytes())
        output = tmp_path / f"{count}.mp4"
        left(folder_of(output), count)
        more = "--seed 3 --num-frames 25 --segment-frames 17 --steps 1 --distilled-lora none"
        words = arguments(tiny, output, *more.split(), "--dtype", "float32")
        words = [word for word in words if word not in ("--seconds", "2.7")]
        status, _, err = command(*words, *[] if audio else ["--no-audio"])
        assert status == 0 and not folder_of(output).exists(), err
        files.add(output.read_bytes())
    assert len(files) == 1


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(tiny, command, tmp_path):
    """One that is killed, one that found the disk full; a second at once is refused."""
    whole, cut = tmp_path / "whole.mp4", tmp_path / "cut.mp4"
    status, _, err = command(*arguments(tiny, whole, "--seed", 5))
    assert status == 0 and "4 segments: 25 frames, then 16 new ones each; 2.71 s" in err
    assert not folder_of(whole).exists()
    run, until = started(arguments(tiny, cut, "--seed", 5)), time.monotonic() + 300
    while not (folder_of(cut) / "0000.mov").exists():
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    run.send_signal(signal.SIGSTOP)
    status, _, err = command(*arguments(tiny, cut, "--seed", 5))
    assert status == 2 and f"another run is writing {cut};" in err, err
    run.kill()
    run.communicate()
    with (folder_of(cut) / STREAM).open("rb") as file:
        size = (folder_of(cut) / STREAM).stat().st_size
        streamed = (folder_of(cut) / STREAM).read_bytes()[: whole_fragments(file, 0, size)]
    small = started(arguments(tiny, cut, "--seed", 5))
    resource.prlimit(small.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    _, err = small.communicate(timeout=300)
    assert small.returncode == 1 and "0001.mov could not be written: File too large" in err, err
    assert err.count("ltx2rt: error: ") == 1 and "Traceback" not in err
    names = {path.name for path in folder_of(cut).iterdir()}
    assert not cut.exists() and {"0000.mov", "request.json"} <= names
    assert "0001.mov" not in names and not any(name.endswith(".partial") for name in names)
    status, _, err = command(*arguments(tiny, cut, "--seed", 6))
    assert status == 2 and "holds segments of another run (seed: '5', now '6')" in err, err
    status, _, err = command(*arguments(tiny, cut))  # the seed is that of the run
    assert status == 0 and "of them are there already" in err, err
    assert not folder_of(cut).exists() and cut.read_bytes() == whole.read_bytes()
    if streamed:  # what was there at the kill plays, and is of this clip
        (tmp_path / "streamed.mp4").write_bytes(streamed)
        shown = list(read_frames(tmp_path / "streamed.mp4", "", 8))
        np.testing.assert_array_equal(shown, list(read_frames(cut, "", 8)))


@pytest.mark.long
@pytest.mark.parametrize("audio", [True, False])
def test_a_clip_plays_while_it_is_made(opened, tmp_path, audio):
    """Its stream grows with each segment; the file equals one that is written at once."""
    folder, output, session = tmp_path / "folder", tmp_path / "a.mp4", opened.resident
    plan = make_plan(session, asked(folder, num_frames=33, overlap=9, steps=1, audio=audio))
    sizes, moments = {}, []
    with (
        claimed(session, plan, folder),
        recording(session, plan, folder, output, Marks(provenance=False)) as recorded,
    ):

        def look(moment):
            moments.append(moment.fraction)
            stream, count = folder / STREAM, len([*folder.glob("*.mov")])
            with stream.open("rb") as file:
                sizes.setdefault(count, []).append(whole_fragments(file, 0, stream.stat().st_size))

        state, *_ = produce(session, plan, on_progress=look)
        frames = np.concatenate(list(next(state.frames)))
        assert recorded is not None
        recorded.finish(output)
        assert (folder / STREAM).stat().st_size > max(sizes[2])
    assert max(sizes[0]) == 0 and 0 < max(sizes[1]) < max(sizes[2])
    assert moments == sorted(moments) and 0.9 < moments[-1] <= 1
    assert moments[len(moments) // 2] < 0.9
    sound = {} if not audio else {"waveform": state.waveforms[0], "sample_rate": state.sample_rate}
    again = tmp_path / "again.mp4"
    note = comment(session, plan.clip, 0)
    write_mp4(again, [frames], num_frames=81, fps=Fraction(24), comment=note, **sound)
    assert output.read_bytes() == again.read_bytes()
    discard(folder)
    assert not folder.exists()


@pytest.mark.long
def test_a_stream_that_finds_the_disk_full_leaves_the_segments(opened, tmp_path):
    folder, output, session = tmp_path / "folder", tmp_path / "a.mp4", opened.resident
    for full in (True, False):
        plan = make_plan(session, asked(folder, segments=2, steps=1))
        with claimed(session, plan, folder):
            if full:
                (folder / STREAM).symlink_to("/dev/full")
            with recording(session, plan, folder, output, Marks()) as recorded:
                produce(session, plan)
                assert recorded is not None
                says = r"a\.mp4 could not be .*No space left"
                with pytest.raises(NotWritten, match=says) if full else nullcontext():
                    recorded.finish(output)
        assert output.exists() != full and len([*folder.glob("*.mov")]) == 2
        (folder / STREAM).unlink()
    assert len(list(read_frames(output, "", 41))) == 41


def test_segments_of_weights_that_were_replaced_are_refused(tmp_path):
    """Under the same name, with the same header; or with all that a digest covers."""
    model, folder = tmp_path / "model", tmp_path / "folder"
    make_checkpoint("tiny-2.3", "official", model, seed=7)
    make_checkpoint("tiny-2.3", "official", tmp_path / "other", seed=8)

    def claim():
        how = {"backend": "cuda", "device": "cpu", "distilled_lora": "none"}
        with ltx2rt.open(model, **how) as opened:
            plan = make_plan(opened.resident, asked(folder))
            with claimed(opened.resident, plan, folder):
                pass

    claim()
    write_arrays(model / "mine.safetensors", {"a": np.ones(3, np.float32)})
    claim()
    files = [path for path in (tmp_path / "other").rglob("*") if path.is_file()]
    file = model / max(files, key=lambda path: path.stat().st_size).relative_to(tmp_path / "other")
    then = file.stat()
    os.utime(file)
    with refused(rf"another run \({file.parent.name}/{file.name}: "):
        claim()
    os.utime(file, ns=(then.st_mtime_ns, then.st_mtime_ns))
    claim()
    shutil.copytree(tmp_path / "other", model, dirs_exist_ok=True)
    os.utime(file, ns=(then.st_mtime_ns, then.st_mtime_ns))
    with refused(r"another run \(digest: "):
        claim()


def test_another_folder_is_left_alone(tiny, command, tmp_path):
    output = tmp_path / "a.mp4"
    folder_of(output).mkdir()
    (folder_of(output) / "mine.txt").write_text("mine")
    status, _, err = command(*arguments(tiny, output))
    assert status == 2 and "mine.txt is of no run" in err
    assert (folder_of(output) / "mine.txt").read_text() == "mine"


@pytest.mark.slow
def test_two_ranks_make_the_clip_of_one(tiny, tmp_path):
    """But for levels of 255 that rounding decides, encoded again and through 2 steps."""
    clips = []
    for name, more in (("one", ()), ("two", ("--num-gpus", 2, "--mesh", "sequence=2"))):
        (tmp_path / name).mkdir()
        frames = tmp_path / name / "%05d.png"
        run = started(arguments(tiny, frames, "--seed", 5, "--length", 1.7, *more))
        _, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        assert sorted(p.suffix for p in (tmp_path / name).iterdir()) == [".png"] * 41 + [".wav"]
        shown = [np.asarray(Image.open(frames.parent / f"{i:05d}.png"), float) for i in range(41)]
        clips.append((np.stack(shown), read_sound(tmp_path / name / "sound.wav")[0]))
    (one, heard), (two, also) = clips
    assert np.abs(one - two).max() <= 2  # reached: 1
    assert relative_l2(also, heard) < 1e-4  # as of every waveform; reached: 2e-5


def parsed(*words):
    """The request of a command line."""
    start = "generate --backend cuda --model m --pipeline one-stage --output a.mp4".split()
    words = [*start, *map(str, words)]
    args = cli.parser().parse_args(words)
    args.argv = words
    return generate.asked(args)[1]


def test_a_clip_is_asked_for_by_its_frames(opened):
    config, size = opened.resident.config, {**SIZE, "num_frames": 57}
    request = {"prompt": "a fox", **size, "segment_frames": 25}
    found = resolve(make_request("one-stage", **request), config)
    length = {**request, "num_frames": None, "seconds": 56 / 24}
    length = resolve(make_request("one-stage", **length), config)
    assert found.request == length.request and found.clip_frames == 57
    assert [part.start for part in found.parts] == [0, 16, 32]
    assert resolve(found.request, config).request == found.request  # as what a server keeps of it
    for fps in ("24", "25", "29.97", "59.94", "7.3"):
        for frames in (129, 729, 1441):
            size = {"num_frames": frames, "segment_frames": 121 if frames < 1441 else None}
            clip = make_request("one-stage", prompt="a", fps=fps, seed=1, **size)
            assert resolve(clip, config).clip_frames == frames, (fps, frames)
    whole = resolve(make_request("one-stage", **{**request, "num_frames": 25}), config)
    assert whole.segments is None and whole.request.segment_frames is None
    assert whole.clip_frames == 25


def test_prompts_of_segments(tmp_path):
    file, empty = tmp_path / "p.txt", tmp_path / "empty.txt"
    file.write_text("a fox\n\n  a hare \na deer\n")
    empty.write_text("\n")
    given = ("--prompt", "a fox", "--prompt", "a hare", "--prompt", "a deer")
    for words in (given, ("--prompts", file)):
        request = parsed("--num-frames", 729, *words)
        assert (request.prompt, request.segment_prompts) == ("a fox", ("a hare", "a deer"))
        assert request.in_segments and request.num_frames == 729
    last = parsed("--prompt", "a fox", "--prompt", "a hare")  # of one clip the last counts
    assert last.prompt == "a hare" and last.segment_prompts == ()
    for words, message in (
        (("--prompts", file), "has 3 prompts, and the clip is not made in segments"),
        (("--prompts", empty, "--seconds", 21), "empty.txt is empty; write a prompt on each line"),
        (("--prompts", tmp_path, "--seconds", 21), "--prompts: "),
    ):
        with refused(message):
            parsed(*words)


@pytest.mark.long
def test_a_cut_begins_anew(opened, tmp_path):
    """What comes before, and from it on, is a clip with the segments' seeds, picture and sound."""
    session, seeds = opened.resident, [segment_seed(3, i) for i in range(3)]
    more = {"overlap": 17, "steps": 1, "num_frames": 33}
    frames, wave = made(session, asked(tmp_path / "whole", **more, cut=(2,)))
    shot = {"seed": seeds[1], "segments": 2, "segment_seeds": ((2, seeds[2]),)}
    alone, heard = made(session, asked(tmp_path / "shot", **more, **shot))
    assert len(frames) == 33 + 33 + 16
    np.testing.assert_array_equal(frames[33:], alone)
    rate = session.config.vocoder.sample_rate
    np.testing.assert_array_equal(wave[:, round(Fraction(33, 24) * rate) :], heard)
    first, _ = part(tmp_path / "whole", 0, 33)
    np.testing.assert_array_equal(frames[:33], first)


@pytest.mark.long
def test_segments_of_given_noise(opened, tmp_path):
    """A record makes the same clip again, whatever the seed and where a segment exists already."""
    session, more = opened.resident, {"segments": 2, "steps": 1}
    state, *_ = produce(session, make_plan(session, asked(tmp_path, **more)), keep=True)
    names = {f"segment{i}.stage1.{m}.noise" for i in (1, 2) for m in ("video", "audio")}
    assert names | {"segment2.source.tail", "segment2.source.audio", "waveform"} <= {*state.record}
    assert all(name == "waveform" or name.startswith("segment") for name in state.record)
    frames, file = np.concatenate(list(next(state.frames))), tmp_path / "noise.safetensors"
    write_arrays(file, state.record)
    given, folder = more | {"noise_in": file, "seed": 9}, tmp_path / "again"
    again, wave = made(session, asked(folder, **given))
    np.testing.assert_array_equal(again, frames)
    np.testing.assert_array_equal(wave, state.waveforms[0])
    (folder / "0001.mov").unlink()
    np.testing.assert_array_equal(made(session, asked(folder, **given))[0], frames)
    write_arrays(file, {n: x for n, x in state.record.items() if "segment2.stage1" not in n})
    with refused(r"has no tensor segment2\.stage1\.video; it must hold"):
        make_plan(session, asked(tmp_path / "rest", **given))
    with refused(r"--latents-out: segment 1 in .* was made without it"):
        check_records(resolve(asked(folder, **given), session.config), folder)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_colours_are_held_to_the_first_segment(opened, tmp_path, share):
    """Of the new latents alone, by mean and deviation of each channel; also after a stop."""
    session, more = opened.resident, {"segments": 2, "steps": 1, "colour_lock": share}
    plan = make_plan(session, asked(tmp_path, **more))
    record = produce(session, plan, keep=True)[0].record
    first, last = (record[f"segment{i}.video_latent"].astype(np.float64) for i in (1, 2))
    before = record["segment2.stage1.video.steps"][-1]
    before = unpack_video(before[None], plan.stages[1].geometry).astype(np.float64)
    np.testing.assert_array_equal(last[:, :, :2], before[:, :, :2])
    new, axes = before[:, :, 2:], (0, 2, 3, 4)

    def moments(x):
        return x.mean(axis=axes, keepdims=True), x.std(axis=axes, keepdims=True, ddof=1)

    (mean, deviation), (aim, spread) = moments(new), moments(first)
    expected = (1 - share) * new + share * ((new - mean) / deviation * spread + aim)
    assert relative_l2(last[:, :, 2:], expected) < 1e-5  # float32
    assert relative_l2(new, expected) > 1e-2
    frames, _ = part(tmp_path, 1)
    (tmp_path / "0001.mov").unlink()
    made(session, asked(tmp_path, **more))
    np.testing.assert_array_equal(part(tmp_path, 1)[0], frames)


@pytest.mark.long
def test_an_anchor_is_a_guide_before_each_later_segment(opened, tmp_path):
    """The first frame's latent, one latent frame before the segment in time, and kept whole."""
    session, more = opened.resident, {"segments": 2, "steps": 1}
    (tmp_path / "plain").mkdir()
    plan = make_plan(session, asked(tmp_path, **more, anchor=1.0))
    first, last = (s for s in plan.stages if isinstance(s, Denoise))
    state = last.blank["video"]
    assert first.blank["video"].shape[1] == 4 * 4 and state.shape[1] == 4 * 4 + 4
    assert (state.mask[0, -4:] == 0).all()
    np.testing.assert_allclose(state.positions[0, -4:], [[-8 / 24, -7 / 24]] * 4, rtol=1e-6)
    record = produce(session, plan, keep=True)[0].record
    plain = produce(session, make_plan(session, asked(tmp_path / "plain", **more)), keep=True)[0]
    steps = record["segment2.stage1.video.steps"][-1]
    np.testing.assert_array_equal(steps[-4:], pack_video(record["segment2.source.anchor"])[0])
    name = "segment1.stage1.video.steps"
    np.testing.assert_array_equal(record[name], plain.record[name])
    assert relative_l2(steps[:16], plain.record["segment2.stage1.video.steps"][-1]) > 1e-3
