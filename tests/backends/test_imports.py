"""The core never imports a framework, and nothing in it reaches for a backend."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "triton", "diffusers", "ltx2rt_cuda", "ltx2rt_tpu")
WALK = f"""
import importlib, pkgutil, sys
import ltx2rt
names = [m.name for m in pkgutil.walk_packages(ltx2rt.__path__, "ltx2rt.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names), *[name for name in {FRAMEWORKS} if name in sys.modules])
"""


def test_importing_every_core_module_imports_no_framework():
    printed = subprocess.check_output([sys.executable, "-c", WALK], text=True).split()
    assert int(printed[0]) > 20
    assert printed[1:] == []


def test_import_contract_holds():
    """Static: also imports inside functions count."""
    lint = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert lint is not None, "lint-imports is missing beside this python: install the dev extra"
    result = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 kept, 0 broken" in result.stdout
