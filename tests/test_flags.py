"""Flags: types, bounds, guesses, and the help that is made from them."""

import argparse
import re
import shlex
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from ltx2rt import cli
from ltx2rt.backend import chosen_backend
from ltx2rt.commands import generate
from ltx2rt.commands.batch import BatchOptions
from ltx2rt.commands.options import choose_backend
from ltx2rt.commands.worker import Warm
from ltx2rt.errors import InputError
from ltx2rt.flags import (
    COMMON,
    GROUPS,
    Flag,
    add_flags,
    check_bounds,
    convert,
    flag,
    flag_like,
    flagged,
    given_flags,
    keywords,
    named_files,
    spelling,
    words_of,
)
from ltx2rt.instruments.ahead import Target
from ltx2rt.instruments.probe import ProbeRequest
from ltx2rt.pipelines import pipelines
from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.size import Size, with_sides
from ltx2rt.pipelines.one_stage import OneStage
from ltx2rt.run.estimate import Devices
from ltx2rt.run.files import Files
from ltx2rt.serve.fields import front, offered, schema, uploads, value
from ltx2rt.serve.options import ServeOptions, parse_bytes
from ltx2rt.serve.upload import MAX_BYTES
from ltx2rt.session.options import ModelOptions
from ltx2rt.suggest import MEANT, meant, nearest, of_files, with_texts_first
from ltx2rt.train.prepare_flags import PrepareRequest
from tests.conftest import refused

OWNERS = (
    ModelOptions, Files, Devices, Target, ProbeRequest, ServeOptions, BatchOptions, Warm,
    *pipelines().values(),
)  # fmt: skip
MODEL = ["--model", "m", "--prompt", "x", "--output", "o.mp4"]


@dataclass(frozen=True)
class Sampler:
    rho: float = flag(7.0, "exponent of the schedule", above=0)
    rounds: int = flag(3, "number of rounds", least=1, most=9, group="sampling")
    fast: bool = flag(False, "skip the last round")
    folder: Path = flag(Path("here"), "folder to write")
    name: str = flag("a", "name of the sampler", choices=("a", "float8"))
    span: tuple[float, ...] = flag((), "first and last", float, metavar=("A", "B"), repeat=True)
    kept: bool = flag(True, "forget the file", name="--no-kept", also=("--kept",))


@dataclass(frozen=True)
class Slow(Sampler):
    rounds: int = flag_like(Sampler, "rounds", 5, most=20)


def read(*words, type_=Sampler):
    parser = argparse.ArgumentParser()
    add_flags(parser, type_)
    args = parser.parse_args(words)
    assert words_of(args, type_) == words_of(parser.parse_args(words_of(args, type_)), type_)
    return type_(**given_flags(args, type_))


def test_a_flag_without_a_parser_has_the_type_of_its_field():
    words = "--rho 2.5 --rounds 4 --fast --folder ~/there --name float8 --span 1 2"
    assert read(*words.split()) == Sampler(
        2.5, 4, True, Path.home() / "there", "float8", (1.0, 2.0)
    )
    assert read() == Sampler()


@pytest.mark.parametrize(
    ("words", "kept"), [((), True), (("--no-kept", "--kept"), True), (("--no-kept",), False)]
)
def test_a_switch_has_its_opposite(words, kept):
    assert read(*words).kept is kept


@pytest.mark.parametrize("name, backend", {"torch": "cuda", "JAX": "tpu", "toy": "toy"}.items())
def test_a_framework_stands_for_its_backend(name, backend):
    choose_backend(args := argparse.Namespace(backend=name))
    given = keywords({"model": "m", "backend": name}, ModelOptions)
    assert args.backend == given["backend"] == backend


def test_a_type_that_has_no_parser_needs_one_in_its_flag():
    @dataclass(frozen=True)
    class Wrong:
        rho: "Fraction | None" = flag(None, "exponent")

    with pytest.raises(TypeError, match=r"rho: Fraction \| None needs a parser"):
        flagged(Wrong)


def test_a_flag_of_another_type_keeps_what_is_not_changed():
    assert Slow().rounds == 5 and read("--rounds", "20", type_=Slow).rounds == 20
    how = flagged(Slow)["rounds"].metadata["flag"]
    assert (how.help, how.group, how.least) == ("number of rounds", "sampling", 1)


