"""`ltx2rt compare`: how close two clips are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ltx2rt.commands.options import json_flag
from ltx2rt.instruments.compare import compare, format_comparison


def flags(to: Any) -> None:
    to.add_argument("a", type=Path, metavar="A.mp4", help="clip to compare with")
    to.add_argument("b", type=Path, metavar="B.mp4", help="clip to measure")
    json_flag(to)


def main(args: argparse.Namespace) -> None:
    result = compare(args.a, args.b)
    print(json.dumps(result, indent=1, allow_nan=False) if args.json else format_comparison(result))
