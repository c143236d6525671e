"""What ranks compare."""

import json

import pytest

from ltx2rt.errors import InputError
from ltx2rt.ranks import facts
from ltx2rt.ranks.crew import Crew


class FakeStore(dict):
    """Of two ranks whose second has said all it has to say."""

    def get(self, key):
        return self[key].encode()

    set = dict.__setitem__


def test_files_are_compared_by_size_and_header(tmp_path, model):
    crew = object.__new__(Crew)
    crew.rank, crew.size = 0, 2
    crew._store = FakeStore()
    file = tmp_path / "w.safetensors"
    original = (model / "tiny-2.3.safetensors").read_bytes()
    file.write_bytes(original)
    mine = facts.digests([tmp_path])
    assert mine == facts.digests([file]) and len(facts.digests([model])) > 3
    file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))  # data are not read
    assert facts.digests([file]) == mine
    file.write_bytes(original.replace(b"transformer_blocks.0", b"transformer_blocks.9", 1))
    crew._store["files/1"] = json.dumps(facts.digests([file]))
    with pytest.raises(
        InputError,
        match=r"ranks 0 and 1 have different files: .*w\.safetensors is .* on rank 0, .*",
    ):
        crew.agree("files", mine)
