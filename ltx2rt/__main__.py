"""`python -m ltx2rt`, and with it `torchrun -m ltx2rt`."""

import sys

from ltx2rt.cli import main

if __name__ == "__main__":
    sys.exit(main())