@pytest.mark.parametrize(("words", "message"), [
    ("--rounds 0", "--rounds: 0, expected 1 to 9"),
    ("--rounds 10", "--rounds: 10, expected 1 to 9"),
    ("--rounds many", "--rounds: 'many', expected a whole number"),
    ("--rounds 2.5", "--rounds: '2.5', expected a whole number"),
    ("--rho 0", "--rho: 0, expected more than 0"),
    ("--rho nan", "--rho: nan, expected a finite number"),
    ("--rho inf", "--rho: inf, expected a finite number"),
    ("--span nan 1", "--span: nan, expected a finite number"),
    ("--name fp8", "--name: 'fp8', expected one of a, float8; did you mean float8?"),
])  # fmt: skip
def test_a_value_out_of_its_bounds_is_refused_by_command_line_python_and_check(words, message):
    with refused(re.escape(message)):
        read(*words.split())
    name, value = words[2:].split()[:2]
    with refused(re.escape(message)):
        keywords({name: [value] if name == "span" else value}, Sampler)
    if value in ("0", "10"):
        with refused(re.escape(message)):
            check_bounds(Sampler(**{name: int(value)}))


@pytest.mark.parametrize(("bounds", "words"), [
    ({}, "a finite number"),
    ({"least": 0}, "0 or more"),
    ({"least": 1}, "at least 1"),
    ({"most": 2.5}, "at most 2.5"),
    ({"least": 0, "most": 51}, "0 to 51"),
    ({"above": 0, "most": 9}, "more than 0 and at most 9"),
])  # fmt: skip
def test_bounds_are_words(bounds, words):
    assert Flag("", int, **bounds).bounds == words


def test_bounds_hold_for_fractions_and_endless_integers():
    steps, fps = (flagged(*pipelines().values())[name] for name in ("steps", "fps"))
    with pytest.raises(InputError, match="--steps: 10000000000000000000, expected 1 to 10000"):
        convert(steps, 10**400)
    assert convert(fps, "23.976") == Fraction(24000, 1001)
    with pytest.raises(InputError, match="--fps: 1000, expected 1 to 240"):
        convert(fps, 1000)


def test_the_server_tells_its_clients_the_bounds():
    found = flagged(*pipelines().values())
    bounds = {"type": "integer", "minimum": 1, "maximum": 10000}
    assert schema(found["steps"]).items() >= bounds.items()
    assert schema(found["audio_max_duration"])["exclusiveMinimum"] == 0
    assert "minimum" not in schema(found["video_cfg"])


@pytest.mark.parametrize("read", [convert, value], ids=["command line", "server"])
@pytest.mark.parametrize(("given", "seconds"), [
    (2, 2), ("2", 2), ("1.5s", 1.5), ("00:02", 2), ("0:00:02.5", 2.5), ("1m30s", 90), ("1m 30s", 90),
    (".5s", 0.5), ("90:00", 5400), ("1.5h", 5400), ("7d", 604800),
    *((x, None) for x in ("1:75", "00:00:02:12", "s", "1s1m", "2x", "")),
])  # fmt: skip
def test_a_time_is_read_in_its_usual_forms(given, seconds, read):
    """By the parser of every flag in seconds, and of no other."""
    found = flagged(ServeOptions, PrepareRequest, *pipelines().values())
    texts = [f.metadata["flag"] for f in found.values() if f.metadata["flag"].metavar == "S"]
    assert not texts, "a flag in seconds that parse_seconds does not read"
    for name in ("start_time", "end_time", "audio_start_time", "keep", "drain"):
        if seconds is None:
            with pytest.raises(InputError, match=r"expected (seconds|TIME)"):
                read(found[name], given)
        else:
            assert read(found[name], given) == seconds
    assert schema(found["start_time"])["type"] == "number"


@pytest.mark.parametrize("text", ["1 GB", "1XB", "x", "-1", "1e9"])
def test_an_amount_without_a_known_unit_names_its_flag(text):
    assert parse_bytes("2KB") == 2000
    with pytest.raises(InputError, match=r"^--disk: .*, expected SIZE\[KB\|MB\|GB\]"):
        convert(flagged(ServeOptions)["disk"], text)


# --- help -----------------------------------------------------------------------------------------


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help-all"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [("serve",), ("batch",), ("plan",), ("train", "run")], ids=str)
def test_a_command_of_many_flags_shows_few_of_them(words, capsys):
    """All that are required, its own and common ones; none that only `--help-all` explains is
    lost."""
    every = shown(help_of(capsys, *words))
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    found = shown(capsys.readouterr().out)
    assert found.keys() < every.keys() and {"--model", "--help-all"} <= found.keys()
    assert "--layers" not in found and len(found) <= 26
    rare = {"train": "--remat", "serve": "--drain"}.get(words[0], "--mesh")
    assert rare in every and rare not in found


