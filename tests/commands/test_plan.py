"""`ltx2rt plan` and `ltx2rt graph` on a mesh: spelling, JSON, tables, and refusals."""

import json

import pytest

STAGE_KEYS = "name steps weights_bytes resident_bytes streamed_bytes activation_bytes flops "
STAGE_KEYS += "collectives exchange_s copy_s waits_s time_s basis"
PLAN = ["plan", "--devices", "2", "--device-kind", "h100-80gb", "--mesh", "tensor=2"]


def test_plan_prints_the_promised_json_of_a_preset_and_a_checkpoint(command, tiny):
    status, out, err = command(*PLAN, "--preset", "tiny-2.3", "--json")
    assert (status, err) == (0, "")
    planned = json.loads(out)
    assert planned.keys() == {"fits", "memory_mode", "devices", "mesh", "stages", "time_s", "basis"}
    assert planned["fits"] is True and planned["devices"] == 2 and planned["mesh"] == {"tensor": 2}
    stages = planned["stages"]
    assert [s["name"] for s in stages] == "text stage1 upsample stage2 audio decode".split()
    assert all(s.keys() == {*STAGE_KEYS.split()} for s in stages)
    ((kind, exchanged),) = stages[1]["collectives"].items()
    assert (kind, exchanged["count"]) == ("all_reduce", (2 * 7 + 1) * 3) and exchanged["bytes"] > 0
    status, out, err = command(*PLAN, "--model", tiny("tiny-2.3", "official"), "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == planned


def test_every_pipeline_is_planned_from_the_flags_that_decide_its_cost(command, tiny, images, film):
    """Of a preset no distilled LoRA is asked for where the pipeline needs none; a weighed reference
    costs a bias. Files of a2v, extend and retake have theirs."""
    lora = tiny("tiny-2.3", "official") / "tiny-2.3-distilled-lora.safetensors"
    flags = ["plan", "--preset", "tiny-2.3", "--devices", 1, "--device-kind", "h200", "--pipeline"]
    size = ("--width", 64, "--height", 64, "--num-frames", 17)
    given, merged = ("--video-path", film), ("--lora", lora)
    guide = (*size, *merged, "--video-conditioning", film, "--skip-stage-2")
    for words, stages in (
        (("distilled", *size), "text stage1 upsample stage2 audio decode"),
        (("hq", *size, "--no-audio"), "text stage1 upsample stage2 decode"),
        (("keyframes", *size, "--image", f"{images[0]}:0", f"{images[1]}:16"), ""),
        (("v2v", *given), "source video source sound text stage1 decode"),
        (("inpaint", *given, "--pad", "32,0,32,0"), "source video source sound text stage1 decode"),
        (("dubit", *given, *merged), ""), (("hdr-ic-lora", *given, *merged), ""),
        (("upscale", *given, *merged), "source sound text stage1 videos stage1 decode"),
        (("ic-lora", *guide, "--conditioning-attention-strength", 0.5),
         "text stage1 videos stage1 audio decode"),
        (("t2a", "--duration", 1), "text stage1 audio"),
    ):  # fmt: skip
        status, out, err = command(*flags, *words, "--json")
        assert status == 0, err
        assert stages in ("", " ".join(s["name"] for s in json.loads(out)["stages"]))


def test_plan_prints_a_table(command):
    """Four cards hold the released model, one H100 does not; the origin of its rates is said."""
    one = "plan --preset ltx-2.3 --device-kind h100-80gb --size 768x512".split()
    status, out, _ = command(*one, "--devices", 4, "--verbose", "--pipeline", "one-stage")
    assert status == 0 and "720 all_reduce" in out and "memory: fits" in out
    assert "scaled from what was measured on h200-141gb" in out
    assert "less what passes under products" in out
    status, out, _ = command(*one, "--memory", "resident")
    assert status == 0 and "does NOT fit" in out
    assert "all_reduce" not in out and "exchanges" not in out
    assert "try --memory auto or more devices or fewer frames" in out
    status, out, _ = command(*one)
    assert len(out.splitlines()) <= 6
    assert status == 0 and "memory: fits" in out and "weights are freed once they are used" in out


def test_segments_that_do_the_same_are_one_row(command):
    words = ["plan", "--preset", "tiny-2.3", "--device-kind", "h200", "--pipeline", "distilled"]
    out = command(*words, "--seconds", 40, "--verbose")[1]
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert len(set(rows) - {""}) < 20 and any(row.startswith("decode x") for row in rows)


def test_devices_are_compared_as_replicas(command):
    """The price of a clip is that of all devices, and what does not fit has none."""
    words = ["plan", "--preset", "tiny-2.3", "--device-kind", "2xh100", "--price", 5]
    words += ["--pipeline", "one-stage"]
    layouts = json.loads(command(*words, "--json")[1])["layouts"]
    assert [(x["replicas"], x["devices"]) for x in layouts] == [(2, 1), (1, 2)]
    for one in layouts:
        assert one["clips_per_hour"] == pytest.approx(one["replicas"] * 3600 / one["time_s"])
        assert one["price_per_clip"] == pytest.approx(10 / one["clips_per_hour"])
    head, *rows = command(*words)[1].split("\nreplicas ")[1].splitlines()
    assert "price/clip" in head and [row.split()[0] for row in rows] == ["2x1", "1x2"]
    assert f"{layouts[1]['price_per_clip']:.4f}" in rows[1]
    assert "\nreplicas" not in command(*words, "--mesh", "tensor=2")[1]
    assert command(*words, "--max-memory", "0.0001")[1].count("does NOT fit") >= 3


def test_plan_streams_what_does_not_fit(command):
    """A card of 12 GB runs every size of the table."""
    one = "plan --preset ltx-2.3 --device-kind 3060 --width 1920 --height 1088".split()
    status, out, _ = command(*one)
    assert status == 0 and "memory: fits" in out, out
    assert "64 of 64 layers of the text-encoder (25.5 GB) come from host memory" in out
    status, out, _ = command(*one, "--json")
    found = json.loads(out)
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert found["memory_mode"] == "streamed" and found["fits"]
    assert stages["stage2"]["copy_s"] == pytest.approx(stages["stage2"]["streamed_bytes"] / 24e9)
    assert stages["stage2"]["waits_s"] == 0 and stages["upsample"]["streamed_bytes"] == 0


@pytest.mark.long
def test_advice_for_the_text_stage_names_no_smaller_clip(command):
    words = "plan --preset ltx-2.5 --device-kind 3060 --num-frames 121 --max-memory 9"
    _, out, _ = command(*words.split())
    assert "text needs 7.7 GB of 9 GB" in out
    advice = out.partition("try ")[2].split("\n")[0]
    assert "does NOT fit: text needs" in out and "more devices" in advice and "frames" not in advice


@pytest.mark.parametrize("encoding, faster", [
    ("float8", (0.6, 0.75)), pytest.param("int8", (1.0, 1.1), marks=pytest.mark.long),
])  # fmt: skip
def test_weights_of_8_bits_are_planned_at_half_the_bytes(command, encoding, faster):
    """46 of 48 blocks of the released model, without their norms, tables, gates and biases: 17.7 of
    37.9 GB."""
    how = "--pipeline one-stage --size 768x512 --json"
    words = f"plan --preset ltx-2.3 --device-kind h200-141gb {how}".split()
    found = []
    for dtype in ("bfloat16", encoding):
        status, out, _ = command(*words, "--weights-dtype", dtype)
        assert status == 0
        found.append({stage["name"]: stage for stage in json.loads(out)["stages"]}["stage1"])
    saved = found[0]["weights_bytes"] - found[1]["weights_bytes"]
    d, audio = 4096, 2048
    block = 16 * (d * d + audio * audio) + 4 * (d * audio + audio * audio)
    assert 0.995 * 46 * block <= saved <= 46 * block  # a scale of 4 bytes for each row
    # The first and last block stand alone, and branches that part inside a block share the rest of
    # it only there.
    assert found[1]["flops"] <= found[0]["flops"] <= 1.01 * found[1]["flops"]
    # float8: attention and the outer blocks at bfloat16's rate; int8: and what decoding moves.
    assert faster[0] <= found[1]["time_s"] / found[0]["time_s"] < faster[1]


def test_graph_prints_float8_linears(command):
    flags = "graph denoise --preset tiny-2.3 --width 64 --height 64 --num-frames 9".split()
    status, text, _ = command(*flags, "--weights-dtype", "float8")
    assert status == 0 and "quantised_linear" in text and "repeat 1" in text


def test_graph_prints_the_placed_graph(command):
    flags = "graph transformer --preset tiny-2.3 --width 64 --height 64 --num-frames 9".split()
    status, text, _ = command(*flags, "--profile", "hopper", "--mesh", 2)
    assert status == 0 and text.count("= all_reduce(") == 7  # of one block, shown once
    assert command(*flags, "--mesh", "tensor=2") == (0, text, "")
    _, whole, _ = command(*flags)
    assert "all_reduce" not in whole
    _, guided, _ = command("graph", "guided-step", *flags[2:], "--tp-size", 2)
    # of the blocks before the one that STG perturbs, and of the others
    assert guided.count("= all_reduce(") == 2 * 7


def test_graph_prints_a_network_that_later_releases_alone_have(command):
    flags = "graph diffusion-features --width 768 --height 64 --num-frames 9 --preset".split()
    status, text, _ = command(*flags, "tiny-2.5")
    assert status == 0 and "neighbourhood_attention" in text and "all_gather" not in text
    status, text, _ = command(*flags, "tiny-2.5", "--mesh", "sequence=4,tensor=2")
    assert status == 0 and text.count("= all_gather(") == 3  # of every stage's slabs
    status, _, err = command(*flags, "tiny-2.3")
    assert status == 2 and "pass one with --video-vae" in err


def test_json_names_the_collective_of_every_node(command):
    flags = "--preset tiny-2.3 --width 64 --height 64 --num-frames 9 --format json".split()
    _, out, _ = command("graph", "transformer", *flags, "--tp-size", 2)

    def walk(nodes):
        for node in nodes:
            yield node
            yield from walk(node.get("body", ()))

    nodes = list(walk(json.loads(out)["nodes"]))
    assert all(n["collective"] == (n["op"] if n["op"] == "all_reduce" else None) for n in nodes)
    assert sum(n["collective"] is not None for n in nodes) == 7


def test_one_device_is_planned_unless_more_are_asked_for(command):
    words = "plan --preset tiny-2.3 --device-kind h100 --pipeline one-stage".split()
    found = [command(*words, *more) for more in ((), ("--devices", 1))]
    assert found[0] == found[1] and found[0][0] == 0


@pytest.mark.parametrize("name,kind", [
    ("h100", "h100-80gb"), ("H200", "h200-141gb"), ("RTX 4090", "rtx4090-24gb"),
])  # fmt: skip
def test_a_device_kind_has_a_short_name(name, kind, command):
    words = ("plan", "--preset", "tiny-2.3", "--pipeline", "one-stage", "--device-kind", name)
    status, out, _ = command(*words)
    assert status == 0 and f"on 1 x {kind} " in out


TRAIN = ("plan", "--preset", "tiny-2.3", "--train", "64x64x17", "--rank", 4, "--mode", "t2v")


def test_a_training_step_is_planned(command):
    """Two clips on two GPUs: weights, work and LoRA of one, and one exchange, of all gradients."""

    def planned(*more):
        return json.loads(command(*TRAIN, "--device-kind", "h200", *more, "--json")[1])

    one, two = (planned("--devices", n) for n in (1, 2))
    assert one["fits"] and one["collectives"] == {} and two["mesh"] == {"data": 2}
    same = ("trained", "weights_bytes", "state_bytes", "kept_bytes", "block_bytes", "flops")
    assert [one[name] for name in same] == [two[name] for name in same]
    assert two["collectives"] == {"all_reduce": {"count": 1, "bytes": 4 * one["trained"]}}
    assert one["state_bytes"] == 16 * one["trained"] and two["exchange_s"] > 0
    kept = planned("--remat", "none")
    assert kept["flops"] < one["flops"] and kept["kept_bytes"] > one["kept_bytes"]
    text = command(*TRAIN, "--device-kind", "h200")[1]
    assert "training step of 1 clip of 64x64x17 (video and audio), LoRA of rank 4" in text
    assert "memory       fits" in text
    eight = planned("--weights-dtype", "int8")
    assert eight["weights_bytes"] < 0.8 * one["weights_bytes"]  # not only blocks have weights here
    assert eight["flops"] == one["flops"] and eight["block_bytes"] > one["block_bytes"]


def test_a_planned_step_has_its_references_and_its_average(command):
    words = (*TRAIN[:-1], "outpaint", "--device-kind", "h200", "--json")
    guided = ("--mode", "ic-lora", "--targets", "video-attn")
    plain, averaged, half, whole = (
        json.loads(command(*words, *more)[1])
        for more in ((), ("--ema", 0.99), (*guided, "--reference-downscale", 2), guided)
    )
    assert averaged["state_bytes"] == 20 * averaged["trained"] == 20 * plain["trained"]
    grows = [x["flops"] for x in (plain, half, whole)]
    assert grows == sorted(set(grows)) and whole["kept_bytes"] > half["kept_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--weights-dtype", "int8"), ("--weights-dtype", "float8")])
