"""Networks as modules of other programs: `ltx2rt_cuda.as_module`, `ltx2rt_tpu.as_nnx`."""

import copy
import json
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from ltx2rt_cuda import as_module
from ltx2rt_tpu import as_nnx
from ltx2rt_tpu.backend import TpuBackend
from ltx2rt_tpu.weights import weight_specs

from ltx2rt.backend import get_backend
from ltx2rt.errors import GraphError
from ltx2rt.models import transformer, video_vae
from ltx2rt.passes.pack import pack
from ltx2rt.passes.place import place
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.presets import preset
from tests.conftest import assert_near, refused
from tests.parity import ArraySource, random_params, relative_l2
from tests.placed_cases import Case, case
from tests.virtual import on_devices

MESH = {"tensor": 2, "sequence": 2}
# gradients in float32, back through two frameworks or a mesh: a few operations of 1e-5 each
CLOSE = 1e-4


@cache
def network(name: str) -> Case:
    """A transformer with every optional input, or the decoder of a tiny VAE."""
    if name == "transformer":
        one = case("forward-2.3")
        keep = np.eye(2, dtype=np.float32)  # every layer's attention counts in one sample
        kept = {k: keep for k in one.inputs if k.endswith("_keep")}
        return replace(one, inputs=one.inputs | kept)
    graph = video_vae.trace_decoder(preset("tiny-2.3").config.video_vae, 1, 2, 2, 2, "float32")
    latent = np.random.default_rng(0).standard_normal(graph.inputs["latent"].type.shape, np.float32)
    return Case(name, graph, random_params(graph), {"latent": latent})


NETWORKS = ("transformer", "video-decoder")


@cache
def probes(name: str) -> dict[str, np.ndarray]:
    """Random weights of a loss that is linear in the outputs: each one's gradient counts."""
    rng, outputs = np.random.default_rng(5), network(name).graph.outputs
    return {k: rng.standard_normal(v.type.shape, np.float32) for k, v in outputs.items()}


@cache
def torch_module(name: str):
    return as_module(network(name).graph, ArraySource(network(name).params))


@cache
def jax_module(name: str):
    return as_nnx(network(name).graph, ArraySource(network(name).params), "cpu")


@cache
def torch_gradients(name: str) -> dict[str, np.ndarray]:
    module = copy.deepcopy(torch_module(name))
    outputs = module(**network(name).inputs)
    sum((outputs[k] * torch.from_numpy(w)).sum() for k, w in probes(name).items()).backward()
    return {k: p.grad.numpy() for k, p in module.named_parameters() if p.grad is not None}


def loss(module, inputs, weights):
    outputs = module(**inputs)
    return sum((outputs[k] * w).sum() for k, w in weights.items()), outputs


