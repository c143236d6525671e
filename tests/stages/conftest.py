"""One tiny model of LTX-2.3 on both backends, for stages that are held to diffusers'
transformer."""

import pytest


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("tiny-2.3", "diffusers")


@pytest.fixture(scope="module")
def sessions(on_both):
    return on_both("tiny-2.3", assume="dev")
