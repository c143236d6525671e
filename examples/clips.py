"""Synthetic clips with sound: one coloured shape that moves, and the sentence that describes it.

Decides what the tiny trained model can know. A clip is drawn from its description, so a program
that measures a generated one can ask what it should have shown (`Clip.centre`, `Clip.hits`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SIZE, FRAMES, FPS = 128, 25, 24  # pixels of either side, 1 + 8 n frames
SECONDS = FRAMES / FPS
LONG = {"scale": 0.5, "seconds": 121 / FPS}  # a `Clip` of 256x256 pixels, 121 frames
RATE = 48000  # Hz

COLOURS = {
    "red": (0.90, 0.16, 0.16),
    "green": (0.16, 0.75, 0.25),
    "blue": (0.20, 0.35, 0.95),
    "yellow": (0.95, 0.85, 0.15),
    "white": (0.95, 0.95, 0.95),
}
PITCHES = {
    "circle": 300.0,
    "square": 500.0,
    "triangle": 700.0,
}  # Hz; of a steady mel of 100 a second no other comes
MOTIONS = {
    "bounces": "bounces on the floor",
    "right": "slides to the right",
    "left": "slides to the left",
    "grows": "grows",
    "shrinks": "shrinks",
}
BACKGROUNDS = {"dark": (0.08, 0.08, 0.10), "grey": (0.42, 0.42, 0.45), "brown": (0.35, 0.24, 0.16)}
FLOOR = 0.86  # share of the height, where a shape that bounces touches
TOP = 0.2  # where it turns


@dataclass(frozen=True)
class Clip:
    """A clip's picture. x: of the centre where it does not slide; radius: where it does not change,
    both in units of the side; phase: in [0, 1), where in its movement a clip begins; period_s:
    between two bounces; seconds: of the clip; scale: SIZE over the picture's side. A shape has as
    many pixels at any scale, and moves as many in a second, so that one autoencoder serves all."""

    shape: str
    colour: str
    motion: str
    background: str
    x: float = 0.5
    radius: float = 0.16
    phase: float = 0.0
    period_s: float = 1.0
    seconds: float = SECONDS
    scale: float = 1.0

    @property
    def side(self) -> int:
        """Pixels of the picture's."""
        return round(SIZE / self.scale)

    @property
    def num_frames(self) -> int:
        return round(self.seconds * FPS)

    @property
    def prompt(self) -> str:
        return sentence(self.shape, self.colour, self.motion, self.background)

    def hits(self) -> np.ndarray:
        """Seconds at which the shape touches the floor, f64[n]."""
        if self.motion != "bounces":
            return np.zeros(0)
        period = self.period_s / self.scale
        times = (np.arange(-1, self.seconds / period + 1) - self.phase) * period
        return times[(times >= 0) & (times < self.seconds)]

    def pose(self, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Centre x, centre y and radius in units of the side, at each of `seconds`."""
        part = np.asarray(seconds) / self.seconds
        still = np.full_like(part, 0.5)
        x, y, radius = still - 0.5 + self.x, still, still - 0.5 + self.radius
        if self.motion in ("left", "right"):
            way = 0.22 + 0.08 * self.phase + (0.56 - 0.16 * self.phase) * part
            x = way if self.motion == "right" else 1 - way
        elif self.motion in ("grows", "shrinks"):
            radius = (
                0.08 + 0.03 * self.phase + 0.18 * (part if self.motion == "grows" else 1 - part)
            )
        radius = self.scale * radius
        if self.motion == "bounces":
            u = (np.asarray(seconds) / self.period_s * self.scale + self.phase) % 1
            y = FLOOR - radius - (FLOOR - 2 * radius - TOP) * 4 * u * (1 - u)
        return x, y, radius

    def frames(
        self, size: int | None = None, first: int = 0, count: int | None = None
    ) -> np.ndarray:
        """f32[count, size, size, 3] in [0, 1] from frame `first` on, all without a count. size:
        pixels, the clip's own without."""
        size = size or self.side
        count = self.num_frames if count is None else count
        x, y, radius = (
            a[:, None, None].astype(np.float32)
            for a in self.pose(np.arange(first, first + count) / FPS)
        )
        along = (np.arange(size, dtype=np.float32) + 0.5) / size
        dx, dy = along[None, None, :] - x, along[None, :, None] - y
        if self.shape == "circle":
            outside = np.sqrt(dx**2 + dy**2) - radius
        elif self.shape == "square":
            outside = np.maximum(np.abs(dx), np.abs(dy)) - 0.86 * radius
        else:  # as high and as wide as the circle
            outside = np.maximum(dy - radius, 0.894 * np.abs(dx) - 0.447 * (dy + radius))
        inside = np.clip(0.5 - outside * size, 0, 1)[..., None]
        made = (
            self.behind(size) * (1 - inside) + np.array(COLOURS[self.colour], np.float32) * inside
        )
        return made.astype(np.float32)

    def behind(self, size: int | None = None) -> np.ndarray:
        """The background alone, f32[1, size, size, 3]: lighter at the top."""
        size = size or self.side
        shade = 1.15 - 0.3 * (np.arange(size, dtype=np.float32) + 0.5) / size
        return np.broadcast_to(
            np.array(BACKGROUNDS[self.background], np.float32) * shade[:, None, None],
            (1, size, size, 3),
        )

    def sound(self, rate: int = RATE, pitch_hz: float | None = None) -> np.ndarray:
        """f32[2, samples] at `rate` Hz: a tone by shape, louder where the shape is larger and on
        its side; clicks. pitch_hz: another tone."""
        t = np.arange(round(self.seconds * rate)) / rate
        x, _, radius = self.pose(t)
        size = radius / (0.16 * self.scale)
        tone = 0.12 * size * np.sin(2 * np.pi * (pitch_hz or PITCHES[self.shape]) * t)
        wave = np.stack([tone * np.sqrt(1 - x), tone * np.sqrt(x)])
        for hit in self.hits():
            since = t - hit
            wave += np.where(
                since >= 0, 0.6 * np.exp(-since / 0.012) * np.sin(2 * np.pi * 1800 * since), 0
            )
        fade = np.minimum(1, np.minimum(t, self.seconds - t) / 0.01)
        return (wave * fade).astype(np.float32)


def sentence(
    shape: str, colour: str | None = None, motion: str | None = None, background: str | None = None
) -> str:
    """The prompt of a clip; None: what it leaves out."""
    words = ["a", *filter(None, (colour, shape, MOTIONS[motion] if motion else None))]
    return " ".join(words) + (f", {background} background" if background else "")


def held_out(shape: str, colour: str, motion: str) -> bool:
    """Whether a combination is never trained on: one in five, each shape, colour and motion among
    them."""
    names = (list(PITCHES).index(shape), list(COLOURS).index(colour), list(MOTIONS).index(motion))
    return (names[0] * 2 + names[1] + names[2]) % 5 == 0


def random_clip(rng: np.random.Generator, trained: bool = True, seconds: float = SECONDS) -> Clip:
    """One of those that are trained on, or else one of those held out."""
    while True:
        shape, colour, motion, background = (
            str(rng.choice(list(names))) for names in (PITCHES, COLOURS, MOTIONS, BACKGROUNDS)
        )
        if held_out(shape, colour, motion) != trained:
            period = rng.uniform(0.8, 1.2)
            return Clip(
                shape,
                colour,
                motion,
                background,
                rng.uniform(0.3, 0.7),
                rng.uniform(0.13, 0.2),
                rng.random(),
                period,
                seconds,
            )
