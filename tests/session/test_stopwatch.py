"""Time is charged to the right account, and the report is the documented JSON."""

import io
import json
import re

import pytest

from ltx2rt.run.files import write_report
from ltx2rt.session.stopwatch import Stopwatch


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def watch():
    return Stopwatch(stream=io.StringIO(), clock=Clock())


def test_loading_and_warmup_are_not_charged_to_the_stage(watch):
    with watch.stage("stage1", 2) as step:
        watch.clock.now += 1
        with watch.apart("load"):
            watch.clock.now += 10
        watch.clock.now += 2
        step()
        with watch.apart("warmup"):
            watch.clock.now += 100
        watch.clock.now += 4
        step()
    (stage,) = watch.stages
    assert (stage.name, stage.time_s, stage.steps_s) == ("stage1", 7, [3, 4])
    assert watch.apart_s == {"load": 10, "warmup": 100} and watch.total_s == 117
    assert "stage1: 7.00 s (2 steps)" in watch.stream.getvalue()


def test_a_stage_ends_only_when_the_device_has(watch):
    def wait():
        watch.clock.now += 5

    watch.synchronize = wait
    with watch.apart("load"):
        pass
    with watch.stage("decode"):
        pass
    # what was queued before a span is never charged to it, what it queued always is
    assert watch.stages[0].time_s == 5 and watch.apart_s["load"] == 5


def test_a_failed_stage_is_not_reported_as_done(watch):
    with pytest.raises(RuntimeError), watch.stage("decode"):
        raise RuntimeError
    assert watch.stages == []


def test_the_closing_line_names_file_size_seed_and_times(watch, tmp_path):
    output = tmp_path / "out.mp4"
    output.write_bytes(b"x" * 1_230_000)
    with watch.stage("text"):
        watch.clock.now += 1.5
    with watch.apart("load"):
        watch.clock.now += 2
    assert watch.closing_line(output, 7) == f"{output}: 1.23 MB, seed 7, 3.5 s (text 1.5, load 2.0)"


def test_the_report_has_the_documented_keys(watch, tmp_path):
    with watch.stage("text"):
        pass
    lora, versions = [{"file": "l", "matched": 2, "total": 2}], {"torch": "2"}
    facts = {"peak_bytes": None, "versions": versions, "device": "CPU", "mesh": {}, "lora": lora}
    report = watch.report(seed=3, settings={"width": 64}, **facts)
    write_report(tmp_path / "r.json", report)
    read = json.loads((tmp_path / "r.json").read_text())
    assert read == report
    documented = "seed stages warmup_s load_s peak_bytes versions device mesh lora".split()
    assert set(documented) <= set(read) and set(read["stages"][0]) == {"name", "time_s", "steps_s"}
    assert read["lora"] == lora


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("verbose", [False, True])
def test_lines_elsewhere_say_what_begins_and_what_has_ended(verbose):
    """verbose: and what is built, and how long loads took."""
    watch = Stopwatch(stream=io.StringIO(), clock=Clock(), verbose=verbose)
    with watch.apart("load", "loading"):
        watch.clock.now += 2
    watch.building("vocoder")
    with watch.stage("decode", 16, "frames") as done:
        done(9)
        done(7)
    more = ["loading: 2.00 s", "building vocoder"] * verbose
    lines = ["loading ...", *more, "decode: 16 frames ...", "decode: 0.00 s (16 frames)"]
    assert watch.stream.getvalue().splitlines() == lines


def test_a_terminal_shows_a_bar_and_keeps_only_what_has_ended():
    watch = Stopwatch(stream=Terminal(), clock=Clock())
    with watch.apart("load", "loading"):
        pass
    with watch.stage("decode", 16, "frames") as done:
        done(8)
        assert "decode: 0 of 16 frames" in watch.stream.getvalue()
    assert "loading ...\x1b[K\r\x1b[K\r" in watch.stream.getvalue()
    assert watch.stream.getvalue().endswith("\x1b[K\rdecode: 0.00 s (8 frames)\n")


def test_a_notebook_shows_the_bar_and_covers_it_by_blanks():
    """Its page reads no command that clears a line."""
    cell = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    watch = Stopwatch(stream=cell, clock=Clock())
    with watch.stage("decode", 16, "frames") as done:
        done(8)
    lines = watch.stream.getvalue().split("\r")
    assert "8 of 16 frames |############            | 50%" in lines[2]
    assert lines[-2].isspace() and len({len(line) for line in lines[:-1]}) == 1
    assert lines[-1] == "decode: 0.00 s (8 frames)\n"


def test_a_bar_is_that_of_the_whole_clip_where_its_work_is_known():
    watch = Stopwatch(Terminal(), clock=Clock(), work={"stage1": 3.0, "decode": 1.0})
    for name, steps in (("stage1", 3), ("decode", 1)):
        with watch.stage(name, steps) as step:
            for _ in range(steps):
                watch.clock.now += 10
                step()
    said = watch.stream.getvalue()
    shown = re.findall(r"(\w+: \d of \d steps) \|.*?\| (\d+%)(, \d+ s left)?", said)
    assert ("stage1: 3 of 3 steps", "75%", ", 10 s left") in shown
    assert ("decode: 0 of 1 steps", "75%", ", 10 s left") in shown


def test_a_long_stage_prints_a_line_every_30_s_where_there_is_no_bar():
    watch = Stopwatch(io.StringIO(), clock=Clock(), brief=True)
    with watch.stage("stage1", 8) as step:
        for _ in range(8):
            watch.clock.now += 10
            step()
    lines = watch.stream.getvalue().splitlines()
    assert lines == ["stage1: 3 of 8 steps, 50 s left", "stage1: 6 of 8 steps, 20 s left"]
