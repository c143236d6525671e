"""AdaLN: from timestep levels to scale, shift and gate of every token.

A stream has few distinct timesteps (one in text-to-video, one more per conditioning strength).
Modulation rows are computed per level [B, levels] and spread to tokens through a level index, never
computed per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltx2rt.graph import Ops, Term


@dataclass(frozen=True)
class Levels:
    """Timesteps of a stream. values: float32 ((B,) levels), already multiplied by the timestep
    scale (0..1000). index: int32 ((B,) tokens) into levels, or None if there is one level."""

    values: Term
    index: Term | None


def with_table(o: Ops, rows: Term, index: Term | None, table: Term, start: int = 0) -> list[Term]:
    """Each of `rows` ((B,) levels, rows, D) plus its table entry, spread to tokens: ((B,) D) if
    there is one level, else ((B,) tokens, D). index: as in Levels. table: (rows, D), of which the
    entries from `start` on are used."""
    count = rows.type.size("rows")
    if start or table.type.size("rows") != count:
        table = o.slice(table, axis="rows", start=start, stop=start + count)
    if index is None:
        return o.each(o.at(rows, axis="levels", index=0) + table, "rows")
    rows += table
    each = (o.at(rows, axis="rows", index=i) for i in range(count))
    return [o.take(row, index, axis="levels") for row in each]


def adaln(o: Ops, levels: Levels, width: int, num_rows: int, axis: str = "D") -> tuple[Term, Term]:
    """Sinusoid, Linear, SiLU, Linear: embedding ((B,) levels, D); SiLU, Linear: modulation rows
    ((B,) levels, rows, D). Returns the rows, then the embedding."""
    e = o.cast(o.sinusoid(levels.values, size=256), dtype=o.dtype)
    e = o.silu(o.linear(e, "emb.timestep_embedder.linear_1", {axis: width}))
    e = o.linear(e, "emb.timestep_embedder.linear_2", {axis: width})
    return o.linear(o.silu(e), "linear", {"rows": num_rows, axis: width}), e
