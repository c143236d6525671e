"""Which device a run takes that names none."""

import pytest
import torch

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
