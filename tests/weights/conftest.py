"""Tiny checkpoints, written once per session."""

import pytest

from ltx2rt.instruments.make import make_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(preset, layout) -> folder. Tests must not change what lies there."""
    made = {}

    def get(name, layout):
        if (name, layout) not in made:
            made[name, layout] = tmp_path_factory.mktemp(f"{name}-{layout}")
            make_checkpoint(name, layout, made[name, layout])
        return made[name, layout]

    return get
