"""Servers for tests, each in a process of its own."""

import pytest

from ltx2rt.instruments.make import make_checkpoint
from tests.serve.serving import Server


@pytest.fixture(scope="session")
def tiny_model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture
def start(tiny_model, tmp_path):
    """start(*flags) -> Server, in one folder unless `data` is another."""
    started = []

    def call(*flags, data="data", **how):
        started.append(Server(tiny_model, tmp_path / data, *flags, **how))
        return started[-1]

    yield call
    for server in started:
        if server.process.poll() is None:
            server.kill()
        server.http.close()


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """One with replicas that have no model, and LoRAs to name."""
    root = tmp_path_factory.mktemp("server")
    loras = root / "loras"
    loras.mkdir()
    # the model's own would be merged twice
    make_checkpoint("tiny-2.3", "official", root / "other", seed=1)
    (loras / "style.safetensors").symlink_to(root / "other/tiny-2.3-distilled-lora.safetensors")
    (loras / "loop.safetensors").symlink_to(loras / "loop.safetensors")
    made = Server(tiny_model, root / "data", "--loras", loras, "--replicas", "2")
    yield made
    made.kill()