def jax_results(module, name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs, and gradients by the checkpoint's names, of an unpacked graph."""
    step = nnx.jit(nnx.grad(loss, has_aux=True))
    gradients, outputs = step(module, network(name).inputs, probes(name))
    found = {}
    for declared, (_, count) in module.program.graph.all_params().items():
        array = np.asarray(gradients["weights"][declared].get_value())
        for i in range(count):
            found[declared.replace("*", str(i))] = array[i] if "*" in declared else array
    return {k: np.asarray(v) for k, v in outputs.items()}, found


@pytest.mark.parametrize("kind, name", [
    ("cuda", "transformer"), ("cuda", "video-decoder"), ("tpu", "transformer"),
    pytest.param("tpu", "video-decoder", marks=pytest.mark.long),
])  # fmt: skip
def test_module_gives_what_the_program_gives(kind, name):
    one, backend = network(name), get_backend(kind, "cpu")
    plain = {"fused": False} if kind == "cuda" else {}  # what is fused adds up in another order
    weights = backend.load([one.graph], ArraySource(one.params))
    expected = backend.lower(one.graph, **plain)(weights, one.inputs)
    module = torch_module(name) if kind == "cuda" else jax_module(name)
    outputs = module(**one.inputs)
    assert outputs.keys() == expected.keys()
    for key, value in expected.items():
        got = outputs[key].detach() if kind == "cuda" else outputs[key]
        assert np.array_equal(backend.to_host(got), backend.to_host(value)), key


def test_module_of_a_program_is_that_of_its_graph():
    one = network("transformer")
    for kind, make in (("cuda", as_module), ("tpu", partial(as_nnx, device="cpu"))):
        program = get_backend(kind, "cpu").lower(one.graph)
        module = make(program, ArraySource(one.params))
        assert (module if kind == "cuda" else module.program).graph is program.graph


@pytest.mark.parametrize("generation", ("2.0", "2.3"))
def test_parameters_have_the_checkpoints_names(tiny, generation):
    checkpoint = open_checkpoint(tiny(f"tiny-{generation}", "diffusers"))
    source = checkpoint.source("transformer")
    structure = transformer.ForwardShape(1, 2, 2, 4, (1,) * len(transformer.TABLES))
    graph = transformer.trace(checkpoint.config.transformer, structure, "bfloat16")
    state = as_module(graph, source).state_dict()
    assert state.keys() == set(source.names())
    assert all(name.startswith("model.diffusion_model.") for name in state)
    for name, tensor in state.items():
        stored = source.read(name).astype(ml_dtypes.bfloat16)  # the file has tables in float32
        assert tensor.dtype == torch.bfloat16
        assert np.array_equal(tensor.float().numpy(), stored.astype(np.float32)), name
    weights = as_nnx(graph, source, "cpu").weights
    params = graph.all_params()
    expanded = {n.replace("*", str(i)) for n, (_, count) in params.items() for i in range(count)}
    assert expanded == state.keys() and set(weights) == params.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "video-decoder"])
def test_gradients_reach_every_parameter_alike_in_both(name):
    """JAX's under `nnx.jit`, beside the outputs."""
    outputs, theirs = jax_results(jax_module(name), name)
    for key, value in jax_module(name)(**network(name).inputs).items():
        # XLA fuses otherwise where a gradient is computed too.
        assert relative_l2(outputs[key], value) <= 1e-5
    ours = torch_gradients(name)
    assert ours.keys() == theirs.keys() == network(name).graph.parameters().keys()
    for key, gradient in ours.items():
        assert np.linalg.norm(gradient) > 0, key
        assert relative_l2(gradient, theirs[key]) <= CLOSE, key


def test_gradients_of_a_fused_program_are_those_of_the_plain_one():
    """Plain ops of what is fused work in memory of their own."""
    one, backend, found = network("transformer"), get_backend("cuda", "cpu"), []
    for fused in (True, False):
        module = as_module(backend.lower(one.graph, fused=fused), ArraySource(one.params))  # type: ignore[call-arg]
        sum(value.square().sum() for value in module(**one.inputs).values()).backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    assert_near(*found, CLOSE)


@pytest.mark.slow
def test_torch_compile_takes_the_module_in_one_graph():
    one, module = network("transformer"), torch_module("transformer")
    torch._dynamo.reset()
    inputs = {name: torch.as_tensor(x) for name, x in one.inputs.items()}
    compiled = torch.compile(module, backend="eager", fullgraph=True)(**inputs)
    for key, value in module(**inputs).items():
        assert torch.equal(compiled[key], value)


