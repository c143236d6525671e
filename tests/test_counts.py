"""Facts stay where they are: no module compares releases, a part or an encoding is named by few
files, flags are listed by their groups; and the whole does not grow."""

import pytest

from tests.counts import (
    FIGURES,
    NAMED,
    RELEASES,
    depth,
    files_of_tests,
    lines,
    long_functions,
    naming,
    product,
)

# ceilings that only go down
MOST = {"duration head": 6, "diffusion decoder": 6, "temporal upsampler": 5, "float8": 8}
MOST_LONG = 0
MOST_OF = dict(zip(FIGURES, (4, 0, 221, 0), strict=True))
MOST_LINES, MOST_LINES_OF_TESTS = 58_700, 44_100


def test_no_module_compares_releases():
    assert naming(RELEASES) == []


def test_few_files_name_a_part_or_an_encoding():
    for word, most in MOST.items():
        assert len(naming(NAMED[word])) <= most, naming(NAMED[word])


def test_few_functions_are_long():
    assert len(long_functions()) <= MOST_LONG, long_functions()


@pytest.mark.parametrize("what", FIGURES)
def test_a_figure_only_goes_down(what):
    assert len(FIGURES[what]()) <= MOST_OF[what], sorted(FIGURES[what]())


def test_a_pipeline_derives_from_request_alone():
    assert depth() == 2


def test_product_and_tests_stay_small():
    assert lines(product()) <= MOST_LINES and lines(files_of_tests()) <= MOST_LINES_OF_TESTS
