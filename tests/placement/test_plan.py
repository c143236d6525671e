"""The estimated cost of a stage, against counts made by hand."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ltx2rt.errors import InputError
from ltx2rt.flags import flagged
from ltx2rt.graph.trace import trace
from ltx2rt.instruments.make import make_checkpoint, standing_for
from ltx2rt.pipelines import pipeline
from ltx2rt.placement.cost import by_kind, exchanges, touched_bytes
from ltx2rt.placement.devices import device_kind, device_kinds
from ltx2rt.placement.plan import StageCost, Work, beside_recorded, cost
from ltx2rt.run.estimate import Devices, Estimate, estimate
from ltx2rt.session.call import Call
from ltx2rt.session.options import ModelOptions


@cache
def plan(preset="tiny-2.3", devices=2, kind="h100-80gb", **settings):
    """Unless it says how, as the kind's profile means the devices to be."""
    known = settings.keys() & ModelOptions.__dataclass_fields__.keys()
    options = {key: settings.pop(key) for key in known}
    if devices > 1 and kind in device_kinds() and not options.keys() & {"mesh", "profile"}:
        options["profile"] = device_kind(kind).profile
    name = settings.pop("pipeline", "two-stage")
    if "width" in flagged(pipeline(name)):
        settings = {"width": 768, "height": 512} | settings
    request = pipeline(name)("a plan", seed=0, **settings)
    found = ModelOptions("", options.pop("model", Path()), dtype="bfloat16", **options)
    with standing_for(preset, found, request.distilled) as found:
        return estimate(found, request, Devices(kind, devices))


def call(found: Estimate, network: str) -> Call:
    """The first call of the network, without its loop."""
    calls = [c for stage in found.plan.stages for c in stage.needs(found.session.config)]
    return replace(next(c for c in calls if c.network == network), steps=None)


def graph(found: Estimate, network: str):
    return found.session.graph(call(found, network))


def alone(graph) -> StageCost:
    return cost(Work("s", ((graph, 1),), {}))


def stages(found) -> dict[str, StageCost]:
    return {c.name: c for c in found.costs}


def test_the_full_model_reaches_the_floor_of_collectives():
    """4 large and 3 small all-reduces in each of 48 blocks; the large ones carry [tokens, 4096] and
    the audio's. On GPUs each of them in two halves, and one of the sound's leaves alone."""
    costs, whole = stages(plan("ltx-2.3", 4)), stages(plan("ltx-2.3", 4, compile=True))
    for stage in ("stage1", "stage2"):
        assert whole[stage].collectives["all_reduce"].count == 48 * 7
        assert costs[stage].collectives["all_reduce"].count == 48 * (2 * 7 + 1)
        found, all_of_it = (x[stage].collectives["all_reduce"].bytes for x in (costs, whole))
        assert found == all_of_it
    large = 48 * 4 * 2 * (6144 * 4096 + 126 * 2048)  # bfloat16
    small = 48 * 4 * (3 * 6144 + 1024 + 126) * 4  # at most: statistics, one float32 a token
    found = costs["stage2"].collectives["all_reduce"]
    assert large < found.bytes < large + small
    assert found.received_bytes == pytest.approx(found.bytes * 2 * 3 / 4, rel=1e-6)
    assert set(costs["stage2"].collectives) == {"all_reduce"}


def test_what_left_the_loop_costs_memory_and_no_step():
    """The prompts' keys and values of LTX-2.0, four branches on four devices: a step reads them
    where they were prepared.

    Two prompts are projected; 28 blocks read those of three branches, the others of four.
    """
    found = plan("ltx-2.0", 4)
    stage1 = stages(found)["stage1"]
    heads = (4096 + 2048) // 4
    # Layers x branches, k and v, tokens, heads, bfloat16.
    kept = (28 * 3 + 20 * 4) * 2 * 1024 * heads * 2
    whole = alone(found.session.as_run(graph(found, "guided-step"), steps=True))
    more = stage1.activation_bytes - whole.activation_bytes
    assert 0.85 * kept < more < 1.05 * kept  # one layer's leave the step
    products = 48 * 2 * 2 * 2 * 1024 * (4096 * 4096 + 2048 * 2048) // 4
    assert products <= whole.flops - stage1.flops < 1.2 * products


