"""Facts stay where they are: no module compares releases, and a part or an encoding is named by
few files."""

from counts import NAMED, RELEASES, long_functions, naming

MOST = {
    "duration head": 6,
    "diffusion decoder": 6,
    "temporal upsampler": 5,
    "float8": 8,
}  # ceilings that only go down
MOST_LONG = 1


def test_no_module_compares_releases():
    assert naming(RELEASES) == []


def test_few_files_name_a_part_or_an_encoding():
    for word, most in MOST.items():
        assert len(naming(NAMED[word])) <= most, naming(NAMED[word])


def test_few_functions_are_long():
    assert len(long_functions()) <= MOST_LONG, long_functions()
