"""DFR equals references from its description in plain numpy: its layout, each step of two rounds."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest

import ltx2rt
from ltx2rt.instruments.ahead import Target, plan_job
from ltx2rt.instruments.make import standing_for
from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.build import Loras
from ltx2rt.pipelines.clip import resolve
from ltx2rt.pipelines.dfr import canvas
from ltx2rt.pipelines.groups.guidance import NEUTRAL
from ltx2rt.pipelines.groups.images import parse_image
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce, run_stages
from ltx2rt.session.call import Call
from ltx2rt.session.open import open_session
from ltx2rt.session.options import LoraSpec, ModelOptions
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.conditioning import Anchor, Image, ModalityState, SeededSlot, audio_state
from ltx2rt.stages.denoise import Denoise, Noise
from ltx2rt.stages.frames import Frames
from ltx2rt.stages.inset import Cut
from ltx2rt.stages.refine import Refine
from ltx2rt.stages.stage import State
from ltx2rt.stages.upsample import UpsampleTime
from ltx2rt.weights.files import write_arrays
from ltx2rt.weights.presets import preset
from tests.conftest import denoised, refused
from tests.parity import relative_l2
from tests.pipelines.test_agree import latents
from tests.pipelines.test_ic_lora import lora_with

# float32 latents against float64 ones, over 35 evaluations of a float32 model, each stage from the
# one before.
CLOSE = 1e-5
SIZE = {"width": 128, "height": 64}
DISTILLED = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0]
STAGE2 = [0.909375, 0.725, 0.421875, 0.0]


@pytest.fixture(scope="module")
def session(tiny):
    return open_session(ModelOptions("cuda", tiny("tiny-2.5", "official"), device="cpu"))


# --- layout ---------------------------------------------------------------------------------------


def expected_canvas(num_frames):
    """Of two segments that fit alike the longer one."""
    pads = {32: (1 - num_frames) % 32, 24: (1 - num_frames) % 24}
    segment = 24 if pads[24] < pads[32] else 32
    return num_frames + pads[segment], segment


def expected_rounds(num_frames, rounds):
    """Of each round its frames and tiles (first, last, latents dropped, anchors, slots)."""
    frames, segment = expected_canvas(num_frames)
    carried = list(range(segment, frames, segment))
    for number in range(1, rounds + 1):
        frames = 2 * (frames - 1) + 1
        seams = [2 * frame for frame in carried]
        borders = [0, *seams]
        dealt = np.array_split(list(pairwise(borders)), min(2**number, len(seams)))
        tiles = []
        for i, own in enumerate(dealt):
            start, stop = own.ravel()[[0, -1]].tolist()
            first = start if i == 0 else borders[borders.index(start) - 1]
            drop = 0 if i == 0 else start // 8 - first // 8 + 1
            inside = [border for border in borders if first <= border <= stop]
            slots = [(a + b) // 2 for a, b in pairwise(inside)]
            tiles.append((first, stop, drop, [s for s in inside if s != 0], slots))
        carried = sorted({*seams, *(slot for tile in tiles for slot in tile[4])})
        yield frames, tiles


def stages_of(**clip):
    config = preset("tiny-2.5").config
    made = resolve(pipeline("dfr")("a fox", seed=1, **SIZE, **clip), config)
    return made.stages(config, ModelOptions("cuda", "model"), Loras())


@pytest.mark.parametrize(
    "num_frames",
    [9, 17, 25, 33, 41, 73, 97, 121, 185, 241, pytest.param(473, marks=pytest.mark.long)],
)
def test_the_layout_is_the_published_one(num_frames):
    """Canvas, windows, their lead-in, what is dropped, anchors, and slots with their starts."""
    assert canvas(num_frames) == expected_canvas(num_frames)
    stages = stages_of(num_frames=num_frames, temporal_upsample_rounds=2, fps=Fraction(24))
    for number, (frames, tiles) in enumerate(expected_rounds(num_frames, 2), 1):
        found = [s for s in stages if isinstance(s, Refine) and s.name.startswith(f"round{number}")]
        made = []
        for stage in found:
            anchors = [g for g in stage.given if isinstance(g, Anchor)]
            slots = [g for g in stage.given if isinstance(g, SeededSlot)]
            assert stage.given == (*anchors, *slots) and all(a.append for a in anchors)
            assert {a.spec.strength for a in anchors} == {0.95}
            assert [a.spec.frame for a in anchors] == [a.of - stage.start for a in anchors]
            assert all(slot.index == round((slot.frame + stage.start) / 8) for slot in slots)
            assert {slot.latents for slot in slots} == {stage.source} == {f"round{number}_upsample"}
            stop = stage.start + (stage.geometry.frames - 1) * 8
            places = [a.of for a in anchors], [s.frame + stage.start for s in slots]
            made.append((stage.start, stop, stage.lead, *places))
            assert stage.geometry.fps == 24 * 2**number, "that of the preview"
            assert stage.geometry.seen_fps == min(24 * 2**number, 60)
            assert (stage.sampler, stage.eta) == ("ancestral", 0.5)
            assert stage.sigmas.tolist() == np.float32(DISTILLED[4:]).tolist()
            assert stage.streams == ("video",)
        assert made == tiles
        assert sum(s.geometry.frames - s.lead for s in found) == (frames - 1) // 8 + 1


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_clip_that_rounds_do_not_see_is_told(film, rounds):
    config = preset("tiny-2.5").config
    given = {"num_frames": 41, "seed": 1, "temporal_upsample_rounds": rounds, **SIZE}
    made = resolve(pipeline("dfr")("a fox", images=(parse_image(str(film)),), **given), config)
    said = "film.mp4 guides stages 1 and 2; rounds see pictures only"
    assert (said in made.remarks(config)) == bool(rounds)


def test_images_are_where_they_are_in_time():
    """Of an image at frame 20 of 41, and one at frame 0: the windows that hold their time."""
    images = (parse_image("a.png:0"), parse_image("b.png:20"))
    stages = stages_of(num_frames=41, temporal_upsample_rounds=2, images=images)
    found = {
        s.name: [(g.spec.frame + s.start, g.spec.path.name) for g in s.given if isinstance(g, Image)]
        for s in stages if isinstance(s, Refine)
    }  # fmt: skip
    first, second = (0, "a.png"), ((40, "b.png"), (80, "b.png"))
    assert found == {
        "round1_tile0": [first, second[0]], "round1_tile1": [first, second[0]], "round2_tile0": [first],
        "round2_tile1": [first, second[1]], "round2_tile2": [second[1]], "round2_tile3": [],
    }  # fmt: skip


def test_its_images_may_be_exr():
    stages = stages_of(num_frames=17, images=(parse_image("a.exr:0"),), hdr="ACESCG")
    found = [g.hdr for s in stages for g in getattr(s, "given", ()) if isinstance(g, Image)]
    assert found == ["ACESCG"] * 4  # of both stages, and of what encodes for them


# --- a whole run ----------------------------------------------------------------------------------


def positions(grid, fps, appended):
    """f32[3, T, 2] of a clip of f latent frames, and of single pixel frames appended to it."""
    frames, rows, columns = grid
    seconds = [(0, 1), *((8 * t - 7, 8 * t + 1) for t in range(1, frames))]
    seconds += [(frame, frame + 1) for frame in appended]
    cells = [
        [[a / fps, b / fps], [32 * r, 32 * r + 32], [32 * c, 32 * c + 32]]
        for (a, b), r, c in product(seconds, range(rows), range(columns))
    ]
    return np.array(cells, np.float32).transpose(1, 0, 2)


def packed(latent):
    """[1, C, f, h, w] -> [1, f h w, C]"""
    return latent.reshape(1, latent.shape[1], -1).transpose(0, 2, 1).astype(np.float64)


def unpacked(tokens, grid):
    return tokens.transpose(0, 2, 1).reshape(1, -1, *grid)


class Reference:
    """A run of DFR in float64, with noise, text, images' latents and LoRAs of the real one."""

    def __init__(self, session, state, loras):
        self.session, self.state, self.loras = session, state, loras

    def upsampled(self, network, latent):
        feeds = {"latent": latent.astype(np.float32)}
        found = self.session.run(Call(network, latent.shape), feeds)["latent"]
        return self.session.backend.to_host(found)

    def walk(self, name, sigmas, grid, fps, start, guides, slots, audio=None, eta=None):
        """(video tokens, slots by frame, audio tokens) at the end. start: the clip's tokens.
        guides: (kind, frame, tokens, strength). slots: starts by frame. audio: start and state."""
        targets, cells = start.shape[1], grid[1] * grid[2]
        clean, mask, full = [np.zeros_like(start)], [np.ones((1, targets, 1))], [start]
        marked = [(np.arange(targets) < cells).astype(float)]
        appended = []
        for kind, frame, latent, strength in guides:
            if kind == "image" and frame == 0:
                clean[0][:, :cells], mask[0][:, :cells] = latent, 1 - strength
                continue
            appended.append(frame)
            clean.append(latent), mask.append(np.full((1, cells, 1), 1 - strength))
            full.append(np.zeros_like(latent)), marked.append(np.zeros(cells))
        for frame, seed in slots.items():
            appended.append(frame)
            clean.append(np.zeros_like(seed)), mask.append(np.ones((1, cells, 1)))
            full.append(seed), marked.append(np.ones(cells))
        clean, mask, full = (np.concatenate(parts, axis=1) for parts in (clean, mask, full))
        video = ModalityState(
            np.float32(clean), np.float32(mask), positions(grid, fps, appended), targets,
            np.float32(np.hstack(marked)),
        )  # fmt: skip
        states, starts = {"video": video}, {"video": full}
        if audio is not None:
            states["audio"], starts["audio"] = audio[1], audio[0]
        keep = {m: (x.mask.astype(np.float64), x.clean.astype(float)) for m, x in states.items()}
        blend = lambda m, x: x * keep[m][0] + keep[m][1] * (1 - keep[m][0])  # noqa: E731
        stage = Denoise(
            name, None, np.array(sigmas), self.loras, Noise((0,)), NEUTRAL, streams=tuple(states)
        )
        shape, feeds = stage.shape(self.session.config, states)
        call = Call("guided-step", shape, steps=1, loras=self.loras)
        feeds |= {f"{m}_context": self.state.contexts[m][:1] for m in states}
        record, x = self.state.record, {}
        for m in states:
            noise = record[f"{name}.{m}.noise"].astype(np.float64)
            x[m] = blend(m, sigmas[0] * noise + (1 - sigmas[0]) * starts[m])
        for i, (sigma, target) in enumerate(pairwise(sigmas)):
            now = {f"{m}_latent": np.float32(x[m]) for m in x}
            pair = {"sigmas": np.array([[sigma, 0]], np.float32)}
            (out,) = self.session.denoise(call, feeds | now, pair)
            # Blended.
            x0 = {m: self.session.backend.to_host(out[f"{m}_x0"]).astype(np.float64) for m in x}
            if eta is None or target == 0:
                x = {m: x[m] + (x[m] - x0[m]) / sigma * (target - sigma) for m in x}
            else:
                down = target * (1 + (target / sigma - 1) * eta)
                again = np.sqrt(target**2 - down**2 * (1 - target) ** 2 / (1 - down) ** 2)
                drawn = record[f"{name}.video.ancestral"][i]
                moved = down / sigma * x["video"] + (1 - down / sigma) * x0["video"]
                x["video"] = (1 - target) / (1 - down) * moved + again * drawn
            x = {m: blend(m, x[m]) for m in x} if eta else x
            for m in x:
                distance = relative_l2(record[f"{name}.{m}.steps"][i], x[m][0])
                assert distance <= CLOSE, f"{name} {m} {i}"
        last = x["video"][:, video.shape[1] - len(slots) * cells :]
        ends = np.split(last, max(len(slots), 1), axis=1)
        return x["video"][:, :targets], dict(zip(slots, ends, strict=False)), x.get("audio")


