"""What is said when a file's folder goes away, or its disk is full."""

import errno
from types import SimpleNamespace

import pytest

from ltx2rt.atomic_file import check_outputs, partial_path, remove_partial, replacing, require_space
from ltx2rt.errors import InputError


def test_a_folder_removed_meanwhile_is_named(tmp_path):
    path = tmp_path / "gone" / "o.mp4"
    path.parent.mkdir()
    with (
        pytest.raises(OSError, match=r"gone/o\.mp4: its folder was removed"),
        replacing(path) as partial,
    ):
        partial.write_bytes(b"x")
        partial.unlink()
        path.parent.rmdir()


def test_an_error_that_is_not_of_the_file_stays_as_it_is(tmp_path):
    """The frames are made while the file is: their errors come through here, too."""
    for error in (OSError(errno.ECONNRESET, "a peer"), FileNotFoundError(errno.ENOENT, "no", "x")):
        with pytest.raises(OSError) as found, replacing(tmp_path / "o.mp4"):
            raise error
        assert found.value is error
    full = OSError(errno.ENOSPC, "No space left")
    with pytest.raises(OSError) as found, replacing(tmp_path / "o.mp4"):
        raise full
    assert "/o.mp4 could not be written: No space left; nothing is" in str(found.value)
    assert found.value.errno == errno.ENOSPC and found.value.strerror == full.strerror


def test_files_on_one_disk_share_its_room(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=15))
    require_space({tmp_path / "a": 7, tmp_path / "b": 8})
    with pytest.raises(InputError, match="make room"):
        require_space({tmp_path / "a": 7, tmp_path / "b": 9})


def test_a_check_leaves_nothing_and_follows_links(tmp_path):
    (tmp_path / "in").write_bytes(b"")
    (tmp_path / "link").symlink_to("in")
    check_outputs([("--a", tmp_path / "new"), ("--b", tmp_path / "other")], [tmp_path / "in"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "link"]
    with pytest.raises(InputError, match="--a"):
        check_outputs([("--a", tmp_path / "link")], [tmp_path / "in"])
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"--a: '.*loop' cannot be written \(Too many levels of"):
        check_outputs([("--a", tmp_path / "loop")], [])
    with pytest.raises(InputError, match="null byte"):
        check_outputs([("--a", tmp_path / "a\0b")], [])


def test_what_a_process_left_unfinished_is_removed(tmp_path):
    for name in ("a.mp4", "%05d.png", "gone.mp4"):
        partial = partial_path(tmp_path / name, 7)
        if name == "a.mp4":
            partial.touch()
        elif name == "%05d.png":  # frames are made in a folder
            partial.mkdir()
            (partial / "00000.png").touch()
        remove_partial(tmp_path / name, 7)
    assert list(tmp_path.iterdir()) == []
