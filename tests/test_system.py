"""Windows and macOS: their Python lacks modules and names that Linux has."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ltx2rt.system import hold

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/tiny-trained"
LACKS = {
    "darwin": "os.pidfd_open os.posix_fadvise os.sched_getaffinity os.memfd_create",
    "win32": """fcntl resource termios pwd grp os.fork os.pread os.preadv os.pwrite os.getuid os.geteuid os.uname
        os.sysconf os.statvfs os.killpg os.setsid os.getpgid os.sched_getaffinity os.posix_fadvise os.sync os.mkfifo
        os.pidfd_open os.getloadavg os.O_NOFOLLOW os.O_DIRECTORY os.O_NONBLOCK os.O_CLOEXEC os.WNOHANG mmap.PROT_READ
        mmap.MADV_DONTNEED select.poll signal.SIGHUP signal.SIGQUIT signal.SIGBUS signal.SIGKILL signal.SIGUSR1
        signal.SIGXCPU signal.SIGALRM signal.set_wakeup_fd""",
}
AS_THERE = """
import asyncio, ctypes, importlib, json, os, sys, types
import av, jax, ml_dtypes, numpy, PIL.Image, psutil, safetensors, tokenizers, torch, yaml
if sys.argv[1] == "win32":
    whole = ctypes.CDLL
    ctypes.CDLL = lambda name, *more: whole(os.fspath(name), *more)  # None is a TypeError there
theirs = types.ModuleType("os")
vars(theirs).update(vars(os))
for module in list(sys.modules.values()):
    if vars(module).get("os") is os and module.__name__ != "__main__":
        vars(module)["os"] = theirs  # a library of that system does without
for name in json.loads(sys.argv[2]):
    module, _, what = name.rpartition(".")
    if module:
        delattr(importlib.import_module(module), what)
    else:
        sys.modules[name] = None
ask = os.open
def open_file(path, *more, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)  # a folder is no file there
    return ask(path, *more, **named)
if sys.argv[1] == "win32":
    os.open = open_file
sys.platform = sys.argv[1]
from ltx2rt import cli
for words in json.loads(sys.argv[3]):
    sys.argv[1:] = words
    print("STATUS", words[0], cli.main(), file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("system", [pytest.param("darwin", marks=pytest.mark.long), "win32"])
def test_a_system_without_them_plans_inspects_compares_and_makes_a_clip(system, tmp_path):
    """The names are taken out of a process whose libraries are imported: theirs are built for the
    system. `os.open` refuses folders where Windows does."""
    clip = "generate --backend cuda --device cpu --steps 1 --width 64 --height 64 --num-frames 9"
    commands = [
        ["plan", "--model", str(MODEL), "--device-kind", "rtx4090"],
        ["weights", "inspect", str(MODEL)],
        ["weights", "make", "--preset", "tiny-2.3", "--layout", "official", "made"],
        [*clip.split(), "--model", str(MODEL), "--prompt", "a red circle", "--output", "a.mp4"],
        ["compare", "a.mp4", "a.mp4", "--json"],
        ["devices"],
        ["serve", "--backend", "cuda", "--model", str(MODEL)],
        [*clip.split(), "--model", str(MODEL), *"--prompt a --output b.mp4 --num-gpus 2".split()],
    ]
    lacks = json.dumps(LACKS[system].split())
    if system == "darwin":
        del commands[-2]  # serves
    argv = [sys.executable, "-c", AS_THERE, system, lacks, json.dumps(commands)]
    ran = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    said = [line.split()[1:] for line in ran.stderr.splitlines() if line.startswith("STATUS")]
    refused = [line for line in ran.stderr.splitlines() if "error:" in line]
    works = ["plan", "weights", "weights", "generate", "compare", "devices"]
    fails = ["generate"] if system == "darwin" else ["serve", "generate"]
    assert said == [[name, "0"] for name in works] + [[name, "2"] for name in fails], ran.stderr
    assert len(refused) == len(fails) and all("needs Linux" in line for line in refused), refused
    assert "Traceback" not in ran.stderr


def test_one_module_alone_has_what_a_system_may_lack():
    """The other files have refused such systems before."""
    asked = re.compile(
        r"import (fcntl|resource|termios|pwd|grp)\b|CDLL\(None|os\.O_(NOFOLLOW|DIRECTORY|NONBLOCK|CLOEXEC)"
        r"|os\.(fork|pread|preadv|pwrite|uname|sysconf|statvfs|sched_getaffinity)\b"
        r"|signal\.SIG(HUP|QUIT|BUS|KILL|USR1)\b"
    )
    refusing = {"serve/supervisor.py", "ranks/environment.py", "ranks/crew.py"}
    known = {f"ltx2rt/{name}" for name in (*refusing, "system.py")}
    files = [
        path for room in ("ltx2rt", "backends", "kernels") for path in (ROOT / room).rglob("*.py")
    ]
    assert {
        str(path.relative_to(ROOT)) for path in files if asked.search(path.read_text())
    } == known


def test_a_name_is_held_once(tmp_path):
    with hold(tmp_path / "a"), hold(tmp_path / "b"):
        assert hold(tmp_path / "a") is None
