"""Weights that come from the host's memory layer by layer: the same numbers, fewer bytes on the
device."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ltx2rt_cuda.device.torch_device import HOST
from ltx2rt_cuda.host import FileWeight
from ltx2rt_cuda.stream import HostTensor, Ring

import ltx2rt
from ltx2rt.instruments.make import make_checkpoint, standing_for
from ltx2rt.media.video import read_frames
from ltx2rt.passes.loop import taken_apart
from ltx2rt.pipelines import make_request
from ltx2rt.placement import stream
from ltx2rt.run.estimate import Devices, estimate
from ltx2rt.run.plan import make_plan
from ltx2rt.session.memory import FROM, Memory
from ltx2rt.session.open import open_session
from ltx2rt.session.options import NO_LORA, ModelOptions
from ltx2rt.session.weights import Residence
from ltx2rt.weights.files import TensorFile

DISTILLED = {"width": 128, "height": 64, "num_frames": 17, "fps": 48, "seed": 7, "image_crf": 0}
SIZE = DISTILLED | {"steps": 2}

SLOW = pytest.mark.slow


@pytest.fixture
def model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture
def small_matrices_move(monkeypatch):
    """Those of the tiny models, whose tables have fewer than 8 KiB."""
    monkeypatch.setattr(stream, "LEAST_BYTES", 8192)


def opened(model, **options):
    return ltx2rt.open(model, **{"backend": "cuda", "device": "cpu"} | options)


def forced(monkeypatch, residence, **options):
    """Every run keeps its weights like this, what is streamed in the host's memory."""
    given = {"host_memory": 1.0} | options
    way = lambda self, stages: [(replace(self.session.asked, **given), residence)]  # noqa: E731
    monkeypatch.setattr(Memory, "_ways", way)


def made(model, pipeline="two-stage", backend="cuda", **options):
    with opened(model, backend=backend, **options) as session:
        size = SIZE if pipeline != "distilled" else DISTILLED
        clip = session.generate("a robot dancing", pipeline=pipeline, **size)
        held = session.resident.weights.held
        streamed = {key[0]: len(one.streamed) for key, one in held.items() if one.streamed}
        return clip, streamed


def assert_same(a, b):
    np.testing.assert_array_equal(a.frames, b.frames)
    np.testing.assert_array_equal(a.waveform, b.waveform)


@pytest.mark.parametrize("preset, weights_dtype", [
    *(pytest.param("tiny-2.3", dtype, marks=pytest.mark.long) for dtype in (None, "int8")),
    *(pytest.param(name, None, marks=SLOW) for name in ("tiny-2.0", "tiny-2.5")),
    *(pytest.param(f"tiny-{n}", "float8", marks=SLOW) for n in ("2.0", "2.3", "2.5")),
])  # fmt: skip
def test_streamed_is_resident_bit_for_bit(
    tiny, monkeypatch, preset, weights_dtype, small_matrices_move
):
    model = tiny(preset, "official")
    resident, streamed = made(model, weights_dtype=weights_dtype)
    assert not streamed
    for number in (1, 99):
        streams = {"text-encoder": number, "transformer": number}
        forced(monkeypatch, Residence(streams, reload=True))
        clip, streamed = made(model, weights_dtype=weights_dtype)
        assert {"text-encoder", "transformer"} <= streamed.keys()
        assert_same(clip, resident)


@pytest.mark.long
@pytest.mark.parametrize(
    "road, dtype", [("file", "bfloat16"), ("file", "float32"), ("staged", "bfloat16")]
)
def test_every_road_to_the_device_makes_the_same_clip(
    model, monkeypatch, small_matrices_move, road, dtype
):
    """The second stage has merged weights, which are in no file, and no file holds float32."""
    choose = Memory.choose_road
    resident, _ = made(model, dtype=dtype)
    streams = {"text-encoder": 99, "transformer": 99}
    forced(monkeypatch, Residence(streams, reload=True), host_memory=0)

    def chosen(self, stages):
        choose(self, stages)
        assert self.session.weights.residence.road == "file"
        store = self.session.weights
        store.residence = replace(store.residence, road=road)

    monkeypatch.setattr(Memory, "choose_road", chosen)
    with opened(model, dtype=dtype) as session:
        for prompt in ("a fox", "a robot dancing"):
            clip = session.generate(prompt, **SIZE)
        store = session.resident.weights
        rings = [held.weights.ring for held in store.held.values() if held.streamed]
        assert {ring.road for ring in rings} == {road}
        kept = [x for ring in rings for piece in ring.pieces.values() for x in piece.values()]
        assert all(isinstance(x, FileWeight) == (road == "file") for x in kept)
        stages = make_plan(session.resident, make_request("two-stage", prompt="x", **SIZE)).stages
        session.resident.memory.choose_road(stages)
        assert FROM[road] in session.resident.memory.line(stages)
    assert_same(clip, resident)


