"""What users have goes in, and a clip comes out: every row of the tables, by the command line."""

import re
from importlib import import_module

import pytest
from conftest import run_cli

MODULES = ("clips", "loras")
ROWS = [row for module in MODULES for row in import_module(f"real.{module}").ROWS]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.real] * row.real) for row in ROWS],
)
def test_a_user_sees(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row.make(tmp_path)
    status, _, stderr = run_cli(row.argv)
    assert status == row.status, stderr
    for pattern in row.says:
        assert re.search(pattern, stderr), f"{pattern!r} is not in:\n{stderr}"
    for pattern in row.silent:
        assert not re.search(pattern, stderr), f"{pattern!r} is in:\n{stderr}"
    row.check(tmp_path)
