"""decode: video latents to frames, tile by tile, while the frames before are taken."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.models import diffusion_decoder
from ltx2rt.models.diffusion_decoder import (
    ATTENTION_TOKENS,
    BORDERS,
    DiffusionDecoderConfig,
    TileShape,
    config_of,
    divides,
)
from ltx2rt.models.geometry import Geometry, pixel_frames
from ltx2rt.session.session import Call, Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.stages.denoise import Noise
from ltx2rt.stages.noise import standard_normal
from ltx2rt.stages.stage import FRAMES, Stage, State, finite, videos_of
from ltx2rt.stages.tiling import (
    FEWER_CELLS,
    Span,
    Tiling,
    blend_tiles,
    plan_feature_tiles,
    plan_tiles,
    slabs,
    tile_latents,
)

DECODERS = ("conv", "diffusion")
SLABS = "diffusion-slabs"  # the network of one slab on each device
STREAM = "decoder"  # name of the diffusion decoder's noise, [videos, 3, F, H, W] in --noise-in
BEGUN_BYTES = 4e9  # noise that is drawn before it is wanted: of 121 frames of 1920x1088 3.03e9
Calls = Iterator[tuple[Call, dict[str, np.ndarray]]]


def video_decoder(model: ModelConfig, asked: str | None) -> str:
    """One of DECODERS: what is asked for, else the diffusion one if the model has it. Raises
    InputError if what is asked for was not found."""
    found = {
        "conv": bool(model.video_vae.decoder),
        "diffusion": model.part("diffusion_decoder") is not None,
    }
    if asked is None:
        return "diffusion" if found["diffusion"] else "conv"
    if not found[asked]:
        raise InputError(
            f"--video-decoder: {asked}, but no video VAE with that decoder was found; pass its "
            "file with --video-vae"
        )
    return asked


def decoding(
    asked: str | None, geometry: Geometry, model: ModelConfig, mode: str, noise: Noise
) -> Frames:
    """The stage that makes a clip's frames. asked: as of `video_decoder`; mode: of tiling, "auto"
    or "off". Raises InputError if the model has no such decoder."""
    conv = Frames(geometry, plan_tiles(mode, geometry), len(noise.seeds))
    if video_decoder(model, asked) == "conv":
        return conv
    config = config_of(model)
    first, *fewer = (
        plan_feature_tiles(
            mode,
            diffusion_decoder.cells(config, geometry.grid),
            diffusion_decoder.overlap(config),
            diffusion_decoder.cell(config),
            most,
        )
        for most in (None, *(FEWER_CELLS if mode == "auto" else ()))
    )
    other = conv if asked is None and model.video_vae.decoder else None
    return DiffusionFrames(
        geometry, first, len(noise.seeds), noise=noise, fewer=tuple(fewer), other=other
    )


@dataclass(frozen=True)
class Frames(Stage):
    """Devices share the tiles; only the main process gets the frames. remark: a line about the
    decoder for the user."""

    geometry: Geometry
    tiling: Tiling
    num_videos: int = 1
    remark: str = ""
    name = "decode"
    makes = (FRAMES,)

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        for spans in [*self.tiling] * self.num_videos:
            latent = (1, self.geometry.video_channels, *(s.stop - s.start for s in spans))
            yield Call("video-decoder", latent, each=True)

    def steps(self) -> int:
        return len(self.tiling.frames) * self.num_videos

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        assert state.video is not None, "nothing was denoised"
        finite(self.name, latents=state.video)
        state.put("video_latent", state.video)
        state.frames = self._frames(session, state, state.video, watch)

    def _calls(self, session: Session, state: State, number: int, video: np.ndarray) -> Calls:
        """The decoder's call for each tile of [1, C, f, h, w], in the order of `blend_tiles`."""
        for latent in tile_latents(video, self.tiling):
            yield Call("video-decoder", latent.shape), {"latent": latent}

    def _checked(self, calls: Calls, watch: Stopwatch) -> Calls:
        """The calls, none of them once the run is cancelled."""
        return map(watch.checked, calls)

    def _clip(self, model: ModelConfig, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Assemble a video's frames from its tiles."""
        return chunks

    def _frames(
        self, session: Session, state: State, latents: np.ndarray, watch: Stopwatch
    ) -> Iterator[Iterator[np.ndarray]]:
        backend, videos = session.backend, videos_of(latents)
        calls = itertools.chain.from_iterable(
            self._calls(session, state, i, video) for i, video in enumerate(videos)
        )
        decoded = session.each(self._checked(calls, watch), "frames")
        num_frames = pixel_frames(self.geometry.frames, session.config.video_vae.time_factor)
        if not backend.is_main:
            with watch.stage(self.name):
                deque(decoded, maxlen=0)
            return

        def chunks(video: int) -> Iterator[np.ndarray]:
            name = self.name if len(videos) == 1 else f"{self.name} {video + 1}"
            with watch.stage(name, num_frames, "frames") as done:
                for chunk in self._clip(
                    session.config, blend_tiles(decoded, self.tiling, backend.to_host)
                ):
                    done(chunk.shape[1])
                    yield chunk

        yield from map(chunks, range(len(videos)))


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that draw a frame of noise each; numpy leaves Python's lock to others meanwhile."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="noise")


@dataclass(frozen=True)
class Drawing:
    """An array that threads fill: it is whole when all of `drawn` are done."""

    array: np.ndarray
    drawn: tuple[Future[None], ...] = ()

    def take(self) -> np.ndarray:
        for one in self.drawn:
            one.result()
        return self.array

    def cancel(self) -> None:
        for one in self.drawn:
            one.cancel()


@dataclass(frozen=True)
class DiffusionFrames(Frames):
    """Decode by the diffusion decoder. tiling: of the features, which are made of a whole video at
    once. Every frame has its own stream of noise, so that it does not depend on the tiles. border:
    beyond the left and right one of a tile, one of BORDERS. kept_bytes: of the features
    if they stay on the device; 0: they wait in the host's memory. at_once: as
    of `TileShape`. fewer: smaller and smaller tiles, for
    devices of less memory; other: decodes where even the last have no room."""

    noise: Noise = field(kw_only=True)
    border: str = BORDERS[0]
    kept_bytes: int = 0
    at_once: int = 0
    fewer: tuple[Tiling, ...] = field(default=(), kw_only=True)
    other: Frames | None = field(default=None, kw_only=True)

    def within(self, session: Session) -> Frames:
        device = session.backend.device()
        room, stage = device.idle_bytes(session.options.max_memory), self
        kept = [0]
        if not session.backend.mesh:
            whole = session.graph(Call("diffusion-features", self.geometry.video_shape))
            kept = [whole.outputs["features"].type.nbytes, 0]
        every = itertools.product((self.tiling, *self.fewer), kept, (0, ATTENTION_TOKENS))
        tiled = (replace(self, tiling=x, kept_bytes=y, at_once=z) for x, y, z in every)
        for stage in (*self._in_slabs(session), *tiled):
            if session.memory.costs([stage])[0].peak_bytes <= room:
                where = session.checkpoint.source("diffusion_decoder").where
                other = f"decode: the weights in {where} differ from the released file's"
                return replace(stage, remark=other if where.is_dir() else "")
        if self.other is None:
            return stage
        gigabytes = session.memory.costs([stage])[0].peak_bytes / 1e9
        return replace(
            self.other,
            remark=(
                "decode: by the convolutional decoder, as the diffusion decoder needs "
                f"{gigabytes:.3g} GB, which {device.name} has not"
            ),
        )

    def _in_slabs(self, session: Session) -> Iterator[DiffusionSlabs]:
        """The stage on several devices that share a clip, if it can be cut."""
        config, devices = config_of(session.config), session.placement.text.sharing(SLABS)
        grid = self.geometry.grid
        if devices > 1 and self.border == "chunked" and divides(config, grid, devices):
            tiles = slabs(
                diffusion_decoder.cells(config, grid), diffusion_decoder.cell(config), devices
            )
            yield DiffusionSlabs(self.geometry, tiles, self.num_videos, noise=self.noise)

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        config = config_of(model)
        for _ in range(self.num_videos):
            yield Call("diffusion-features", self.geometry.video_shape)
            for spans in self.tiling:
                yield Call("diffusion-decoder", self._shape(config, *spans), each=True)

    def holds(self, model: ModelConfig) -> int:
        return self.kept_bytes

    def draws(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        return {self.noise.prefix + STREAM: (self.num_videos, 3, *self._pixels(config_of(model)))}

    def begin(self, model: ModelConfig, state: State) -> None:
        """Draw the first tiles' noise while other stages run: seconds of all cores for 1920x1088."""
        self._begin(config_of(model), state, 0, self.tiling.frames[0])

    def _begin(self, config: DiffusionDecoderConfig, state: State, number: int, t: Span) -> None:
        _, height, width = self._pixels(config)
        if 12 * (t.end - t.first) * height * width <= BEGUN_BYTES:
            drawing = self._drawing(number, range(t.first, t.end), height, width)
            state.begun[number, t.first] = drawing

    def run(self, session: Session, state: State, watch: Stopwatch) -> None:
        if state.keep:
            frames, *size = self._pixels(config_of(session.config))
            drawn = [
                self._drawing(number, range(frames), *size) for number in range(self.num_videos)
            ]
            state.put(f"{STREAM}.noise", np.concatenate([drawing.take() for drawing in drawn]))
        super().run(session, state, watch)

    def _pixels(self, config: DiffusionDecoderConfig) -> tuple[int, int, int]:
        """Frames, rows and columns that all tiles make, before the padding is cut off."""
        return diffusion_decoder.whole(config, 1, self.geometry.grid).pixels(config)

    def _shape(
        self, config: DiffusionDecoderConfig, frames: Span, rows: Span, columns: Span
    ) -> TileShape:
        shape = diffusion_decoder.whole(config, 1, self.geometry.grid, self.border)
        first, last = frames is self.tiling.frames[0], frames is self.tiling.frames[-1]
        return replace(
            shape,
            frames=(shape.frames if last else frames.stop) - frames.start,
            rows=rows.stop - rows.start,
            columns=columns.stop - columns.start,
            first=first,
            last=last,
            at_once=self.at_once,
        )

    def _calls(self, session: Session, state: State, number: int, video: np.ndarray) -> Calls:
        config, after = config_of(session.config), [*self.tiling.frames[1:], None]
        call = Call("diffusion-features", video.shape)
        features = session.run(call, {"latent": video})["features"]
        if not self.kept_bytes:
            features = session.backend.to_host(features)
        for t, following in zip(self.tiling.frames, after, strict=True):
            noise = self._drawn(config, state, number, t, following)
            for r, c in itertools.product(self.tiling.rows, self.tiling.columns):
                shape = self._shape(config, t, r, c)
                frames = slice(t.start, t.start + shape.frames)
                feeds = {
                    "features": features[:, frames, r.latents, c.latents],
                    "noise": noise[..., r.positions, c.positions],
                }
                yield Call("diffusion-decoder", shape), feeds

    def _drawn(
        self,
        config: DiffusionDecoderConfig,
        state: State,
        number: int,
        t: Span,
        following: Span | None,
    ) -> np.ndarray:
        """Return the noise of a video's span of frames; begin to draw the next span's."""
        _, height, width = self._pixels(config)
        drawing = state.begun.pop((number, t.first), None)
        noise = (drawing or self._drawing(number, range(t.first, t.end), height, width)).take()
        if following:
            self._begin(config, state, number, following)
        elif number + 1 < self.num_videos:
            self._begin(config, state, number + 1, self.tiling.frames[0])
        return noise

    def _drawing(self, number: int, frames: range, height: int, width: int) -> Drawing:
        """The noise of these frames of a video, f32[1, 3, frames, height, width]."""
        if self.noise.file is not None:
            of_video, of_frames = (0, number, number + 1), (2, frames.start, frames.stop)
            return Drawing(self.noise.read(STREAM, of_video, of_frames))
        noise = np.empty((1, 3, len(frames), height, width), np.float32)
        seed, size = self.noise.seeds[number], (3, height, width)

        def draw(at: int, frame: int) -> None:
            noise[0, :, at] = standard_normal(seed, f"{STREAM}.{frame}", size)

        drawn = tuple(_pool().submit(draw, at, frame) for at, frame in enumerate(frames))
        return Drawing(noise, drawn)

    def _clip(self, model: ModelConfig, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        frames, rows, columns = diffusion_decoder.inside(config_of(model), self.geometry.grid)
        left = frames.stop
        for chunk in chunks:
            if left > 0:
                yield chunk[:, :left, rows, columns]
            left -= chunk.shape[1]


@dataclass(frozen=True)
class DiffusionSlabs(DiffusionFrames):
    """Decode a whole video at once, a slab of its columns on each device. tiling: the slabs."""

    def needs(self, model: ModelConfig) -> Iterator[Call]:
        for _ in range(self.num_videos * len(self.tiling.columns)):
            yield Call(SLABS, self.geometry.video_shape, each=True)

    def _calls(self, session: Session, state: State, number: int, video: np.ndarray) -> Calls:
        config = config_of(session.config)
        noise = self._drawn(config, state, number, self.tiling.frames[0], None)
        spans = self.tiling.columns
        for columns in spans:
            ends = [[columns is spans[0], columns is spans[-1]]]
            feeds = {"latent": video, "border": np.array(ends, np.float32)}
            yield Call(SLABS, video.shape), feeds | {"noise": noise[..., columns.positions]}

    def _checked(self, calls: Calls, watch: Stopwatch) -> Calls:
        """All slabs of a video or none: devices wait for each other while they make them."""
        for number, call in enumerate(calls):
            yield call if number % len(self.tiling.columns) else watch.checked(call)