def test_two_rounds_equal_a_reference_at_every_step(session, images):
    """Both stages with images, keyframes beside them, tiles, stitching, what is carried on."""
    given = tuple(map(parse_image, (f"{images[0]}:0:0.8", f"{images[1]}:20:0.7")))
    clip = {"num_frames": 41, "fps": Fraction(24), "seed": 3, "temporal_upsample_rounds": 2, **SIZE}
    request = pipeline("dfr")("a fox", images=given, image_crf=0, **clip)
    plan, state = denoised(session, request)
    record, (first,) = state.record, [s for s in plan.stages if s.name == "stage1"]
    reference = Reference(session, state, first.loras)

    grid, big = (7, 1, 2), (7, 2, 4)  # 49 frames: the canvas of 41, in segments of 24
    pictured = {}
    for stage in ("stage1", "stage2"):
        a, b = (given.clean for given in state.given[stage][:2])
        pictured[stage] = [("image", 0, a, 0.8), ("image", 20, b, 0.7)]
    empty = {frame: np.zeros((1, 2, 128)) for frame in (24, 48)}
    sound = audio_state(first.geometry)
    start = np.zeros((1, 14, 128)), np.zeros(sound.shape)
    given = pictured["stage1"], empty, (start[1], sound)
    video, slots, audio = reference.walk("stage1", DISTILLED, grid, 24, start[0], *given)
    kept = record["audio_latent"].transpose(0, 2, 1, 3).reshape(audio.shape)
    assert relative_l2(kept, audio) <= CLOSE  # stage 1's

    video = reference.upsampled("upsampler", unpacked(video, grid))
    planes = np.concatenate([unpacked(slots[frame], (1, 1, 2)) for frame in (24, 48)], axis=2)
    planes = reference.upsampled("upsampler", planes)  # as if the two were frames of a clip
    slots = {frame: packed(planes[:, :, i : i + 1]) for i, frame in enumerate((24, 48))}
    given = pictured["stage2"], slots, (audio, sound)
    video, slots, _ = reference.walk("stage2", STAGE2, big, 24, packed(video), *given)

    video = unpacked(video, big)
    for number, (frames, tiles) in enumerate(expected_rounds(41, 2), 1):
        coarse = reference.upsampled("temporal-upsampler", video)
        carried = {2 * f: x for f, x in slots.items()}
        fps = min(24 * 2**number, 60)
        parts, generated = [], {}
        for i, (low, high, drop, anchors, middles) in enumerate(tiles):
            window = coarse[:, :, low // 8 : high // 8 + 1]
            size = (window.shape[2], 2, 4)
            placed = [(kind, at * 2**number - low, *what) for kind, at, *what in pictured["stage2"]]
            guides = [guide for guide in placed if 0 <= guide[1] <= high - low]
            guides += [("anchor", frame - low, carried[frame], 0.95) for frame in anchors]
            at = {frame - low: round((frame - low) / 8) for frame in middles}
            seeds = {frame: packed(window[:, :, k : k + 1]) for frame, k in at.items()}
            given = DISTILLED[4:], size, fps, packed(window), guides, seeds
            made, ends, _ = reference.walk(f"round{number}_tile{i}", *given, eta=0.5)
            parts.append(unpacked(made, size)[:, :, drop:])
            for frame, end in ends.items():
                generated.setdefault(frame + low, end)
        video, slots = np.concatenate(parts, axis=2), dict(sorted((carried | generated).items()))
        assert video.shape[2] == (frames - 1) // 8 + 1
    assert relative_l2(state.video, video) <= CLOSE
    assert sorted(state.keyframes) == list(slots) == list(range(24, 193, 24))
    for frame, latent in state.keyframes.items():
        assert relative_l2(packed(latent), slots[frame]) <= CLOSE, frame


@pytest.mark.long
def test_fewer_rounds_are_the_beginning_of_more(session, tmp_path):
    """And what a run records is noise for another one, whatever its seed."""

    def recorded(rounds, **more):
        clip = {"num_frames": 17, "seed": 3, "temporal_upsample_rounds": rounds, **SIZE} | more
        return latents(session, "dfr", **clip)

    def assert_begins(more, fewer):
        for name, value in fewer.items():
            np.testing.assert_array_equal(value, more[name], err_msg=name)

    none, one, two = map(recorded, (0, 1, 2))
    assert none.keys() < one.keys() < two.keys()
    assert_begins(one, none)
    assert_begins(two, one)
    asked = pipeline("dfr")("a red fox", num_frames=17, temporal_upsample_rounds=1, **SIZE)
    (decoder,) = (s for s in make_plan(session, asked).stages if isinstance(s, Frames))
    ((name, shape),) = decoder.draws(session.config).items()  # is not run here
    noise = one | {f"{name}.noise": np.zeros(shape, np.float32)}
    write_arrays(tmp_path / "noise.safetensors", noise)
    assert_begins(recorded(1, seed=4, noise_in=tmp_path / "noise.safetensors"), one)


def test_a_detailing_lora_sees_the_clip_of_stage_1_in_stage_2(session, tmp_path):
    """After the keyframes, kept whole, no keyframe, spread over the clip; rounds have neither."""
    own = session.checkpoint.distilled_lora()
    detail = LoraSpec(lora_with(own, tmp_path / "ic.safetensors", downscale=2), 0.5)
    request = pipeline("dfr")("a fox", num_frames=17, seed=3, temporal_upsample_rounds=1, **SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "options", replace(session.options, loras=(detail,)))
        plan = make_plan(session, request)
    first, second, last = (stage for stage in plan.stages if isinstance(stage, Denoise))
    assert [lora.path for lora in second.loras] == [first.loras[0].path, detail.path]
    assert last.loras == first.loras and len(first.loras) == 1
    until = plan.stages[: plan.stages.index(second) + 1]
    state, *_ = produce(session, replace(plan, stages=until), keep=True)
    states = second._states(state.given["stage2"], {})["video"]
    seen = packed(state.latents["stage1"])
    expected = positions((4, 1, 2), 24, ()) * np.float32([1, 2, 2])[:, None, None]
    where = slice(4 * 8 + 8, None)
    np.testing.assert_array_equal(states.positions[:, where], expected)
    np.testing.assert_array_equal(states.clean[:, where], np.float32(seen))
    np.testing.assert_array_equal(states.keyframes, np.repeat([1, 0, 1, 0], (8, 24, 8, 8)))
    np.testing.assert_array_equal(states.mask[0, :, 0], np.repeat([1, 0], (40, 8)))
    last = state.record["stage2.video.steps"][-1]
    np.testing.assert_array_equal(last[where], np.float32(seen)[0])


# --- both backends --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions(session, tiny):
    other = open_session(ModelOptions("tpu", tiny("tiny-2.5", "official"), device="cpu"))
    yield {"cuda": session, "tpu": other}
    other.close()


def test_a_round_is_the_same_on_both_backends(sessions):
    """At every step, from what one of them has made before it."""
    request = pipeline("dfr")("a fox", num_frames=17, seed=3, temporal_upsample_rounds=1, **SIZE)
    plans = {b: make_plan(session, request) for b, session in sessions.items()}
    plan, before, found = plans["cuda"], State(), []
    (first,) = (i for i, stage in enumerate(plan.stages) if isinstance(stage, UpsampleTime))
    run_stages(sessions["cuda"], replace(plan, stages=plan.stages[:first]), Stopwatch(), before)
    for backend, plan in plans.items():
        own = {"latents": dict(before.latents), "given": dict(before.given)}
        state = replace(before, keep=True, record={}, **own)
        stages = plan.stages[first : first + 3]
        run_stages(sessions[backend], replace(plan, stages=stages), Stopwatch(), state)
        found.append(state.record)
    assert found[0].keys() == found[1].keys()
    assert found[0]["round1_tile0.video.steps"].shape == (4, (7 + 1 + 1) * 8, 128)
    for name, ours in found[0].items():
        for a, b in zip(ours, found[1][name], strict=True):
            assert relative_l2(b, a) <= CLOSE, name


# --- what is made of it ---------------------------------------------------------------------------


def test_the_canvas_end_is_cut_off():
    """Frames are cut across chunks, all of which are decoded; sound is cut to the frames' time."""
    frames = np.arange(25, dtype=np.float32)[None, :, None, None]
    taken = []

    def chunks():
        for chunk in (frames[:, :9], frames[:, 9:20], frames[:, 20:]):
            taken.append(chunk.shape[1])
            yield chunk

    sound = np.zeros((1, 2, 30000), np.float32)
    state = State(frames=iter([chunks()]), waveforms=sound, sample_rate=24000)
    Cut(17, fps=Fraction(24)).run(None, state, Stopwatch())
    (video,) = state.frames
    np.testing.assert_array_equal(np.concatenate(list(video), axis=1), frames[:, :17])
    assert taken == [9, 11, 5] and state.waveforms.shape == (1, 2, 17000)


def test_a_clip_has_twice_the_frames_in_the_same_time(tiny, images):
    """In Python, with warm weights and programs; the plan's stages are the run's."""
    clip = {"pipeline": "dfr", "num_frames": 17, "seed": 2, "audio": False, **SIZE}
    clip |= {"temporal_upsample_rounds": 1, "image": [(images[0], 0)]}
    with ltx2rt.open(tiny("tiny-2.5", "official"), backend="cuda", device="cpu") as opened:
        found = opened.generate("a fox", **clip)
        assert found.frames.shape == (33, 64, 128, 3) and found.fps == 48
        assert found.settings["num_frames"] == 17
        names = [stage["name"] for stage in found.report["stages"]]
        stages = ["text", "stage1 images", "stage1", "upsample", "stage2 images", "stage2", "round1_upsample",
                  "round1_tile0 images", "round1_tile0"]  # fmt: skip
        assert names == [*stages, "decode"]
        assert [s["name"] for s in opened.plan("h100-80gb", **clip)["stages"]] == names
        again = opened.generate("a fox", **clip)
        np.testing.assert_array_equal(again.frames, found.frames)
        assert again.report["programs_built"] == again.report["loaded_bytes"] == 0
        sets = {key[0]: held.tensors() for key, held in opened.resident.weights.held.items()}
        # The same tensors, not copies.
        assert sets["transformer video"].keys() < sets["transformer"].keys()


def test_windows_of_one_size_are_compiled_once():
    request = pipeline("dfr")("a fox", seed=1, num_frames=97, temporal_upsample_rounds=2, **SIZE)
    target = Target("v6e:1x1", ("denoise-step",))
    with standing_for("tiny-2.5", ModelOptions("", "model", dtype="bfloat16")) as options:
        cells = plan_job(options, request, target).cells
    sizes = [cell.graph.inputs["video_latent"].type.sizes["tokens"] for cell in cells]
    assert [cell.stage for cell in cells] == [1, 2, None, None, None]
    # The clip's, anchors, slots: of 2, 2 and 3 segments.
    rows = [13 + 3, 13 + 3, 17 + 2 + 2, 17 + 3 + 2, 25 + 4 + 3]
    assert sizes == [2 * rows[0], *(8 * n for n in rows[1:])]


def test_rounds_without_the_temporal_upsampler_are_refused(tiny, tmp_path):
    for file in tiny("tiny-2.5", "official").iterdir():
        if "temporal" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    opened = open_session(ModelOptions("cuda", tmp_path, device="cpu"))
    request = pipeline("dfr")("a fox", num_frames=17, **SIZE)
    with refused("no x2 temporal upsampler was found; pass one with --temporal-upsampler"):
        make_plan(opened, replace(request, temporal_upsample_rounds=1))
    make_plan(opened, request)
