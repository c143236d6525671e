"""Variables that a rank reads, and the statuses and times that it and its launcher share."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Mapping
from ipaddress import ip_address

from ltx2rt.errors import InputError
from ltx2rt.system import libc

LAUNCHER = "LTX2RT_LAUNCHER"  # pid of the `start` that launched this rank: it reports failures that no rank can
# drawn for that launch: a process that does not know it finds nothing of it in the store
TOKEN = "LTX2RT_TOKEN"
STORE = "LTX2RT_STORE"  # rank 0's descriptor of the socket on which its store listens
SLEEPING = ("OMP_WAIT_POLICY", "PASSIVE")  # idle threads of OpenMP sleep instead of spinning
FAILED, SIGNALLED = 1, 128  # exit statuses; a signal's is 128 + its number
GRACE_S = 5.0  # for ranks to end by themselves, then again after SIGTERM
POLL_S = 0.2
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """(this rank, how many there are) by the variables of torchrun, accelerate and `start`. Raises
    InputError unless these are numbers in range and say where the ranks meet."""
    size = number(environment, "WORLD_SIZE", 1, default="1")
    if size == 1:
        return 0, 1
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := ", ".join(name for name in needed if name not in environment):
        raise InputError(
            f"WORLD_SIZE is {size} without {missing}; start ranks by torchrun or --num-gpus"
        )
    number(environment, "MASTER_PORT", 1, 2**16)
    return number(environment, "RANK", 0, size), size


def number(
    environment: Mapping[str, str],
    name: str,
    least: int,
    limit: int | None = None,
    default: str | None = None,
) -> int:
    """The variable as a number from `least` to below `limit`. Raises InputError if it is none."""
    text = environment.get(name, default) or ""
    found = int(text) if text.isdecimal() and len(text) < 10 else -1
    if found < least or (limit is not None and found >= limit):
        below = "" if limit is None else f" below {limit}"
        raise InputError(f"{name} is {text!r}, expected a number from {least}{below}")
    return found


def interface(host: str) -> str:
    """Return an address to which every host resolves the name `host`; "", all addresses, if there
    is none."""
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return ""
    loopback = ip_address(str(address).partition("%")[0]).is_loopback
    return "" if loopback and host not in (address, "localhost") else str(address)


def die_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends, however that happens."""
    if sys.platform == "linux":
        libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
