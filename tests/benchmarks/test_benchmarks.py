"""The benchmarks run, at toy sizes, and record what they say they do. No time is asserted here."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from ltx2rt_cuda.ops import WITH_KERNEL

from benchmarks import cold_start, collectives, end_to_end, kernels, load, measure, peer, step
from benchmarks.random_weights import LARGE, RandomBackend, empty_checkpoint, random_session
from ltx2rt.backend import get_backend
from ltx2rt.graph import trace
from ltx2rt.models import video_vae
from ltx2rt.passes.pack import pack
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.run.plan import make_plan
from ltx2rt.session.stopwatch import Stopwatch
from tests.parity import ArraySource, random_params

ON_GPU = Path(end_to_end.__file__).with_name("on_gpu.sh")
TINY_SIZE = "--preset tiny-2.3 --device cpu --width 64 --height 64 --num-frames 9".split()
TINY_CLIP = [*TINY_SIZE, *"--steps 1 --repeats 2".split()]
FLOAT8 = ["--weights-dtype", "float8"]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="it is for Linux machines")
TINY_REQUEST = TwoStage("a fox", width=64, height=64, num_frames=9, steps=1, seed=0)


QUOTED = [  # document, how the line begins, result, where in it the figure is, digits
    ("benchmarks", "stage-1 step, four", "h200-end-to-end", "seconds.stage1 step.mean", 3),
    ("benchmarks", "stage-2 step |", "h200-end-to-end", "seconds.stage2 step.mean", 3),
    ("benchmarks", "the same / diff", "h200-step", "stages.stage1.ratio_to_diffusers.cuda.median", 2),
    ("benchmarks", "the same / diff", "h200-step", "stages.stage2.ratio_to_diffusers.cuda.median", 2),
    ("benchmarks", "whole two-stage", "h200-end-to-end", "seconds.request.mean", 2),
    ("benchmarks", "decode |", "h200-end-to-end", "seconds.decode.mean", 2),
    ("benchmarks", "one H200, step of stage 1 / 2, mea", "h200-step", "stages.stage1.seconds.cuda.median", 3),
    ("benchmarks", "one H200, step of stage 1 / 2, mea", "h200-step", "stages.stage2.seconds.cuda.median", 3),
    ("gpus", "prompt to the last", "h200-end-to-end", "seconds.request.mean", 2),
    ("gpus", "text, both", "h200-end-to-end", "seconds.text.mean", 2),
    ("gpus", "guided step of stage 1", "h200-end-to-end", "seconds.stage1 step.mean", 3),
    ("gpus", "step of stage 2", "h200-end-to-end", "seconds.stage2 step.mean", 3),
    ("gpus", "step of stage 2", "h200-step", "stages.stage2.seconds.cuda.median", 3),
    ("gpus", "step of stage 2", "h200-step-float8", "stages.stage2.seconds.cuda.median", 3),
    ("gpus", "the same of diff", "h200-step", "stages.stage1.seconds.diffusers.median", 3),
    ("gpus", "the same of diff", "h200-step", "stages.stage2.seconds.diffusers.median", 3),
    ("gpus", "decoder; upsampler; sound", "h200-end-to-end", "seconds.decode.mean", 2),
]  # fmt: skip


@pytest.mark.parametrize(("document", "line", "result", "key", "digits"), QUOTED)
def test_documents_quote_the_recorded_figures(document, line, result, key, digits):
    root = ON_GPU.parents[1]
    results = json.loads((root / "benchmarks" / "results" / f"{result}.json").read_text())
    figure = reduce(getitem, key.split("."), results)
    text = (root / "docs" / f"{document}.md").read_text().splitlines()
    (said,) = [row for row in text if row.startswith(f"| {line}")]
    assert f"{figure:.{digits}f}" in said


@pytest.mark.long
def test_step_is_compared_with_diffusers_on_the_same_weights(tmp_path, capsys):
    flags = "--tiny --rounds 2 --backends cuda --output".split()
    facts = step.main([*flags, str(tmp_path / "step.json")])
    assert facts["relative_l2"]["cuda"] < 1e-5
    written = json.loads((tmp_path / "step.json").read_text())
    assert {"date", "device", "versions", "commit", "floor_s", "shape", "dtype"} <= written.keys()
    assert set(written["seconds"]) == {"diffusers", "cuda"}
    assert written["ratio_to_diffusers"]["cuda"].keys() == {"median", "low", "high", "min", "max"}
    assert "x diffusers" in capsys.readouterr().out


def test_implementations_that_disagree_are_not_compared(monkeypatch):
    monkeypatch.setattr(step, "SAME", 0.0)
    with pytest.raises(RuntimeError, match="away from diffusers"):
        step.measure(step.TINY, ("cuda",), "cpu", rounds=1, threads=1)


@pytest.mark.slow
def test_guided_steps_are_raced_against_diffusers_loop(tmp_path, capsys):
    """All four branches, guidance and Euler; then the one branch of stage 2: the same latents after
    three steps."""
    flags = [*"--guided --tiny --rounds 1 --threads 1 --output".split(), str(tmp_path / "g.json")]
    facts = step.main(flags)
    branches = {name: len(stage["branches"]) for name, stage in facts["stages"].items()}
    assert branches == {"stage1": 4, "stage2": 1}
    for stage in facts["stages"].values():
        assert stage["relative_l2"].keys() == {"cuda", "tpu"} and stage["steps"] == 3
        assert max(stage["relative_l2"].values()) <= 1e-4
        assert stage["floor_s"] == pytest.approx(stage["flops"] / facts["matmul_flops_per_s"])
        share = stage["floor_s"] / stage["seconds"]["cuda"].median
        assert stage["share_of_matmul"]["cuda"] == pytest.approx(share)
        assert stage["launches"]["cuda"] > 0
        assert {"GEMM", "attention"} <= stage["kernels"]["diffusers"].keys()
    written = json.loads((tmp_path / "g.json").read_text())
    named = "benchmark date commit device preset clip dtype compile stages"
    assert {*named.split()} <= written.keys()
    assert "x diffusers" in capsys.readouterr().out


@pytest.mark.slow
def test_float8_weights_race_against_the_tensors_that_they_are_quantised_from():
    flags = "--guided --tiny --rounds 1 --threads 1 --steps 1 --backends cuda without-sums".split()
    flags += ["--dtype", "bfloat16"]
    facts, plain = step.main([*flags, "--weights-dtype", "float8"]), step.main(flags)
    assert (facts["dtype"], facts["weights_dtype"]) == ("bfloat16", "float8")
    for name, stage in facts["stages"].items():
        distance, without = (x["stages"][name]["relative_l2"]["cuda"] for x in (facts, plain))
        assert distance > 1.5 * without  # ours lost bits, theirs did not
        # the same weights, on a CPU the same program
        assert stage["relative_l2"]["without-sums"] == distance
        # The first and last block stand alone, and branches that part inside a block share the rest
        # of it only there.
        assert 0.95 <= stage["flops"] / plain["stages"][name]["flops"] <= 1


def test_both_hold_the_same_tensors():
    """Packed weights are cut apart where the checkpoint's tensors end."""
    graph = pack(trace("net", two_linears, "float32"))
    backend = get_backend("cuda", "cpu")
    weights = backend.load([graph], ArraySource(random_params(graph)))
    (packed,) = (x for name, x in weights.items() if name.endswith("weight"))
    found = dict(peer.checkpoint_tensors(graph, weights))
    assert found.keys() == graph.parameters().keys()
    assert found["b.weight"].data_ptr() == packed[3:].data_ptr()
    assert found["b.weight"].shape == (5, 4)