def shown(text):
    """Help by flag: lines of a flag joined, under the title of its group."""
    found, title = {}, ""
    for line in text.splitlines():
        if re.match(r"^[a-z].*:$", line):
            title = line[:-1]
        elif match := re.match(r"^  (--[\w-]+)(.*)", line):
            name = match[1]
            found[name] = [title, match[2]]
        elif line.startswith("   ") and found:
            found[name][1] += f" {line.strip()}"
    return {name: (title, " ".join(text.split())) for name, (title, text) in found.items()}


@pytest.mark.parametrize("type_", OWNERS, ids=lambda type_: type_.__name__)
def test_every_help_text_says_something_and_has_a_group(type_):
    for name, f in flagged(type_).items():
        how = f.metadata["flag"]
        if how.help == argparse.SUPPRESS:
            continue
        assert how.group in GROUPS, name
        assert len(how.help.split()) > 2, name
        assert not re.match(r"(of|what|the|default|which|a|an|with|as)\b", how.help, re.I), name
        assert how.help[0].islower() or how.help.split()[0].isupper() or how.help[0] in "GHJLT*", (
            name
        )


def test_help_is_of_the_pipeline_that_is_named(capsys):
    plain, hq = (shown(help_of(capsys, "generate", *words)) for words in ((), ("--pipeline", "hq")))
    for name, ours, theirs in (
        ("--width", 1536, 1920), ("--height", 1024, 1088), ("--video-stg", 1, 0),
        ("--video-rescale", 0.7, 0.45), ("--steps", "40 for LTX-2.0, else 30", 15),
        ("--num-videos", 1, 1),
    ):  # fmt: skip
        assert f"(default: {ours})" in plain[name][1] and f"(default: {theirs})" in hq[name][1]
    assert "--distilled-lora-strength-stage-1" in hq.keys() - plain.keys()
    assert "--video-path" in shown(help_of(capsys, "generate", "--pipeline=retake"))
    assert "--num-frames" not in shown(help_of(capsys, "plan", "--pipeline", "retake"))
    assert "--image" not in shown(help_of(capsys, "compile", "--pipeline", "t2a"))


def test_help_has_groups_pipelines_and_marks_what_is_required(capsys):
    text = help_of(capsys, "generate")
    found = shown(text)
    titles = [group for group in GROUPS if group not in ("network", "training", "server", "jobs")]
    assert list(dict.fromkeys(re.findall(r"^([a-z ]+):$", text, re.M))) == [
        "options",
        *titles,
        "examples",
    ]
    assert {name for name, (_, text) in found.items() if "(required)" in text} == {
        "--model",
        "--prompt",
    }
    assert "ltx2rt generate --pipeline NAME --help-all" in text
    assert all(
        re.search(rf"^    {name} +{re.escape(type_.summary)}$", text, re.M)
        for name, type_ in pipelines().items()
    )
    assert found["--max-memory"][0] == "devices and memory" and found["--quiet"][0] == "log"
    assert "--auto-duration MIN MAX " in text and "[" not in found["--auto-duration"][1]


def test_the_short_help_has_the_common_flags_in_four_groups(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    text = capsys.readouterr().out
    found = shown(text)
    assert list(dict.fromkeys(title for title, _ in found.values())) == [*COMMON, "options"]
    assert {"--model", "--image", "--audio-path", "--video-path", "--mask", "--seed"} <= set(found)
    assert 15 <= len(found) <= 20 and "--fps" not in found and len(text.splitlines()) < 75
    assert len(re.findall(r"^  --mask ", text, re.M)) == 1
    assert found.keys() < shown(help_of(capsys, "generate")).keys() | {
        "--audio-path",
        "--video-path",
        "--mask",
    }
    with pytest.raises(SystemExit):
        cli.main(["generate", "--pipeline", "retake", "--video-cfg", "3", "-h"])
    retake = shown(capsys.readouterr().out)
    assert "--video-path" in retake and "--audio-path" not in retake


def test_no_command_gets_first_steps(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert len(re.findall("^  ltx2rt ", said, re.M)) == 3 and "error" not in said


@pytest.mark.parametrize("name", pipelines())
def test_examples_in_the_help_are_taken(name):
    for example in generate.examples(pipelines()[name]):
        words = shlex.split(example.replace("\\\n", " "))
        options, request, _ = generate.asked(
            cli.parser().parse_args([*words[1:], "--backend", "cuda"])
        )
        assert type(request).name == name and options.model == Path("MODEL_DIR")
        request.check()


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "devices"])
def test_every_command_has_help_for_every_flag(command, capsys):
    for name, (_, text) in shown(help_of(capsys, *command.split())).items():
        assert len(text.split()) > 2, name


