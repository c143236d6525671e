"""A process starts from what an earlier one compiled, and says and replaces what it cannot use."""

import json
import os
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import jax
import pytest
from ltx2rt_tpu.compile_cache import keep_compiled, remove_damaged

from ltx2rt.commands.generate import compiled_folder
from ltx2rt.instruments.compare import compare

COUNTED = """
import json, sys
from collections import Counter
import jax
seen = Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.rsplit("/")[-1]]))
from ltx2rt.cli import main
status = main()
print(json.dumps(seen), file=sys.stderr)
sys.exit(status)
"""
CLIP = "--pipeline one-stage --width 64 --height 64 --num-frames 9 --steps 1 --seed 1 --no-audio --device cpu"
FLAGS = ["--backend", "tpu", "--prompt", "a fox", *CLIP.split()]


def run(model: Path, root: Path, output: Path, *flags: str) -> tuple[dict[str, int], str]:
    """One `generate` in a process of its own: JAX's cache events, and what it said."""
    argv = [sys.executable, "-c", COUNTED, "generate", "--model", model, "--output", output]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(root)}
    ran = subprocess.run([*argv, *FLAGS, *flags], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said, events = ran.stderr.strip().rsplit("\n", 1)
    return json.loads(events), said


@pytest.mark.long
def test_the_second_process_compiles_nothing_and_damage_is_mended(tiny, tmp_path):
    """The second makes another request of the same size."""
    model, root = tiny("tiny-2.0", "official"), tmp_path / "kept"
    (root / "ltx2rt-0.0.1_jax-0.1").mkdir(parents=True)
    first, said = run(model, root, tmp_path / "first.mp4")
    assert "ltx2rt-0.0.1_jax-0.1" in said and "cannot use" in said
    assert first["cache_misses"] == first["compile_requests_use_cache"] > 0
    assert "cache_hits" not in first

    changed = ["--prompt", "an owl", "--seed", "2", "--steps", "3", "--video-cfg", "2.5"]
    second, said = run(model, root, tmp_path / "second.mp4", *changed)
    assert second["cache_hits"] == second["compile_requests_use_cache"] > 0
    assert "cache_misses" not in second
    assert "ltx2rt:" not in said

    *_, flipped, cut = sorted(root.glob("*/*-cache"), key=lambda path: path.stat().st_size)
    cut.write_bytes(cut.read_bytes()[:1000])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 255
    flipped.write_bytes(data)
    third, said = run(model, root, tmp_path / "third.mp4")
    assert third["cache_misses"] == 2 and said.count("is damaged") == 2
    found = compare(tmp_path / "first.mp4", tmp_path / "third.mp4")
    assert found["psnr_db"] == 200.0  # what equal pictures give
    for path in (flipped, cut):
        assert len(zlib.decompress(path.read_bytes())) > 1000


@pytest.mark.slow
def test_another_size_compiles_what_depends_on_it_once(tiny, tmp_path):
    model, root = tiny("tiny-2.0", "official"), tmp_path / "kept"
    run(model, root, tmp_path / "first.mp4")
    wider, _ = run(model, root, tmp_path / "wider.mp4", "--width", "128")
    assert wider["cache_misses"] > 0 and wider["cache_hits"] > 0  # the text encoder's
    assert "cache_misses" not in run(model, root, tmp_path / "again.mp4", "--width", "128")[0]


KEPT = """
import sys
from pathlib import Path
from ltx2rt_tpu.compile_cache import keep_compiled
keep_compiled(Path(sys.argv[1]))
import jax
jax.jit(lambda x: x + 1)(1.0)
print(sorted(path.name for path in Path(sys.argv[1]).glob("*/*-cache")))
"""


def test_keys_do_not_depend_on_the_folder(tmp_path):
    """A copied cache is used."""
    command = [sys.executable, "-c", KEPT]
    keys = {subprocess.check_output([*command, tmp_path / name]) for name in "ab"}
    assert len(keys) == 1 and b"-cache" in keys.pop()


def test_what_decompresses_and_is_no_executable_goes_with_its_module(tmp_path):
    for name in ("jit_a-1-cache", "jit_a-2-cache", "jit_b-1-cache"):
        (tmp_path / name).write_bytes(zlib.compress(b"garbage"))
    remove_damaged(tmp_path, "jit_a")
    assert [path.name for path in tmp_path.iterdir()] == ["jit_b-1-cache"]


@pytest.fixture
def kept_configuration():
    """What `keep_compiled` sets is put back."""
    more = (f"persistent_cache_{x}" for x in ("min_compile_time_secs", "enable_xla_caches"))
    names = tuple(f"jax_{name}" for name in ("compilation_cache_dir", *more))
    values, show = [getattr(jax.config, name) for name in names], warnings.showwarning
    yield
    for name, value in zip(names, values, strict=True):
        jax.config.update(name, value)
    warnings.showwarning = show


def test_a_folder_that_keeps_nothing_is_said(tmp_path, capsys, kept_configuration):
    (tmp_path / "file").write_text("")
    keep_compiled(tmp_path / "file")
    assert "cannot keep executables in" in capsys.readouterr().err
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, capsys, kept_configuration):
    """What lies there is run as it is."""
    with warnings.catch_warnings():
        keep_compiled(tmp_path / "own")
    (folder,) = (tmp_path / "own").iterdir()
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    assert jax.config.jax_compilation_cache_dir == str(folder) and capsys.readouterr().err == ""
    for path in (folder, folder.parent):
        path.chmod(0o777)
        keep_compiled(tmp_path / "own")
        assert f"others may write to {path}; chmod go-w" in capsys.readouterr().err
        assert jax.config.jax_compilation_cache_dir is None
        path.chmod(0o755)


def test_the_user_says_where_executables_are_kept():
    home, own = {"XDG_CACHE_HOME": "/b"}, {"JAX_COMPILATION_CACHE_DIR": "/a"}
    found = [compiled_folder(environment) for environment in (home | own, home, {})]
    assert found == [Path("/a"), Path("/b/ltx2rt"), Path.home() / ".cache/ltx2rt"]
