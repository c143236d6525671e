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
        """Raises InputError where it is not installed."""
        if find_spec("tensorboard") is None:
            said = "the package tensorboard is not installed"
            raise InputError(f"--tensorboard: {said}; install it, or read metrics.jsonl")

    def write(self, row: Mapping[str, Any]) -> None:
        """All numbers of a line of metrics."""
        event: Any = import_module("tensorboard.compat.proto.event_pb2")
        summary: Any = import_module("tensorboard.compat.proto.summary_pb2")
        values = [
            summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
            if name != "step" and isinstance(value, (int, float))
        ]
        found = summary.Summary(value=values)
        self.writer.add_event(event.Event(wall_time=time.time(), step=row["step"], summary=found))
        self.writer.flush()
