"""Files that a user can touch are read, or refused in one line that names them."""

import os

import pytest

from ltx2rt.commands.options import read_prompts
from ltx2rt.errors import InputError
from ltx2rt.serve.batch import read_lines
from ltx2rt.serve.users import read_tokens
from ltx2rt.serve.webhooks import read_hooks
from ltx2rt.text_files import parse, read_json, read_json_lines, read_text, read_toml

SHAPE = {"step": int, "rate?": float, "names": [str], "sizes": {str: (int, None)}}
GOOD = '{"step": 1, "rate": 2, "names": ["a"], "sizes": {"x": null}, "more": []}'


def test_a_value_of_its_shape_is_returned():
    assert parse(GOOD, SHAPE)["sizes"] == {"x": None}


@pytest.mark.parametrize("text, said", [
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
])  # fmt: skip
def test_a_text_that_is_no_such_value_is_refused(tmp_path, text, said):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"^.*a\.json is damaged \(.*{said}.*\); remove it$"):
        read_json(path, SHAPE, "remove it")
    with pytest.raises(InputError, match=rf"a\.json is damaged \(line 1: .*{said}.*\); correct it"):
        read_json_lines(path, SHAPE)


USERS = {  # what reads a file, and its lines
    "--prompts": (read_prompts, "a red circle\n\nis made", ["a red circle", "is made"]),
    "--token-file": (lambda p: [*read_tokens(p)], "# users\nann 0123456789abcdef0123456789\n",
                     ["0123456789abcdef0123456789"]),
    "--webhooks": (lambda p: [*read_hooks(p)], "ann https://a.test/x whsec_" + "QUFB" * 12, ["ann"]),
    "batch": (lambda p: [line.id for line in read_lines(p)], '{"id": "ab", "prompt": "é"}\n', ["ab"]),
}  # fmt: skip


@pytest.mark.parametrize("flag", USERS)
def test_what_windows_editors_save_is_read(tmp_path, flag):
    """With a byte order mark and carriage returns, in UTF-8 and in UTF-16 as PowerShell writes."""
    read, text, expected = USERS[flag]
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / "a").write_bytes(text.replace("\n", "\r\n").encode(encoding))
        assert read(tmp_path / "a") == expected
    (tmp_path / "a").write_bytes(b"\xe9\n")
    with pytest.raises(InputError, match=r"no UTF-8 text.*save it again as UTF-8"):
        read(tmp_path / "a")


def test_only_small_regular_files_of_text_are_read(tmp_path):
    path = tmp_path / "a.txt"
    for text in (b"\xef\xbb\xbfone\r\ntwo", "one\r\ntwo".encode("utf-16")):
        path.write_bytes(text)
        assert read_text(path) == "one\ntwo"
    with pytest.raises(InputError, match="more than 4 bytes"):
        read_text(path, 4)
    path.write_bytes(b"\xff")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, said in {
        "a.txt": "no UTF-8 text",
        "fifo": "fifo: not a regular file; save its content as one$",
        "/dev/zero": "^/dev/zero: not a regular file",
        ".": "cannot be read",
        "loop": "cannot be read",
        "x" * 10_000: "cannot be read",
        "nul\0": "cannot be read",
    }.items():
        with pytest.raises(InputError, match=said):
            read_text(tmp_path / name)


@pytest.mark.parametrize("name, text", [
    ("a.json", '["a red circle", "a blue square"]'),
    ("a.txt", '[\n "a red circle",\n "a blue square"\n]\n'),
    ("a.json", '[{"prompt": "a red circle"}, {"prompt": "a blue square"}]'),
    ("a.json", '{"prompts": ["a red circle", "a blue square", ""]}'),
    ("a.jsonl", '"a red circle"\n{"prompt": "a blue square"}\n'),
])  # fmt: skip
def test_prompts_come_from_lists_of_json(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == ["a red circle", "a blue square"]


def test_prompts_in_brackets_are_lines_and_tables_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("[VISUAL] a red circle\n[SOUND] rain [soft]\n")
    assert read_prompts(path) == ["[VISUAL] a red circle", "[SOUND] rain [soft]"]
    for name, text, said in (
        ("a.json", '{"a": 1}', "is no list of texts"),
        ("a.json", "[", 'is no list of texts .*; write \\["a fox", "a hare"\\]'),
        ("a.json", "[]", "is empty"),
        ("a.csv", "prompt\na fox\n", "is a table or markup"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=f"--prompts: .*{name} {said}"):
            read_prompts(tmp_path / name)


@pytest.mark.parametrize("text", ["a = ", "a = 1" + "0" * 5000, "a = " + "[" * 5000])
def test_a_file_that_is_no_toml_is_refused(tmp_path, text):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"^--config: .*a\.toml is no TOML file \("):
        read_toml("--config", path)
