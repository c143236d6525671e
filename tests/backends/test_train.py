"""Gradients and optimiser steps: both backends alike, any mesh as one device, rematerialised as
kept. Run as a script, on virtual devices, it trains on a mesh."""

import sys
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from ltx2rt_cuda.collectives import with_transpose
from ltx2rt_cuda.train import Rematerialised

from ltx2rt.backend import MOMENTS, get_backend
from ltx2rt.graph.encodings import QUANTISED, decoded
from ltx2rt.graph.interpret import interpret
from ltx2rt.placement import stream
from ltx2rt.session.options import parse_mesh
from tests.parity import ArraySource, random_params, relative_l2
from tests.train_cases import OPTIMISER, WEIGHTS, parameters, placed, step, trained, trainer
from tests.virtual import forked, on_devices

CLOSE = 1e-5  # float32, another order of summation
KEPT = "tensor=2,sequence=2"  # the mesh that keeps its exchanges, too; the others are slow tests
MESHES = "tensor=2", "sequence=2", "data=2", "fsdp=2", "tensor=3", KEPT, "tensor=2,data=2"


def assert_close(found: dict, expected: dict, most: float = CLOSE) -> None:
    """Losses, norms, and first moments, a tenth of the gradients after one step."""
    first = f"{MOMENTS[0]} "
    names = [name for name in expected if " " not in name or name.startswith(first)]
    far = {name: relative_l2(found[name], expected[name]) for name in names}
    assert {name: d for name, d in far.items() if not d <= most} == {}


@cache
def once(kind: str, generation: str, remat: str = "block") -> dict[str, np.ndarray]:
    made = trainer(get_backend(kind, "cpu", {}), generation, {}, remat)
    return trained(made, step(generation)[1])


@pytest.mark.parametrize(
    "generation", ["2.3", *(pytest.param(g, marks=pytest.mark.slow) for g in ("2.0", "2.5"))]
)
def test_backends_agree(generation):
    assert_close(once("tpu", generation), once("cuda", generation))


def test_gradients_are_the_slopes_of_the_interpreter():
    """Along one direction, by central differences in float32: three digits."""
    params, (_, inputs), graph = parameters("2.3"), step("2.3"), placed("2.3", {})
    backend = get_backend("cuda", "cpu", {})
    made = backend.trainer(graph, backend.load([graph], ArraySource(params)), OPTIMISER)
    made.accumulate(inputs, WEIGHTS)
    scale = min(1, OPTIMISER.max_norm / np.sqrt(sum(made.update(0.0).values())))
    slopes = {name: x * 10 / scale for name, x in made.state()[MOMENTS[0]].items()}
    length = np.sqrt(sum(float((x**2).sum()) for x in slopes.values()))

    def loss(move: float) -> float:
        by = np.float32(move / length)
        moved = params | {name: params[name] + by * x for name, x in slopes.items()}
        losses = interpret(graph, moved, inputs)
        return sum(float(x.mean()) * WEIGHTS[name] for name, x in losses.items())

    found = (loss(0.01) - loss(-0.01)) / 0.02
    assert found == pytest.approx(length, rel=1e-3)


def test_a_rematerialised_step_is_a_kept_one():
    kept, anew = once("cuda", "2.3", "none"), once("cuda", "2.3")
    assert all(np.array_equal(kept[name], x) for name, x in anew.items())


def test_an_exchange_is_made_once_where_its_result_is_kept():
    made = []

    def exchange(x: torch.Tensor) -> list[torch.Tensor]:
        made.append(x)
        return [2 * x]

    for kept, times in ((True, 2), (False, 4)):  # two exchanges, each once or twice
        made.clear()
        x = torch.tensor([3.0, 5.0], requires_grad=True)

        def squares(x: torch.Tensor) -> torch.Tensor:
            (y,) = with_transpose(exchange, lambda g: [2 * g], x.sin())
            (z,) = with_transpose(exchange, lambda g: [2 * g], y * y)
            return z * z

        block = Rematerialised(squares, kept)
        block(x).sum().backward()
        assert len(made) == times
        slope = 256 * x.sin() ** 3 * x.cos()  # of (2 (2 sin x)^2)^2
        torch.testing.assert_close(x.grad, slope.detach())


def _numpy(field) -> np.ndarray:
    """torch gives no float8 to numpy."""
    if isinstance(field, torch.Tensor) and field.dtype == torch.float8_e4m3fn:
        return field.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return np.asarray(field)


