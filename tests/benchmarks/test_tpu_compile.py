"""Every cell of the table can be planned; the table keeps what it does not compile again."""

import json
import re
from collections import Counter
from fractions import Fraction
from importlib.util import find_spec

import pytest

from benchmarks import tpu_compile
from benchmarks.tpu_compile import CELLS, MESHES, Cell, compile_cell, figures
from ltx2rt import cli
from ltx2rt.commands import compile
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.models.catalog import network
from ltx2rt.models.geometry import Geometry
from ltx2rt.pipelines import make_request
from ltx2rt.run.estimate import Devices, estimate
from ltx2rt.session.options import NO_LORA, ModelOptions
from ltx2rt.weights.presets import preset


def marks(number: int, cell: Cell) -> list[pytest.MarkDecorator]:
    """Every sixth cell of v6e:2x4 is planned in every run of the tests."""
    if cell.topology != "v6e:2x4":
        return [pytest.mark.slow]
    return [pytest.mark.long] * (number % 6 > 0)


@pytest.mark.parametrize("cell", [
    pytest.param(c, marks=marks(i, c), id=f"{c.name}-{c.topology}") for i, c in enumerate(CELLS)
])  # fmt: skip
def test_a_cell_is_one_program(cell, monkeypatch):
    jobs, where = [], ["--topology", cell.topology, "--mesh", MESHES[cell.topology]]
    monkeypatch.setattr(compile, "compile_job", lambda job: jobs.append(job) or ())
    assert cli.main(["compile", *where, *cell.flags.split()]) == 0
    ((program,),) = (job.cells for job in jobs)
    if cell.name in ("step-2.0", "step-2.3"):
        assert program.graph.inputs["video_latent"].type.sizes["tokens"] == 6144
    if cell.name.startswith("stage2-large"):
        assert program.graph.inputs["video_latent"].type.sizes["tokens"] == 24576
    if cell.name.startswith("decode-whole"):
        assert program.graph.outputs["frames"].type.shape == (1, 3, 121, 512, 768)


@pytest.mark.parametrize(
    "name", "video-encoder video-decoder upsampler audio-decoder vocoder".split()
)
def test_what_2_5_shares_with_2_3_is_compiled_once(name):
    graphs = []
    for generation in ("ltx-2.3", "ltx-2.5"):
        config = preset(generation).config
        sizes = network(name).sizes(config, Geometry.of(config, 768, 512, 121, Fraction(24)), 1)
        graphs.append(str(network(name).trace(config, sizes, "bfloat16")))
    assert graphs[0] == graphs[1]


@pytest.mark.long
def test_a_clip_is_each_of_its_parts_as_often_as_a_run_calls_it(tmp_path, monkeypatch, capsys):
    """Real-time adds them up by rows that are there."""
    make_checkpoint("ltx-2.5", "official", tmp_path, empty=True)
    options = ModelOptions(
        "tpu", tmp_path, dtype="bfloat16", distilled_lora=NO_LORA,
        video_decoder="diffusion", mesh={"sequence": 8},
    )  # fmt: skip
    clip = {"width": 1920, "height": 1088, "num_frames": 121}
    found = estimate(options, make_request("distilled", prompt="a", **clip), Devices("v7x-8"))
    needed = Counter()
    for stage in found.plan.stages:
        for call in stage.needs(found.session.config):
            number = f" {stage.name[5:]}" if call.steps else ""
            needed[call.network + number] += call.steps or 1
    for shared in ("diffusion-slabs", "vocoder"):
        needed[shared] = -(-needed[shared] // 8)  # on each device at once
    cells = {cell.name: cell.flags for cell in CELLS}
    counted = {}
    for name, calls in tpu_compile.REAL_TIME.items():
        flags = dict(re.findall(r"--(\S+) (\S+)", cells[name]))
        step = flags["component"] == "denoise-step"
        counted[f"guided-step {flags['stage']}" if step else flags["component"]] = calls
        assert flags["width"] == "1920"
    assert counted.pop("denoise-before") == 1 and counted == needed

    rows = [
        {"cell": name, "topology": where, "times_s": {"products": 0.1}, "commit": "c"}
        for name in tpu_compile.REAL_TIME for where in MESHES
    ]  # fmt: skip
    (output := tmp_path / "c.json").write_text(json.dumps({"rows": rows}))
    words = ["--cells", "real-time", "--times", "--topology", "tpu7x:2x2x1"]
    row = tpu_compile.main([*words, "--output", str(output)])["rows"][-1]
    assert row["time_s"] == pytest.approx(1.9) and 1.5 < row["plan_s"] < 2.5
    assert "text-hd-2.5" in capsys.readouterr().out


needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("cell", [
    pytest.param(c, id=f"{c.name}-{c.topology}") for c in CELLS if c.target.executed is not None
])  # fmt: skip
def test_a_full_size_program_reaches_its_targets(cell):
    """Those of counts and bytes: how long the compiler takes depends on the machine."""
    row = compile_cell(cell)
    found = figures(row)
    assert row["fits"] and found.executed <= cell.target.executed
    assert found.received_bytes <= cell.target.received_bytes
    assert cell.target.memory_bytes is None or found.memory_bytes <= cell.target.memory_bytes


@needs_libtpu
@pytest.mark.slow
def test_the_table_is_printed_and_recorded(tmp_path, capsys, monkeypatch):
    flags = "--preset tiny-2.3 --width 64 --height 64 --num-frames 9"
    flags += " --component denoise-step --stage 2"
    cell = Cell("tiny", "v6e:2x2", flags, tpu_compile.STEP)
    monkeypatch.setattr(tpu_compile, "MESHES", {"v6e:2x2": "tensor=2,sequence=2"})
    monkeypatch.setattr(tpu_compile, "CELLS", (cell,))
    output = tmp_path / "c.json"
    rows = [{"cell": "tiny", "topology": where} for where in ("other", "v6e:2x2")]
    output.write_text(json.dumps({"rows": rows}))
    facts = tpu_compile.main(["--output", str(output)])
    kept, row = facts["rows"]
    assert kept == {"cell": "tiny", "topology": "other"}
    assert json.loads(output.read_text())["rows"] == facts["rows"]
    assert row["collectives"]["all-to-all"] > 0 and row["versions"]["libtpu"]
    assert "--json" in row["command"]
    out = capsys.readouterr().out
    assert "compiled, not run" in out and "target, at most" in out