# --- guesses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "meant"), [
    (["generate", "--num-frame", "9"], "--num-frames"),
    (["generate", "--promp", "9"], "--prompt"),
    (["generate", "--video-frames", "9"], "--num-frames"),
    (["generate", "--negative_prompt", "x"], "--negative-prompt"),
    (["generate", "--cfg", "3"], "--video-cfg"),
    (["generate", "--guidance-scale=3"], "--video-cfg"),
    (["generate", "--pipline", "hq"], "--pipeline"),
    (["generate", "-o", "x.mp4"], "--output"),
    (["generate", "--pipeline", "two_stage"], "two-stage"),
    (["plan", "--preset", "ltx-2.5", "--device-kind", "h100", "--num-gpus", "8"], "--devices"),
    (["genrate"], "generate"),
    (["download"], "weights fetch"),
    (["weights", "inspct", "x"], "inspect"),
    (["plan", "--preset", "ltx2.3", "--device-kind", "h100"], "ltx-2.3"),
    (["plan", "--preset", "tiny-2.3", "--device-kind", "rtx-409"], "rtx4090-24gb"),
    (["generate", *MODEL, "--backend", "cuda", "--dtype", "fp16"], "bfloat16"),
    (["generate", *MODEL, "--backend", "cuda", "--weights-dtype", "fp8"], "float8"),
    (["graph", "transfomer", "--preset", "tiny-2.3"], "transformer"),
    (["graph", "transformer", "--preset", "tiny-2.3", "--profile", "hoper"], "hopper"),
], ids=lambda given: " ".join(given) if isinstance(given, list) else "")  # fmt: skip
def test_an_unknown_name_gets_a_guess(words, meant, tmp_path, monkeypatch, capsys):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and f"; did you mean {meant}?" in error, error


@pytest.mark.parametrize(("words", "says"), [
    ((*MODEL[:4], "red", "fox", *MODEL[4:]), "unrecognized: red fox; put the prompt in quotes"),
    ((*MODEL, "--pipeline"), "--pipeline: expected one argument"),
    (("--zzz",), "unrecognized flag --zzz; see `ltx2rt generate --help`"),  # resembles nothing
])  # fmt: skip
def test_words_that_are_no_flags_are_told(words, says, capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", *words])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["--output", "o.mp4", "--model", "no/such/folder", "a fox"],
    ["--model", "no/such/folder", "--output", "o.mp4", "a.wav", "a fox"],
    ["--output", "o.mp4", "--model", "no/such/folder", "--image", "a.png:0:0.5", "a fox"],
], ids=len)  # fmt: skip
def test_a_text_without_a_flag_is_the_prompt(words, capsys):
    assert cli.main(["generate", *words]) == 2
    told = capsys.readouterr().err
    assert "read as --prompt 'a fox'" in told and "no/such/folder" in told.splitlines()[-1]


@pytest.mark.parametrize(("typed", "read"), [
    ('--output o.mp4 "a fox"', '"a fox" --output o.mp4'), ("--output o.mp4 fox", "fox --output o.mp4"),
    ('--output o.mp4 a red fox --seed 1', 'a red fox --output o.mp4 --seed 1'),
    ('--image a.png:0:0.5 b.png "a fox. It runs"', '"a fox. It runs" --image a.png:0:0.5 b.png'),
    *((line, line) for line in (
        '--output "a fox"', "--output o.mp4 clips/o", '--output o.mp4 "my clip.wmv"', "--output o.mp4 HERE",
        "--lora style detail", '--lora a.safetensors "my style:0.8"', '--image a.png "MY FRAMES:3"',
        '--image a.png "my photo.jpg:last"', '--prompt-at "0:1=a fox" "a dog"',
        '-- --output o.mp4 "a fox"',
    )),
])  # fmt: skip
def test_a_text_among_files_is_a_word_without_a_flag(typed, read, tmp_path, monkeypatch):
    """But not the only value, nor what may be a file that is not there."""
    monkeypatch.chdir(tmp_path)
    for name in ("HERE", "MY FRAMES"):
        (tmp_path / name).mkdir()
    assert with_texts_first(shlex.split(typed)) == shlex.split(read)


