"""What ranks agree on, who speaks, and how they end."""

import os
import signal
import socket
import time

import pytest
from ltx2rt_cuda.distributed import rendezvous

from ltx2rt.atomic_file import partial_path
from ltx2rt.ranks.crew import Crew
from tests.conftest import refused
from tests.ranks.launches import (
    BROKEN,
    LOADING,
    TIME_LIMIT_S,
    Launch,
    alive,
    by_hand,
    ranks_of,
    said_once,
    wait_for,
    written,
)


@pytest.mark.long
def test_ranks_with_other_arguments_are_told_apart_before_any_collective(flags, tmp_path):
    words = ["-m", "ltx2rt", *flags("--seed", 7)]
    line = said_once(by_hand(words, [*words[:-1], "8"]))
    assert "ranks 0 and 1 have different arguments: --seed is 7 on rank 0, 8 on rank 1" in line
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0"}
        for name, value in where.items():
            monkeypatch.setenv(name, value)
        with refused(f"port {port} is in use; choose another port"):
            rendezvous()


def test_a_world_without_a_meeting_place_is_refused(flags, command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, error = command(*flags())
    assert status == 2 and "WORLD_SIZE is 2 without RANK, MASTER_ADDR, MASTER_PORT" in error


OTHER_VERSION = """
import os, sys
from ltx2rt import version
if os.environ["RANK"] == "1":
    version.VERSION = "9.9"
from ltx2rt.cli import main
sys.exit(main())
"""


@pytest.mark.long
def test_ranks_of_other_versions_are_told_apart(flags, tmp_path):
    script = written(tmp_path, OTHER_VERSION)
    line = said_once(by_hand([str(script), *flags()]))
    assert "ranks 0 and 1 have different versions: ltx2rt is " in line and "9.9 on rank 1" in line
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize("found,status", [
    (b"1 2", 2), (b"1 137", 1), (b"1 0", 1), (b"1 -3", 1), (b"", 1), (b"\xc2\xb9 \xc2\xb9", 1),
])  # fmt: skip
def test_no_failure_has_status_0_whatever_stands_in_the_store(found, status):
    class Written:
        def compare_set(self, key, expected, desired):
            return found

    crew = object.__new__(Crew)
    crew.rank, crew._watched = 0, Written()
    assert crew._claim(1) == (False, status)


@pytest.mark.parametrize("victim,number,status,message", [
    pytest.param(1, signal.SIGKILL, 1, "rank 1 was ended by SIGKILL", marks=pytest.mark.slow),
    pytest.param(0, signal.SIGKILL, 1, "rank 0 was ended by SIGKILL", marks=pytest.mark.long),
    (None, signal.SIGINT, 130, "interrupted"),
    pytest.param(1, signal.SIGHUP, 1, "rank 1 was ended by SIGHUP", marks=pytest.mark.slow),
    pytest.param(0, signal.SIGINT, 1, "rank 0 was ended by SIGINT", marks=pytest.mark.slow),
    pytest.param(None, signal.SIGHUP, 143, "ended by SIGHUP", marks=pytest.mark.slow),
    pytest.param(None, signal.SIGQUIT, 143, "ended by SIGQUIT", marks=pytest.mark.slow),
    pytest.param(None, signal.SIGKILL, -9, None, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_death_in_a_step_ends_all(flags, tmp_path, victim, number, status, message):
    run = Launch(["-m", "ltx2rt", *flags("--steps", 2000, "--num-gpus", 2)])
    ranks = wait_for(lambda: ranks if len(ranks := ranks_of(run.pid)) == 2 else None)
    for line in iter(run.process.stderr.readline, ""):
        if line.startswith("text:"):
            break
    started = time.monotonic()
    os.kill(run.pid if victim is None else ranks[victim], number)
    found, out, errors = run.end()
    wait_for(lambda: not any(map(alive, ranks.values())))
    assert time.monotonic() - started < TIME_LIMIT_S
    assert (found, out) == (status, "") and not list(tmp_path.iterdir())
    assert len(errors) == (message is not None) and (message is None or message in errors[0])


@pytest.mark.long
def test_an_exception_on_one_rank_is_shown_once_with_its_rank(flags, tmp_path):
    script = written(tmp_path, BROKEN)
    line = said_once(by_hand([str(script), "raise", *flags("--num-frames", 161)]), status=1)
    assert line == "ltx2rt: error: rank 1: RuntimeError: a bad day"
    assert {path.name for path in tmp_path.iterdir()} == {"clip.mp4.part", script.name}  # its steps


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_the_end_of_rank_0_before_its_last_tile_keeps_only_its_steps(flags, tmp_path, number):
    """Without a launcher that could clean up or keep the store: who is killed leaves it to the
    other."""
    script = written(tmp_path, BROKEN)
    main, other = by_hand([str(script), "hang", *flags("--num-frames", 161)])
    assert main.process.stdout.readline() == "hanging\n"
    wait_for(partial_path(tmp_path / "clip.mp4", main.pid).exists)
    os.kill(main.pid, number)
    ended, (status, _, lines) = main.end(), other.end()
    if number == signal.SIGHUP:
        assert ended == (128 + number, "", ["ltx2rt: error: rank 0 was ended by SIGHUP"])
    else:
        assert ended[0] == -9
        assert lines == ["ltx2rt: error: rank 0 died: killed, or out of memory"]
    left = {path.name for path in tmp_path.iterdir()} - {script.name}
    assert status == 1 and left == {"clip.mp4.part"}  # its steps


@pytest.mark.long
def test_a_death_while_loading_ends_all(flags, tmp_path):
    """Rank 0 has its weights and waits for rank 1 in the first collective."""
    script = written(tmp_path, LOADING)
    main, other = by_hand([str(script), *flags()])
    assert other.process.stdout.readline() == "loading\n"
    os.kill(other.pid, signal.SIGKILL)
    assert other.end()[0] == -9
    status, _, lines = main.end()
    assert status == 1 and lines == ["ltx2rt: error: rank 1 died: killed, or out of memory"]
    assert list(tmp_path.iterdir()) == [script]
