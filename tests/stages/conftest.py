"""One tiny model of LTX-2.3 on both backends, for stages that are held to diffusers'
transformer."""

import pytest

from ltx2rt.session.open import open_session
from ltx2rt.session.options import ModelOptions


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("tiny-2.3", "diffusers")


@pytest.fixture(scope="module")
def sessions(folder):
    options = {
        b: ModelOptions(b, folder, device="cpu", dtype="float32", assume="dev")
        for b in ("cuda", "tpu")
    }
    opened = {name: open_session(given) for name, given in options.items()}
    yield opened
    for session in opened.values():
        session.close()