def two_linears(o):
    x = o.input("x", tokens=2, D=4)
    return {name: o.linear(x, name, {"out": n}) for name, n in (("a", 3), ("b", 5))}


@pytest.mark.long
@on_linux
def test_load_is_measured_in_fresh_processes(tmp_path):
    load.write_checkpoint(tmp_path, load.TINY)
    found = load.measure(tmp_path, load.TINY, "float32", ("plain", "cuda+lora"), rounds=1)
    assert found["seconds"].keys() == found["peak_per_weights"].keys() == {"plain", "cuda+lora"}
    assert found["ratio_to_plain"]["cuda+lora"].median > 0
    assert found["peak_per_weights"]["plain"].median > 0.5  # the weights themselves


@pytest.mark.long
@on_linux
def test_a_cold_start_is_timed_by_phase_in_a_fresh_process(tmp_path, capsys):
    flags = "--device cpu --width 128 --height 128 --num-frames 9 --rounds 1".split()
    facts = cold_start.main([*flags, *FLOAT8, "--output", str(tmp_path / "c.json")])
    assert facts["dtype"] == "bfloat16"
    # a CPU records nothing
    assert facts["seconds"]["lower"].median > 0 == facts["seconds"]["record"].median
    assert tuple(facts["seconds"]) == cold_start.PHASES
    whole = facts["first_step_after_s"].median
    phases = sum(spread.median for spread in facts["seconds"].values())
    assert phases <= whole * 1.01  # they follow each other; two clocks measure them
    files = facts["loaded_bytes"] / facts["plain_bytes_per_s"].median
    ratio = facts["seconds"]["load"].median / files
    assert facts["load_ratio_to_plain"].median == pytest.approx(ratio)
    assert json.loads((tmp_path / "c.json").read_text())["cache"] == "cold"
    assert "x a plain read" in capsys.readouterr().out


