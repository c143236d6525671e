"""What is shipped: a wheel with four typed packages and the licence, a source archive that builds
the same wheel."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"ltx2rt", "ltx2rt_cuda", "ltx2rt_tpu", "ltx2rt_kernels"}
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, f'build_{sys.argv[1]}')(sys.argv[2]))"


def build(kind: str, source: Path, out: Path) -> Path:
    ran = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)], cwd=source, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return out / ran.stdout.split()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(wheel, source archive) of a copy of this tree."""
    folder = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "demo")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    archive = build("sdist", source, folder)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return build("wheel", folder / archive.name.removesuffix(".tar.gz"), folder), archive


def test_the_wheel_holds_four_typed_packages_and_the_licence(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        (licence,) = [name for name in names if name.endswith("dist-info/licenses/LICENSE")]
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = [
            wheel.read(name).decode() for name in names if name.endswith("dist-info/METADATA")
        ]
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert {name for name in names if name.endswith("py.typed")} == {
        f"{package}/py.typed" for package in PACKAGES
    }
    expected = {path.relative_to(ROOT) for path in (ROOT / "ltx2rt").rglob("*.py")}
    assert expected == {
        Path(name) for name in names if name.startswith("ltx2rt/") and name.endswith(".py")
    }
    page = {path.relative_to(ROOT) for path in (ROOT / "ltx2rt/serve/page").iterdir()}
    assert page and page <= {Path(name) for name in names}
    fields = message_from_string(metadata)
    assert fields["License-Expression"] == "Apache-2.0" and fields["Author"]
    assert "Typing :: Typed" in fields.get_all("Classifier", [])
    needs = fields.get_all("Requires-Dist", [])
    assert not [
        need for need in needs if need.startswith(("torch", "jax", "triton")) and "<" in need
    ]  # no downgrade


def test_the_source_archive_holds_all_of_a_folder_or_nothing(built):
    with tarfile.open(built[1]) as tar:
        names = [name.split("/", 1)[1] for name in tar.getnames() if "/" in name]
    assert not [name for name in names if name.startswith(("tests", "benchmarks", ".ci"))]
    assert {"LICENSE", "README.md", "pyproject.toml", "kernels/ltx2rt_kernels/py.typed"} <= set(
        names
    )
