"""What is kept among the inputs and for how long, and which files are ever removed."""

import errno
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from ltx2rt.errors import InputError
from ltx2rt.serve import folder as module
from ltx2rt.serve.folder import Folder, publish
from ltx2rt.serve.jobs import new_id


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path, min_free_bytes=0)
    yield made
    made.close()


def names(path):
    return {file.name for file in path.iterdir()}


def test_what_was_sent_and_no_job_reads_goes_after_a_while(folder, monkeypatch):
    """By the monotonic clock; what an earlier server was sent stays as long from the start on."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.s)
    monkeypatch.setattr(module.time, "time", lambda: 1e12)  # a clock that is far ahead
    before = "0" * 64
    (folder.inputs / before).write_bytes(b"0")
    read, unread, sent_again = (folder.keep_input(data) for data in (b"1", b"2", b"4"))
    jobs = [SimpleNamespace(job={"images": [[read, 0, 1.0]]})]
    now.s += 3000
    fresh = folder.keep_input(b"3")
    folder.keep_input(b"4")
    folder.sweep_inputs(jobs, older_than_s=3600)
    assert names(folder.inputs) == {before, read, unread, fresh, sent_again}
    now.s += 1000
    folder.sweep_inputs(jobs, older_than_s=3600)
    assert names(folder.inputs) == {before, read, fresh, sent_again}
    now.s += 2700
    folder.sweep_inputs(jobs, older_than_s=3600)
    assert names(folder.inputs) == {read}


def clip(number, path):
    path.write_bytes(b"clip")


def made(folder, stem, count=1, write=clip, report=dict):
    picture = partial(clip, 0)
    return publish(folder.outputs / stem, write, picture, report, count)


def test_only_files_that_a_server_made_are_removed(folder):
    foreign = {*"thesis.pdf .hidden video_1.mp4 folder link.mp4".split(), f"{new_id()}.1.mp4.bak"}
    for name in foreign - {"folder", "link.mp4"}:
        (folder.outputs / name).write_text("mine")
        (folder.inputs / name).write_text("mine")
    for place in (folder.outputs, folder.inputs):
        (place / "folder").mkdir()
        (place / "link.mp4").symlink_to("/etc/hostname")
    kept, gone, lost = new_id(), new_id(), new_id()
    for stem in (f"{kept}.2", f"{kept}.1", f"{gone}.1"):
        made(folder, stem, count=2)
    (folder.outputs / f"{lost}.1.json").write_text("{}")  # it was not made to its end
    for half in (f".{kept}.3.partial.mp4", f"..{kept}.3.1.partial.mp4.77.partial"):
        (folder.outputs / half).write_bytes(b"half")
    (folder.inputs / f".{'a' * 64}.media.01234567").write_bytes(b"half")
    for job in (kept, gone):
        (folder.outputs / f"{job}.segments").mkdir()
        for name in (
            *"request.json 0000.mov .0001.mov.7.partial ..0001.mov.7.partial.7.partial".split(),
        ):
            (folder.outputs / f"{job}.segments" / name).write_bytes(b"part")
    job = SimpleNamespace(id=kept, over=False, stem=f"{kept}.2", job={"images": []})
    assert folder.sweep([job], {kept, gone}) == []
    assert len(list((folder.outputs / f"{kept}.segments").iterdir())) == 4
    assert not (folder.outputs / f"{gone}.segments").exists()
    job.over = True
    folder.sweep([job], {kept, gone})
    assert not (folder.outputs / f"{kept}.segments").exists()
    assert names(folder.outputs) - foreign == {
        f"{kept}.2{end}" for end in (".mp4", ".1.mp4", ".webp", ".json")
    }
    assert names(folder.inputs) == foreign
    folder.clear()
    assert names(folder.outputs) == names(folder.inputs) == foreign
    folder.remove_folder()
    assert names(folder.outputs) == foreign


def test_a_clip_of_a_job_that_the_queue_does_not_know_stays(folder):
    """The queue may be a copy of some days ago."""
    made(folder, stem := f"{new_id()}.1")
    assert folder.sweep([], set()) == [f"{stem}.mp4"]
    assert names(folder.outputs) == {f"{stem}{end}" for end in (".mp4", ".webp", ".json")}


@pytest.mark.parametrize("left", ["clip", "image", "log"])
def test_files_of_a_server_without_their_queue_are_refused(folder, left):
    folder.require_queue()
    if left == "clip":
        made(folder, f"{new_id()}.1")
    elif left == "image":
        folder.keep_input(b"1")
    else:
        folder.queue.with_name("jobs.db-wal").write_bytes(b"1")
    for empty in (False, True):
        if empty:
            folder.queue.touch()
        with pytest.raises(
            InputError, match=r"^--data: .* but not its queue, jobs.db; put that back"
        ):
            folder.require_queue()
    folder.queue.write_bytes(b"a queue")
    folder.require_queue()


def test_a_clip_whose_report_is_gone_or_damaged_is_not_done(folder):
    job = SimpleNamespace(stem=f"{new_id()}.1", job={})
    assert folder.published(job) is None
    made(folder, job.stem)
    assert folder.published(job)["bytes"] == 4
    report = folder.outputs / f"{job.stem}.json"
    for text in ("", "{", None):
        report.unlink() if text is None else report.write_text(text)
        assert folder.published(job) is None


def test_a_run_that_fails_leaves_no_file(folder):
    def report():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        made(folder, "x.1", report=report)
    assert not names(folder.outputs)


def test_frames_of_a_clip_come_and_go_with_it(folder):
    """Whole before the clip is there; counted with it; none after a disk that was full."""
    job = SimpleNamespace(id=new_id(), over=True, job={"images": [], "n": 2})
    job.stem = f"{job.id}.1"

    def write(number, path):
        path.write_bytes(b"clip")
        path.with_suffix(".zip").write_bytes(b"frames"[: 3 * number])
        if number and full:
            raise OSError(errno.ENOSPC, "No space left on device")

    full = True
    with pytest.raises(OSError, match="No space left"):
        made(folder, job.stem, 2, write)
    assert not names(folder.outputs)
    full = False
    assert made(folder, job.stem, 2, write)["bytes"] == 4 + 4 + 3
    ends = (".mp4", ".zip", ".1.mp4", ".1.zip", ".webp", ".json")
    assert names(folder.outputs) == {job.stem + end for end in ends}
    assert folder.used_bytes() == folder.published(job)["bytes"] + 4 + 2  # thumbnail, report
    (folder.outputs / f".{job.id}.2.partial.zip").write_bytes(b"half")
    assert folder.sweep([job], {job.id}) == [] and len(names(folder.outputs)) == 6
    folder.remove(job)
    assert not names(folder.outputs)


def test_a_problem_is_told_in_a_sentence(folder, tmp_path):
    assert folder.problem() is None
    folder.outputs.rename(tmp_path / "away")
    code, said = folder.problem()
    assert code == "unavailable" and "cannot be written (No such file or directory)" in said
    (tmp_path / "away").rename(folder.outputs)
    folder.min_free_bytes = 10**18
    assert folder.problem()[0] == "disk_full"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "data", "/proc/data"):
        with pytest.raises(InputError, match=r"^--data: .*cannot be written .*name another one$"):
            Folder(Path(place))
