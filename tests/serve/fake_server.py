"""`ltx2rt` in a process of its own, whose workers are `fake_replica.py`."""

import sys
from pathlib import Path

from ltx2rt import cli
from ltx2rt.commands import serve

serve.worker_command = lambda args: [sys.executable, str(Path(__file__).with_name("fake_replica.py"))]

if __name__ == "__main__":
    sys.exit(cli.main())
