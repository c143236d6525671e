"""What ranks compare."""

import json

from ltx2rt.ranks.crew import Crew
from ltx2rt.weights.digests import digests
from tests.conftest import refused


class FakeStore(dict):
    """Of two ranks whose second has said all it has to say."""

    def get(self, key):
        return self[key].encode()

    set = dict.__setitem__


def test_files_are_compared_by_size_and_content(tmp_path, model):
    crew = object.__new__(Crew)
    crew.rank, crew.size = 0, 2
    crew._store = FakeStore()
    file = tmp_path / "w.safetensors"
    original = (model / "tiny-2.3.safetensors").read_bytes()
    file.write_bytes(original)
    mine = digests([tmp_path])
    assert mine == digests([file]) and len(digests([model])) > 3
    file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))  # the header is equal
    crew._store["files/1"] = json.dumps(digests([file]))
    with refused(r"ranks 0 and 1 have different files: .*w\.safetensors is .* on rank 0, .*"):
        crew.agree("files", mine)