@pytest.mark.parametrize("given, road", [(None, "file"), (4.0, "file"), (40.0, "pinned")])
def test_a_cpu_and_its_host_are_one_memory(full_model, given, road):
    """Weights do not move to the same machine's memory, unless --host-memory says so."""
    how = {"device": "cpu", "dtype": "bfloat16", "max_memory": 10.0, "host_memory": given}
    session = open_session(ModelOptions("cuda", full_model, **how))
    request = make_request("one-stage", prompt="a", width=64, height=64, num_frames=9, seed=1)
    stages = make_plan(session, request).stages
    assert session.memory.fit(stages, 10**10)
    session.memory.choose_road(stages)
    assert session.weights.residence.road == road
    assert f"(25.5 GB) come from {FROM[road]}" in session.memory.line(stages)


@SLOW
def test_a_full_model_runs_from_its_file(full_model, tmp_path):
    """Weights are 0, statistics 1; the process ends at 12 GB of memory."""
    words = "generate --backend cuda --device cpu --dtype bfloat16 --max-memory 9".split()
    words += ["--width", 64, "--height", 64, "--num-frames", 9, "--steps", 2, "--prompt", "a"]
    words += ["--pipeline", "one-stage", "--model", full_model, "--output", tmp_path / "clip.mp4"]
    run = subprocess.Popen([sys.executable, "-m", "ltx2rt", *map(str, words)])
    most = 0
    while run.poll() is None:
        status = Path(f"/proc/{run.pid}/status").read_text()
        most = max(most, int(re.search(r"RssAnon:\s+(\d+)", status + "RssAnon: 0")[1]) * 1024)
        if most > 12e9:
            run.kill()
        time.sleep(0.2)
    assert run.returncode == 0 and most < 12e9, most
    assert len(list(read_frames(tmp_path / "clip.mp4", "", 9))) == 9


@pytest.fixture(scope="module")
def full_model(tmp_path_factory):
    """LTX-2.3 in files that take no room."""
    folder = tmp_path_factory.mktemp("full")
    make_checkpoint("ltx-2.3", "official", folder, empty=True)
    path = folder / "ltx-2.3.safetensors"
    file = TensorFile(path)
    with path.open("r+b") as written:
        for name, (info, begin) in zip(file.names(), file.places(), strict=True):
            if "std-of-means" in name:
                written.seek(begin)
                written.write(np.ones(info.shape, info.dtype).tobytes())
    return folder


def test_the_road_follows_from_the_hosts_memory():
    """8 GB, or a tenth, are left; WSL pins little; a container's limit is the host's memory."""
    for *gigabytes, pins, road in (
        (20, 64, 30, True, "pinned"),
        (20, 64, 30, False, "staged"),
        (23, 64, 30, True, "file"),
        (20, 128, 30, True, "file"),
        (20, 64, 27, False, "file"),
    ):
        assert stream.road(*(n * 10**9 for n in gigabytes), pins) == road


@pytest.mark.long
def test_requests_in_a_row_load_what_they_need_and_stay_right(
    model, monkeypatch, small_matrices_move
):
    """The residence changes from request to request, as when another needs more room."""
    resident, _ = made(model)
    with opened(model) as session:
        for number in (0, 2, 2, 1, 0):
            streams = {"text-encoder": number, "transformer": number} if number else {}
            forced(monkeypatch, Residence(streams, reload=True))
            assert_same(session.generate("a robot dancing", **SIZE), resident)
        with pytest.raises(ltx2rt.Cancelled):
            session.generate("a robot dancing", cancelled=lambda: True, **SIZE)
        forced(monkeypatch, Residence({"transformer": 99}, reload=True))
        assert_same(session.generate("a robot dancing", **SIZE), resident)


