"""Requests with sounds and videos, planned in a process that decodes their files.

It lives as long as the server and plans one request after another. A request that takes too long,
or ends it, is refused; the next one gets a new process.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ltx2rt.backend import DeviceInfo
from ltx2rt.ranks.environment import die_with_parent
from ltx2rt.serve.admission import Admission, Admitted
from ltx2rt.serve.refusal import Refusal
from ltx2rt.system import limit

TIME_S = 60
MEMORY_BYTES = 2**32  # beside the files of the checkpoint, which are mapped
LINE_BYTES = 2**24


class Apart:
    """admission: the server's own, whose twin the process makes."""

    def __init__(self, admission: Admission):
        more = {n: getattr(admission, n) for n in ("default", "lora_folder", "enhancer", "names")}
        self._made_of = (admission.options, admission.inputs), more
        self._process: Any = None  # as asyncio starts it
        self._one_at_a_time = asyncio.Lock()

    async def admit(
        self, given: Mapping[str, Any], device: tuple[dict[str, Any], Mapping[str, int]] | None
    ) -> Admitted:
        """As `Admission.admit`, for such a device and mesh if they are known. Raises Refusal."""
        async with self._one_at_a_time:
            await self._start()
            try:
                self._send(given, device)
                answer = await asyncio.wait_for(self._process.stdout.readuntil(), TIME_S)
                found = json.loads(answer)
            except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
                text = "the files of this request take too much time or memory; send smaller ones"
                raise Refusal(400, "too_large_to_plan", text) from None
            finally:
                if sys.exception() is not None:  # what it says next would answer this request
                    await self.stop()
        if "refused" in found:
            raise Refusal(**found["refused"])
        return Admitted(**found)

    async def _start(self) -> None:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "ltx2rt.serve.apart", stdin=-1, stdout=-1, limit=LINE_BYTES,
                start_new_session=True,
            )  # fmt: skip
            self._send(pickle.dumps(self._made_of).hex())

    def _send(self, *what: Any) -> None:
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.communicate()


def main() -> None:
    """Plan what comes in lines on stdin, until it ends."""
    die_with_parent()
    limit("RLIMIT_DATA", MEMORY_BYTES)
    (made_of,) = json.loads(sys.stdin.readline())
    words, more = pickle.loads(bytes.fromhex(made_of))  # sent by the server itself
    admission = Admission(*words, **more)
    for line in sys.stdin:
        given, device = json.loads(line)
        if device is not None:
            admission.plan_for(DeviceInfo(**device[0]), device[1])
        try:
            found = asdict(admission.admit(given))
        except Refusal as refusal:
            found = {"refused": {**vars(refusal), "message": str(refusal)}}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
