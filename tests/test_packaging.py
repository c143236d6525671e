"""What is shipped: a wheel with four typed packages and the licence, a source archive that builds
the same wheel."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from ltx2rt.version import VERSION

ROOT = Path(__file__).parents[1]
OUTSIDE = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
PACKAGES = {"ltx2rt", "ltx2rt_cuda", "ltx2rt_tpu", "ltx2rt_kernels"}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(wheel, source archive) that `make dist` builds of a copy of this tree."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "demo")
    source = shutil.copytree(ROOT, tmp_path_factory.mktemp("build") / "source", ignore=ignored)
    bin_ = Path(sys.executable).parent
    made = ["make", "-C", source, "-o", ".venv/.installed", "dist", f"BIN={bin_}"]
    ran = subprocess.run(made, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (wheel,), (archive,) = (source.glob(f"dist/*{end}") for end in (".whl", ".tar.gz"))
    return wheel, archive


def test_the_wheel_holds_four_typed_packages_and_the_licence(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
        (licence,) = [name for name in names if name.endswith("dist-info/licenses/LICENSE")]
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = [name for name in names if name.endswith("dist-info/METADATA")]
        fields = message_from_string(wheel.read(metadata).decode())
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert {name for name in names if name.endswith("py.typed")} == {
        f"{package}/py.typed" for package in PACKAGES
    }
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "ltx2rt").rglob("*.py")}
    assert expected == {n for n in names if n.startswith("ltx2rt/") and n.endswith(".py")}
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "ltx2rt/serve/page").iterdir()}
    assert page and page <= set(names)
    assert fields["License-Expression"] == "Apache-2.0" and fields["Author"]
    assert "Typing :: Typed" in fields.get_all("Classifier", [])
    needs, big = fields.get_all("Requires-Dist", []), ("torch", "jax", "triton")
    assert not [need for need in needs if need.startswith(big) and "<" in need]  # no downgrade


def test_the_source_archive_holds_all_of_a_folder_or_nothing(built):
    with tarfile.open(built[1]) as tar:
        names = [name.split("/", 1)[1] for name in tar.getnames() if "/" in name]
    assert not [name for name in names if name.startswith(("tests", "benchmarks", ".ci"))]
    needed = {"LICENSE", "README.md", "pyproject.toml", "kernels/ltx2rt_kernels/py.typed"}
    needed |= {f"examples/comfyui/{name}" for name in ("nodes.py", "client.py", "pyproject.toml")}
    assert needed <= set(names) and "examples/comfyui/workflows/text.json" in names
    nodes = tomllib.loads((ROOT / "examples/comfyui/pyproject.toml").read_text())
    assert nodes["project"]["version"] == VERSION and nodes["tool"]["comfy"]["DisplayName"]
    assert not [name for name in names if name.endswith(".safetensors")]  # models stay in the clone


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """`bin` of an empty environment with the wheel, which finds the packages that it needs here."""
    venv = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--no-deps"]
    subprocess.run([*pip, "--quiet", built[0]], check=True, env=OUTSIDE)
    (packages,) = venv.glob("lib/python*/site-packages")
    packages.joinpath("here.pth").write_text(sysconfig.get_path("purelib"))
    return venv / "bin"


@pytest.mark.long
def test_the_installed_wheel_makes_a_clip_without_the_clone(installed, tmp_path):
    def run(*words: object, program: str = "ltx2rt") -> str:
        ran = subprocess.run(
            [installed / program, *map(str, words)], cwd=tmp_path, env=OUTSIDE,
            capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    where = "import ltx2rt, ltx2rt_cuda, ltx2rt_tpu; print(ltx2rt.__file__, ltx2rt_cuda.__file__)"
    found = run("-c", where, program="python").split()
    assert all(Path(name).is_relative_to(installed.parent) for name in found)
    assert run("--version").split() == ["ltx2rt", VERSION]
    model = ROOT / "examples/tiny-trained"
    assert json.loads(run("plan", "--model", model, "--device-kind", "v6e", "--json"))["fits"]
    assert "gemma" in run("weights", "inspect", model)
    clip = ("--width", 64, "--height", 64, "--num-frames", 9, "--steps", 1, "--output", "clip.mp4")
    words = ("--backend", "cuda", "--device", "cpu", "--prompt", "a red circle", *clip)
    run("generate", "--model", model, *words)
    assert json.loads(run("compare", "clip.mp4", "clip.mp4", "--json"))["ssim"] == 1


def test_the_changelog_has_the_version():
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" and headings[1].split()[0] == VERSION


def test_every_sentence_about_installing_names_an_extra_of_the_clone():
    """The package is in no index: `pip install` means the clone, `.[EXTRA]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    said = re.compile(r"(ltx2rt|pip install '\.)\[([^]]*)\]")
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    for folder in ("ltx2rt", "backends", "kernels", "examples", "benchmarks"):
        files += [*ROOT.joinpath(folder).rglob("*.py"), *ROOT.joinpath(folder).rglob("*.md")]
    found = [(path, *match) for path in files for match in said.findall(path.read_text())]
    assert len(found) > 5
    for path, what, names in found:
        assert what != "ltx2rt", f"{path}: ltx2rt[{names}]"
        unknown = {name for name in names.split(",") if "{" not in name} - extras.keys()
        assert not unknown, f"{path}: {unknown}"


@pytest.mark.parametrize(("subject", "passes"), [
    ("server: hide the negative prompt when unused", True),
    ("fixup! server: hide", True),
    ("Server hides the prompt", False),
    ("server: " + "x" * 65, False),
])  # fmt: skip
def test_a_commit_names_its_area(tmp_path, subject, passes):
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nBody.\n")
    hook = [ROOT / ".ci/commit-msg", message]
    assert (subprocess.run(hook, capture_output=True).returncode == 0) is passes
