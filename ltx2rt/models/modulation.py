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


@dataclass(frozen=True)
class Modulation:
    """rows: ((B,) levels, rows, D) of a modulation MLP; index as in Levels."""

    rows: Term
    index: Term | None

    def with_table(self, o: Ops, table: Term, start: int = 0) -> list[Term]:
        """Each row plus its table entry, spread to tokens: ((B,) D) if there is one level, else
        ((B,) tokens, D). table: (rows, D), of which the entries from `start` on are used."""
        count = self.rows.type.size("rows")
        if start or table.type.size("rows") != count:
            table = o.slice(table, axis="rows", start=start, stop=start + count)
        if self.index is None:
            rows = o.at(self.rows, axis="levels", index=0) + table
            return [o.at(rows, axis="rows", index=i) for i in range(count)]
        rows = self.rows + table
        return [
            o.take(o.at(rows, axis="rows", index=i), self.index, axis="levels")
            for i in range(count)
        ]


def adaln(
    o: Ops, levels: Levels, width: int, num_rows: int, axis: str = "D"
) -> tuple[Modulation, Term]:
    """Sinusoid, Linear, SiLU, Linear: embedding ((B,) levels, D); SiLU, Linear: modulation rows."""
    e = o.cast(o.sinusoid(levels.values, size=256), dtype=o.dtype)
    e = o.silu(o.linear(e, "emb.timestep_embedder.linear_1", {axis: width}))
    e = o.linear(e, "emb.timestep_embedder.linear_2", {axis: width})
    rows = o.linear(o.silu(e), "linear", {"rows": num_rows, axis: width})
    return Modulation(rows, levels.index), e