def test_a_recording_is_timed_to_the_end_of_its_context():
    seconds, seen = [], []

    @contextmanager
    def recording(graph):
        yield seen.append((graph, len(seconds)))
        seen.append(len(seconds))

    with cold_start.timed(recording, seconds)("graph"):
        seen.append("body")
    assert seen == [("graph", 0), "body", 0] and len(seconds) == 1


@pytest.mark.long
def test_a_cold_start_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no checkpoint"):
        cold_start.main(["--device", "cpu", "--model", str(tmp_path), "--rounds", "1"])


def test_ratios_are_taken_round_by_round():
    # a machine that slowed down changes no ratio
    seconds = {"ours": [1.0, 30.0], "theirs": [2.0, 60.0]}
    assert measure.ratios(seconds, "ours", "theirs") == measure.Spread.of([0.5, 0.5])


def test_collectives_are_counted_against_the_floor(tmp_path, capsys):
    facts = collectives.main(["--output", str(tmp_path / "c.json")])
    for found in facts["stages"].values():
        assert {name: found[name] for name in collectives.FLOOR} == collectives.FLOOR
        assert found["count"] == {"all_reduce": 48 * 7}
        received = 1.5 * found["bytes"]["all_reduce"]
        assert found["received_bytes"]["all_reduce"] == pytest.approx(received)
    assert json.loads((tmp_path / "c.json").read_text())["stages"] == facts["stages"]
    assert "all-gathers" in capsys.readouterr().out


