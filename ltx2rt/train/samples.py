"""The samples of a run: which of the caches' it uses, for which streams, and the order of the
draws, each a function of the seed and the number of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.errors import InputError
from ltx2rt.stages.noise import uniform
from ltx2rt.train.manifest import SCALES, Sample, heard_latents, read_manifest, require_same
from ltx2rt.train.recipe import GROUPS, MODES, STREAM_OF, reached
from ltx2rt.train.request import TrainRequest


@dataclass(frozen=True)
class Kind:
    """Samples that one graph trains on. reference: latent frames, rows and columns of it, None:
    none; heard: latents of a sound that is a reference."""

    bucket: str
    fps: str
    reference: tuple[int, int, int] | None = None
    heard: int = 0

    @property
    def plain(self) -> Kind:
        return replace(self, reference=None, heard=0)


@dataclass(frozen=True)
class Item:
    """A sample with the cache that it is in. empty: the context of no caption there. heard: as of
    `Kind`."""

    sample: Sample
    cache: Path
    weight: float
    empty: str
    heard: int


class Samples:
    """The samples of a resolved request. streams: the present ones; trained: those that are noised;
    targets: those of the request, or of a mode that trains silent clips. batch: samples of a step
    on all devices.

    Raises InputError where data and request do not go together. say: gets a sentence about each
    thing that is trained otherwise than asked.
    """

    def __init__(self, r: TrainRequest, base: str, devices: int, say: Callable[[str], None]):
        self.request, self.mode = r, MODES[r.mode]
        self.heads: list[dict[str, Any]] = []
        read: list[Item] = []
        for data in r.data:
            head, samples = read_manifest(data.cache, base)
            self.heads.append(head)
            read += [
                Item(s, data.cache, data.weight, head["empty"], heard_latents(data.cache, s))
                for s in samples
            ]
        self.streams, self.trained = self.mode.streams, self.mode.trained
        self.targets = r.targets
        self._choose_streams()
        sounding = [i for i in read if "audio" in i.sample.streams]
        self._require_sound(read, sounding, say)
        usable = self._usable(read, sounding)
        if r.held_out is None:
            apart = {i.sample.sample for i in usable if i.sample.held_out}
        else:
            count = math.ceil(r.held_out * len(usable))
            apart = set(sorted(i.sample.sample for i in usable)[:count])
        self.items = [i for i in usable if i.sample.sample not in apart]
        self.held_out = [i for i in usable if i.sample.sample in apart]
        self.batch = r.batch * devices
        if len(self.items) < self.batch:
            raise InputError(
                f"--batch: {self.batch} samples at once, the cache has {len(self.items)}; lower it"
            )
        self.kinds = sorted({self.kind(i) for i in self.items}, key=str)
        self.shares = self._shares()

    def kind(self, item: Item) -> Kind:
        """The kind of a batch with its references, as far as the streams have them."""
        s = item.sample
        if not self.request.reference:
            return Kind(s.bucket, s.fps)
        reference = s.reference if "video" in self.streams else None
        return Kind(s.bucket, s.fps, reference, item.heard if "audio" in self.streams else 0)

    def _choose_streams(self) -> None:
        """Apply `--streams`."""
        r, trained = self.request, self.trained
        if strange := sorted(set(r.streams) - set(trained)):
            raise InputError(
                f"--streams: {strange[0]}, --mode {r.mode} trains {' and '.join(trained)}; "
                "leave it out, or choose another --mode"
            )
        if left := set(trained) - set(r.streams or trained):
            self.trained, self.streams = (
                tuple(name for name in names if name not in left)
                for names in (trained, self.streams)
            )

    def _require_sound(
        self, items: list[Item], sounding: list[Item], say: Callable[[str], None]
    ) -> None:
        """Leave the sound out where no clip has any. Raises InputError where the mode needs it."""
        r, aims, both = self.request, reached(self.targets), self.mode.trained == ("video", "audio")
        silent, named = f"none of the {len(items)} clips has sound", " ".join(self.targets)
        if "audio" in self.streams and not sounding:
            if not both or not any("video" in i.sample.streams for i in items):
                raise InputError(
                    f"--data: {silent}, and --mode {r.mode} trains with it; prepare clips with "
                    "sound, or choose --mode t2v, which then trains the picture"
                )
            if aims != {"video"} and self.targets != self.mode.targets:
                raise InputError(
                    f"--targets {named}: {silent}; leave the flag out, or name groups of the "
                    "picture"
                )
            self.streams = self.trained = ("video",)
            kept = (x for x in self.targets if x not in GROUPS or STREAM_OF[x] == "video")
            self.targets = tuple(kept)
            say(f"{silent}: the picture is trained")
        elif "audio" in self.trained and not aims & {"audio", "cross"}:
            said = f"--targets {named}: none reaches the sound"
            if not both:
                raise InputError(f"{said}, which --mode {r.mode} trains; add audio-attn")
            say(f"{said}, so the LoRA will not change it")
        elif "audio" in self.trained and both and len(sounding) < len(items):
            say(
                f"{len(items) - len(sounding)} of {len(items)} clips have no sound: they train "
                "only the picture"
            )

    def _usable(self, items: list[Item], sounding: list[Item]) -> list[Item]:
        """The samples with all streams of the mode. Raises InputError if there are none, and for
        samples that lack a condition."""
        both = self.mode.trained == ("video", "audio")
        needed = items if both or "audio" not in self.streams else sounding
        if "video" in self.streams:
            needed = [i for i in needed if "video" in i.sample.streams]
            if not needed:
                raise InputError(
                    f"--data: no clip has a picture, --mode {self.request.mode} needs it; use "
                    "--mode t2a"
                )
        own = ["" if "video" in self.streams else "audio_"]
        wanted = [f"{prefix}mask" for prefix in own if self.request.mask]
        own = ["", "audio_"] if self.mode.heard else own
        wanted += [f"{prefix}reference" for prefix in own if self.request.reference]
        for name in wanted:
            if lacking := [i.sample.name for i in needed if name not in i.sample.streams]:
                kind, ending = name.removeprefix("audio_"), "wav" if "audio" in name else "mp4"
                raise InputError(
                    f"--{kind}: {len(lacking)} of {len(needed)} clips have none, such as "
                    f"{lacking[0]}; put NAME.{kind}.{ending} beside each and run `ltx2rt train "
                    "prepare` again"
                )
        for name in SCALES:
            require_same((head.get(name, 1) for head in self.heads), name.replace("_", " "))
        return needed

    def _shares(self) -> np.ndarray | None:
        """How often each sample is drawn, None: each once in an epoch. Raises InputError for a
        share of sound that the data cannot give."""
        p = self.request.sound_share
        weights = np.array([i.weight for i in self.items])
        if p is None and (weights == weights[0]).all():
            return None
        weights = weights / weights.sum()
        sounding = np.array(["audio" in i.sample.streams for i in self.items])
        if p is not None:
            for share, there, kind in ((p, sounding, "with"), (1 - p, ~sounding, "without")):
                if share and not there.any():
                    raise InputError(
                        f"--sound-share: {p:g}, but no clip is {kind} sound; leave the flag out"
                    )
                weights[there] *= share / max(weights[there].sum(), 1e-30)
        return weights

    @property
    def reference_scales(self) -> tuple[int, int]:
        """How much smaller references are, and how many times fewer frames they have."""
        downscale, temporal_scale = (self.heads[0].get(name, 1) for name in SCALES)
        return downscale, temporal_scale

    @property
    def trigger(self) -> str | None:
        return next((head["trigger"] for head in self.heads if head.get("trigger")), None)

    def drawn(self, step: int, part: int) -> list[tuple[Item, str]]:
        """The samples of a batch, all of one kind, and the stream of random numbers of each."""
        number = step * self.request.accumulate + part
        streams = [f"train.{step}.{part * self.batch + i}" for i in range(self.batch)]
        if self.shares is not None:
            found = self._picked(number)
        elif len(self.kinds) > 1:
            found = self._of_one_kind(number)
        else:
            places = range(number * self.batch, (number + 1) * self.batch)
            epochs = (divmod(i, len(self.items)) for i in places)
            found = [self.items[self._order(epoch, len(self.items))[i]] for epoch, i in epochs]
        return list(zip(found, streams, strict=True))

    def _order(self, epoch: object, count: int) -> np.ndarray:
        drawn = uniform(self.request.seed, f"train.order.{epoch}", count)
        return np.argsort(drawn, kind="stable")

    def _picked(self, number: int) -> list[Item]:
        """Samples by their shares, drawn with replacement; the first one decides the kind."""
        assert self.shares is not None
        found, shares = list[Item](), self.shares
        for place in uniform(self.request.seed, f"train.pick.{number}", self.batch):
            bounds = np.cumsum(shares) / shares.sum()
            at = min(int(np.searchsorted(bounds, place, "right")), len(shares) - 1)
            found.append(self.items[at])
            same = [self.kind(i) == self.kind(found[0]) for i in self.items]
            shares = self.shares * np.array(same)
        return found

    def _of_one_kind(self, number: int) -> list[Item]:
        """The batch of this number; an epoch's last batch of a kind repeats its first samples."""
        groups = [[i for i in self.items if self.kind(i) == kind] for kind in self.kinds]
        counts = [-(-len(group) // self.batch) for group in groups]
        epoch, place = divmod(number, sum(counts))
        places = [(kind, i) for kind, count in enumerate(counts) for i in range(count)]
        kind, chosen = places[int(self._order(epoch, len(places))[place])]
        group, first = groups[kind], chosen * self.batch
        order = self._order(f"{epoch}.{kind}", len(group))
        return [group[order[i % len(group)]] for i in range(first, first + self.batch)]