def test_every_stage_has_its_own_mesh():
    """Stage 1 gathers four branches; stage 2 has one, and trades tokens for heads."""
    found = plan.__wrapped__(devices=2, mesh={"guidance": 2})
    costs = stages(found)
    notes = [note for note in found.notes if "guidance=2 puts its 4 branches" in note]
    assert [note.split(":")[0] for note in notes] == ["stage1"]
    assert set(costs["text"].collectives) == {"all_reduce"}
    assert {name: t.count for name, t in costs["stage1"].collectives.items()} == {"all_gather": 2}
    assert "all_to_all" in costs["stage2"].collectives


@pytest.mark.parametrize("kind, mesh", [
    pytest.param("v6e", {"sequence": 4, "tensor": 2}, marks=pytest.mark.long),
    pytest.param("v7x", {"sequence": 8}, marks=pytest.mark.long),
    ("h100-80gb", {"tensor": 8}),
])  # fmt: skip
def test_a_kind_of_device_has_a_mesh_of_its_own(kind, mesh):
    found = plan("ltx-2.3", 8, kind)
    assert found.session.backend.mesh == graph(found, "guided-step").mesh == mesh


def test_work_of_one_step_is_the_known_number():
    """One forward of stage 2 is 198.7 TFLOP, of stage 1 with four branches 152.8, of 191.9 if they
    shared nothing; 0.2 % for the small layers."""
    costs = stages(plan("ltx-2.3", 1))
    assert costs["stage2"].flops == pytest.approx(198.7e12, rel=2e-3)
    assert costs["stage1"].flops == pytest.approx(152.8e12, rel=2e-3)
    assert costs["stage1"].steps == 30 and costs["stage2"].steps == 3


@pytest.mark.long
def test_devices_share_work_and_weights():
    one, four = (stages(plan("ltx-2.3", n, memory="resident")) for n in (1, 4))
    assert four["stage1"].flops == pytest.approx(one["stage1"].flops / 4, rel=0.01)
    # Two tiles, of 10 and 9 latents.
    assert four["decode"].flops == pytest.approx(one["decode"].flops / 2, rel=0.25)
    assert stages(plan("ltx-2.3", 8, "v6e"))["decode"].flops == four["decode"].flops
    assert four["stage2"].weights_bytes < 0.4 * one["stage2"].weights_bytes
    assert one["stage1"].collectives == {} and one["upsample"].flops == four["upsample"].flops


def test_weights_follow_the_run(kept):
    def planned(**how):
        kept(**how)
        return stages(plan.__wrapped__())

    both, reload, offload = planned(), planned(reload=True), planned(offload=True)
    names = ["text", "stage1", "upsample", "stage2", "audio", "decode"]
    assert list(both) == names
    assert [both[n].weights_bytes for n in names] == sorted(both[n].weights_bytes for n in names)
    assert both["stage1"].weights_bytes == reload["stage1"].weights_bytes
    assert both["stage2"].weights_bytes > reload["stage2"].weights_bytes  # the LoRA's second set
    assert both["text"].weights_bytes == offload["text"].weights_bytes
    freed = both["decode"].weights_bytes - offload["decode"].weights_bytes
    assert freed == both["text"].weights_bytes
    assert "audio" not in stages(plan(audio=False))
    assert "stage2" not in stages(plan(pipeline="one-stage"))


def test_a_warm_up_leaves_everything_on_the_device(tmp_path):
    make_checkpoint("tiny-2.3", "official", tmp_path, empty=True)
    found = plan.__wrapped__(None, model=tmp_path)
    cold = found.session.memory.costs(found.plan.stages)
    warm = found.session.memory.costs(found.plan.stages, warm=True)
    assert tuple(cold) == found.costs == plan().costs
    assert {c.weights_bytes for c in warm} == {cold[-1].weights_bytes}


