"""The finished steps of a denoising stage on disk, from which a run that was stopped goes on.

Decides when they are written: every ten seconds, at the stage's end, and when the run is stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from ltx2rt.atomic_file import replacing
from ltx2rt.backend import Backend
from ltx2rt.errors import Cancelled, InputError
from ltx2rt.notes import note
from ltx2rt.stages.stage import State
from ltx2rt.weights.files import TensorFile, write_arrays

STEPS, COUNT = ".steps", "steps"  # suffix of the files; the tensor of (finished, all) steps
DIGEST = "digest"  # the tensor that covers all others
EVERY_S = 10.0
STOPPED = (KeyboardInterrupt, SystemExit, Cancelled)


@contextmanager
def durable(path: Path) -> Iterator[Path]:
    """Path of a file in the making, which is on the disk before it gets its name."""
    with replacing(path) as partial:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())


class KeptSteps:
    """The file of one stage; none if the state has no folder. of: the stage's number of steps."""

    def __init__(self, backend: Backend, state: State, name: str, of: int):
        self.backend, self.claim, self.of = backend, state.claim, of
        self.path = state.folder and state.folder / f"{name}{STEPS}"
        self.saved = self.done = 0
        self._values: Callable[[], dict[str, np.ndarray]] = dict
        self._saved_s = time.monotonic()

    def read(self, begun: Mapping[str, np.ndarray]) -> tuple[int, dict[str, np.ndarray]]:
        """Number of finished steps, and the loop's state after them; 0 unless all processes find
        the file whole. begun: the state before the first step."""
        if self.path is None:
            return 0, {}
        values: dict[str, np.ndarray] = {}
        if self.path.is_dir():
            raise InputError(f"{self.path} is a folder; move it, or choose another name")
        if os.path.lexists(self.path):
            try:
                values = _whole(self.path, begun, self.of)
            except InputError as error:
                note(f"{error}; the stage begins at its first step")
        if self.backend.agree(COUNT not in values):
            return 0, {}
        self.saved = self.done = int(values.pop(COUNT)[0])
        return self.done, values

    def step(self, values: Callable[[], dict[str, np.ndarray]]) -> None:
        """Note that a step is finished. values: makes the loop's state after it."""
        self.done, self._values = self.done + 1, values
        if self.done == self.of or time.monotonic() - self._saved_s > EVERY_S:
            self._save()

    def _save(self) -> None:
        if self.path is None or self.saved == self.done or not self.backend.is_main:
            return
        if not self.path.parent.exists():
            self.claim()
        values = self._values() | {COUNT: np.array([self.done, self.of], np.int32)}
        with durable(self.path) as partial:
            write_arrays(partial, values | {DIGEST: _digest(values)})
        self.saved, self._saved_s = self.done, time.monotonic()

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Write the latest step if the body is stopped."""
        try:
            yield
        except STOPPED:
            self._save()
            raise


def _digest(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """u8[32]: the digest of all bytes, in the order of the tensors' names."""
    found = sha256()
    for name in sorted(values):
        found.update(name.encode())
        found.update(np.ascontiguousarray(values[name]).data.cast("B"))
    return np.frombuffer(found.digest(), np.uint8)


def _whole(path: Path, begun: Mapping[str, np.ndarray], of: int) -> dict[str, np.ndarray]:
    """The tensors of a file of steps. begun: some with these names, shapes and types; of: the number
    of all steps. Raises InputError for a file that is not as it was written."""
    if not path.is_file():
        raise InputError(f"{path} is no regular file")
    file = TensorFile(path)
    values = {name: file.read(name) for name in file.names()}
    digest = values.pop(DIGEST, None)
    form = {name: (x.shape, x.dtype) for name, x in values.items()}
    expected = {name: (x.shape, x.dtype) for name, x in begun.items()}
    if form != expected | {COUNT: ((2,), np.dtype(np.int32))}:
        whole = False
    elif digest is None:  # an earlier version wrote it
        whole = all(np.isfinite(x).all() for x in values.values())
    else:
        whole = np.array_equal(digest, _digest(values))
    if not whole or not 0 < values[COUNT][0] <= values[COUNT][1] == of:
        raise InputError(f"{path} is damaged")
    return values


def latest(folder: Path) -> tuple[str, int, int] | None:
    """The stage of a folder that was written last, with its numbers of finished and all steps."""
    files = sorted(folder.glob(f"*{STEPS}"), key=lambda path: path.lstat().st_mtime_ns)
    for path in reversed(files):
        with suppress(ValueError, KeyError, TypeError):  # a damaged file counts for nothing
            if not path.is_file():
                continue
            done, of = TensorFile(path).read(COUNT)
            return path.name.removesuffix(STEPS), int(done), int(of)
    return None