@SLOW
def test_a_text_encoder_goes_by_layers_on_jax(model, monkeypatch, small_matrices_move):
    """Two requests: the second takes its layers from where the first has left them."""
    resident, _ = made(model, "distilled", "tpu", distilled_lora="none")
    forced(monkeypatch, Residence({"text-encoder": 99}, reload=True, offload=True))
    with opened(model, backend="tpu", distilled_lora="none") as session:
        for prompt in ("a robot dancing", "a fox", "a robot dancing"):
            clip = session.generate(prompt, pipeline="distilled", **DISTILLED)
        assert_same(clip, resident)
        store = session.resident.weights
        assert not [key for key in store.held if key[0] == "text-encoder"]
        stages = plan_of(session.resident).stages
        assert "of the text-encoder" in session.resident.memory.line(stages)


@pytest.mark.long
@pytest.mark.parametrize("way", [-1, *(pytest.param(way, marks=SLOW) for way in (1, 2, 3, 4))])
def test_every_way_makes_the_same_clip(model, monkeypatch, small_matrices_move, way):
    """Freed after use, reloaded, with a streamed encoder, one layer, all layers."""
    ways = Memory._ways
    resident, _ = made(model)
    monkeypatch.setattr(Memory, "_ways", lambda self, stages: [list(ways(self, stages))[way]])
    with opened(model) as session:
        for _ in range(2):
            assert_same(session.generate("a robot dancing", **SIZE), resident)
        held = {key[0] for key in session.resident.weights.held}
    assert ("text-encoder" in held, "transformer" in held) == (False, way == 1)


@pytest.mark.parametrize("preset", ("tiny-2.3", pytest.param("tiny-2.5", marks=pytest.mark.long)))
def test_a_late_read_would_show(tiny, monkeypatch, small_matrices_move, preset):
    """A slot is filled with NaN once the next layer begins."""
    used = Ring.used

    def poisoned(self, piece):
        used(self, piece)
        slot = self._holds.index(piece)
        for place in self._slots[slot].values():
            place.view(torch.uint8).fill_(255)
        self._holds[slot] = None

    model = tiny(preset, "official")
    resident, _ = made(model, "distilled", distilled_lora="none")
    forced(monkeypatch, Residence({"text-encoder": 99, "transformer": 99}))
    monkeypatch.setattr(Ring, "used", poisoned)
    clip, streamed = made(model, "distilled", distilled_lora="none")
    assert_same(clip, resident)
    if preset == "tiny-2.5":  # each of Gemma 4's layers, of which six are a body of its repeat
        assert streamed["text-encoder"] > 6


def test_bytes_copied_are_those_of_the_plan(model, monkeypatch, small_matrices_move):
    forced(monkeypatch, Residence({"transformer": 2}))
    with opened(model, distilled_lora="none") as session:
        resident = session.resident
        plan = plan_of(resident)
        resident.weights.residence = Residence({"transformer": 2})
        session.generate("a robot dancing", pipeline="distilled", **DISTILLED)
        (held,) = [h for h in resident.weights.held.values() if h.streamed]
        costs = {cost.name: cost for cost in resident.memory.costs(plan.stages)}
        pieces = stream.pieces(held.graph)
        sizes = [pieces[piece] for piece in held.streamed]
        assert {costs[name].streamed_bytes for name in ("stage1", "stage2")} == {sum(sizes)}
        # Two pieces have two slots: they are brought once, and stay.
        assert held.weights.ring.copied_bytes == sum(sizes)
        assert held.weights.ring.nbytes == stream.slots_bytes(sizes)


def plan_of(session):
    return make_plan(session, make_request("distilled", prompt="a robot dancing", **DISTILLED))


def test_the_fastest_way_that_fits_is_taken(model, small_matrices_move):
    """By planned bytes: kept, else freed after use, else streamed, else refused."""
    with opened(model, distilled_lora="none") as session:
        resident = session.resident
        stages = plan_of(resident).stages
        ways, peaks = list(resident.memory._ways(stages)), []
        for way in ways:
            resident.memory._keep(way)
            peaks.append(max(cost.peak_bytes for cost in resident.memory.costs(stages)))
        assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]
        for budget in (peaks[0], peaks[0] - 1, peaks[-1]):
            assert resident.memory.fit(stages, budget)
            first = next(way for way, peak in zip(ways, peaks, strict=True) if peak <= budget)
            assert (resident.options, resident.weights.residence) == first
        assert not resident.memory.fit(stages, peaks[-1] - 1)
        resident.use(replace(resident.asked, memory="resident"))
        assert not resident.memory.fit(stages, peaks[0] - 1) and resident.memory.mode == "resident"


