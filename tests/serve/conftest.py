"""Servers for tests, each in a process of its own."""

import pytest

from tests.serve.serving import TOKENS, Server


@pytest.fixture(scope="session")
def tiny_model(tiny):
    return tiny("tiny-2.3", "official")


@pytest.fixture
def anyio_backend():
    return "asyncio"


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


@pytest.fixture
def not_started(command, tiny_model, tmp_path):
    """not_started(*flags) -> what a server says that refuses to start in the folder of `start`."""

    def call(*flags):
        where = ("--model", tiny_model, "--data", tmp_path / "data", "--port", 0)
        words = "serve --quiet --backend cuda --device cpu".split()
        status, _, said = command(*words, *where, *flags)
        assert status == 2, said
        return said

    return call


@pytest.fixture(scope="module")
def server(tiny_model, user_lora, tmp_path_factory):
    """One with replicas that have no model, and LoRAs to name."""
    root = tmp_path_factory.mktemp("server")
    loras = root / "loras"
    loras.mkdir()
    (loras / "style.safetensors").symlink_to(user_lora)  # the model's own would be merged twice
    (loras / "loop.safetensors").symlink_to(loras / "loop.safetensors")
    flags = "--replicas 2 --max-work 30 --keep 7d --served-name sora-2 tiny --loras".split()
    made = Server(tiny_model, root / "data", *flags, loras, env={"FAKE_MEMORY": str(6 * 10**8)})
    yield made
    made.kill()


@pytest.fixture(scope="module")
def with_tokens(tiny_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("guarded")
    (root / "tokens").write_text(TOKENS)
    flags = ("--token-file", root / "tokens", "--max-queue", 20, "--user-quota", 5)
    made = Server(tiny_model, root / "data", *flags)
    made.tokens = root / "tokens"
    yield made
    made.kill()


@pytest.fixture
def guarded(with_tokens):
    """A server of `USERS`, of whom eve operates it. A test may change its file `tokens`."""
    yield with_tokens
    with_tokens.tokens.write_text(TOKENS)
    with_tokens.http.cookies.clear()
