"""Whole requests through PyTorch's own CUDA build, on stand-ins for the CUDA libraries: what is
refused while a step is recorded, streams that are not joined, memory, the order of collectives.

`python tests/stand_in/install.py` installs that build. The requests run at full size, on random
weights that take no memory of this machine; nothing is computed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(os.environ.get("LTX2RT_STAND_IN", Path(__file__).parents[2] / ".venv/stand-in"))
REPOSITORY = Path(__file__).resolve().parents[2]
TREES = (REPOSITORY, REPOSITORY / "backends", REPOSITORY / "kernels", Path(__file__).parent)
HERE = (FOLDER / ".installed").exists()
WHY = f"no CUDA build of PyTorch in {FOLDER}: python tests/stand_in/install.py installs it"
pytestmark = pytest.mark.skipif(not HERE, reason=WHY)
slow = pytest.mark.slow
# Memory in MiB and compute capability by the gigabytes under which a card is sold: RTX 3060, 4080,
# 4090 and 5090, L40S, H100 and H200, as nvidia-smi names them.
CARDS = {
    12: (12288, "8.6"), 16: (16376, "8.9"), 24: (24564, "8.9"), 32: (32607, "12.0"),
    48: (46068, "8.9"), 80: (81559, "9.0"), 141: (143771, "9.0"),
}  # fmt: skip
PYTHON = str(FOLDER / "venv/bin/python")
TINY = {"width": 128, "height": 64, "num_frames": 17}
MESHES = ({"tensor": 2}, {"tensor": 4}, {"sequence": 2, "tensor": 2}, {"guidance": 2, "tensor": 2})


def environment(gigabytes: int) -> dict[str, str]:
    libraries, (mebibytes, capability) = str(FOLDER / "lib"), CARDS[gigabytes]
    card = {"STAND_IN_MB": str(mebibytes), "STAND_IN_CAPABILITY": capability}
    paths = {"LD_LIBRARY_PATH": libraries, "TRITON_LIBCUDA_PATH": libraries}
    paths |= {"TRITON_CACHE_DIR": str(FOLDER / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    paths["PYTHONPATH"] = os.pathsep.join(map(str, (libraries, *TREES)))
    return {**os.environ, **card, **paths, "JAX_PLATFORMS": "cpu"}


def started(case: dict[str, Any], gigabytes: int, **more: str) -> subprocess.Popen[str]:
    command = [PYTHON, str(Path(__file__).with_name("run_case.py")), json.dumps(case)]
    env = environment(gigabytes) | more
    return subprocess.Popen(command, env=env, text=True, stdout=-1, stderr=-1)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    assert process.returncode == 0, err[-4000:]
    found = json.loads(out.splitlines()[-1])
    assert not found["illegal"] and not found["unjoined"] and not found["concurrent"], err[-4000:]
    return found


def session(preset: str, *requests: dict, gigabytes: int = 80, **case: Any) -> dict[str, Any]:
    """A session of these requests, in which nothing was refused and no stream was left."""
    return ended(started({"preset": preset, "requests": requests, **case}, gigabytes))


def test_a_part_of_an_array_is_rounded_on_its_way_to_the_device():
    code = """if True:
        import numpy, torch
        from ltx2rt_cuda.device.cuda import Cuda
        from ltx2rt_cuda.program import to_torch
        part = numpy.arange(192, dtype=numpy.float32).reshape(4, 6, 8)[:, 1:4, 2:7]
        sent = Cuda().upload(to_torch(part, "K"), torch.bfloat16)
        assert sent.is_cuda and sent.is_contiguous() and sent.dtype == torch.bfloat16
        assert (sent.cpu().float().numpy() == part).all()
    """
    subprocess.run([PYTHON, "-c", code], env=environment(80), check=True)


def test_a_request_is_recorded_and_repeated():
    found = session("tiny-2.3", TINY | {"steps": 2}, runs=2)
    assert found["replays"] == 2 * (2 + 3 + 2), "steps of both stages, and what is before them"
    (request,) = found["requests"]
    assert request["mode"] == "resident" and request["reserved_bytes"] > request["planned_bytes"]


@slow
@pytest.mark.parametrize("by", ["flash", "cudnn", "torch"])
def test_a_step_is_recorded_with_the_attention_that_is_asked_for(by):
    found = session("tiny-2.3", TINY | {"steps": 2}, options={"attention": by}, runs=2)
    assert found["replays"] == 14 and "refused" not in found["requests"][0]


def sources(folder: Path) -> dict[str, dict[str, Any]]:
    """The fields of one small request of each pipeline."""
    from ltx2rt.media.mp4 import write_mp4

    film, image = folder / "film.mp4", folder / "image.png"
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (25, 64, 64, 3), np.uint8)
    sound = rng.normal(0, 0.1, (2, 48000)).astype(np.float32)
    write_mp4(film, [frames], num_frames=25, fps=Fraction(24), waveform=sound, sample_rate=48000)
    Image.fromarray(frames[0]).save(image)
    size = {"width": 64, "height": 64, "num_frames": 25}
    images = {"images": [(str(image), 0)], "image_crf": 0}
    return {
        "two-stage": size | images | {"steps": 2},
        "one-stage": size | {"steps": 2, "voice": str(film)},
        "hq": size | images | {"steps": 2},
        "distilled": size,
        "keyframes": size | images | {"steps": 2, "images": [(str(image), 0), (str(image), 16)]},
        "a2v": size | {"steps": 2, "audio_path": str(film)},
        "v2v": {"video_path": str(film)},
        "retake": {"video_path": str(film), "start_time": 0.3, "end_time": 0.5},
        "extend": {"video_path": str(film)},
        "inpaint": {"video_path": str(film), "pad": (32, 0, 0, 0)},
        "ic-lora": size | {"reference": str(film)},
        "dubit": {"video_path": str(film)},
        "hdr-ic-lora": {"video_path": str(film)},
        "upscale": {"video_path": str(film)},
        "dfr": size,
        "t2a": {"steps": 2, "num_frames": 25},
    }


@slow
@pytest.mark.parametrize("preset", ["tiny-2.0", "tiny-2.3", "tiny-2.5"])
def test_every_pipeline_runs_in_one_session(preset, tmp_path):
    requests = [{"pipeline": name, **fields} for name, fields in sources(tmp_path).items()]
    found = session(preset, *requests)
    refused = {r["pipeline"]: r["refused"] for r in found["requests"] if "refused" in r}
    assert refused.keys() == ({"dfr"} if preset != "tiny-2.5" else set()), refused


@slow
@pytest.mark.parametrize("checks", [1, 6, 12])
def test_a_session_goes_on_after_a_cancelled_request(checks):
    found = session("tiny-2.3", TINY | {"steps": 4}, cancel_after=checks, runs=2)
    assert "ended" not in found["requests"][0]


@slow
def test_a_session_goes_on_after_the_device_was_full_in_a_recording():
    found = session("tiny-2.3", TINY | {"steps": 2}, full=True, runs=2)
    assert found["requests"][0]["out_of_memory"] and found["replays"] >= 10


@slow
def test_a_session_of_twenty_sizes():
    sizes = [TINY | {"width": 64 + 64 * (i % 5), "num_frames": 9 + 8 * (i // 5)} for i in range(20)]
    found = session("tiny-2.3", *(size | {"steps": 2} for size in sizes))
    assert not [r for r in found["requests"] if "refused" in r]


TWO_STAGE = {"width": 768, "height": 512, "num_frames": 121, "steps": 2}
DISTILLED = {"pipeline": "distilled", "width": 1920, "height": 1088, "num_frames": 121}
SMALLER = DISTILLED | {"width": 1280, "height": 704}
RESIDENT = {"memory": "resident"}
FULL_SIZE = [
    *((f"ltx-{n}", gb, size, {}) for n in ("2.0", "2.3", "2.5") for gb in CARDS for size in (TWO_STAGE, DISTILLED)),
    *(("ltx-2.3", gb, SMALLER, {}) for gb in (12, 16, 24, 32)),
    *((f"ltx-{n}", gb, TWO_STAGE, {"weights_dtype": "float8"}) for n in ("2.0", "2.3", "2.5") for gb in (24, 80)),
]  # fmt: skip


@slow
@pytest.mark.parametrize("preset,gigabytes,size,options", FULL_SIZE)
def test_a_run_takes_the_memory_that_its_plan_says(preset, gigabytes, size, options):
    """Twice, on a card that has no more than that, beside what PyTorch takes for itself."""
    found = session(preset, size, gigabytes=gigabytes, options=options, runs=2, tight=True)
    (request,) = found["requests"]
    assert request["reserved_bytes"] <= request["allowed_bytes"]
    assert request["planned_bytes"] <= 1.03 * request["reserved_bytes"] + 1e9, "planned too much"


LIMITED = """
import device, torch
from ltx2rt_cuda.backend import CudaBackend
backend = CudaBackend("cuda")
backend.limit(12.0)
kept = torch.empty(11 * 10**9, dtype=torch.uint8, device="cuda")
del kept  # kept for later, and given back for what needs the room
torch.empty(11_900_000_000, dtype=torch.uint8, device="cuda")
try:
    torch.empty(12_100_000_000, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    backend.limit(None)
    torch.empty(80 * 10**9, dtype=torch.uint8, device="cuda")
    print("done")
"""


def test_a_limit_holds_for_what_pytorch_keeps_and_is_lifted():
    """Without it an H200 whose user allowed 12 GB had 14.1 GB taken."""
    command = [PYTHON, "-c", LIMITED]
    found = subprocess.run(command, env=environment(141), capture_output=True, text=True)
    assert found.stdout == "done\n", found.stderr[-2000:]


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = server.getsockname()[1]
    yield found


def in_order(log: Path) -> list[str]:
    """A rank's collectives but those of two ranks, communicators numbered by their first use: each
    rank has others of its own."""
    numbers: dict[str, int] = {}
    lines = []
    for line in log.read_text().splitlines():
        communicator, what = line.split(maxsplit=1)
        if "send_recv" not in what:
            lines.append(f"{numbers.setdefault(communicator, len(numbers))} {what}")
    return lines


@slow
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: ",".join(f"{a}={n}" for a, n in m.items()))
def test_ranks_issue_the_same_collectives_one_after_the_other(mesh, port, tmp_path):
    """NCCL deadlocks where two ranks begin two collectives in different orders: each rank's are the
    same, and none begins beside one of another communicator."""
    count = int(np.prod(list(mesh.values())))
    case = {"preset": "tiny-2.3", "mesh": mesh, "requests": [TINY | {"steps": 2}], "runs": 2}
    where = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where |= {"STAND_IN_DEVICES": str(count), "STAND_IN_LOG": str(tmp_path / "log")}
    ranks = [started(case, 80, **where, RANK=str(n), LOCAL_RANK=str(n)) for n in range(count)]
    found = [ended(rank) for rank in ranks]
    assert all(rank["collectives"] for rank in found)
    logs = [in_order(tmp_path / f"log.{rank}") for rank in range(count)]
    assert any("recorded" in line for line in logs[0])
    for log in logs[1:]:
        assert log == logs[0]