def test_a_name_that_resembles_nothing_gets_no_guess():
    assert nearest("zzz", ["alpha"]) is None and nearest("", ["alpha"]) is None


@pytest.mark.parametrize(("given", "meant"), [
    ("numframes", "num_frames"),
    ("guidance_scale", "video_cfg"),
    ("num_inference_steps", "steps"),
])  # fmt: skip
def test_an_unknown_keyword_gets_a_guess(given, meant):
    with pytest.raises(InputError, match=f"unknown keyword '{given}'; did you mean {meant}"):
        keywords({given: 3}, pipelines()["two-stage"])


def test_every_word_of_a_peer_leads_to_a_name_that_exists():
    from ltx2rt.serve.admission import OURS
    from ltx2rt.suggest import PEERS, _key
    from ltx2rt.train.prepare_flags import PrepareRequest
    from ltx2rt.train.request import TrainRequest

    known = {*pipelines(), *cli.COMMANDS, "cuda", "tpu", "float8", "bfloat16", "float32", *OURS}
    fields = flagged(*OWNERS, TrainRequest, PrepareRequest)
    keys = {_key(name) for name in (*known, *fields, *map(spelling, fields.values()))}
    assert not [meant for several in PEERS.values() for meant in several if meant not in keys]


@pytest.mark.parametrize("typed, read", [
    ("--frames 9", "--num-frames 9"), ("--frames=9", "--num-frames 9"), ("-n 2", "--num-videos 2"),
    ("--first-frame a.png --last-frame b.png", "--image a.png --image b.png:last"),
    ("--quality high", "--preset best"), ("--fast", "--preset draft"), ("--mute", "--no-audio"),
    ("--from 1 --to 2", "--start-time 1 --end-time 2"), ("--denoise 0.5", "--noise-level 0.5"),
    ("--seed 3 -- --mute", "--seed 3 -- --mute"), ("--quality odd", "--quality odd"),
])  # fmt: skip
def test_flags_of_other_programs_are_read_where_their_meaning_is_certain(typed, read):
    known = {
        "--num-frames": None, "--num-videos": None, "--image": None, "--no-audio": None, "--seed": None,
        "--start-time": None, "--end-time": None, "--noise-level": None, "--preset": ["draft", "best"],
    }  # fmt: skip
    actions = {name: SimpleNamespace(choices=choices) for name, choices in known.items()}
    words, said = meant(typed.split(), actions)
    assert words == read.split()
    assert bool(said) == (typed != read)


@pytest.mark.parametrize("size, sides", [
    ("1080p", (1920, 1080)), ("720P", (1280, 720)), ("16:9", (1728, 960)), ("9:16", (960, 1728)),
    ("1:1", (1280, 1280)), ("3:2", (1536, 1024)), ("64x66", (64, 66)),
])  # fmt: skip
def test_a_size_may_be_a_name_or_a_shape(size, sides):
    found = with_sides({"size": size})
    assert (found["width"], found["height"]) == sides


@pytest.mark.parametrize("size", ["0:9", "9:", "1081p", "p", "100:1"])
def test_other_sizes_are_refused(size):
    with refused("expected WIDTHxHEIGHT such as 768x512, 480p, .* or a shape such as 9:16"):
        with_sides({"size": size})


def test_every_flag_that_is_read_as_another_leads_to_one_that_exists():
    fields = flagged(*OWNERS)
    known = {
        *map(spelling, fields.values()),
        *(one for f in fields.values() for one in f.metadata["flag"].also),
    }
    names = {ours.partition(" ")[0] for ours in MEANT.values()}
    assert names - known <= {"--preset", "--no-audio", "--prompts", "--size"}
    # `quality` is a hidden field, which presets fill
    assert MEANT.keys() & known <= {"--quality"}, "a flag of ours is never read as another"


