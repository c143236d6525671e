"""A fused graph is the same graph: values, tensors, communication; and it has the nodes that
kernels run."""

from collections import Counter

import numpy as np
import pytest

from ltx2rt.backend import get_backend
from ltx2rt.graph import trace
from ltx2rt.graph.interpret import interpret
from ltx2rt.models import gemma, video_vae, vocoder
from ltx2rt.passes.fuse import fuse
from ltx2rt.weights.presets import preset
from tests.parity import ArraySource, relative_l2
from tests.placed_cases import NAMES, Case, case

rng = np.random.default_rng(np.random.SeedSequence().entropy)
DRAWN = ("video_latent", "audio_latent", "video_context", "audio_context")
CLOSE = 1e-6  # float32: one sum in another order
FUSED = {
    "norm_modulate", "gated_residual", "residual_norm_modulate", "qk_norm_rope", "qk_scale_rope", "qk_norm", "qk_scale",
    "linear_gelu", "gelu_quantised_linear", "head_gate", "pixel_norm_silu", "snake_beta",
}  # fmt: skip


FUSED_MODELS = []


def fuses(expected: dict[str, int]):
    """A model that `fuse` makes these ops of."""
    return lambda model: FUSED_MODELS.append(pytest.param(model, expected, id=model.__name__))


def fused_ops(graph) -> dict[str, int]:
    return dict(Counter(node.op for node in graph.nodes if node.op in FUSED))


def body(graph):
    """A block: of a step that is divided where branches part, the last."""
    return graph.repeats[-1].body


def collectives(graph) -> Counter:
    found = Counter()
    for node, times in graph.walk():
        if node.op == "all_reduce":
            found[sum(v.type.nbytes for v in node.inputs)] += times
    return found


@pytest.mark.parametrize("devices", (1, 2))
@pytest.mark.parametrize("name", NAMES)
def test_fused_graph_has_the_same_values_tensors_and_communication(name, devices):
    one = case(name)
    graph = one.on(devices)
    fused = fuse(graph)
    assert fused.parameters() == graph.parameters()
    assert collectives(fused) == collectives(graph)
    assert any(node.op in FUSED for node, _ in fused.walk())
    one.agrees(fused, CLOSE, graph)


@pytest.mark.parametrize("name", [pytest.param("guided-2.0", marks=pytest.mark.long), "guided-2.3"])
def test_fused_bfloat16_step_is_no_further_from_float32(name):
    """In the mean of ten draws, which scatters by 0.06."""
    wide, one = case(name), case(name, "bfloat16")
    fused, ratios = fuse(one.graph), {key: [] for key in wide.graph.outputs}
    for _ in range(10):
        drawn = {key: rng.standard_normal(wide.inputs[key].shape, np.float32) for key in DRAWN}
        inputs = wide.inputs | drawn
        exact = interpret(wide.graph, wide.params, inputs)
        plain = interpret(one.graph, one.params, inputs)
        for key, value in interpret(fused, one.params, inputs).items():
            ratios[key].append(relative_l2(value, exact[key]) / relative_l2(plain[key], exact[key]))
    means = {key: np.exp(np.log(found).mean()) for key, found in ratios.items()}
    assert max(means.values()) <= 1.25, means


@pytest.mark.parametrize("layers", ["scan", "unrolled"])
@pytest.mark.parametrize("name", ["guided-2.0", "guided-2.3", "forward-2.3"])
def test_torch_runs_the_fused_graph(name, layers):
    one = case(name)
    backend = get_backend("cuda", "cpu")
    weights = backend.load([one.graph], ArraySource(one.params))
    expected = one.expected
    program = backend.lower(one.graph, layers)
    assert any(node.op in FUSED for node, _ in program.graph.walk())
    for key, value in program(weights, one.inputs).items():
        # As far from the interpreter as the plain graph may be: sums of a whole network in another
        # order.
        assert relative_l2(backend.to_host(value), expected[key]) <= 1e-5, key


def test_lowering_fuses_nothing_if_asked():
    program = get_backend("cuda", "cpu").lower(case("guided-2.3").graph, fused=False)  # type: ignore[call-arg]
    assert not any(n.op in FUSED for n, _ in program.graph.walk())


@pytest.mark.parametrize("devices,qk", [(1, "qk_norm_rope"), (2, "qk_scale_rope")])
@pytest.mark.parametrize("generation", ["2.0", "2.3"])
def test_block_has_the_expected_fusions(generation, devices, qk):
    """Two streams. 2.3: norms after all three attentions follow a gated residual; the block's first
    norm and its last residual have no partner inside it. 2.0: text attention has neither gate nor
    modulation of its own."""
    new = generation == "2.3"
    assert fused_ops(body(fuse(case(f"guided-{generation}").on(devices)))) == {
        "residual_norm_modulate": 6 if new else 4,
        "norm_modulate": 2 if new else 4,
        "gated_residual": 2,
        "linear_gelu": 2,
        qk: 4,  # q and k together, of four attentions with RoPE
        qk.removesuffix("_rope"): 2,  # and of two to the text
    } | ({"head_gate": 6} if new else {})


