"""What is kept among the inputs, and for how long."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ltx2rt.errors import InputError
from ltx2rt.serve.folder import Folder


def test_what_was_sent_and_no_job_reads_goes_after_a_while(tmp_path):
    folder = Folder(tmp_path)
    read, unread, fresh, sent_again = (folder.keep_input(data) for data in (b"1", b"2", b"3", b"4"))
    for name in (read, unread, sent_again):
        os.utime(folder.inputs / name, (0, time.time() - 7200))
    folder.keep_input(b"4")
    folder.sweep_inputs([SimpleNamespace(job={"images": [[read, 0, 1.0]]})], older_than_s=3600)
    assert {path.name for path in folder.inputs.iterdir()} == {read, fresh, sent_again}
    folder.sweep([])
    assert not list(folder.inputs.iterdir())
    folder.close()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "data", "/proc/data"):
        with pytest.raises(InputError, match=r"^--data: .*cannot be written .*name another folder$"):
            Folder(Path(place))
