"""Files that a user can touch are read, or refused in one line that names them."""

import os

import pytest

from ltx2rt.errors import InputError
from ltx2rt.text_files import parse, read_json, read_json_lines, read_text

SHAPE = {"step": int, "rate?": float, "names": [str], "sizes": {str: (int, None)}}
GOOD = '{"step": 1, "rate": 2, "names": ["a"], "sizes": {"x": null}, "more": []}'


def test_a_value_of_its_shape_is_returned():
    assert parse(GOOD, SHAPE)["sizes"] == {"x": None}


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "Expecting"),
        ("[" * 200_000, "nested too deeply"),
        ("9" * 5000, "digits"),
        ('{"step": ' + "9" * 4000 + "}", "step is a huge number, expected a whole number"),
        ("{}", "step is missing"),
        ("[]", r"it is \[\], expected an object"),
        (GOOD.replace("1", "true"), "step is True, expected a whole number"),
        (GOOD.replace("1", "1.5"), "step is 1.5, expected a whole number"),
        (GOOD.replace("2", "NaN"), "rate is nan, expected a number"),
        (GOOD.replace('"a"', "3"), r"names\[0\] is 3, expected text"),
        (GOOD.replace("null", '"y"'), "x is 'y', expected a whole number"),
    ],
)
def test_a_text_that_is_no_such_value_is_refused(tmp_path, text, said):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"^.*a\.json is damaged \(.*{said}.*\); remove it$"):
        read_json(path, SHAPE, "remove it")
    with pytest.raises(InputError, match=rf"a\.json is damaged \(line 1: .*{said}.*\); correct it"):
        read_json_lines(path, SHAPE)


def test_only_small_regular_files_of_text_are_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read_text(path) == "one\ntwo"
    with pytest.raises(InputError, match="more than 4 bytes"):
        read_text(path, 4)
    path.write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, said in {
        "a.txt": "no UTF-8 text",
        "fifo": "not a regular file",
        "/dev/zero": "not a regular file",
        ".": "cannot be read",
        "loop": "cannot be read",
        "x" * 10_000: "cannot be read",
        "nul\0": "cannot be read",
    }.items():
        with pytest.raises(InputError, match=said):
            read_text(tmp_path / name)