@pytest.mark.parametrize("encoding", QUANTISED)
@pytest.mark.parametrize("kind", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_a_base_in_8_bits_trains_as_its_decoded_copy(kind, encoding):
    """All blocks are encoded; the backward pass decodes each matrix again."""
    graph, plain, backend = placed("2.3", {}, encoding), placed("2.3", {}), get_backend(kind, "cpu")
    kept = {
        name
        for parameter, layout in graph.all_layouts().items()
        if layout.encoding == encoding
        for layer in range(graph.all_params()[parameter][1])
        for name in layout.names(layer)
    }
    assert len(kept) > 20 and kept < parameters("2.3").keys()
    encode = import_module(f"ltx2rt_{kind}.ops.stored").encode
    ends = dict(parameters("2.3"))
    for name in kept:
        fields = encode(encoding, torch.tensor(ends[name]) if kind == "cuda" else ends[name])
        ends[name] = decoded(encoding, [_numpy(x) for x in fields])
    runs = []
    for each, source in ((graph, parameters("2.3")), (plain, ends)):
        weights = backend.load([each], ArraySource(source))
        made = backend.trainer(each, weights, OPTIMISER)
        runs.append(trained(made, step("2.3")[1]))
    assert_close(*runs)


@pytest.mark.parametrize("encoding", [pytest.param(None, marks=pytest.mark.long), "int8"])
def test_a_streamed_base_gives_the_same_bits(encoding, monkeypatch):
    """Five blocks take turns in two slots, to the last and back: of 2 x 10 uses of a block two at
    each turn are there already."""
    monkeypatch.setattr(stream, "LEAST_BYTES", 4000)  # no table
    graph, inputs = placed("2.3", {}, encoding, 5), step("2.3", blocks=5)[1]
    params = random_params(placed("2.3", {}, None, 5))
    backend = get_backend("cuda", "cpu")
    found = []
    sizes = stream.pieces(graph)
    assert len(sizes) == 5 and len(set(sizes.values())) == 1
    for number in (0, 3, 5):
        moved = stream.streamed(sizes, number) if number else frozenset()
        weights = backend.load([graph], ArraySource(params), streamed=moved)
        made = backend.trainer(graph, weights, OPTIMISER)
        state = trained(made, inputs, 2)
        if number == 5:
            assert weights.ring.copied_bytes == (5 + 3 + 3 + 3) * sizes[next(iter(sizes))]
        measured = made.losses(inputs)
        found.append({**state, **measured, **trained(made, inputs, 1)})
    resident, *others = found
    for other in others:
        assert [name for name, x in resident.items() if not np.array_equal(other[name], x)] == []


def on_mesh(kind: str, mesh: str, folder: Path) -> None:
    """Write losses, gradients' moments and parameters, on a rank or on JAX's devices."""
    backend = get_backend(kind, "cpu", parse_mesh(mesh))
    for remat in ("block", "exchanges") if mesh == KEPT else ("block",):
        made = trainer(backend, "2.3", backend.mesh, remat)
        found = trained(made, step("2.3")[1])
        if kind == "tpu" and mesh == KEPT:
            text = made.batches[0].lowered().as_text()
            found["all-reduces"] = np.array(text.count("all_reduce"))
        if backend.is_main:
            np.savez(folder / f"{remat}.npz", **found)


def main(kind: str, mesh: str, folder: Path) -> None:
    if kind == "tpu":
        return on_mesh(kind, mesh, folder)
    import ltx2rt_cuda.backend  # noqa: F401  once for all ranks

    parameters("2.3")
    forked(prod(parse_mesh(mesh).values()), lambda rank: on_mesh(kind, mesh, folder))


@pytest.mark.parametrize("kind", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", [
    pytest.param(mesh, marks=pytest.mark.long if mesh == KEPT else pytest.mark.slow) for mesh in MESHES
])  # fmt: skip
def test_a_mesh_is_one_device(kind, mesh, tmp_path):
    on_devices(4, __file__, kind, mesh, tmp_path)
    found = dict(np.load(tmp_path / "block.npz"))
    if mesh == KEPT:  # XLA fuses another program in another way
        kept = dict(np.load(tmp_path / "exchanges.npz"))
        assert kind == "cuda" or kept.pop("all-reduces") < found.pop("all-reduces")
        assert_close(kept, found, {"cuda": 0, "tpu": CLOSE}[kind])
    assert_close(found, once("cuda", "2.3"))


@pytest.mark.parametrize("kind", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_a_restored_trainer_goes_on_bit_for_bit(kind):
    backend, inputs = get_backend(kind, "cpu", {}), step("2.3")[1]
    straight = trained(trainer(backend, "2.3", {}), inputs, steps=3)
    first = trainer(backend, "2.3", {})
    trained(first, inputs)
    second = trainer(backend, "2.3", {})
    second.restore(first.state(), 1)
    resumed = trained(second, inputs, steps=2)
    state = [name for name in straight if " " in name]
    assert all(np.array_equal(resumed[name], straight[name]) for name in state)


@pytest.mark.slow
def test_optimisers_agree_over_fifty_steps():
    inputs, losses = step("2.3")[1], []
    for kind in ("cuda", "tpu"):
        made = trainer(get_backend(kind, "cpu", {}), "2.3", {})
        trained(made, inputs, 50)
        losses.append(made.accumulate(inputs, WEIGHTS))
    for name, loss in losses[0].items():
        assert loss.mean() < 0.8 * once("cuda", "2.3")[name].mean()
        started = once("cuda", "2.3")[name].max()
        # Rounding, through fifty steps of Adam.
        np.testing.assert_allclose(losses[1][name], loss, atol=1e-4 * started)


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]))
