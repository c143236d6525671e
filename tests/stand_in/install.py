"""Install PyTorch's CUDA build for machines without a GPU: python tests/stand_in/install.py

Everything above the CUDA libraries is the shipped build: the caching allocator, streams, CUDA
graphs, NCCL's process groups. libcudart, libcuda, libcublas, libcublasLt and libnccl are replaced
by stand-ins, built from the C files beside this one with a function that returns 0 for everything
else that PyTorch wants of them. Needs gcc, nm and 5 GB of disk.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
FOLDER = REPOSITORY / ".venv" / "stand-in"
TORCH = "2.14.1"
# What the product and its tests import beside torch; no backend of JAX is tried here.
PACKAGES = (
    "av",
    "einops",
    "hypothesis",
    "ml_dtypes",
    "pillow",
    "pytest",
    "safetensors",
    "tokenizers",
)
CUDA = 13
# Soname of each library, its source, and definitions for the compiler.
LIBRARIES = {
    f"libcudart.so.{CUDA}": ("runtime.c", ()),
    f"libcublas.so.{CUDA}": ("blas.c", ()),
    f"libcublasLt.so.{CUDA}": ("blas.c", ("-DLT",)),
    "libcuda.so.1": ("driver.c", ()),
    "libnccl.so.2": ("nccl.c", ()),
}
# Headers of the runtime include one of CCCL's, of which they use three names.
NV_TARGET = """#define NV_IF_TARGET(...)
#define NV_IF_ELSE_TARGET(...)
#define NV_PROVIDES_SM_80 0
#define NV_IS_DEVICE 0
"""


def run(*command: object) -> str:
    return subprocess.check_output([*map(str, command)], text=True)


def wanted(site: Path) -> dict[str, set[str]]:
    """Functions that the shipped libraries want of each library that is replaced, by soname."""
    found: dict[str, set[str]] = {soname: set() for soname in LIBRARIES}
    patterns = ("torch/lib/*.so*", "torch/_C*.so", "nvidia/*/lib/*.so*")
    for library in (path for pattern in patterns for path in site.glob(pattern)):
        for line in run("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version in found:
                found[version].add(name)
            elif name.startswith("nccl"):
                found["libnccl.so.2"].add(name)
    header = (site / f"nvidia/cu{CUDA}/include/cuda.h").read_text()
    found["libcuda.so.1"] = set(re.findall(r"CUDAAPI (cu[A-Z]\w+)\(", header))
    return found


def build(soname: str, names: Iterable[str], site: Path, built: Path) -> None:
    source, definitions = LIBRARIES[soname]
    compiled, stubs, versions = (built / f"{soname}.{end}" for end in ("o", "c", "map"))
    gcc = ("gcc", "-w", "-O1", "-fPIC", *definitions)
    includes = [f"-I{site / f'nvidia/cu{CUDA}/include'}", f"-I{built / 'include'}"]
    includes.append(f"-I{built / f'crt/nvidia/cu{CUDA}/include'}")
    run(*gcc, *includes, "-c", HERE / source, "-o", compiled)
    own = {line.split()[-1] for line in run("nm", "--defined-only", compiled).splitlines()}
    lines = [f"int {name}(void) {{ return 0; }}" for name in sorted(set(names) - own)]
    stubs.write_text("\n".join(lines) + "\n")
    more: list[object] = [f"-Wl,-soname,{soname}"]
    if soname.endswith(f".{CUDA}"):  # PyTorch asks these for versions of their symbols
        versions.write_text(f"{soname} {{ global: *; }};\n")
        more.append(f"-Wl,--version-script={versions}")
    if source != "runtime.c":
        more.append(built / f"libcudart.so.{CUDA}")
    run(*gcc, "-shared", "-o", built / soname, compiled, stubs, *more, "-lpthread")


def describe(built: Path) -> None:
    """Metadata of the package, by which its backends are found; the code is the tree's own."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    folder = built / "ltx2rt-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ltx2rt\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def install(folder: Path, torch: str) -> None:
    python, built = folder / "venv/bin/python", folder / "lib"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder / "venv")
    built.mkdir(exist_ok=True)
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    run(*pip, f"torch=={torch}", *PACKAGES)
    run(*pip, "--no-deps", "--upgrade", "--target", built / "crt", "nvidia-cuda-crt")
    (built / "include/nv").mkdir(parents=True, exist_ok=True)
    (built / "include/nv/target").write_text(NV_TARGET)
    site = next((folder / "venv/lib").glob("python3*")) / "site-packages"
    for soname, names in wanted(site).items():
        build(soname, names, site, built)
    for soname in LIBRARIES:
        for shipped in site.glob(f"nvidia/*/lib/{soname}"):
            shutil.copy(built / soname, shipped)
    describe(built)
    cuda = run(python, "-c", "import torch; print(torch.version.cuda)").strip()
    (folder / ".installed").write_text(f"torch {torch}, CUDA {cuda}\n")
    print(f"{folder}: torch {torch} for CUDA {cuda} on a stand-in for its libraries")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PyTorch's CUDA build on stand-ins for CUDA")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--torch", default=TORCH, help="its version")
    args = parser.parse_args()
    install(args.folder.absolute(), args.torch)