@pytest.mark.parametrize("devices", (1, 2))
@pytest.mark.parametrize("generation", ["2.0", "2.3"])
def test_rows_of_several_timesteps_are_spread_by_the_kernels(generation, devices):
    """An image and a kept sound: no modulation row of a block is written out for every token."""
    graph = case(f"guided-{generation}").on(devices)
    plain, fused = body(graph), body(fuse(graph))
    spread = [node for node in plain.nodes if node.op == "take" and node.attrs["axis"] == "levels"]
    left = [node for node in fused.nodes if node.op == "take" and node.attrs["axis"] == "levels"]
    assert len(spread) >= 20 and not left
    by_level = [node for node in fused.nodes if "index_view" in node.args]
    spreading = {"norm_modulate", "residual_norm_modulate", "gated_residual"}
    assert {node.op for node in by_level} == spreading


def counted(graph) -> Counter:
    return Counter(node.op for node, _ in graph.walk())


@pytest.mark.parametrize("generation", ["2.0", "2.3"])
def test_every_norm_of_the_video_decoder_is_fused_with_its_silu_and_zeros_with_their_convolution(
    generation,
):
    """2.0 reflects frames at their borders, which no convolution does by itself."""
    config = preset(f"tiny-{generation}").config.video_vae
    graph = video_vae.trace_decoder(config, 1, 2, 2, 3, "float32")
    fused = fuse(graph)
    ops = counted(fused)
    assert ops["pixel_norm_silu"] == counted(graph)["silu"] > 0 == ops["silu"] + ops["rms_norm"]
    zeros = sum(node.op == "pad" and node.attrs["mode"] == "zeros" for node, _ in graph.walk())
    assert ops["padded_conv"] == zeros and (zeros > 0) == (generation == "2.3")
    Case.drawn(graph).agrees(fused, CLOSE)


def test_every_norm_of_gemma_adds_one_to_its_weight_by_itself():
    config = preset("tiny-2.3").config.gemma
    graph = gemma.trace(config, 2, 5, "float32")
    fused = fuse(graph)
    norms, ops = (counted(g.repeats[0].body) for g in (graph, fused))
    assert ops["norm_scale"] == norms["rms_norm"] == 6 and ops["rms_norm"] == 0
    assert ops["affine"] == norms["affine"] - 6
    mask = np.array([[0, 0, 1, 1, 1], [1] * 5])
    feeds = gemma.feeds(config, np.arange(10).reshape(2, 5), mask)
    Case.of("text-encoder", graph, feeds).agrees(fused, CLOSE)


def test_every_snake_of_the_vocoder_is_one_op():
    graph = vocoder.trace(preset("tiny-2.3").config.vocoder, 1, 5, "float32")
    fused = fuse(graph)
    assert counted(fused)["snake_beta"] == counted(graph)["sin"] > 0 == counted(fused)["sin"]
    Case.drawn(graph).agrees(fused, CLOSE)


@fuses({})
def snake_whose_inside_is_read_elsewhere_is_kept(o):
    y = vocoder.snake_beta(o, o.input("x", B=1, channels=2, time=9))
    (sin,) = (node.outputs[0] for node in o.graph.nodes if node.op == "sin")
    return {"y": y, "sin": sin}


def checked(model) -> dict[str, int]:
    """The fused ops of a model, whose values are those of the plain graph."""
    graph = trace("net", model, "float32")
    fused = fuse(graph)
    Case.drawn(graph).agrees(fused, CLOSE)
    return fused_ops(fused)


def stream(o, name="x"):
    return o.input(name, B=2, tokens=3, D=4)


def row(o, name):
    return o.input(name, B=2, D=4)


def normed(o, x=None):
    return o.rms_norm(stream(o) if x is None else x, over=("D",), eps=1e-6)


def residual(o, gate):
    return o.add(stream(o), o.mul(stream(o, "y"), gate))


@fuses({"gated_residual": 1})
def scales_made_from_the_sum_do_not_fuse_with_it(o):
    x = residual(o, row(o, "gate"))
    scale = o.linear(o.mean(x, over=("tokens",)), "scale", {"D": 4})
    return {"y": o.modulate(normed(o, x), scale, row(o, "shift"))}


