"""The command line: flags in, exit status out.

Decides which commands there are and how failures are reported: 2 for bad input, 1 for any other
failure, 130 when interrupted, one line on stderr each time. Flags and work of a command are in its
own module, which is imported when it is called, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn, TextIO, cast

from ltx2rt.atomic_file import NotWritten, remove_unfinished
from ltx2rt.errors import InputError, printable
from ltx2rt.flags import MANY, keep_common
from ltx2rt.notes import LOGGER, note
from ltx2rt.ranks import facts
from ltx2rt.ranks.crew import Crew
from ltx2rt.suggest import Anything, flag_of, hint, instead, meant, of_files, with_texts_first
from ltx2rt.system import ENDING, on_fatal
from ltx2rt.version import VERSION

COMMANDS = {
    "generate": "generate a video with sound from a prompt",
    "serve": "serve OpenAI's video API and a web page, with a durable queue",
    "batch": "generate the clips of a file of jobs, one job a line",
    "worker": "run jobs for `ltx2rt serve`, which starts it",
    "probe": "run one network on given tensors",
    "weights make": "write a random checkpoint in a released layout",
    "weights inspect": "describe a model file or folder",
    "weights fetch": "download a model from the Hugging Face hub",
    "weights merge": "write tensors with LoRAs merged into them",
    "train prepare": "encode clips and captions for training, once",
    "train run": "train a LoRA on prepared clips",
    "train export": "write the LoRA of a training run",
    "compare": "measure how close two clips are",
    "graph": "print the graph of a network",
    "plan": "estimate memory and time of a run, also for hardware you do not have",
    "compile": "compile the networks of a run for TPUs you do not have",
    "devices": "list the backends and their devices",
}
GROUPED = {"weights": "make, inspect, fetch or merge weights", "train": "train a LoRA"}
FIRST_STEPS = """\
first steps:
  ltx2rt weights fetch Lightricks/LTX-2.5           download a model
  ltx2rt plan --preset ltx-2.5 --device-kind h100   estimate memory and time on one H100
  ltx2rt generate --model Lightricks/LTX-2.5 --prompt "a red fox in the snow" --output fox.mp4

