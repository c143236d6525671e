"""A file in a few words: its release, the types of its tensors, its size. Headers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ltx2rt.release import of_tensors, stated
from ltx2rt.weights.files import DTYPE_NAMES, TensorReader

SMALL = 0.0005  # share of the bytes: types that are not worth a word


def type_bytes(source: TensorReader) -> Counter[str]:
    """Stored bytes by type, such as BF16 or Q4_K."""
    found: Counter[str] = Counter()
    for name in source.names():
        info = source.info(name)
        found[getattr(info, "format", None) or DTYPE_NAMES[info.dtype]] += info.nbytes
    return found


def mix(sizes: Mapping[str, int]) -> str:
    """Such as "Q4_K 61 %, Q6_K 39 %", the largest first; a type alone without a number."""
    whole = sum(sizes.values()) or 1
    shares = sorted(((size / whole, name) for name, size in sizes.items()), reverse=True)
    shares = [share for share in shares if share[0] >= SMALL]
    if len(shares) == 1:
        return shares[0][1]
    digits = {name: 0 if 0.01 <= share < 0.99 else 1 for share, name in shares}
    return ", ".join(f"{name} {100 * share:.{digits[name]}f} %" for share, name in shares)


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def release_of(file: TensorReader) -> str:
    """The name of the release that a transformer's file states, or that its tensors tell."""
    return stated(getattr(file, "metadata", {})) or of_tensors(set(file.names())).name


def words(file: TensorReader) -> str:
    """A transformer's file, such as "LTX-2.3, Q4_K 61 %, Q6_K 39 %, 15.3 GB"."""
    sizes = type_bytes(file)
    return f"LTX-{release_of(file)}, {mix(sizes)}, {gigabytes(sum(sizes.values()))}"