@fuses({})
def norm_that_others_read_too_is_kept(o):
    n = normed(o)
    return {"y": o.modulate(n, row(o, "scale"), row(o, "shift")), "n": n}


@fuses({})
def product_that_others_read_too_is_kept(o):
    delta = o.mul(stream(o, "y"), row(o, "gate"))
    return {"x": o.add(stream(o), delta), "delta": delta}


@fuses({"norm_modulate": 1})
def rows_that_are_made_later_move_up(o):
    n = normed(o)
    used = o.linear(o.modulate(n, row(o, "scale"), row(o, "shift")), "early", {"D": 4})
    late = o.modulate(n, o.affine(row(o, "late_scale"), scale=0.5), row(o, "late_shift"))
    return {"y": o.add(used, late)}


@fuses({})
def modulation_that_feeds_its_neighbour_is_kept_apart(o):
    """The second modulation's scale comes from the first."""
    n = normed(o)
    early = o.modulate(n, row(o, "scale"), row(o, "shift"))
    return {"y": o.modulate(n, o.mean(early, over=("tokens",)), row(o, "late_shift"))}


@pytest.mark.parametrize("axes", [{"B": 2, "D": 4}, {"D": 4}, {"B": 2, "tokens": 3, "D": 4}])
def test_keep_mask_of_the_residual_joins_the_gate(axes):
    def model(o):
        delta = o.mul(o.mul(stream(o, "y"), o.input("keep", B=2)), o.input("gate", **axes))
        return {"x": o.add(stream(o), delta)}

    assert checked(model) == {"gated_residual": 1}


def levels(o, name):
    return o.input(name, B=2, levels=2, D=4)


def indexed(o, name, index="index", **axes):
    index = o.graph.inputs.get(index) or o.input(index, "int32", **(axes or {"tokens": 3}))
    return o.take(levels(o, name), index, axis="levels")


def takes(model) -> int:
    """Those of the fused graph."""
    return sum(node.op == "take" for node in fuse(trace("net", model, "float32")).nodes)


@pytest.mark.parametrize("axes", [{"tokens": 3}, {"B": 2, "tokens": 3}])
def test_rows_by_level_beside_rows_per_sample_are_one_node(axes):
    def model(o):
        scale, gate = indexed(o, "scale", **axes), indexed(o, "gate")
        x = residual(o, gate)
        return {"x": x, "y": o.modulate(normed(o, x), scale, row(o, "shift"))}

    assert checked(model) == {"residual_norm_modulate": 1} and not takes(model)


def test_rows_of_two_indices_stay_per_token():
    def model(o):
        scale, shift = indexed(o, "scale"), indexed(o, "shift", "other")
        return {"y": o.modulate(normed(o), scale, shift)}

    assert checked(model) == {"norm_modulate": 1} and takes(model) == 2


@fuses({"norm_modulate": 1})
def rows_per_token_stay_so_beside_rows_by_level(o):
    return {"y": o.modulate(normed(o), indexed(o, "scale"), stream(o, "shift"))}


def rotated(o, name, **sizes):
    x = o.input(name, B=2, **sizes, heads=2, head_dim=4)
    names = (f"{name}_cos", f"{name}_sin")
    tables = [o.input(table, "float32", **sizes, heads=2, pairs=2) for table in names]
    return o.rope(o.rms_norm(x, f"{name}_norm", over=("heads", "head_dim"), eps=1e-6), *tables)


@fuses({"qk_norm_rope": 1})
def q_and_k_of_other_lengths_are_one_node(o):
    q, k = rotated(o, "q", tokens=3), rotated(o, "k", text=5)
    return {"y": o.attention(q, k, o.input("v", B=2, text=5, heads=2, head_dim=4), scale=0.5)}


@fuses({"qk_norm_rope": 2})
def q_and_k_of_other_heads_stay_apart(o):
    q, k = rotated(o, "q", tokens=3), o.input("k", B=2, text=5, heads=1, head_dim=4)
    tables = [o.input(kind, "float32", text=5, heads=1, pairs=2) for kind in ("cos", "sin")]
    k = o.rope(o.rms_norm(k, "k_norm", over=("heads", "head_dim"), eps=1e-6), *tables)
    return {"y": o.attention(q, k, o.input("v", B=2, text=5, heads=1, head_dim=4), scale=0.5)}


@fuses({"qk_norm": 1})
def text_queries_and_keys_of_other_batches_are_one_node(o):
    """Two contexts of four branches: the keys are spread behind their norm."""
    q = o.input("q", B=3, tokens=3, heads=2, head_dim=4)
    k = o.input("k", B=2, text=5, heads=2, head_dim=4)
    q, k = (o.rms_norm(x, n, over=("heads", "head_dim"), eps=1e-6) for x, n in ((q, "q"), (k, "k")))
    k = o.concat(*(o.slice(k, axis="B", start=i, stop=i + 1) for i in (0, 1, 0)), axis="B")
    return {"y": o.attention(q, k, o.input("v", B=3, text=5, heads=2, head_dim=4), scale=0.5)}


