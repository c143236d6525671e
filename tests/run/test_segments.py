"""The folder of a clip in segments when its run is stopped."""

from types import SimpleNamespace

import pytest

from ltx2rt.run import segments


@pytest.mark.parametrize("made", [0, 1])
def test_a_stopped_run_says_how_it_goes_on(made, tmp_path, monkeypatch, capsys):
    for name in ("comment", "written"):
        monkeypatch.setattr(segments, name, lambda *_: {})
    folder = tmp_path / "clip.mp4.segments"
    parts = [SimpleNamespace(path=folder / f"{i:04d}.mov") for i in range(3)]
    plan = SimpleNamespace(clip=SimpleNamespace(parts=parts, segments=parts))
    with pytest.raises(KeyboardInterrupt), segments.claimed(None, plan, folder):
        for part in parts[:made]:
            part.path.touch()
        raise KeyboardInterrupt
    said = f"1 of 3 segments are kept in {folder}: the same command goes on"
    assert (said in capsys.readouterr().err) == bool(made)
