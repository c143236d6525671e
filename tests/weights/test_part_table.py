"""A part of a checkpoint is one row, from which scan, flag, opening and programs follow."""

import subprocess
import sys
from pathlib import Path


def test_a_new_part_is_a_row_a_model_and_a_config(tiny, tmp_path):
    for path in tiny("tiny-2.3", "official").iterdir():
        (tmp_path / path.name).symlink_to(path)
    words = [sys.executable, Path(__file__).with_name("toy_part.py"), tmp_path]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
