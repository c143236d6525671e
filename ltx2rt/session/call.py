"""A stage's need of a session: a network, at which sizes, how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ltx2rt.models.catalog import Network, network
from ltx2rt.passes.loop import step_slots
from ltx2rt.session.options import LoraSpec

# a network's name (and its part), and the LoRAs merged into it
WeightsKey = tuple[str, tuple[LoraSpec, ...]]


def network_of(key: WeightsKey) -> str:
    return key[0].split()[0]


def holds(theirs: WeightsKey, ours: WeightsKey) -> bool:
    """Whether one set has all tensors of another: both are of one part, or it is the whole."""
    return theirs[0] in (ours[0], network_of(ours))


@dataclass(frozen=True)
class Call:
    """network: of the catalog; sizes: what its graph is traced from. steps: of a denoise loop, None
    for a network that runs once. each: devices share out such calls. room: steps of a longer loop
    with which it shares a program."""

    network: str
    sizes: Any
    steps: int | None = None
    loras: tuple[LoraSpec, ...] = ()
    each: bool = False
    room: int = 0

    @property
    def row(self) -> Network:
        return network(self.network)

    @property
    def branches(self) -> int:
        row = self.row
        return row.branches(self.sizes) if row.branches else 1

    @property
    def weights(self) -> WeightsKey:
        return " ".join(filter(None, (self.row.rules, self.row.partial(self.sizes)))), self.loras

    @property
    def slots(self) -> int | None:
        """The steps that its loop has room for."""
        return None if self.steps is None else max(self.steps, self.room)

    @property
    def program(self) -> tuple[str, Any, int | None]:
        """The key of kept programs: calls that differ only in LoRAs share one."""
        return self.network, self.sizes, None if self.slots is None else step_slots(self.slots)
