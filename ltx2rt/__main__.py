"""`ltx2rt`, `python -m ltx2rt`, and with it `torchrun -m ltx2rt`."""

import sys


def main() -> int:
    """`cli.main`, with one line for an interrupt from the first import on."""
    try:
        from ltx2rt import cli

        return cli.main()
    except KeyboardInterrupt:
        print("ltx2rt: error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
