"""Ctrl-C while JAX compiles."""

import os
import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.long
@pytest.mark.parametrize(
    "number,status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_an_interrupted_compiler_ends_the_process_with_its_status_and_leaves_no_file(
    tiny, tmp_path, tmp_path_factory, number, status
):
    """It ended by SIGSEGV: threads of the compiler outlived what they compile for."""
    words = "generate --backend tpu --device cpu --prompt x --width 64 --height 64 --num-frames 9"
    files = "--model", tiny("tiny-2.3", "official"), "--output", tmp_path / "clip.mp4"
    # Background jobs ignore them.
    heard = [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGHUP)]
    command = [sys.executable, "-m", "ltx2rt", *words.split(), *map(str, files)]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("empty"))}
    process = subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True)
    for n, handler in zip((signal.SIGINT, signal.SIGHUP), heard, strict=True):
        signal.signal(n, handler)
    assert process.stderr is not None
    while not process.stderr.readline().partition(": ")[2].startswith("merged"):
        assert process.poll() is None
    time.sleep(1)  # of 20 that it compiles for
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert f"ltx2rt: error: {said}" in errors
    assert not list(tmp_path.iterdir())
