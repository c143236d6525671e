"""Which versions of Python, PyTorch and JAX make a clip?

    make test-versions                     # every row of the table below
    python -m tests.versions 3.12 2.14     # only rows with one of these words

Installs the wheel in `dist` with each row's versions into an empty environment of its Python, and
has both backends make a clip of `examples/tiny-trained` there, which must agree. Prints the rows as
docs/dependencies.md shows them. A Python that this machine lacks is a row that says so.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEWEST = ""  # what pip chooses
ROWS = (
    ("3.11", "2.11.0", "0.10.0"),
    ("3.11", "2.12.1", "0.10.1"),
    ("3.11", "2.13.0", "0.10.2"),
    ("3.12", "2.14.1", NEWEST),
    ("3.13", NEWEST, NEWEST),
    ("3.14", NEWEST, NEWEST),
)  # Python, torch, JAX
AGREE_DB = 60  # float32 of two libraries: 89 dB in docs/quality.md
CLIP = (
    "--prompt", "a yellow triangle moves right, brown background", "--width", "128", "--height", "128",
    "--num-frames", "9", "--steps", "4", "--seed", "7", "--device", "cpu", "--dtype", "float32",
)  # fmt: skip
# where pip finds this tree
OUTSIDE = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
READ = "import importlib.metadata as m; print(*(m.version(n) for n in ('torch', 'jax')))"


def python(version: str) -> str | None:
    """The interpreter on PATH, or one that pyenv keeps."""
    kept = glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python"))
    for path in (*kept, shutil.which(f"python{version}")):
        asked = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if path and subprocess.run(asked, capture_output=True, text=True).stdout.split() == [
            version
        ]:
            return path
    return None


def tried(wheel: Path, row: tuple[str, str, str], folder: Path) -> tuple[str, str, str, str]:
    """(Python, torch, JAX as installed, result)."""
    found = python(row[0])
    if found is None:
        return (*(version or "newest" for version in row), "not tried: not on this machine")
    pins = [
        f"{name}=={version}"
        for name, version in zip(("torch", "jax"), row[1:], strict=True)
        if version
    ]
    bin_ = folder / "venv/bin"
    versions: list[str] = []

    def run(*words: str | Path) -> str:
        ran = subprocess.run(
            list(map(str, words)), cwd=folder, env=OUTSIDE, capture_output=True, text=True
        )
        if ran.returncode:
            raise RuntimeError((ran.stderr or ran.stdout).strip().splitlines()[-1])
        return ran.stdout

    try:
        run(found, "-m", "venv", "venv")
        run(bin_ / "python", "-m", "pip", "install", "-q", f"{wheel}[cuda,tpu]", *pins)
        versions = run(bin_ / "python", "-c", READ).split()
        run(bin_ / "ltx2rt", "--version")
        for backend in ("cuda", "tpu"):
            model = ROOT / "examples/tiny-trained"
            where = ("--model", model, "--backend", backend, "--output", f"{backend}.mp4")
            run(bin_ / "ltx2rt", "generate", *where, *CLIP)
        compared = json.loads(run(bin_ / "ltx2rt", "compare", "cuda.mp4", "tpu.mp4", "--json"))
        agree = compared["psnr_db"] is None or compared["psnr_db"] >= AGREE_DB
        result = "works" if agree else f"backends differ: {compared['psnr_db']:.0f} dB"
    except RuntimeError as error:
        result = str(error)
    return (row[0], *(versions or [version or "newest" for version in row[1:]]), result)


def main(*words: str) -> int:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if words and not any(word in part for word in words for part in row):
                continue
            where = Path(folder, "row")
            where.mkdir()
            shown = tried(wheel, row, where)
            shutil.rmtree(where)  # 6 GB with CUDA's libraries
            failed |= not shown[-1].startswith(("works", "not tried"))
            print("|", " | ".join(shown), "|", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
