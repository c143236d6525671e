"""The answer to a client whose request is refused."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection
from functools import cache

from ltx2rt.errors import InputError
from ltx2rt.flags import flagged, spelling
from ltx2rt.suggest import nearest

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@cache
def fields() -> dict[str, str]:
    """The fields of requests, by flags of the command line."""
    from ltx2rt.pipelines import pipelines  # a process that decodes an upload does without

    known = flagged(*pipelines().values()).items()
    found = {spelling(f): name for name, f in known if f.metadata["flag"].typed}
    return {**found, "--lora": "loras", "--pipeline": "pipeline"}


def field_of(flag: str) -> str:
    return fields().get(flag, flag[2:].replace("-", "_"))


class Refusal(Exception):
    """param: the field that is to blame; retry_after_s: when to try again."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None,
        retry_after_s: int | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


def invalid(message: str, param: str | None = None) -> Refusal:
    """The refusal of a value that a request gives."""
    return Refusal(400, "invalid_value", message, param)


def conflict(message: str, retry_after_s: int | None = None) -> Refusal:
    """The refusal of a request that the state of its video does not allow."""
    return Refusal(409, "conflict", message, retry_after_s=retry_after_s)


def misfit(name: str, given: object, expected: str) -> Refusal:
    """The refusal of a field's value."""
    return invalid(f"{name}: {str(given)[:80]!r}, expected {expected}", name)


def of_input(error: InputError, known: Collection[str], given: Collection[str]) -> Refusal:
    """The command line's sentence, about a field if it begins with the flag of one; `param` is its
    name. known, given: names of fields; where `size` is given, it is the one for width and
    height."""
    message, field = str(error), None
    code = "too_large_for_memory" if message.startswith("no room") else "invalid_value"
    if flag := re.match(r"(--[\w-]+):", message):
        field = field_of(flag[1])
        rest = message[flag.end() :]
        if field in ("width", "height") and "size" in given:
            field, rest = "size", f" {field} {rest.strip()}"
        if field in known:
            message = f"{field}:{rest}"

    def word(flag: re.Match) -> str:
        return found if (found := field_of(flag[0])) in fields().values() else flag[0]

    return Refusal(400, code, re.sub(r"(?<![\w-])--[a-z][\w-]*", word, message), field)


def unknown(name: str, known: list[str]) -> Refusal:
    """The refusal of a field by its name, with the field that it is probably meant for."""
    near, name = nearest(name, known), name[:80]
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(known))}"
    return Refusal(400, "unknown_field", f"{name!r} is no field of this request; {hint}", name)