def test_every_op_with_a_kernel_is_raced_against_its_floor(tmp_path, capsys):
    """On a CPU plain ops run in place of the kernels, which the result says."""
    written = tmp_path / "k.json"
    flags = "--rounds 1 --contestants kernel eager --stored int8 --output".split()
    facts = kernels.main([*TINY_SIZE, *FLOAT8, *flags, str(written)])
    # on several devices; in LTX-2.5
    elsewhere = {*"sum_squares qk_scale_rope qk_scale neighbourhood_attention".split()}
    assert {case["op"] for case in facts["cases"]} == set(WITH_KERNEL) - elsewhere
    why_not = {case["why_not"] for case in facts["cases"]}
    assert why_not == {"the operands are on cpu, the kernel runs on cuda"}
    for row in facts["attention"]:  # sums of bfloat16 products, rounded once
        assert row["distance"].keys() == {"auto", "torch"}
        assert all(0 < x < 4e-3 for x in row["distance"].values())
        assert row["why_not"].keys() == {"flash", "cudnn", "sage"}
    parts = ("text", "stage1", "stage2", "decode", "audio")
    assert facts["total_us"].keys() == {f"{part}, int8" for part in parts}
    decode = "decode, int8"
    floor = sum(c["floor_us"] * c["calls"][decode] for c in facts["cases"] if decode in c["calls"])
    assert facts["total_us"][decode]["floor"] == pytest.approx(floor)
    first = json.loads(written.read_text())["cases"][0]
    floor = first["minimum_bytes"] / facts["copy_bytes_per_s"] * 1e6
    assert first["floor_us"] == pytest.approx(floor)
    assert first["us"]["eager"].keys() == {"median", "low", "high", "min", "max"}
    assert "plain ops run in place of kernels" in capsys.readouterr().out


