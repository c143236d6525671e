"""`make demo` writes below its own folder alone."""

import pytest

from benchmarks import demo


@pytest.fixture
def commands(monkeypatch):
    """What it would run."""
    found = []
    monkeypatch.setattr(demo, "ltx2rt", lambda *words: found.append([*map(str, words)]))
    monkeypatch.setattr(demo.contact_sheet, "draw", lambda *_: None)
    monkeypatch.setattr(demo.os.path, "getsize", lambda _: 0)
    return found


def test_a_folder_that_holds_a_model_is_only_read(commands, tmp_path):
    (model := tmp_path / "model").mkdir()
    (model / "weights").write_text("precious")
    demo.main(str(model), folder=tmp_path / "demo")
    assert (model / "weights").read_text() == "precious"
    assert [words[0] for words in commands] == ["generate", "generate", "compare"]
    assert commands[0][commands[0].index("--model") + 1] == str(model)


def test_a_preset_is_written_below_the_demo_folder(commands, tmp_path):
    demo.main("tiny-2.5", folder=tmp_path / "demo")
    assert commands[0][:2] == ["weights", "make"]
    assert commands[0][-1] == str(tmp_path / "demo" / "tiny-2.5")


@pytest.mark.parametrize("model", ["tiny-9", "../tiny-2.5", "/nowhere/at/all"])
def test_anything_else_is_refused_and_writes_nothing(commands, tmp_path, model):
    with pytest.raises(SystemExit, match="is neither a folder nor one of tiny"):
        demo.main(model, folder=tmp_path / "demo")
    assert not commands and not (tmp_path / "demo").exists()
