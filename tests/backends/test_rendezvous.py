"""The store of torch ranks: who reaches it, and who finds what is in it."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from ltx2rt.ranks.environment import STORE, TOKEN

RENDEZVOUS = """
import os, pathlib
from torch.distributed import TCPStore
from ltx2rt_cuda.distributed import rendezvous
store, again = rendezvous(), rendezvous()
store.set("key", "value")
assert again.get("key") == b"value"
stranger = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
assert stranger.check(["ltx2rt//key"]) == (not os.environ.get("LTX2RT_TOKEN"))
mine = {os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()}
sockets = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
print(*[words[1] for words in sockets if words[3] == "0A" and f"socket:[{words[9]}]" in mine])
"""


@pytest.mark.parametrize("launched", [False, True])
def test_the_store_listens_on_loopback_alone_under_the_token_of_the_launch(launched):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = os.environ | where | {"RANK": "0", "WORLD_SIZE": "2"}
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
        if launched:
            env |= {STORE: str(listening.fileno()), TOKEN: "a secret"}
            how["pass_fds"] = (listening.fileno(),)
        else:
            listening.close()
        ran = subprocess.run([sys.executable, "-c", RENDEZVOUS], env=env, **how)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [f"0100007F:{port:04X}"]