@pytest.mark.parametrize("kind,weights", [("Q8_0", 34), ("nvfp4", 18)])
def test_matrices_are_raced_as_files_hold_them(kind, weights):
    graphs = kernels.request_graphs("tiny-2.3", 64, 64, 9, 1, parts=("stage2",), stored=kind)
    found = kernels.cases(graphs, ["unpack"])
    moved = {case.minimum_bytes for case in found if case.node.outputs[0].type.shape == (128, 128)}
    rows = 4 * 128 if kind == "nvfp4" else 0  # each has a float32, too
    assert moved == {128 * 128 // 32 * weights + rows + 2 * 128 * 128}


def test_operands_are_raced_as_they_lie_in_the_runtime():
    """q and k as slices of packed rows, the keys' heads beside them; the decoder's videos channels
    last."""
    parts = ("stage2", "decode")
    graphs = kernels.request_graphs("tiny-2.3", 64, 64, 9, levels=1, parts=parts)
    found = kernels.cases(graphs, WITH_KERNEL)
    for case in found:
        drawn = kernels.operands(case, torch.device("cpu"), torch.Generator())
        assert [tuple(x.shape) for x in drawn] == [v.type.shape for v in case.node.inputs]
        if case.node.op in ("qk_norm_rope", "qk_norm"):
            q = drawn[0]
            assert q.stride(1) > q.shape[2] * q.shape[3] and q.stride(2) == q.shape[3], case
        if case.node.op == "pixel_norm_silu" and drawn[0].ndim == 5:
            assert drawn[0].is_contiguous(memory_format=torch.channels_last_3d)


def test_a_race_that_is_cut_off_leaves_the_cases_it_had(tmp_path, monkeypatch):
    written, contest, started = tmp_path / "k.json", kernels.contest, []

    def second_fails(*arguments):
        started.append(arguments)
        if len(started) == 2:
            raise KeyboardInterrupt
        return contest(*arguments)

    monkeypatch.setattr(kernels, "contest", second_fails)
    flags = "--rounds 1 --contestants kernel --ops pixel_norm_silu --output".split()
    flags = [*TINY_SIZE, *flags, str(written)]
    with pytest.raises(KeyboardInterrupt):
        kernels.main(flags)
    assert len(json.loads(written.read_text())["cases"]) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of inductor
@pytest.mark.slow
def test_plain_ops_are_raced_compiled_too():
    facts = kernels.main([*TINY_SIZE, "--rounds", "1", "--ops", "pixel_norm_silu"])
    assert all(case["us"].keys() == set(kernels.CONTESTANTS) for case in facts["cases"])


def test_bytes_of_a_kernel_are_those_of_its_operands_and_results():
    """Of an image's two timesteps: some rows per sample, some per token."""
    how = {"levels": 2, "weights_dtype": "float8", "parts": ("stage1", "decode")}
    graphs = kernels.request_graphs("tiny-2.3", 64, 64, 9, **how)
    found = kernels.cases(graphs, WITH_KERNEL)
    for case in found:
        # v instead of y
        read = case.node.inputs[:3] if case.node.op.startswith("head_gate") else case.node.inputs
        expected = sum(v.type.nbytes for v in (*read, *case.node.outputs))
        assert case.minimum_bytes == expected, case
    gates = [c for c in found if c.node.op in ("head_gate", "head_gate_rows")]
    # Six attentions in each of three blocks; in one of them branches part between two gates and
    # what they gate.
    assert sum(c.calls.get("stage1", 0) for c in gates) == 6 * 3 - 2


@pytest.mark.slow
def test_a_whole_request_is_timed_by_phase(tmp_path, capsys):
    kept, written = tmp_path / "kept.npz", tmp_path / "e.json"
    files = ["--save", str(kept), "--output", str(written)]
    facts = end_to_end.main([*TINY_CLIP, *files, "--profile-kernels"])
    assert {"request", "stage1 step", "stage2 step", "decode"} <= facts["seconds"].keys()
    assert all(len(row["runs"]) == 2 for row in facts["seconds"].values())
    assert facts["steps"] == [1, 3]
    assert facts["repeats"] == [{"psnr_db": 200.0, "ssim": pytest.approx(1), "audio_corr": 1.0}]
    assert json.loads(written.read_text())["kernels"] == facts["kernels"]
    groups = facts["kernels"]["stage1"]
    assert {"GEMM", "attention", "pointwise"} <= groups.keys()
    # the last run encodes its prompts, too
    assert {"GEMM", "attention"} <= facts["kernels"]["text"].keys()
    assert sum(row["share"] for row in groups.values()) == pytest.approx(1)
    frames = np.load(kept)["frames"]
    # a picture, not a constant and not NaN
    assert frames.shape == (9, 64, 64, 3) and frames.std() > 10
    assert "per step" in capsys.readouterr().out


@pytest.mark.slow
def test_drawing_an_offloaded_encoder_is_no_kernel_of_its_stage():
    flags = [*TINY_CLIP, "--repeats", "1", "--pipeline", "one-stage", "--profile-kernels"]
    resident = end_to_end.main(flags)["kernels"]
    offloaded = end_to_end.main([*flags, "--max-memory", "0.04"])["kernels"]
    assert offloaded["text"]["pointwise"]["launches"] == resident["text"]["pointwise"]["launches"]


@pytest.mark.slow
def test_diffusers_makes_the_same_clip_on_the_same_tensors(tmp_path, capsys):
    """Both prompts, both stages, upsampler, picture and sound; from ours as far as float32 rounding
    goes."""
    written = tmp_path / "p.json"
    facts = end_to_end.main([*TINY_CLIP, "--peer", "diffusers", "--output", str(written)])
    assert facts["weights_dtype"] == "float32"
    (found,) = facts["from diffusers"]
    assert found["psnr_db"] > 70 and found["audio_corr"] > 1 - 1e-6
    seconds = json.loads(written.read_text())["peer"]["seconds"]
    assert seconds["cuda"]["max"] == max(facts["seconds"]["request"]["runs"])
    assert "x diffusers" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["two-stage", "distilled", "one-stage", "a2v"])
def test_any_pipeline_is_asked_for_beside_a_peer(name):
    """Of two stages the second gives the sound, as in diffusers."""
    args = argparse.Namespace(pipeline=name, peer="diffusers", num_frames=9)
    assert getattr(end_to_end.asked(args), "audio_from", "stage2") == (
        "stage1" if name == "one-stage" else "stage2"
    )


def test_the_peer_holds_no_copy_of_our_weights():
    with random_session("tiny-2.0", device="cpu") as session:
        held = peer.Peer(session, make_plan(session, TINY_REQUEST))
    sets = [kept.weights for kept in session.weights.held.values()]
    ours = {x.untyped_storage().data_ptr() for weights in sets for x in weights.values()}
    pipe = held.pipe
    for part in (pipe.transformer, pipe.text_encoder, pipe.connectors, pipe.vae):
        assert {x.untyped_storage().data_ptr() for x in part.parameters()} <= ours