def test_time_is_work_or_weights_and_then_what_is_exchanged():
    """A product of a second, weights of a third, an all-reduce of two."""
    n = 64

    def model(o):
        y = o.linear(o.input("x", tokens=n, D=n), "w", {"D": n}, bias=False)
        return {"y": o.all_reduce(y, mesh_axis="tensor")[0]}

    placed = trace("net", model, "float32")
    placed.mesh = {"tensor": 2}
    step, size = alone(placed), 4 * n * n
    figures = dict(flops_per_s=2 * n**3, memory_bytes_per_s=3 * size, link_bytes_per_s=size / 2)
    kind = replace(device_kind("h100-80gb"), collective_s=0.5, **figures)
    assert step.time_s(kind) == pytest.approx(1 + 2.5)
    assert step.exchange_s(kind) == pytest.approx(2.5)
    slow = replace(kind, memory_bytes_per_s=size / 5)  # five seconds for the weights
    assert step.time_s(slow) == pytest.approx(5 + 2.5)
    streamed = replace(step, streamed_bytes=int(10 * slow.host_bytes_per_s))
    assert streamed.time_s(slow) == pytest.approx(10)
    assert streamed.waits_s(slow) == pytest.approx(2.5)
    tpu = device_kind("v6e")
    pair, line = (tpu.exchange_s("all_to_all", devices, 1000, int(90e9)) for devices in (2, 4))
    assert pair == pytest.approx(1.002) and line == pytest.approx(4 / 3 + 0.002)


@pytest.mark.long
def test_a_guidance_axis_is_weighed_against_sharing():
    """Two branches are 96 TFLOP; half of what four share, 82."""
    found = plan.__wrapped__("ltx-2.3", 2, mesh={"guidance": 2}, profile="hopper")
    (note,) = [note for note in found.notes if note.startswith("stage1")]
    assert "96 TFLOP" in note and "sequence=2 82.1 " in note, note
    assert "sharing is cheaper" in note and "computes less" in note, note


def test_a_stage_adds_up_its_graphs_and_keeps_the_largest_activations():
    graphs = [graph(plan(), name) for name in ("upsampler", "audio-decoder")]
    work = Work("s", tuple((g, 3) for g in graphs), {"a": 10, "b": 5}, 2)
    found = cost(work)
    assert found.weights_bytes == 15 and found.steps == 2
    assert found.flops == 3 * sum(alone(g).flops for g in graphs)
    assert found.activation_bytes == max(alone(g).activation_bytes for g in graphs)


def test_a_packed_weight_is_touched_by_any_of_its_parts():
    placed = graph(plan(), "guided-step")
    q = "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"
    (packed,) = {n for n in placed.all_params() if "attn1.to_q.weight" in n and "audio" not in n}
    assert " | " in packed
    assert touched_bytes(placed, {q}) == placed.all_params()[packed][0].type.nbytes
    assert touched_bytes(placed, set()) == 0
    everything = sum(v.type.nbytes * n for v, n in placed.all_params().values())
    assert touched_bytes(placed, set(placed.parameters())) == everything


def test_replicated_parts_are_named_with_their_reason():
    notes = "\n".join(plan("ltx-2.0", 4).notes)
    assert "heads=30 does not divide over tensor=4" in notes and "replicated" in notes
    assert "replicated" not in "\n".join(plan("ltx-2.3", 4).notes)
    assert "kv_heads=8 does not divide over tensor=16" in "\n".join(plan("ltx-2.3", 16).notes)


def test_traffic_of_an_unplaced_graph_is_none():
    assert by_kind(exchanges(graph(plan(devices=1), "guided-step"))) == {}


@pytest.mark.parametrize("settings,words", [
    ({"kind": "abacus"}, ["abacus", *device_kinds()]),
    ({"devices": 0}, ["--devices"]),
    ({"devices": 3}, ["heads=4", "tensor=3"]),
    ({"mesh": {"tensor": 4}}, ["--mesh", "4", "2"]),
    ({"devices": 3, "mesh": {"guidance": 3}}, ["4 branches do not divide over guidance=3"]),
    ({"mesh": {"sequence": 2}, "profile": "ironwood-1d"}, ["ironwood-1d", "sequence=2", "tensor"]),
    ({"devices": 5, "kind": "v6e"}, ["trillium", "tensor=2", "5 devices", "--mesh"]),
    ({"devices": 5, "mesh": {"fsdp": 5}}, ["D=128", "fsdp=5"]),
    ({"profile": "kitchen"}, ["kitchen", "hopper"]),
    ({"width": 0}, ["--width"]),
])  # fmt: skip
def test_what_no_machine_can_do_is_refused_by_name(settings, words):
    with pytest.raises(InputError) as error:
        plan.__wrapped__(**settings)
    assert all(word in str(error.value) for word in words)


