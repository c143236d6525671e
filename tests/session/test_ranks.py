"""A session of several processes: what one decides holds for all, and a second request costs no
more than on one."""

import json

import pytest

from tests.ranks.launches import by_hand, hosts_by_hand, written

SESSION = """
import json, os, sys
import numpy as np
import ltx2rt
model, backend, mesh, folder = sys.argv[1:]
rank = int(os.environ.get("RANK") or os.environ["JAX_PROCESS_ID"])
small = dict(width=64, height=64, num_frames=17, fps=48, steps=3, image_crf=0, seed=3, audio=backend == "cuda")
found = {}
with ltx2rt.open(model, backend=backend, device="cpu", mesh=mesh) as session:
    def made(**more):
        return session.generate("a red fox", **small, **more)
    first, again = made(), made()
    found["again"] = [again.report["programs_built"], again.report["loaded_bytes"]]
    found["frames"] = len(first.frames)
    asked = 0
    def counting():
        global asked
        asked += 1
        return False
    made(cancelled=counting)
    found["asked"], found["cancelled"] = asked, []
    for last in (2, 5, asked - 1):  # rank 1 alone wants it: before a stage, in a step, in the decoder
        left = last
        def cancelled():
            global left
            left -= 1
            return rank == 1 and left == 0
        try:
            made(cancelled=cancelled)
        except ltx2rt.Cancelled:
            found["cancelled"].append(left)
    after = made()
    found["same"] = [bool(np.array_equal(first.frames, x.frames)) for x in (again, after)]
    try:
        session.generate("a red fox")
    except ltx2rt.InputError as error:
        found["seed"] = str(error)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.long
@pytest.mark.parametrize("backend,mesh", [
    ("cuda", "tensor=2"), pytest.param("tpu", "sequence=2,tensor=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_ranks_cancel_together_and_go_on(backend, mesh, tiny, tmp_path):
    words = (written(tmp_path, SESSION), tiny("tiny-2.3", "official"), backend, mesh, tmp_path)
    words = [*map(str, words)]
    runs = by_hand(words) if backend == "cuda" else hosts_by_hand(words, words)
    for run in runs:
        _, err = run.process.communicate(timeout=400)
        assert run.process.returncode == 0, err
    main, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for found in (main, other):
        assert found["again"] == [0, 0] and found["same"] == [True, True]
        assert found["asked"] == main["asked"] and found["cancelled"] == [0, 0, 0]
        assert "several processes" in found["seed"]
    assert (main["frames"], other["frames"]) == (17, 0)
