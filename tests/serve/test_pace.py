"""The time that a run takes, by those that are over."""

import pytest

from ltx2rt.serve.pace import LIKE, Pace


@pytest.mark.parametrize("runs, seconds, words", [
    ([], None, "nothing"),
    ([(2.0, 30.0)], 30.0, "1 like it took 30 s here"),
    ([(2.0, 20.0), (9.0, 1.0), (2.0, 30.0), (2.0, 40.0)], 30.0, "3 like it took 20 to 40 s"),
    ([(2.0, 20.0)] * LIKE + [(2.0, 90.0)] * 9, 20.0, "5 like it"),
    ([(1.0, 10.0), (4.0, 40.0), (0.0, 7.0)], 20.0, "by work from 2 other runs"),
])  # fmt: skip
def test_an_estimate_is_of_runs_like_it_or_of_their_work(runs, seconds, words):
    found, basis = Pace(runs).of(2.0)
    assert found == seconds and words in basis


def test_a_data_sheet_stands_in_for_runs():
    assert Pace().of(2.0, 5.0)[0] == 5.0 and Pace([(2.0, 8.0)]).of(2.0, 5.0)[0] == 8.0