# torch hides this warning of its own by a filter, which pytest's -W error comes before.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.long
def test_compiled_block_is_compiled_once_for_all_layers():
    compiled = []

    def counting(module, _):
        compiled.append(module)
        return module.forward

    torch._dynamo.reset()
    one = network("transformer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=counting, fullgraph=True))
        module = as_module(one.graph, ArraySource(one.params), compile=True)
    outputs = module(**one.inputs)
    assert len(compiled) == 1
    for key, value in torch_module("transformer")(**one.inputs).items():
        assert torch.equal(outputs[key], value)


class Lora(torch.nn.Module):
    def __init__(self, shape: torch.Size, rank: int):
        super().__init__()
        self.down = torch.nn.Parameter(torch.randn(rank, shape[1]) * 0.1)
        self.up = torch.nn.Parameter(torch.zeros(shape[0], rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def test_lora_trains_through_a_parametrized_weight():
    module = copy.deepcopy(torch_module("transformer")).requires_grad_(False)
    inputs = network("transformer").inputs
    before = torch_module("transformer")(**network("transformer").inputs)
    linear = module.get_submodule("model.diffusion_model.transformer_blocks.1.attn1.to_q")
    lora = Lora(linear.weight.shape, 2)
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", lora)
    assert torch.equal(module(**inputs)["video_velocity"], before["video_velocity"].detach())
    trained = [p for p in module.parameters() if p.requires_grad]
    assert len(trained) == 2
    optimizer = torch.optim.SGD(trained, 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = module(**inputs)["video_velocity"].square().mean()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert sorted(losses, reverse=True) == losses and losses[-1] < losses[0]


def test_functional_call_takes_other_weights():
    one, module = network("transformer"), torch_module("transformer")
    other = {k: torch.from_numpy(v) for k, v in random_params(one.graph, seed=1).items()}
    outputs = torch.func.functional_call(module, other, kwargs=one.inputs)
    expected = as_module(one.graph, ArraySource(random_params(one.graph, seed=1)))(**one.inputs)
    for key in expected:
        assert torch.equal(outputs[key], expected[key])


@pytest.mark.parametrize("name", NETWORKS)
def test_module_without_weights_takes_them_later(name):
    one = network(name)
    module = as_module(one.graph)
    assert all(p.is_meta for p in module.parameters())
    module.load_state_dict({k: torch.from_numpy(v) for k, v in one.params.items()}, assign=True)
    flax_module = as_nnx(one.graph, device="cpu")
    arrays = TpuBackend("cpu").load([one.graph], ArraySource(one.params))
    for key, array in arrays.items():
        promised = flax_module.weights[key].get_value()
        assert promised.shape == array.shape and promised.dtype == array.dtype
        assert promised.sharding == array.sharding
    nnx.update(flax_module.weights, arrays)
    for key in one.graph.outputs:
        assert torch.equal(module(**one.inputs)[key], torch_module(name)(**one.inputs)[key])
        assert np.array_equal(flax_module(**one.inputs)[key], jax_module(name)(**one.inputs)[key])


def test_copy_and_state_hold_the_checkpoints_tensors_only():
    """The graph's constants are no parameters, in a copy neither."""
    module = copy.deepcopy(torch_module("transformer"))
    assert any(isinstance(v, np.ndarray) for n in module.graph.nodes for v in n.args.values())
    assert module.state_dict().keys() == network("transformer").graph.parameters().keys()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(p.any() for p in torch_module("transformer").parameters())


def test_packed_graph_keeps_the_checkpoints_names_in_torch():
    one = network("transformer")
    packed = pack(one.graph)
    assert any("|" in name for name in packed.all_params())
    module = as_module(packed, ArraySource(one.params))
    assert module.state_dict().keys() == one.graph.parameters().keys()
    for key, value in torch_module("transformer")(**one.inputs).items():
        # Another order of summation.
        assert relative_l2(module(**one.inputs)[key].detach(), value.detach()) <= 1e-5


@pytest.mark.slow
def test_gradients_reach_chosen_parameters_and_inputs():
    """As a trainer of some of the weights, or of what makes the latents, asks for them."""
    one = network("transformer")
    chosen = "model.diffusion_model.transformer_blocks.*.attn1.to_q.weight"
    latent = torch.from_numpy(one.inputs["video_latent"]).requires_grad_()
    outputs = torch_module("transformer")(**one.inputs | {"video_latent": latent})
    ours = torch.autograd.grad(outputs["audio_velocity"].sum(), latent)[0].numpy()
    assert np.linalg.norm(ours) > 0

    definition, state = nnx.split(jax_module("transformer"))
    trained, rest = nnx.split_state(state, lambda path, _: path[-1] == chosen, ...)

    def value(trained, latent):
        module = nnx.merge(definition, trained, rest)
        return module(**one.inputs | {"video_latent": latent})["audio_velocity"].sum()

    given = jnp.asarray(one.inputs["video_latent"])
    gradients, theirs = jax.grad(value, argnums=(0, 1))(trained, given)
    assert relative_l2(theirs, ours) <= CLOSE
    ((path, gradient),) = nnx.to_flat_state(gradients)
    assert path == ("weights", chosen) and gradient.get_value().any()


@pytest.mark.parametrize("make", (as_module, partial(as_nnx, device="cpu")), ids=("torch", "jax"))
def test_bad_inputs_and_weights_are_refused_by_name(make):
    one = network("video-decoder")
    module = make(one.graph, ArraySource(one.params))
    said = r"inputs \['latent'\] are missing, \['latents'\] are unknown"
    with pytest.raises(ValueError, match=said):
        module(latents=one.inputs["latent"])
    with pytest.raises(ValueError, match=r"input latent has shape \(2, 2\), expected f32"):
        module(latent=np.ones((2, 2), np.float32))
    _, *left = one.params
    with refused("1 parameters have no tensor"):
        make(one.graph, ArraySource({name: one.params[name] for name in left}))


def test_torch_module_of_a_placed_graph_is_refused():
    with pytest.raises(GraphError, match=r"placed on tensor=2.*pass the graph before placement"):
        as_module(network("transformer").on(2))


# --- a mesh: in a process of its own, because JAX fixes the number of host devices at its start ---


def run_on_mesh(folder: Path) -> None:
    one, source = network("transformer"), ArraySource(network("transformer").params)
    # Not packed: the checkpoint's parameters.
    graph = place(one.graph, PROFILES["hopper"].rules["transformer"], MESH)
    module = as_nnx(graph, source, "cpu")
    local = Placement(PROFILES["hopper"], MESH).local(one.graph, "transformer")
    state, packed = (nnx.state(m.weights) for m in (module, as_nnx(local, source, "cpu")))

    def specs(state) -> dict[str, tuple]:
        return {k: tuple(v.get_value()) for k, v in nnx.get_partition_spec(state).items()}

    laid = {
        "specs": specs(state),
        "arrays": {k: tuple(v.get_value().sharding.spec) for k, v in state.items()},
        "devices": [len(v.get_value().sharding.device_set) for v in state.values()],
        "expected": {k: tuple(v) for k, v in weight_specs(graph).items()},
        "packed": specs(packed),
        "expected packed": {k: tuple(v) for k, v in weight_specs(local).items()},
    }
    (folder / "laid.json").write_text(json.dumps(laid))
    outputs, gradients = jax_results(module, "transformer")
    np.savez(folder / "outputs.npz", **outputs)
    np.savez(folder / "gradients.npz", **gradients)


@pytest.fixture(scope="module")
def on_mesh(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    on_devices(4, __file__, folder)
    return folder


@pytest.mark.slow
def test_sharding_metadata_is_the_graphs(on_mesh):
    laid = json.loads((on_mesh / "laid.json").read_text())
    assert laid["specs"] == laid["arrays"] == laid["expected"]
    assert set(laid["devices"]) == {4}
    # most weights of a block are split
    assert sum(spec != [] for spec in laid["specs"].values()) >= 40
    assert laid["packed"] == laid["expected packed"] and any("|" in name for name in laid["packed"])


@pytest.mark.slow
def test_module_and_gradients_on_a_mesh_equal_those_on_one_device(on_mesh):
    expected = jax_module("transformer")(**network("transformer").inputs)
    outputs, gradients = np.load(on_mesh / "outputs.npz"), np.load(on_mesh / "gradients.npz")
    # The contract's bound.
    assert max(relative_l2(outputs[key], expected[key]) for key in expected) <= 1e-5
    ours = torch_gradients("transformer")
    assert set(gradients) == ours.keys()
    assert max(relative_l2(gradients[key], ours[key]) for key in ours) <= CLOSE


if __name__ == "__main__":
    run_on_mesh(Path(sys.argv[1]))


@pytest.mark.parametrize("register", [
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
])  # fmt: skip
def test_a_hook_that_would_never_run_is_refused(register):
    """Submodules hold parameters, and nothing calls them; the whole network's hooks run."""
    one, seen = network("video-decoder"), []
    module = as_module(one.graph, ArraySource(one.params))
    home = next(iter(one.params)).rpartition(".")[0]
    place = module.get_submodule(home)
    with pytest.raises(GraphError, match=r"holds only parameters .* hook the whole network"):
        getattr(place, register)(lambda *given: seen.append(1))
    module.register_forward_hook(lambda *given: seen.append(1))
    module(**one.inputs)
    assert seen == [1]
