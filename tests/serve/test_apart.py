"""What is planned in a process of its own is what the server would plan, and costs it nothing."""

import pytest

from ltx2rt.serve import apart
from ltx2rt.serve.admission import Admission
from ltx2rt.serve.apart import Apart
from ltx2rt.serve.folder import Folder
from ltx2rt.serve.refusal import Refusal
from ltx2rt.session.options import ModelOptions
from tests.serve.serving import moving, sound

pytestmark = pytest.mark.anyio
CLIP = {"prompt": "a fox", "size": "64x64", "num_frames": 9, "seed": 1, "steps": 1}


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def admission(folder, tiny_model):
    return Admission(
        ModelOptions("cuda", tiny_model, device="cpu"), folder.inputs, default="two-stage"
    )


async def test_a_plan_is_the_same_and_a_process_that_dies_is_replaced(admission, folder, tmp_path):
    planner = Apart(admission)
    heard = folder.keep_input(sound(), ".media")
    given = {**CLIP, "pipeline": "a2v", "audio_path": [{"file_id": heard}]}
    expected = admission.admit(given)
    assert await planner.admit(given, None) == expected
    planner._process.kill()
    await planner._process.wait()
    assert await planner.admit(given, None) == expected
    seen = folder.keep_input(moving(tmp_path), ".media")
    given = {"prompt": "x", "pipeline": "retake", "video_path": [{"file_id": seen}], "steps": 0}
    with pytest.raises(Refusal) as here:
        admission.admit(given)
    with pytest.raises(Refusal) as there:
        await planner.admit(given, None)
    assert there.value.body == here.value.body and there.value.status == 400
    await planner.stop()


async def test_what_takes_too_long_is_refused_and_ends_its_process(admission, monkeypatch):
    planner = Apart(admission)
    monkeypatch.setattr(apart, "TIME_S", 0.01)  # it takes longer to start
    with pytest.raises(Refusal, match="too much time or memory"):
        await planner.admit(CLIP, None)
    assert planner._process is None
    monkeypatch.undo()
    assert (await planner.admit(CLIP, None)).job["n"] == 1
    await planner.stop()
