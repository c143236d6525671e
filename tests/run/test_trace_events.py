"""`plan --trace`: the file is what the trace-event format asks for, and as long as the printed
time."""

import json
from collections import defaultdict

import pytest

PLAN = ("plan", "--preset", "tiny-2.3", "--json")
NESTING_US = 1e-6  # of numbers that are rounded to 1e-3 us


@pytest.fixture(
    scope="module",
    params=[("h100", 2, "tensor=2"), ("h100", 2, "sequence=2"), ("v6e", 2, "tensor=2")],
)
def traced(request, command, tmp_path_factory):
    """The plan as JSON, and its trace."""
    kind, devices, mesh = request.param
    path = tmp_path_factory.mktemp("trace") / "plan.json"
    where = ("--device-kind", kind, "--devices", devices, "--mesh", mesh)
    status, out, err = command(*PLAN, *where, "--width", 1024, "--height", 1024, "--trace", path)
    assert (status, err) == (0, "")
    return json.loads(out), json.loads(path.read_text())


def test_every_event_has_the_fields_of_its_phase(traced):
    _, trace = traced
    assert trace["displayTimeUnit"] in ("ms", "ns") and trace["traceEvents"]
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["ph"] == "X" and isinstance(event["tid"], int)
            assert event["ts"] >= 0 and event["dur"] >= 0
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}


def test_slices_of_a_thread_are_in_one_another_or_apart(traced):
    found = defaultdict(list)
    for event in traced[1]["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    for events in found.values():
        around: list[float] = []  # ends of the slices that are open
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            end = event["ts"] + event["dur"]
            while around and around[-1] <= event["ts"] + NESTING_US:
                around.pop()
            assert not around or end <= around[-1] + NESTING_US, event
            around.append(end)


def test_a_traced_step_takes_the_printed_time_and_does_the_printed_work(traced):
    planned, trace = traced
    events = trace["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    slices = [e for e in events if e["ph"] == "X"]
    for stage in planned["stages"]:
        own = [e for e in slices if e["pid"] == processes[stage["name"]]]
        (step,) = [e for e in own if e["cat"] == "step"]
        assert step["dur"] == pytest.approx(1e6 * stage["time_s"], abs=1e-3)
        assert max(e["ts"] + e["dur"] for e in own) == pytest.approx(step["dur"], abs=NESTING_US)
        inner = [e for e in own if e["cat"] in ("product", "attention", "kernel", "wait")]
        rounding_us = 1e-3 * len(own)
        assert sum(e["dur"] for e in inner) == pytest.approx(step["dur"], abs=rounding_us)
        assert sum(e["args"].get("TFLOP", 0) for e in inner) == pytest.approx(stage["flops"] / 1e12)
        exchanges = [e for e in own if e["cat"] == "exchange"]
        assert len(exchanges) == sum(c["count"] for c in stage["collectives"].values())
    assert {e["cat"] for e in slices} >= {"product", "attention", "kernel", "exchange"}


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_planned(command, tmp_path):
    (tmp_path / "file").touch()
    status, out, err = command(*PLAN, "--device-kind", "h100", "--trace", tmp_path / "file/x.json")
    assert status == 2 and out == "" and "Not a directory" in err
