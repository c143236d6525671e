"""Where tests lie: that of a module `y` of a package `x` is `test_y.py` in `x`, but for tests of
whole runs."""

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGES = (
    "commands", "graph", "media", "models", "passes", "pipelines", "placement", "ranks", "run", "serve", "session",
    "stages", "weights",
)  # fmt: skip
WHOLE = {
    *"commands/test_backends_agree.py commands/test_bad_input.py".split(),
    *"commands/test_natural.py commands/test_num_videos.py commands/test_ranks_agree.py".split(),
    *"models/test_full_width.py passes/test_sequence.py pipelines/test_agree.py".split(),
    *"ranks/test_hosts.py pipelines/test_refusals.py session/test_ranks.py".split(),
    *"serve/test_comfyui_nodes.py serve/test_earlier.py stages/test_interval.py".split(),
}


def test_the_test_of_a_module_has_its_name():
    found = {
        path.relative_to(TESTS)
        for package in PACKAGES
        for path in (TESTS / package).rglob("test_*.py")
    }
    strange = {
        str(path)
        for path in found
        if not (
            module := TESTS.parent / "ltx2rt" / path.with_name(path.name.removeprefix("test_"))
        ).exists()
        and not module.with_suffix("").is_dir()  # of a package
        and module.stem != module.parent.name  # of the package itself
    }
    assert strange == WHOLE