def test_keys_and_values_of_two_contexts_are_spread_by_their_norm():
    """Four branches, one of another context; of the heads' gates two are of the values instead."""

    def model(o, where=(0, 1, 0)):
        q = o.input("q", B=3, tokens=5, heads=2, head_dim=4)
        k = o.input("k", B=2, text=5, heads=2, head_dim=4)
        pairs, over = ((q, "q_norm"), (k, "k_norm")), ("heads", "head_dim")
        q, k = (o.rms_norm(x, n, over=over, eps=1e-6) for x, n in pairs)
        pair = k, o.input("v", B=2, text=5, heads=2, head_dim=4)
        parts = [[o.slice(x, axis="B", start=i, stop=i + 1) for i in where] for x in pair]
        k, v = (o.concat(*part, axis="B") for part in parts)
        y = o.attention(q, k, v, scale=0.5)
        y = o.select(o.input("keep", "int32", B=3), y, o.rename(v, names={"text": "tokens"}))
        logits = o.input("logits", B=3, tokens=5, heads=2)
        return {"y": o.mul(y, o.affine(o.sigmoid(logits), scale=2.0))}

    assert checked(model) == {"qk_norm": 1, "head_gate": 1}


def test_q_and_k_of_two_attentions_that_turn_alike_are_one_node():
    """Two streams that attend to each other."""

    def model(o):
        tables = {s: [o.input(f"{s}_{f}", "float32", B=2, **{s: n}, heads=2, pairs=2) for f in ("cos", "sin")]
                  for s, n in (("video", 5), ("audio", 3))}  # fmt: skip

        def turned(name, s):
            x = o.input(name, B=2, **{s: tables[s][0].type.size(s)}, heads=2, head_dim=4)
            return o.rope(
                o.rms_norm(x, f"{name}_norm", over=("heads", "head_dim"), eps=1e-6), *tables[s]
            ), x

        (q, _), (k, v) = turned("q", "video"), turned("k", "audio")
        (other_q, _), (other_k, other_v) = turned("other_q", "audio"), turned("other_k", "video")
        other = o.attention(other_q, other_k, other_v, scale=0.5)
        return {"y": o.attention(q, k, v, scale=0.5), "z": other}

    nodes = fuse(trace("net", model, "float32")).nodes
    fused = [node for node in nodes if node.op == "qk_norm_rope"]
    assert checked(model) == {"qk_norm_rope": 2}
    assert all(node.inputs[2:4] == node.inputs[6:8] for node in fused), "the tables are read once"


@fuses({"residual_norm_modulate": 1})
def residual_that_lacks_samples_is_not_padded(o):
    x, y = o.input("x", B=3, tokens=4, D=6), o.input("y", B=2, tokens=4, D=6)
    x = o.add(x, o.mul(o.pad(y, B=(0, 1)), o.input("gate", D=6)))
    n = o.rms_norm(x, over=("D",), eps=1e-6)
    return {"y": o.modulate(n, o.input("scale", D=6), o.input("shift", D=6))}


def test_bias_behind_an_all_reduce_joins_the_residual():
    """Row-parallel linears of two devices: no pass over the tokens of its own."""
    nodes = body(fuse(case("guided-2.3").on(2))).nodes
    left = [node for node in nodes if node.op in ("add", "mul")]
    made = {v.type.axes[-2:] for node in left for v in node.outputs}
    assert not made & {("tokens", "D"), ("audio_tokens", "audio_D")}


def test_q_and_k_that_travel_to_other_heads_are_one_node():
    """Ulysses: the exchange, not the attention, reads them."""
    graph = case("guided-2.3").placed({"sequence": 2})
    found = [node for node in body(fuse(graph)).nodes if node.op == "qk_norm_rope"]
    assert sum(len(node.outputs) for node in found) == 8 and len(found) == 4


@fuses({})
def norm_of_each_head_by_itself_is_not_a_norm_of_all_heads(o):
    x = o.input("x", B=2, tokens=3, heads=2, head_dim=4)
    tables = [o.input(name, "float32", tokens=3, heads=2, pairs=2) for name in ("cos", "sin")]
    return {"y": o.rope(o.rms_norm(x, "norm", over=("head_dim",), eps=1e-6), *tables)}


@pytest.mark.parametrize("model, expected", FUSED_MODELS)
def test_a_model_is_fused_as_far_as_its_values_allow(model, expected):
    assert checked(model) == expected