@pytest.mark.parametrize("kernel,group", [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", "all-reduce"),
    ("ncclDevKernel_AllGather_RING_LL(...)", "all-gather"),
    ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "GEMM"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "GEMM"),
    ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(...)", "attention"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "pointwise"),
    ("triton_poi_fused_add_mul_0", "pointwise"),
    ("Memcpy DtoH (Device -> Pinned)", "transfer"),
])  # fmt: skip
def test_kernels_are_grouped_by_name(kernel, group):
    assert end_to_end.group_of(kernel) == group


def test_two_clips_apart_are_not_called_equal():
    frames = np.zeros((2, 16, 16, 3), np.uint8)
    sound = np.random.default_rng(0).standard_normal((2, 100)).astype(np.float32)
    a, b = end_to_end.Clip(frames, sound), end_to_end.Clip(frames + 1, -sound)
    found = end_to_end.distance(a, b)
    assert found["psnr_db"] == pytest.approx(20 * np.log10(255)) and found["ssim"] < 1
    assert found["audio_corr"] == pytest.approx(-1)
    with pytest.raises(ValueError, match="zip"):
        end_to_end.distance(a, end_to_end.Clip(frames[:1], sound))


@pytest.mark.long
@on_linux
def test_on_gpu_runs_one_part_and_leaves_its_json(tmp_path):
    done = on_gpu(tmp_path, "stages", *TINY_CLIP, GPU_GB="80")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "stages.json").read_text())
    assert found["memory"] == "resident"  # --memory auto has room for a tiny model
    assert found["commit"] == "abc1234" and found["preset"] == "tiny-2.3"
    assert "refinement" in done.stdout
    unknown = on_gpu(tmp_path, "nonsense")
    assert unknown.returncode == 2 and "known: env tests" in unknown.stderr


@on_linux
@pytest.mark.slow
def test_on_gpu_all_makes_every_call_and_each_goes_on_after_a_part_that_fails(tmp_path):
    shrunk = "race --device cpu --shrink 64 --rounds 1"
    parts = f"bad 30 nonsense\nrace 60 {shrunk}\nslow 20 {shrunk} --rounds 100000"
    done = on_gpu(tmp_path, "all", PARTS=parts)
    assert done.returncode == 1 and "calls with a part that failed: 1 2 3 4 5 6\n" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"call-{n}.tgz" for n in range(1, 7)}
    assert "== bad: status 2" in done.stdout and "== race: status 0" in done.stdout
    assert "== slow: status 124" in done.stdout
    with tarfile.open(tmp_path / "call-2.tgz") as archive:
        names = {name for name in archive.getnames() if name.endswith((".json", "log", "summary"))}
        race = json.load(archive.extractfile("./race/race.json"))
    left = {
        "./summary",
        "./bad/log",
        *(f"./{n}/{f}" for n in ("race", "slow") for f in ("log", "race.json")),
    }
    assert names == left  # also the rows of a race that was cut off
    raced = {row["name"].split()[0] for row in race["rows"]}
    assert raced >= {"flash2", "efficient", "math", "bfloat16", "float8"}
    assert any("error" not in row for row in race["rows"])
    assert on_gpu(tmp_path, "all", PARTS=f"race 60 {shrunk}").returncode == 0
    late = on_gpu(tmp_path, "all", PARTS="race 60 race", CALL_S="20")
    assert late.returncode == 0 and late.stdout.count("no time left") == 6