def test_files_and_a_prompt_without_flags_are_read_by_what_they_are(tmp_path):
    known = ("--prompt", "--image", "--video-path", "--audio-path")
    photo, clip, song = (str(tmp_path / name) for name in ("a.jpg", "b.mov", "c.wav"))
    for path in (photo, clip, song):
        Path(path).touch()
    assert of_files(["a fox", photo, song], known) == [
        "--prompt", "a fox", "--image", photo, "--audio-path", song,
    ]  # fmt: skip
    assert of_files([clip], known) == ["--video-path", clip]
    assert of_files([photo, "a fox"], known) == ["--image", photo, "--prompt", "a fox"]
    assert of_files(["fox"], known, ["--prompt=red", "fox"]) is None  # half of one prompt
    assert of_files(["phoot.png"], known) is None, "a file that is not there is no text"
    assert of_files(["a", "fox"], known) is None and of_files(["a fox"], ("--image",)) is None


# --- the backend of this machine ------------------------------------------------------------------


class Factory:
    def __init__(self, name, accelerator, package="numpy"):
        self.name, self.accelerator, self.packages = name, accelerator, (package,)


GPU, TPU = Factory("a", "GPU"), Factory("b", "TPU")


@pytest.mark.parametrize(("factories", "files", "chosen", "why"), [
    ([GPU], ["nvidia0"], "a", ""),
    ([Factory("a", "GPU", "absent"), TPU], ["nvidia0"], "b", ""),
    ([GPU, TPU], ["accel0"], "b", ""),
    ([GPU, TPU], ["accel0", "nvidia0"], "a", "a GPU and a TPU are here"),
    ([GPU, TPU], ["nvidiactl"], "a", ""),
])  # fmt: skip
def test_the_backend_is_the_one_of_this_machine(
    factories, files, chosen, why, tmp_path, monkeypatch, capsys
):
    found = {factory.name: factory for factory in factories}
    monkeypatch.setattr("ltx2rt.backend.backend_names", lambda: list(found))
    monkeypatch.setattr("ltx2rt.backend.get_factory", found.get)
    for name in files:
        (tmp_path / name).touch()
    assert chosen_backend(tmp_path) == chosen
    assert capsys.readouterr().err == (f"backend {chosen}: {why}\n" if why else "")
    assert chosen_backend(tmp_path, quiet=True) == chosen and capsys.readouterr().err == ""


def test_no_backend_is_refused(monkeypatch):
    monkeypatch.setattr("ltx2rt.backend.backend_names", lambda: [])
    with pytest.raises(InputError, match="--backend: none is installed"):
        chosen_backend()


@pytest.mark.parametrize("given", [[], ["--backend", "auto"]])
def test_a_command_without_a_backend_takes_that_one_and_tells_its_ranks(given, monkeypatch, capsys):
    monkeypatch.setattr(
        "ltx2rt.backend._has_device", lambda factory, _: factory.accelerator == "TPU"
    )
    args = cli.parser().parse_args(["generate", *MODEL, *given])
    args.argv = ["generate"]
    options, _, _ = generate.asked(args)
    assert options.backend == "tpu" and args.argv == ["generate", "--backend", "tpu"]
    generate.asked(args)
    assert capsys.readouterr().err == ""


def test_every_kind_of_file_is_one_that_the_server_takes_or_is_known_not_to():
    """A kind that is misspelt would leave the field out of the server and of its page."""
    kinds = {f.metadata["flag"].file for f in flagged(*OWNERS).values()} - {None}
    assert kinds - MAX_BYTES.keys() == {"tensors", "folder"}


def test_a_flag_of_a_file_is_a_field_of_the_server():
    """A group with it is all that is added."""

    @dataclass(frozen=True)
    class Depth(Group):
        depth: Path | None = flag(
            None, "video of depths", group="conditioning", file="video", asks="toy"
        )

    class Toy(OneStage):
        name = "toy"
        groups = (*OneStage.groups, Depth())

    assert uploads(Toy)["depth"] == "video" and "depth" not in uploads(OneStage)
    assert front(Toy) == ["depth"] and "depth" not in offered(Toy)
    ((f, path),) = named_files(Toy("a fox", depth=Path("depth.mp4")))
    assert (spelling(f), path) == ("--depth", Path("depth.mp4"))


def test_sides_are_of_a_class_and_not_the_default_of_a_group():
    """`Size(1920, 1088)` would lose the shape of a first image, and its help the usual sides."""
    for type_ in pipelines().values():
        assert {(g.width, g.height) for g in type_.groups if isinstance(g, Size)} <= {(None, None)}


def test_fields_of_all_pipelines_that_share_a_flag_share_its_spelling():
    seen = {}
    for type_ in pipelines().values():
        for name, f in flagged(type_).items():
            assert seen.setdefault(name, spelling(f)) == spelling(f)
        assert len(flagged(type_)) <= len(fields(type_))
