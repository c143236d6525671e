"""A new part of a checkpoint, in one row; test_part_table.py runs it in its own process."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ltx2rt.graph import trace as trace_graph
from ltx2rt.models import catalog
from ltx2rt.weights import part_table
from ltx2rt.weights.files import write_arrays


@dataclass(frozen=True)
class ToyConfig:
    width: int


def toy(o, config, batch):
    x = o.input("x", B=batch, D=config.width)
    return {"y": x + o.param("toy.shift", D=config.width)}


catalog.CATALOG["toy"] = catalog.Network(
    "toy",
    ("toy",),
    lambda c, s, dtype: trace_graph("toy", toy, dtype, c.need("toy"), s[0]),
    lambda *_: (1,),
    "toy",
)
part_table.PARTS["toy"] = part_table.FILES["toy"] = part_table.Part(
    "toy", "toy network", "toy", lambda header: header.begins("toy."), prefix="toy.", every=False,
    help="toy network", read=lambda found: ToyConfig(found.keys.inner("toy").number("width")),
)  # fmt: skip


def main(folder: Path) -> None:
    from ltx2rt.session.open import open_session
    from ltx2rt.session.options import ModelOptions
    from ltx2rt.session.session import Call
    from ltx2rt.weights.inspect import inspect_path

    file = folder / "t.safetensors"
    shift = np.arange(4, dtype=np.float32)
    write_arrays(file, {"toy.shift": shift}, {"config": '{"toy": {"width": 4}}'})
    assert inspect_path(file)["kind"] == "toy network"
    found = inspect_path(folder)
    assert found["components"]["toy"]["tensors"] == 1 and not found["problems"], found
    for options in (
        ModelOptions("cuda", folder, device="cpu"),
        ModelOptions("cuda", folder, device="cpu", **{"toy": file}),
    ):
        session = open_session(options, "float32")
        assert session.config.part("toy") == ToyConfig(4)
        call = Call("toy", (2,))
        session.weights.audit(call, session.graph(call))
        y = session.run(call, {"x": np.ones((2, 4), np.float32)})["y"]
        np.testing.assert_array_equal(session.backend.to_host(y), np.stack([1 + shift] * 2))


main(Path(sys.argv[1]))