TINY_PARTS = {  # flags that shrink a part of calls 1 to 4
    "plan": "",
    "kernels-of": "--preset tiny-2.5 --device cpu --width 64 --height 64 --num-frames 9 --rounds 1",
    "step": "--device cpu --guided --tiny --rounds 1 --steps 1 --backends cuda",
    "train": "--preset tiny-2.3 --device cpu --sizes 64x64x9 --rank 4 --rounds 1 --shrink 64",
    "serve": "--device cpu --width 64 --height 64 --num-frames 9 --others 64x64x17 --steps 1 --jobs 2",
    "unpack": "--preset tiny-2.3 --device cpu --width 64 --height 64 --num-frames 9 --rounds 1",
    "race": "--device cpu --shrink 64 --rounds 1 --sustain 0.01",
}
METER = """#!/bin/sh
while :; do echo "2026/01/01 00:00:00.000, 600.00, 1500, 60, 70000"; sleep 0.2; done
"""


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("call,results", [
    (1, {"distilled", "race", "kernels-of", "step", "step-float8"}),
    (2, {"end-to-end", "float8", "distilled"}),
    (3, {"peer", "step"}),
    (4, {"train", "train-24", "serve", "pin-registered-True", "kernels-stored", "race"}),
])  # fmt: skip
def test_first_gpu_call_runs_all_of_its_parts_at_toy_sizes(call, results, tmp_path):
    script = ON_GPU.with_name("first_gpu.sh")
    (own,) = re.findall(rf'^  {call}\) own="(.*?)"', script.read_text(), re.MULTILINE | re.DOTALL)
    tiny = " ".join([*TINY_CLIP, "--repeats 1"])
    parts = []
    for line in own.splitlines():
        if line.endswith(" env"):  # the meter below would be asked for the card, and never end
            continue
        name, _, part, *flags = line.replace("$new", "--preset ltx-2.5").split()
        newest = {"ltx-2.5", "2.5"} & {*flags}
        small = TINY_PARTS.get(part, tiny).replace("tiny-2.3", "tiny-2.5" if newest else "tiny-2.3")
        if "--step-plan" in flags:
            small += " --step-plan 0"
        parts.append(" ".join([name, "500", part, *flags, small]))
    (tmp_path / "nvidia-smi").write_text(METER)
    (tmp_path / "nvidia-smi").chmod(0o755)
    more = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALL_S": "3000"}
    more |= {"TORCHDYNAMO_DISABLE": "1"}  # Inductor compiles minutes for a CPU
    done = on_gpu(tmp_path, str(call), script=script, PARTS="\n".join(parts), **more)
    assert done.returncode == 0, done.stdout
    with tarfile.open(tmp_path / f"call-{call}.tgz") as archive:
        names = archive.getnames()
    assert results <= {Path(name).stem for name in names if name.endswith(".json")}
    assert sum(name.endswith("/power.csv") for name in names) == len(parts)
    assert done.stdout.count("600 W mean, 600 W most") == len(parts)


@on_linux
@pytest.mark.slow
def test_on_gpu_tests_that_are_cut_off_leave_their_results(tmp_path):
    """Deaf to interrupts, as a job in the background is."""
    endless = tmp_path / "test_endless.py"
    bodies = {"a": "pass", "b": "assert 0", "c": "__import__('time').sleep(600)"}
    endless.write_text("".join(f"def test_{name}(): {body}\n" for name, body in bodies.items()))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = on_gpu(tmp_path, "tests", str(endless), LIMIT_S="10")
    signal.signal(signal.SIGINT, handler)
    assert done.returncode != 0
    (suite,) = ElementTree.parse(tmp_path / "tests.xml").iter("testsuite")
    assert [case.get("name") for case in suite.iter("testcase")][:2] == ["test_a", "test_b"]
    assert suite.get("failures") == "1" and "test_a PASSED" in (tmp_path / "tests.txt").read_text()


