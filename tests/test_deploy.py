"""examples/deploy: the commands are ones that the program takes and that fit their cards."""

import re
import shlex
from pathlib import Path

import pytest

from ltx2rt import cli
from ltx2rt.flags import words_of
from ltx2rt.serve.batch import parse_shard
from ltx2rt.session.options import ModelOptions

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples/deploy"
PLANNED = ("--max-memory", "--memory", "--weights-dtype")


def pods():
    """(words of a command, kind of its card, number of cards) of all manifests."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        if template := document["spec"].get("template"):
            (container,) = template["spec"]["containers"]
            words = container["command"] + container.get("args", [])
            count = container["resources"]["limits"]["nvidia.com/gpu"]
            yield words, template["spec"]["nodeSelector"]["nvidia.com/gpu.product"], count
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    kind, _, count = task["resources"]["accelerators"].partition(":")
    yield ["sh", "-c", task["run"]], kind, int(count)


def parsed(words):
    if words[0] == "sh":
        text = re.sub(r"\$\(\(\w+ \+ 1\)\)", "1", words[2]).replace("$SKYPILOT_NUM_NODES", "4")
        words = shlex.split(text.removeprefix("exec "))
    return cli.parser().parse_args(words[1:])


@pytest.mark.long
def test_every_command_fits_the_cards_that_its_manifest_asks_for(capsys):
    commands = []
    for words, kind, count in pods():
        args = parsed(words)
        commands.append(args.command)
        assert not hasattr(args, "shard") or parse_shard(args.shard).count in (4, 8)
        each = int(getattr(args, "num_gpus", 1))
        assert each * int(getattr(args, "replicas", 1)) == count
        flags = [w for w in words_of(args, ModelOptions) if w.startswith(PLANNED)]
        plan = ["plan", "--preset", "ltx-2.3", "--device-kind", kind, "--devices", str(each)]
        assert cli.main([*plan, *flags]) in (None, 0)
        said = capsys.readouterr().out
        assert f"on {each} x h100-80gb" in said and "memory: fits" in said, said
    assert commands == ["serve", "batch", "batch"]


def test_images_are_pinned_and_hold_what_a_kernel_needs():
    cuda, tpu = ((DEPLOY / f"{name}.Dockerfile").read_text() for name in ("cuda", "tpu"))
    for text in (cuda, tpu):
        assert 'ENTRYPOINT ["ltx2rt"]' in text
        assert re.search(r"^FROM python:3\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    (torch,) = re.findall(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch in cuda and torch in (DEPLOY / "skypilot.yaml").read_text()
    assert "gcc libc6-dev" in cuda and re.search(r"jax\[tpu\]==[\d.]+", tpu)


def test_an_image_is_built_from_the_package_alone():
    """Beside the three roots of packages it takes the files that pyproject.toml names."""
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(kept) == {
        *"LICENSE MANIFEST.in README.md pyproject.toml backends kernels ltx2rt".split()
    }
    assert all((ROOT / name).exists() for name in kept)