def test_prompts_keys_and_values_that_have_no_room_are_computed_in_every_step(tiny, monkeypatch):
    """Those of LTX-2.0, of prompts of 1024 tokens; a later request that has room keeps them."""
    model, said = tiny("tiny-2.0", "official"), "keys and values of prompts are computed in every"
    with opened(model) as session:
        kept = session.generate("a robot dancing", **SIZE)
        resident, request = session.resident, {"prompt": "a robot dancing", **SIZE}
        plan = make_plan(resident, make_request("two-stage", **request))
        stages = [stage for stage in plan.stages if stage.name == "stage1"]
        (loop,) = stages[0].needs(resident.config)
        peaks: dict[int | None, list[int]] = {None: [], 0: []}
        for way in list(resident.memory._ways(stages)):
            resident.memory._keep(way)
            peaks[way[1].keep_bytes].append(
                max(c.peak_bytes for c in resident.memory.costs(stages))
            )
        least = min(peaks[None])
        assert min(peaks[0]) < least
        for budget in (least - 1, least):
            assert resident.memory.fit(stages, budget)
            before = taken_apart(resident.graph(loop)).before
            assert bool(before.repeats) == (budget == least)
            assert (said in resident.memory.line(stages)) == (budget < least)
        forced(monkeypatch, Residence(keep_bytes=0))
        assert_same(session.generate("a robot dancing", **SIZE), kept)
        assert resident.weights.residence.keep_bytes == 0


def test_layers_are_spaced_evenly_and_the_ends_stay():
    sizes = {("blocks.", i): 1 for i in range(8)}
    assert stream.streamed(sizes, 0) == frozenset()
    assert sorted(layer for _, layer in stream.streamed(sizes, 2)) == [3, 6]
    assert sorted(layer for _, layer in stream.streamed(sizes, 6)) == [1, 2, 3, 4, 5, 6]
    assert stream.streamed(sizes, 8) == stream.streamed(sizes, 99) == frozenset(sizes)
    saved = [stream.saved_bytes(sizes, number) for number in range(9)]
    assert saved == [0, 0, 0, 1, 2, 3, 4, 5, 6]


def test_memory_that_cannot_be_pinned_is_staged(monkeypatch, capsys):
    ring = Ring(HOST)
    ring._slabs.pinned = True

    def refused(*args, pin_memory=False, real=torch.empty, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refused)
    kept = ring.add(("b.", 0), {"b.*.w": torch.arange(6.0)})
    assert isinstance(kept["b.*.w"], HostTensor)
    assert "pins no more host memory" in capsys.readouterr().err
    (brought,) = ring.brought([kept["b.*.w"]])
    assert brought.tolist() == list(range(6))


CARDS = re.compile(
    r"^\| (rtx[\w-]+|\w+-\d+gb|v\w+-8) \| (.+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE
)
WORKLOADS = (
    ("ltx-2.5", "distilled", 1920, 1088),
    ("ltx-2.3", "two-stage", 768, 512),
    ("ltx-2.3", "distilled", 1280, 704),
)


@pytest.mark.long
def test_the_table_of_cards_is_what_plan_says():
    """Each card of docs/gpus.md runs them in bfloat16: seconds, GB a step from the host, and the
    origin of the rates."""
    rows = CARDS.findall((Path(__file__).parents[2] / "docs" / "gpus.md").read_text())
    cards = {"rtx3060-12gb", "rtx4090-24gb", "rtx5090-32gb", "h100-80gb", "v6e-8", "v7x-8"}
    assert {card for card, *_ in rows} >= cards
    origin = {"measured": "measured", "scaled": "scaled from the H200", "bound": "bound"}
    origin["compiled"] = "by the compiler's code"
    for column, (preset, name, width, height) in enumerate(WORKLOADS):
        with standing_for(preset, ModelOptions("", Path(), dtype="bfloat16")) as options:
            on = replace(options, distilled_lora=NO_LORA) if name == "distilled" else options
            for card, *cells, basis in rows:
                clip = {"width": width, "height": height, "num_frames": 121}
                request = make_request(name, prompt="x", seed=0, **clip)
                found = estimate(on, request, Devices(card))
                assert found.fits and basis == origin[found.basis], card
                stages = [cost for cost in found.costs if cost.name.startswith("stage")]
                moved = max(cost.streamed_bytes for cost in stages)
                streamed = f", {moved / 1e9:.0f} GB" if moved else ""
                digits = 1 if found.basis == "compiled" else 0
                assert cells[column] == f"{found.time_s:.{digits}f} s{streamed}", (card, name)
