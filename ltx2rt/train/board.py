"""Metrics of a run for TensorBoard, by its own writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError


class EventFiles:
    """Event files of a folder."""

    def __init__(self, folder: Path):
        writer: Any = import_module("tensorboard.summary.writer.event_file_writer")
        self.writer = writer.EventFileWriter(str(folder))

    @staticmethod
    def check() -> None:
        """Raises InputError where TensorBoard is not installed."""
        if find_spec("tensorboard") is None:
            raise InputError(
                "--tensorboard: the package is not installed; install it, or read metrics.jsonl"
            )

    def write(self, row: Mapping[str, Any]) -> None:
        """Write all numbers of a line of metrics."""
        event: Any = import_module("tensorboard.compat.proto.event_pb2")
        kept = {name: x for name, x in row.items() if isinstance(x, (int, float))}
        values = [{"tag": name, "simple_value": x} for name, x in kept.items() if name != "step"]
        made = event.Event(wall_time=time.time(), step=row["step"], summary={"value": values})
        self.writer.add_event(made)
        self.writer.flush()