`ltx2rt --help` lists the commands, `ltx2rt COMMAND --help` the flags of one.
"""
# commands that several processes may run together
RANKED = ("generate", "probe", "worker", "train run")
# commands with files as their results
WRITING = (
    "generate",
    "weights make",
    "weights merge",
    "train prepare",
    "train run",
    "train export",
)
BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
MESSAGE = 2000  # characters of an error


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Usage names the required flags alone; `FLAG X ...` stands for one or more values."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        choices = [action for g in groups if g.required for action in g._group_actions]
        needed = [action for action in actions if action.required or action in choices]
        rest = [argparse.Action([], "flags", metavar="[flags]")] * (len(needed) < len(actions))
        super().add_usage(usage, [*needed, *rest], groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """All spellings of a flag, then its value, once."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "+":
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line, with guesses, and without abbreviated flags. fill:
    adds the command's flags, when they are needed; `words` is then what follows the command.
    elsewhere: refusals by flag, of flags that the command has in another form. together: the
    refusal of all flags together, each of which it has. foreign: words of other programs are read
    before the flags are added, which depend on them."""

    def __init__(self, *args: Any, fill: Callable[[Parser], None] | None = None, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, formatter_class=Formatter, **kwargs)
        self.fill = fill
        self.words: list[str] = []
        self.read_as: list[str] = []  # what words of other programs were read as
        self.elsewhere: dict[str, str] = {}
        self.together = ""
        self.foreign = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.fill is not None:
            fill, self.fill, self.words = self.fill, None, list(args)
            if self.foreign:  # the words choose the flags
                args = self.words = self._translated(self.words, Anything())
            try:
                fill(self)
                self._shorten_help()
            except InputError as error:
                self.error(str(error))
            if not self.foreign:
                args = self.words = self._translated(self.words, self._option_string_actions)
            self._refuse_unknown_flags()
        known, unknown = super().parse_known_args(args, namespace)
        if unknown and (files := of_files(unknown, self._option_string_actions, self.words)):
            left = list(args)
            for word in unknown:
                left.remove(word)
            self.read_as.append(f"read as {shlex.join(files)}")
            known, unknown = super().parse_known_args([*left, *files], None)
        if self.read_as:
            known.read_as = self.read_as
        if unknown and self._subparsers is None:  # else the parser of all commands would say so
            advice = (  # `--prompt a red fox`
                "; put the prompt in quotes" if "--prompt" in self._option_string_actions else ""
            )
            if os.path.isfile(unknown[0]) or flag_of(unknown[0]):
                advice = f"; say for what this file is, such as {flag_of(unknown[0]) or '--lora'} {unknown[0]}"
            self.error(f"unrecognized: {' '.join(unknown)}{advice}")
        return known, unknown

    def _translated(self, words: Sequence[str], known: Mapping[str, Any]) -> list[str]:
        """Replace words of other programs where their meaning is certain."""
        words = with_texts_first(words) if "--prompt" in known else words
        leading = [*takewhile(lambda word: not word.startswith("-"), words)]
        if leading and "--prompt" in known and (files := of_files(leading, known, words)):
            self.read_as.append(f"read as {shlex.join(files)}")
            words = [*files, *words[len(leading) :]]
        words, said = meant(words, known)
        self.read_as += said
        return words

    def _shorten_help(self) -> None:
        """Have two kinds of help where there are many flags."""
        if "--help-all" in self._option_string_actions:
            return
        self.add_argument("--help-all", action="help", help="show every flag")
        if len(self._actions) > MANY and {"-h", "--help"} & set(self.words):
            keep_common(self)

    def _refuse_unknown_flags(self) -> None:
        known = self._option_string_actions
        for word in self.words:
            name = word.partition("=")[0]
            if word == "--":
                return
            if re.match("--?[A-Za-z]", word) and " " not in name and name not in known:
                if name not in self.elsewhere:
                    if other := instead(name):
                        self.error(f"unrecognized flag {name}: {other}")
                    shown = [flag for flag in known if known[flag].help != argparse.SUPPRESS]
                    self.error(f"unrecognized flag {name}{hint(name, [*shown, *self.elsewhere])}")
                if not self.together:
                    self.error(self.elsewhere[name])
        if self.together:
            self.error(self.together)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's check of `choices`, with a guess."""
        if action.choices is None or value in action.choices:
            return
        choices, what = list(action.choices), "/".join(action.option_strings) or "command"
        near = hint(value, [*choices, *COMMANDS] if what == "command" else choices)
        self.error(f"{what}: {value!r}, expected one of {', '.join(choices)}{near}")

    def error(self, message: str) -> NoReturn:
        if not _first():  # all ranks have the same flags
            self.exit(BAD_INPUT)
        see = "" if message.endswith("?") else f"; see `{self.prog} --help`"
        self.exit(BAD_INPUT, f"ltx2rt: error: {_shortened(message)}{see}\n")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(FIRST_STEPS, end="", file=sys.stderr)
        return BAD_INPUT
    if argv is None:
        _open_closed()
    args = parser().parse_args([*words[1:], "--help"] if words[0] == "help" else words)
    args.argv = words
    args.own_process = argv is None
    crew = None
    # a process of its own: let `kill` unwind, so that no partial file stays behind
    if argv is None:
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has SIGHUP
                signal.signal(number, _end)
        if isinstance(sys.stdout, io.TextIOWrapper):  # Windows' code page lacks most letters
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout = cast(TextIO, _Plain(sys.stdout))
        on_fatal("SIGBUS", lambda: _shrunk(crew))
    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR if getattr(args, "quiet", False) else level)
    for line in getattr(args, "read_as", []) if _first() else ():
        note(line)
    try:
        args.crew = crew = _join(args)
        status = _call(args.command, "main", args) or 0
        try:
            sys.stdout.flush()
        except OSError:  # the files are there, and only their names are not said
            if args.command not in WRITING:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if crew:
            crew.leave()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED if crew is None else crew.fail("no process reads its output", FAILED)
    except KeyboardInterrupt:
        status = _fail("interrupted", INTERRUPTED, crew)
        return status if argv is not None else _leave(status)
    except Ended as end:
        _leave(_fail(f"ended by {end.name}", TERMINATED, crew))
    except InputError as error:
        return _fail(str(error), BAD_INPUT, crew)
    except PermissionError as error:
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        return _fail(f"{what}; change its permissions, or run as its owner", BAD_INPUT, crew)
    except NotWritten as error:
        return _fail(str(error), FAILED, crew)
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            name = str(getattr(error, "filename", ""))[:80]
            return _fail(f"{name!r} is no path (it is too long); check it", BAD_INPUT, crew)
        return _fail(f"{type(error).__name__}: {error}", FAILED, crew)
    finally:
        LOGGER.setLevel(level)


