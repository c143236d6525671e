"""What is kept among the inputs, and for how long."""

import os
import time
from types import SimpleNamespace

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
