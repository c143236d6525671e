"""The users of a server: who holds which token, and which of them operates it.

The file is read again whenever it changes; one that cannot be read, or is wrong, changes nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_urlsafe

from ltx2rt.errors import InputError
from ltx2rt.text_files import flag_rows

OPERATOR = "operator"
MIN_TOKEN = 16  # characters


@dataclass(frozen=True)
class User:
    """operator: may read metrics and other users' counts, and pause the queue."""

    name: str
    operator: bool = False


LOCAL = User("local", operator=True)  # everybody, where there are no tokens
STRANGER = User("")


def read_tokens(path: Path) -> dict[str, User]:
    """Users by token, of a file with a line `NAME TOKEN [operator]` for each. Raises InputError."""
    tokens: dict[str, User] = {}
    for where, words in flag_rows("--token-file", path):
        new = len(words) > 1 and len(words[1]) >= MIN_TOKEN and words[1] not in tokens
        if not new or words[2:] not in ([], [OPERATOR]):
            raise InputError(
                f"{where} is no `NAME TOKEN` or `NAME TOKEN {OPERATOR}` with a new token of at "
                f"least {MIN_TOKEN} characters"
            )
        tokens[words[1]] = User(words[0], words[2:] == [OPERATOR])
    if not tokens:
        raise InputError(f"--token-file: {path} names no user; write a line `NAME TOKEN` for each")
    return tokens


class Users:
    """Those of a token file. log: hears of a change. Raises InputError."""

    def __init__(self, path: Path, log: Callable[..., None] = lambda *_, **__: None):
        self.path, self.log = path, log
        self._changed = self._identity()
        self._tokens: Mapping[str, User] = read_tokens(path)

    def tokens(self) -> Mapping[str, User]:
        """The users by token: another mapping once the file has changed."""
        if (changed := self._identity()) != self._changed:
            self._changed = changed
            try:
                self._tokens = read_tokens(self.path)
                self.log("tokens", users=len(self._tokens))
            except InputError as error:
                self.log("tokens_error", error=str(error))
        return self._tokens

    def of(self, token: str) -> User | None:
        """The user who has the token; None for an unknown token."""
        found, given = None, token.encode("utf-8", "replace")
        for known, user in self.tokens().items():
            if hmac.compare_digest(known.encode(), given):
                found = user
        return found

    def _identity(self) -> tuple[int, ...]:
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns


class OneUser(Users):
    """The user of a batch's own server, by a new token."""

    def __init__(self) -> None:
        self.token = token_urlsafe(32)
        self._known = {self.token: User("batch")}

    def tokens(self) -> Mapping[str, User]:
        return self._known