class _Plain:
    """Standard output, on which no text of a file or its name steers the terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_closed() -> None:
    """Open standard streams that are closed, as by `>&-`, on the null device: else a file of the
    run takes their number, and a library writes into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w" if number else "r")  # noqa: SIM115
            try:
                os.fstat(number)
            except OSError:  # no file has the number
                os.dup2(stream.fileno(), number)
            setattr(sys, name, stream)


class Ended(SystemExit):
    """A signal has asked this process to end, which it does as for an exception."""

    def __init__(self, number: int):
        super().__init__(TERMINATED)
        self.name = signal.Signals(number).name


def _end(number: int, _: Any) -> NoReturn:
    raise Ended(number)


def _shrunk(crew: Crew | None) -> None:
    """End with a line if a mapped file became shorter while it was read, which is a SIGBUS."""
    from ltx2rt.weights.files import check_opened

    try:
        check_opened()
    except InputError as error:
        remove_unfinished()
        _leave(_fail(str(error), BAD_INPUT, crew))


def _leave(status: int) -> NoReturn:
    """End this process at once: threads of a compiler that still work crash a slower end."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _fail(message: str, status: int, crew: Crew | None) -> int:
    if os.environ.get("LTX2RT_TRACEBACK") == "1":
        import traceback

        traceback.print_exc()
    message = _shortened(message)
    if crew:
        crew.fail(message, status, bad_input=status == BAD_INPUT)
    print(f"ltx2rt: error: {message}", file=sys.stderr)
    return status


def _shortened(message: str) -> str:
    """In one line, without the middle of what was given, if that is endless."""
    message = printable(" ".join(message.split()))
    if len(message) <= MESSAGE:
        return message
    return f"{message[: MESSAGE // 2]} ... {message[-MESSAGE // 2 :]}"


def _join(args: argparse.Namespace) -> Crew | None:
    """The other ranks, if this process is one of several, with the same arguments and files."""
    if args.command not in RANKED:
        return None
    from ltx2rt.backend import backend_names, get_factory, get_rendezvous
    from ltx2rt.commands.options import choose_backend
    from ltx2rt.weights.digests import digests

    choose_backend(args, quiet=not _first())
    if args.backend not in backend_names():
        return None
    factory = get_factory(args.backend)
    rank, size = factory.rank_and_size(os.environ)
    if size == 1:
        return None
    inputs, outputs = _call(args.command, "files", args)
    try:
        crew = Crew(rank, size, get_rendezvous(args.backend), outputs)
    except InputError as error:
        if rank == 0 or not isinstance(error.__cause__, ImportError):
            raise
        sys.exit(BAD_INPUT)  # all ranks run one installation
    try:
        crew.agree("versions", facts.versions(factory.packages))
        given = {n: x for n, x in vars(args).items() if n not in ("argv", "own_process")}
        named = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
        crew.agree("arguments", named)
        crew.agree("files", digests(inputs))
        if args.command == "generate" and getattr(args, "seed", "-1") == "-1":
            from ltx2rt.pipelines.groups.seeds import draw_seed

            args.seed = crew.from_main("seed", draw_seed)
    except InputError as error:
        _fail(str(error), BAD_INPUT, crew)
    return crew


def _first() -> bool:
    """Whether this process speaks for all ranks of a launch."""
    return {os.environ.get(name, "0") for name in ("RANK", "JAX_PROCESS_ID")} == {"0"}


def parser() -> Parser:
    about = "Generate video with sound by LTX-2, with PyTorch or JAX."
    top = Parser(prog="ltx2rt", description=about, epilog=FIRST_STEPS)
    top.add_argument("--version", action="version", version=f"ltx2rt {VERSION}")
    groups = {"": top.add_subparsers(metavar="COMMAND", required=True)}
    for name, help in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            below = groups[""].add_parser(group, help=GROUPED[group])
            groups[group] = below.add_subparsers(metavar="COMMAND", required=True)
        fill = partial(_call, name, "flags")
        about = f"{help[0].upper()}{help[1:]}."
        added = groups[group].add_parser(last, help=help, description=about, fill=fill)
        added.set_defaults(command=name)
        added.foreign = name == "generate"
    return top


def _call(name: str, function: str, *args: Any) -> Any:
    """Call `flags`, `main` or `files` of a command; in a group after the command's name."""
    module, _, last = name.partition(" ")
    if last:
        function = last if function == "main" else f"{last}_{function}"
    return getattr(import_module(f"ltx2rt.commands.{module}"), function)(*args)


if __name__ == "__main__":
    sys.exit(main())