def test_a_card_of_24_gb_trains_ltx_2_3_with_streamed_blocks(command, more):
    words = ("plan", "--preset", "ltx-2.3", "--train", "768x512x49", "--mode", "t2v", "--json")
    made = json.loads(command(*words, "--device-kind", "rtx4090", *more)[1])
    assert made["fits"] and made["streamed_bytes"] > 8e9
    whole = json.loads(command(*words, "--device-kind", "h200", *more)[1])
    assert whole["fits"] and whole["streamed_bytes"] == 0 == whole["copy_s"]


ON_H200 = " ".join(map(str, (*TRAIN, "--device-kind h200")))
GRAPH = "graph transformer --preset tiny-2.3"


@pytest.mark.parametrize(("words", "said"), [
    *(("plan --preset tiny-2.3 --device-kind gpu", kind)
      for kind in ("h100-80gb", "h200-141gb", "v6e", "v7x")),
    ("plan --preset tiny-2.3 --device-kind a100", "a100-40gb or a100-80gb"),
    *((f"plan --preset tiny-2.3 --device-kind h100-80gb --devices {count}",
       f"--devices: {count}, expected 1 to 10000") for count in (0, 99999999999)),
    (f"{GRAPH} --tp-size 3", "heads=4 does not divide over tensor=3"),
    (f"{GRAPH} --tp-size 0", "--mesh: '0'"),
    (f"{GRAPH} --tp-size 2 --profile nope", "hopper"),
    (f"{ON_H200} --devices 2 --mesh guidance=2", "a training step has no guidance branches"),
    (f"{ON_H200} --train 60x64x9", "--train: 60x64x9, sides are multiples of 32"),
    (f"{ON_H200} --width 64", "--width: a training step does not read it"),
    (f"{ON_H200} --trace x.json", "a training step has no trace"),
    (f"{ON_H200} --reference-downscale 2", "--mode t2v has no references"),
    (f"{ON_H200} --mode t2a --targets video-attn", "video-attn is not part of this training"),
])  # fmt: skip
def test_what_is_not_planned_is_refused_in_one_line(command, words, said):
    status, out, err = command(*words.split())
    assert (status, out, err.count("\n")) == (2, "", 1) and said in err
