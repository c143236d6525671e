"""Which device a run takes that names none."""

import re

import pytest
import torch

import ltx2rt
from ltx2rt.errors import InputError
from ltx2rt.session import open as module
from ltx2rt.session.options import ModelOptions


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_large_model_takes_the_cpu_only_if_asked(tiny, monkeypatch):
    options = {"model": tiny("tiny-2.3", "official"), "backend": "cuda"}
    module.open_session(ModelOptions(**options))
    monkeypatch.setattr(module, "SMALL_BYTES", 10**6)
    with pytest.raises(InputError, match=r"--device: no GPU is used .* --device cpu says so"):
        module.open_session(ModelOptions(**options))
    assert module.open_session(ModelOptions(**options, device="cpu")).backend.device_kind == "cpu"


@pytest.mark.parametrize("backend,options,reason", [
    ("cuda", {"attention": "flash", "device": "cpu"}, "flash: it runs on a GPU, this is a CPU; leave it out"),
    ("tpu", {"attention": "torch"}, "torch: backend tpu has one kernel for each device; leave it out"),
    ("cuda", {"attention": "sage"}, "sage: sageattention is not installed; pip install sageattention"),
])  # fmt: skip
def test_an_attention_kernel_that_is_not_here_is_refused(backend, options, reason, tiny):
    with pytest.raises(InputError, match=f"^--attention {re.escape(reason)}$"):
        ltx2rt.open(tiny("tiny-2.3", "official"), backend=backend, **options)


def test_the_attention_kernel_that_is_asked_for_is_in_the_clips_settings(tiny):
    size = {"width": 64, "height": 64, "num_frames": 9, "steps": 1, "seed": 1}
    with ltx2rt.open(
        tiny("tiny-2.3", "official"), backend="cuda", device="cpu", attention="torch"
    ) as session:
        clip = session.generate("a fox", pipeline="one-stage", audio=False, **size)
    assert clip.report["settings"]["options"]["attention"] == "torch"
    assert clip.metadata["settings"]["options"]["attention"] == "torch"


def test_sageattention_and_inductor_are_one_too_many(tmp_path):
    with pytest.raises(InputError, match=r"^--attention sage: .*; leave out --compile$"):
        ModelOptions("cuda", tmp_path, attention="sage", compile=True).check()
