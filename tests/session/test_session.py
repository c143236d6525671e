"""One session, many requests: what is kept is not made again, what is cancelled leaves no trace,
nothing piles up."""

import os
import random
import shutil
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import ltx2rt
from ltx2rt.backend import DeviceInfo
from ltx2rt.errors import InputError
from ltx2rt.pipelines import make_request
from ltx2rt.run.plan import make_plan
from ltx2rt.run.run import produce
from ltx2rt.session import session as sessions
from ltx2rt.session import weights as stores
from ltx2rt.session.options import LoraSpec
from ltx2rt.weights.files import TensorFile, write_arrays

SIZES = ({"width": 128, "height": 64}, {"width": 64, "height": 64}, {"width": 64, "height": 128})
SMALL = {"num_frames": 9, "fps": 48, "steps": 3, "image_crf": 0}
SEED = int(os.environ.get("LTX2RT_TEST_SEED", "11"))


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture(params=["cuda", "tpu"])
def session(request, model):
    with ltx2rt.open(model, backend=request.param, device="cpu") as opened:
        yield opened


JAX_IS_SLOW = pytest.mark.parametrize(
    "session", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def opened(model):
    with ltx2rt.open(model, backend="cuda", device="cpu") as session:
        yield session


def made(session, **changes):
    """Silent with JAX unless a test asks for sound: it compiles the vocoder for ten seconds."""
    audio = session.resident.options.backend == "cuda"
    given = {"seed": 3, "audio": audio, **SMALL, **SIZES[0], **changes}
    return session.generate("a red fox", **given)


def new(clip) -> tuple[int, int]:
    """What a request built and loaded."""
    return clip.report["programs_built"], clip.report["loaded_bytes"]


def assert_same(a, b):
    np.testing.assert_array_equal(a.frames, b.frames)
    if a.waveform is not None:
        np.testing.assert_array_equal(a.waveform, b.waveform)


@pytest.mark.parametrize(
    "session", ["cuda", pytest.param("tpu", marks=pytest.mark.long)], indirect=True
)  # with JAX, too: tests/backends/test_programs.py
def test_a_repeated_request_builds_and_loads_nothing(session):
    """Neither does another seed, prompt, guidance or number of steps in the same room; a new size
    loads nothing. Of one stage with JAX, which compiles each program for seconds."""
    jax = session.resident.options.backend == "tpu"
    ask = partial(made, session, pipeline="one-stage" if jax else "two-stage")
    first = ask()
    assert repr(first).startswith("<Clip of 9 frames 128x64, ")
    assert repr(first).endswith(", seed 3>")
    assert new(first)[0] > 0 and new(first)[1] > 1e6
    again = ask()
    assert new(again) == (0, 0)
    assert_same(again, first)
    for change in ({"seed": 4}, {"video_cfg": 2.5}, {"steps": 5}, {"negative_prompt": "dull"}):
        other = ask(**change)
        assert new(other) == (0, 0), change
        assert not np.array_equal(other.frames, first.frames), change
    built, loaded = new(ask(**SIZES[2]))
    assert built > 0 and loaded == 0


@JAX_IS_SLOW
def test_a_cancelled_request_ends_within_a_step_and_leaves_no_trace(session):
    """Whenever it is cancelled: before the first stage, in a step, while sound or frames are
    made."""
    undisturbed = made(session)
    asked = 0

    def counting():
        nonlocal asked
        asked += 1
        return False

    made(session, cancelled=counting)
    seen = []
    for last in random.Random(SEED).sample(range(1, asked + 1), 4):
        left = last

        def cancelled():
            nonlocal left
            left -= 1
            return left == 0

        seen.clear()
        with pytest.raises(ltx2rt.Cancelled):
            made(session, cancelled=cancelled, on_progress=seen.append)
        assert left == 0, f"asked again after {last} (LTX2RT_TEST_SEED={SEED})"
        assert len(seen) <= asked
    assert_same(made(session), undisturbed)


def test_a_run_that_ends_early_begins_to_compile_no_more(model, monkeypatch):
    with ltx2rt.open(model, backend="tpu", device="cpu") as session:
        backend, started, free = session.resident.backend, [], threading.Event()
        begin = backend.compile_ahead
        began = lambda programs: started.extend(begin(programs)) or started  # noqa: E731
        monkeypatch.setattr(backend, "compile_ahead", began)
        for _ in range(backend.compilers._max_workers):
            backend.compilers.submit(free.wait)
        try:
            with pytest.raises(ltx2rt.Cancelled):
                made(session, cancelled=lambda: True)
        finally:
            free.set()
        assert len(started) >= 5 and all(one.cancelled() for one in started)


@JAX_IS_SLOW
def test_progress_goes_from_nothing_to_everything(session):
    seen = []
    made(session, on_progress=seen.append)
    stages = list(dict.fromkeys(p.stage for p in seen))
    sound = ["audio"] if session.resident.options.backend == "cuda" else []
    assert stages == ["text", "stage1", "upsample", "stage2", *sound, "decode"]
    assert [(p.step, p.of) for p in seen if p.stage == "stage1"] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    fractions = [p.fraction for p in seen]
    assert fractions == sorted(fractions) and fractions[0] == 0
    assert fractions[-1] == pytest.approx(1)
    assert seen[0].eta_s is None and seen[-1].eta_s == pytest.approx(0, abs=1e-6)


@JAX_IS_SLOW
def test_another_lora_set_loads_what_differs_and_no_more(session, user_lora, model, tmp_path):
    """The set of one LoRA differs from the plain weights in the 130 tensors that it touches. A file
    that changes in another session does not matter."""
    write_arrays(tmp_path / "x.safetensors", {"x": np.ones(5)})
    of_others = TensorFile(tmp_path / "x.safetensors")
    os.truncate(of_others.path, 20)
    resident = session.resident
    made(session)
    plain = resident.weights.held_bytes
    resident.use_loras([LoraSpec(user_lora, 0.5, "stage1")])
    # without sound a third is the transformer's matrices
    assert 0 < new(made(session))[1] < plain / 2
    resident.use_loras([])
    assert new(made(session))[1] == 0


def test_a_lora_that_is_replaced_is_never_taken_for_the_planned_one(model, user_lora, tmp_path):
    """Between plan and load it is refused; between two requests the new one is merged, not the set
    of the old."""
    lora, other = tmp_path / "style.safetensors", tmp_path / "other.safetensors"
    shutil.copy(user_lora, lora)
    stored = TensorFile(user_lora)
    write_arrays(other, {name: stored.read(name) * 3 for name in stored.names()})
    with ltx2rt.open(model, backend="cuda", device="cpu", lora=[lora]) as opened:
        resident, before = opened.resident, made(opened)
        shutil.copy(user_lora, kept := tmp_path / "kept.safetensors")
        plan = _plan(resident)
        resident.weights.free(*list(resident.weights.held))
        os.replace(shutil.copy(other, tmp_path / "new"), lora)
        with pytest.raises(InputError, match=r"style\.safetensors: another file .*planned"):
            produce(resident, plan)
        after = made(opened)
        assert not np.array_equal(before.frames, after.frames)
        os.replace(kept, lora)
        np.testing.assert_array_equal(made(opened).frames, before.frames)


@pytest.mark.long
@JAX_IS_SLOW
def test_sets_that_do_not_fit_are_let_go_least_recently_used_first(session, user_lora):
    resident = session.resident
    made(session)
    peak = max(c.peak_bytes for c in resident.memory.costs(_plan(resident).stages))
    room, sizes = peak * 1.02 / 1e9, []
    resident.use(replace(resident.options, max_memory=room, memory="resident"))
    for i in (1, 2, 3):
        resident.use_loras([LoraSpec(user_lora, 0.25 * i, "stage1")])
        made(session)
        sizes.append(resident.weights.held_bytes)
    assert all(size <= room * 1e9 for size in sizes), sizes
    assert sum(key[0] == "transformer" for key in resident.weights.held) <= 3


def test_what_recorded_steps_keep_is_let_go_before_weights(opened, monkeypatch):
    resident, recorded = opened.resident, [1000]
    made(opened)
    stages, held = _plan(resident).stages, dict(resident.weights.held)
    most = max(c.peak_bytes for c in resident.memory.costs(stages, resident.memory._held()))
    need = most - resident.weights.held_bytes

    def device():
        free = need - (recorded[0] > 0)
        return DeviceInfo("cuda", "a GPU", 10**12, free, recorded_bytes=recorded[0])

    def trim(**given):
        recorded[0] = 0 if given.get("recorded") else recorded[0]

    monkeypatch.setattr(resident.backend, "device", device)
    monkeypatch.setattr(resident.backend, "trim", trim)
    resident.memory.require(stages)
    assert recorded == [0] and resident.weights.held == held
    assert new(made(opened))[1] == 0


@pytest.mark.long
@pytest.mark.parametrize("backend", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_weights_that_come_back_wait_in_the_host(backend, model, kept, monkeypatch, capsys):
    """What a second request reads again, a third finds in the host's memory; on a CPU, where that
    is the device's own, only because it is told that there is room. In PyTorch a set takes the
    other's place: recorded steps stay valid."""
    monkeypatch.setattr(stores, "has_room", lambda kind, size: size > 0)
    kept(reload=True, offload=True)
    with ltx2rt.open(model, backend=backend, device="cpu") as opened:
        store, places = opened.resident.weights, []
        first, second, *others = (_counted(opened, places) for _ in range(5))
        # the decoders stay
        assert new(first)[1] > new(second)[1] > 1e6
        for other in others:
            assert new(other)[1] == 0
            assert_same(other, first)
        parked = sorted(key[0] for key in store.parked)
        assert parked == ["text-encoder", "transformer", "transformer"]
        assert capsys.readouterr().err.count("the host keeps the weights of") == 3
        if backend == "cuda":
            assert places[-1] == places[-2]


def _counted(opened, places):
    """One request that encodes its prompt."""
    resident = opened.resident
    resident._contexts.clear()
    clip = made(opened)
    (one,) = (held for key, held in resident.weights.held.items() if key[0] == "transformer")
    torch = resident.backend.name == "cuda"
    places.append([x.data_ptr() for x in one.weights.values()] if torch else 0)
    return clip


@pytest.mark.long
def test_a_host_with_room_for_one_set_keeps_one_and_does_not_trade_it(
    opened, user_lora, kept, monkeypatch
):
    kept(reload=True)
    store, clips = opened.resident.weights, []
    monkeypatch.setattr(stores, "has_room", lambda kind, size: not store.parked)
    for _ in range(5):
        clips.append(made(opened))
        assert_same(clips[-1], clips[0])
    read = [new(clip)[1] for clip in clips]
    assert read[1] > read[2] == read[3] == read[4] > 0
    opened.resident.use_loras([LoraSpec(user_lora, 0.5)])
    old = set(store.parked)
    for _ in range(3):
        made(opened)
    # what no request loads any more makes room
    assert len(store.parked) == 1 and not old & set(store.parked)
    opened.resident.use_loras([])
    monkeypatch.setattr(stores, "has_room", lambda kind, size: False)
    store.close()
    again = [new(made(opened))[1] for _ in range(2)]
    assert again[1] == read[1] and not store.parked


def test_a_warm_run_is_kept_from_the_first_time_on(opened, kept, monkeypatch):
    monkeypatch.setattr(stores, "has_room", lambda kind, size: True)
    kept(reload=True)
    opened.resident.weights.again = True
    assert new(made(opened))[1] > 0 == new(made(opened))[1]


def _plan(resident):
    request = make_request("two-stage", prompt="a red fox", seed=3, **SMALL, **SIZES[0])
    return make_plan(resident, request)


@pytest.mark.long
@JAX_IS_SLOW
def test_programs_of_rarely_used_shapes_are_let_go(session, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_PROGRAMS", 10)
    released = []
    first = made(session)
    for program in session.resident._programs.values():
        release = program.release
        program.release = lambda own=release: released.append(own()) or None
    made(session, **SIZES[1])
    made(session, **SIZES[2])
    assert len(session.resident._programs) == 10 and released
    again = made(session)
    assert again.report["programs_built"] > 0
    assert_same(again, first)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "tpu"])
def test_twenty_requests_leave_no_more_than_five(backend, model):
    """Three sizes, cancels at random steps: after the fifth request nothing is built, loaded or
    piled up."""
    rng, kept, sizes = random.Random(SEED), {}, []
    with ltx2rt.open(model, backend=backend, device="cpu") as session:
        for i in range(20):
            size = i % 3
            if i > 5 and rng.random() < 0.3:
                left = rng.randrange(1, 8)

                def cancelled():
                    nonlocal left
                    left -= 1
                    return left <= 0

                with pytest.raises(ltx2rt.Cancelled):
                    made(session, **SIZES[size], cancelled=cancelled)
                continue
            clip = made(session, **SIZES[size])
            assert_same(kept.setdefault(size, clip), clip)
            if i >= 5:
                assert new(clip) == (0, 0), (i, SEED)
                resident = session.resident
                kept_now = len(resident._programs), len(resident._graphs)
                sizes.append((resident.weights.held_bytes, *kept_now))
    assert len(set(sizes)) == 1


def test_a_closed_session_says_so(model):
    session = ltx2rt.open(model, backend="cuda", device="cpu")
    session.close()
    session.close()
    with pytest.raises(ltx2rt.InputError, match="closed"):
        made(session)
