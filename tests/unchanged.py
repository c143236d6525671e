"""Has a change of structure changed anything that is computed?

    python -m tests.unchanged record FILE     # on the commit before
    python -m tests.unchanged compare FILE    # on the commit after, on the same machine

Compares the graph of every network (both generations, one to four devices, every mesh axis) node
for node, names of values apart, and whole tiny runs of every pipeline on both backends bit for bit
(latents after every step, waveform). All but the loops of `a2v` goes through the command line, which
outlives any restructuring. The graphs' hashes hold on any machine, and `golden_graphs.json` keeps them for the
tests; the runs' digests hold on one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from ltx2rt import cli
from ltx2rt.graph.show import show
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.media.sound import write_wav
from ltx2rt.pipelines import make_request
from ltx2rt.run.plan import resolved_stages
from ltx2rt.session.open import open_session
from ltx2rt.session.options import NO_LORA, ModelOptions

GOLDEN = Path(__file__).with_name("golden_graphs.json")
PRESETS = ("tiny-2.0", "tiny-2.3", "tiny-2.5")  # whose graphs the golden file has
NETWORKS = (
    "text-encoder", "video-encoder", "video-decoder", "audio-encoder", "audio-decoder", "vocoder", "upsampler",
)  # fmt: skip
TRANSFORMERS = ("transformer", "guided-step", "denoise")
MESHES = ("", "tensor=2", "tensor=4")
MORE_MESHES = (
    *"sequence=2,tensor=2 guidance=2,tensor=2 fsdp=2,tensor=2".split(),
    *"guidance=2,sequence=2".split(),
)
PIPELINES = ("two-stage", "distilled", "one-stage")
CLIP = "--width 768 --height 512".split()  # of the golden graphs
SIZE = "--width 128 --height 64 --num-frames 17 --fps 48 --seed 5 --image-crf 0 --device cpu"


def graph_cases(presets: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Arguments of `ltx2rt graph`."""
    for preset in presets:
        for network in NETWORKS:
            for mesh in MESHES if network == "text-encoder" else MESHES[:1]:
                yield (network, "--preset", preset, *(("--mesh", mesh) if mesh else ()))
        for network in TRANSFORMERS:
            for mesh in (*MESHES, *MORE_MESHES):
                for branches in ("1", "4"):
                    if "guidance" not in mesh or branches != "1" or network != "transformer":
                        found = (network, "--preset", preset, "--branches", branches)
                        yield (*found, *(("--mesh", mesh) if mesh else ()))
        yield ("denoise", "--preset", preset, "--weights-dtype", "float8", "--mesh", "tensor=2")


def graph_hash(arguments: tuple[str, ...]) -> str:
    """Of the printed graph: the same for two graphs that differ in the names of their values alone.

    A constant counts as such however it is made: `full`, `affine` with scale 0, or `affine` or
    `expand` of a constant; what only constants read does not count.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(["graph", *arguments, *CLIP, "--format", "json"])
    assert status == 0, arguments
    return digest_of(out.getvalue())


def digest_of(text: str) -> str:
    """Of a graph's JSON."""
    graph = json.loads(text)
    numbers: dict[str, Any] = {}
    head = [[v["name"], v["axes"], v["shape"], v["dtype"]] for v in graph["inputs"]]
    body = [graph["name"], head, sorted(graph["params"].items()), _nodes(graph["nodes"], numbers)]
    body.append({name: numbers.get(v, v) for name, v in graph["outputs"].items()})
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def _nodes(nodes: list[dict[str, Any]], numbers: dict[str, Any]) -> list[Any]:
    readers: dict[str, list[int]] = {}
    gone = set()
    for i, node in enumerate(nodes):
        constant = _constant(node, [numbers.get(name, name) for name in node["inputs"]])
        if constant is not None:
            about = ["constant", constant, node["axes"], node["shape"], node["dtype"]]
            numbers[node["outputs"][0]] = about
            gone.add(i)
        for name in node["inputs"]:
            readers.setdefault(name, []).append(i)
    for i, node in reversed(list(enumerate(nodes))):
        read_by = [reader for name in node["outputs"] for reader in readers.get(name, ())]
        if read_by and gone.issuperset(read_by):
            gone.add(i)
    rows = []
    for i, node in enumerate(nodes):
        if i in gone:
            continue
        operands = [numbers.get(name, name) for name in node["inputs"]]
        row = {key: node[key] for key in ("op", "axes", "shape", "dtype", "collective")}
        row |= {"inputs": operands, "attrs": node.get("attrs", {})}
        if "body" in node:
            row |= {"count": node["count"], "body": _nodes(node["body"], {})}
            row |= {key: node[key] for key in ("first",) if key in node}
        rows.append(row)
        numbers |= {name: f"{len(rows)}.{i}" for i, name in enumerate(node["outputs"])}
    return rows