def test_figures_are_positive():
    for name in device_kinds():
        k = device_kind(name)
        rates = k.memory_bytes, k.flops_per_s, k.memory_bytes_per_s, k.link_bytes_per_s
        assert min(rates) > 1e9


@pytest.mark.parametrize("block,count,waits_s", [
    ("prw", 1, 1.5),  # nothing to do meanwhile
    ("prpw", 1, 0.5),
    ("prppw", 1, 0),
    ("prprw", 1, 2),  # the second leaves when the first has arrived
    ("prwpr", 1, 3),  # what nothing reads is waited for at the end
    ("prw", 4, 4 * 1.5),
    ("pwpr", 4, 3 * 0.5 + 1.5),  # read by the next iteration, after a product
    ("pwppr", 1, 1.5),
])  # fmt: skip
def test_an_all_reduce_travels_until_something_reads_it(block, count, waits_s):
    """Products (p) of 1 s, all-reduces (r) of 1.5 s, and their readers (w)."""

    def body(o, carry, invariant, data):
        x, brought = carry["x"], carry["brought"]
        for i, op in enumerate(block):
            if op == "p":
                x = o.linear(x, f"{i}", {"D": 8}, bias=False)
            elif op == "r":
                (brought,) = o.all_reduce(x, mesh_axis="tensor")
            else:
                x = o.add(x, brought)
        return {"x": x, "brought": brought}, {}

    def model(o):
        start = {name: o.input(name, tokens=8, D=8) for name in ("x", "brought")}
        return o.repeat(body, count, start)[0]

    placed = trace("sums", model, "float32")
    placed.mesh = placed.repeats[0].body.mesh = {"tensor": 2}
    rates = {"flops_per_s": 2 * 8**3, "link_bytes_per_s": 4 * 8**2 / 1.5}
    kind = replace(device_kind("h100-80gb"), **rates)
    found = alone(placed)
    # 10 us of each are the link's.
    assert found.exchange_s(kind) == pytest.approx(waits_s, abs=1e-3)
    on_tpu = replace(kind, backend="tpu")  # whose compiler orders by itself
    assert found.exchange_s(on_tpu) == pytest.approx(1.5 * block.count("r") * count, abs=1e-3)


def beside(recorded: int, *rows) -> list[int]:
    """rows: name, activation and prepared bytes, whether it loops."""
    nothing = {"weights_bytes": 0, "read_bytes": 0, "flops": 0, "exchanged": {}}
    costs = [
        StageCost(name, 1, activation_bytes=size, prepared_bytes=prepared, loops=loops, **nothing)
        for name, size, prepared, loops in rows
    ]
    return [c.activation_bytes for c in beside_recorded(costs, recorded)]


@pytest.mark.parametrize(
    "recorded,expected", [(0, [5, 3, 4, 10, 11]), (6, [5, 3, 1, 7, 5]), (10, [5, 3, 1, 7, 4])]
)
def test_a_loop_runs_beside_recorded_steps_and_keeps_what_it_takes_more(recorded, expected):
    loops = ("stage1", 3, 0, True), ("upsample", 1, 0, False), ("stage2", 7, 0, True)
    found = beside(recorded, ("text", 5, 0, False), *loops, ("decode", 4, 0, False))
    assert found == expected


def test_recorded_loops_keep_what_each_has_prepared_and_share_the_rest():
    loops = ("stage1", 30, 10, True), ("stage2", 50, 12, True)
    found = beside(0, *loops, ("decode", 7, 0, False))
    assert found == [30, 10 + 20 + 50, 10 + 12 + 38 + 7]