def on_gpu(out: Path, *arguments: str, script: Path = ON_GPU, **settings: str):
    env = {"PYTHON": sys.executable, "OUT": str(out), "COMMIT": "abc1234", "OMP_NUM_THREADS": "1"}
    env = os.environ | env | settings
    return subprocess.run([script, *arguments], env=env, capture_output=True, text=True)


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("part,flags,files,benchmark", [
    ("kernels", [*TINY_SIZE, *"--rounds 1 --contestants kernel".split()],
     "kernels kernels-image kernels-float8", "kernels"),
    ("cold-start", "--preset tiny-2.3 --device cpu --width 128 --height 128 --num-frames 9".split(),
     "cold-start", "cold_start"),
    ("peer", [*TINY_CLIP, "--repeats", "1"], "peer", "end_to_end"),
    ("memory", [*TINY_CLIP, "--repeats", "1"], "memory-resident memory-90 memory-60", "end_to_end"),
])  # fmt: skip
def test_on_gpu_part_leaves_the_figures_of_its_benchmark(part, flags, files, benchmark, tmp_path):
    done = on_gpu(tmp_path, part, *flags)
    assert done.returncode == 0, done.stderr
    left = {path.stem: json.loads(path.read_text())["benchmark"] for path in tmp_path.iterdir()}
    assert left == dict.fromkeys(files.split(), benchmark)


def test_on_gpu_names_the_parts_that_it_has():
    """At its top, in its cases and in the error about an unknown part; every benchmark that it runs
    is a module."""
    script = ON_GPU.read_text()
    described = re.findall(r"^#   ([a-z0-9-]+)  +\S", script, re.MULTILINE)
    cases = re.findall(r"^  ([a-z0-9-]+)\)", script, re.MULTILINE)
    known = re.search(r'known="(.*?)"', script, re.DOTALL)
    assert known and described == cases == [*known[1].split(), "all"]
    for name in re.findall(r"\bbenchmark ([a-z_]+) ", script):
        assert ON_GPU.with_name(f"{name}.py").exists(), name


def test_docs_say_what_each_call_of_first_gpu_answers():
    said = re.findall(
        r"^#   (\d)  (.+)$", ON_GPU.with_name("first_gpu.sh").read_text(), re.MULTILINE
    )
    docs = ON_GPU.parents[1].joinpath("docs", "benchmarks.md").read_text()
    assert re.findall(r"^benchmarks/first_gpu\.sh (\d)   # (.+)$", docs, re.MULTILINE) == said


@pytest.mark.parametrize("large", [0, LARGE])
def test_ranks_hold_slices_of_one_random_tensor(large, monkeypatch):
    monkeypatch.setattr("benchmarks.random_weights.LARGE", large)
    backend = RandomBackend("cpu")
    whole = backend._draw("a.weight", (6, 8), (), torch.float32)
    part = backend._draw("a.weight", (6, 8), [(1, 4, 8)], torch.float32)
    assert torch.equal(whole[:, 4:], part) and part.is_contiguous()
    assert whole.std() == pytest.approx(8**-0.5, rel=0.5)
    assert not torch.equal(whole, backend._draw("b.weight", (6, 8), (), torch.float32))


def test_a_lora_gives_its_random_weights_memory_of_their_own():
    with empty_checkpoint("tiny-2.0") as checkpoint:
        graph = video_vae.trace_decoder(checkpoint.config.video_vae, 1, 2, 2, 2, "float32")
        backend = RandomBackend("cpu")
        first = backend.load([graph], checkpoint.source("video_vae"))
        changed = next(name for name in first if name.endswith("conv_in.conv.weight"))
        second = backend.load([graph], checkpoint.source("video_vae"), first, {changed})
    assert {name for name in first if second[name] is not first[name]} == {changed}
    assert torch.equal(first[changed], second[changed])


@pytest.mark.long
@pytest.mark.parametrize("preset", ["tiny-2.3", "tiny-2.5"])
def test_a_run_holds_the_weights_that_its_plan_says(preset):
    with random_session(preset, device="cpu") as session:
        plan = make_plan(session, TINY_REQUEST)
        end_to_end.run_once(session, plan, Stopwatch())
        planned = session.memory.costs(plan.stages)[-1].weights_bytes
    sets = [kept.weights for kept in session.weights.held.values()]
    held = {tensor.data_ptr(): tensor.nbytes for weights in sets for tensor in weights.values()}
    assert sum(held.values()) == planned