def _constant(node: dict[str, Any], operands: list[Any]) -> float | None:
    attrs = node.get("attrs", {})
    if node["op"] == "full":
        return float(attrs["value"])
    if node["op"] == "affine":
        scale, offset = attrs.get("scale", 1.0), attrs.get("offset", 0.0)
        if scale == 0:
            return float(offset)
        if isinstance(operands[0], list):
            return operands[0][1] * scale + offset
    if node["op"] == "expand" and isinstance(operands[0], list):
        return operands[0][1]
    return None


def graph_hashes(presets: tuple[str, ...]) -> dict[str, str]:
    found = {" ".join(case): graph_hash(case) for case in graph_cases(presets)}
    return found | {name: x for one in presets for name, x in unguided_hashes(one).items()}


def unguided_hashes(preset: str) -> dict[str, str]:
    """Of the loops of stages 1 and 2 of `a2v` on distilled weights, at `CLIP`; on one device, where
    both backends lower the same graph."""
    with tempfile.TemporaryDirectory() as name:
        folder, sound = Path(name) / preset, Path(name) / "song.wav"
        make_checkpoint(preset, "official", folder, empty=True)
        write_wav(sound, np.full((2, 48000), 0.1, np.float32), 48000)
        how = {"distilled_lora": NO_LORA, "assume": "distilled"}
        session = open_session(ModelOptions("cuda", folder, device="cpu", **how))
        clip = {"width": 768, "height": 512, "num_frames": 17, "seed": 0}
        request = make_request("a2v", prompt="a fox", audio_path=sound, **clip)
        stages = resolved_stages(session.checkpoint, session.options, request)
        calls = [call for stage in stages for call in stage.needs(session.config) if call.steps]
        graphs = [digest_of(show(session.graph(call), "json")) for call in calls]
        session.close()
    return {f"a2v stage{i} --preset {preset}": x for i, x in enumerate(graphs, 1)}


def run_digests() -> dict[str, str]:
    """Of every tensor that whole runs leave behind, each run in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _ltx2rt(*"weights make --preset tiny-2.3 --layout official".split(), folder / "tiny-2.3")
        _ltx2rt(*"weights make --preset tiny-2.0 --layout diffusers".split(), folder / "tiny-2.0")
        Image.linear_gradient("L").resize((200, 100)).convert("RGB").save(folder / "image.png")
        for backend in ("cuda", "tpu"):
            for model in ("tiny-2.3", "tiny-2.0"):
                for pipeline in PIPELINES:
                    lora = next((folder / model).rglob("*lora*.safetensors"))
                    words = f"generate --backend {backend} --pipeline {pipeline} {SIZE}".split()
                    words += ["--prompt", "a red fox", "--model", folder / model]
                    words += (
                        ["--distilled-lora", lora] if pipeline == "distilled" else ["--steps", 3]
                    )
                    if model == "tiny-2.3":
                        words += ["--image", f"{folder}/image.png:0", f"{folder}/image.png:8:0.7"]
                    latents = folder / "latents.safetensors"
                    _ltx2rt(*words, "--output", folder / "x.mp4", "--latents-out", latents)
                    for tensor, array in sorted(load_file(latents).items()):
                        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
                        found[f"{backend} {model} {pipeline} {tensor}"] = digest
    return found


def _ltx2rt(*arguments: object) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "ltx2rt", *map(str, arguments)]
    subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def main(argv: list[str]) -> int:
    command, path = argv[0], Path(argv[1]) if len(argv) > 1 else None
    if command == "golden":
        GOLDEN.write_text(json.dumps(graph_hashes(PRESETS), indent=1) + "\n")
        return 0
    assert path and command in ("record", "compare"), "record FILE, compare FILE or golden"
    runs = {} if "--graphs" in argv else run_digests()
    found = graph_hashes(("ltx-2.0", "ltx-2.3", "tiny-2.0", "tiny-2.3")) | runs
    if command == "record":
        path.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before, of_runs = json.loads(path.read_text()), ("cuda ", "tpu ")
    if "--graphs" in argv:
        before = {name: before[name] for name in before if not name.startswith(of_runs)}
    different = [name for name in before if found.get(name) != before[name]]
    for name in different:
        print(f"{'differs' if name in found else 'absent'}: {name}")
    print(f"{len(before) - len(different)} of {len(before)} are equal")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
