"""Trains a tiny model of the LTX-2.3 architecture on synthetic clips, with the graphs that run it.

    python -m examples.train_tiny FOLDER             # goes on where it was stopped

Every network is trained by itself, in the order of `PARTS`; what is done lies in FOLDER and is not done again. The
seed decides every clip and every noise. At the end FOLDER/model is a checkpoint that `ltx2rt generate` takes, and
FOLDER/losses.png shows how the losses fell.

The text encoder stays random: it only has to tell words apart. So does the second half of the vocoder, which adds what
lies above 8 kHz: its last convolution is zero, for the clips have nothing there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ltx2rt_cuda import as_module
from ltx2rt_cuda.module import NetworkModule
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from examples.clips import BACKGROUNDS, COLOURS, FPS, FRAMES, MOTIONS, PITCHES, SIZE, Clip, random_clip
from ltx2rt.config import ModelConfig
from ltx2rt.graph import Graph
from ltx2rt.graph import trace as trace_graph
from ltx2rt.models import audio_vae, connectors, gemma, transformer, upsampler, video_vae, vocoder
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import Geometry, audio_positions, pack_audio, pack_video, video_positions
from ltx2rt.models.mel import log_mel
from ltx2rt.pipelines.request import DEFAULT_NEGATIVE_PROMPT
from ltx2rt.stages.schedule import DISTILLED_SIGMAS, STAGE2_SIGMAS
from ltx2rt.stages.tokenizer import tokenize
from ltx2rt.weights.files import TensorInfo, write_tensors
from ltx2rt.weights.random.make import F32, Tensor, plan_checkpoint, stored, tokenizer_json, values
from ltx2rt.weights.random.presets import SIZES, Preset, of_sizes

NAME = "tiny-trained-2.3"
HALF = SIZE // 2  # what stage 1 makes
CROP_FRAMES = 17  # of the pieces of HALF x HALF pixels that the video autoencoder is trained on
LATENT_NOISE = 0.3  # added to latents in training: neighbours must decode to neighbours
DROPPED = 0.1  # of the prompts are the empty or the negative one, for classifier-free guidance
GIVEN = 0.3, 0.1  # of the clips have a clean first frame, and of them all a clean sound or video
GUIDANCE, SUBSTEPS = 3.0, 4  # of the teacher that is distilled
MEL_SECONDS = 0.32  # of the pieces that the vocoder is trained on
STATES = "states"


def sizes() -> Preset:
    """Of a checkpoint of at most 12 MB in bfloat16."""
    own = replace(
        SIZES["tiny-2.3"], layers=6, encoder_widths=(32, 32, 64, 64, 64), audio_multipliers=(1, 2, 2),
        vocoder_hidden=96, extension_hidden=32, lora_rank=16,
    )  # fmt: skip
    made = of_sizes(own, NAME)
    return replace(made, config=replace(made.config, audio_vae=replace(made.config.audio_vae, base_channels=32)))


def prompts() -> list[str]:
    every = itertools.product(PITCHES, COLOURS, MOTIONS, BACKGROUNDS)
    return [Clip(*names).prompt for names in every] + ["", DEFAULT_NEGATIVE_PROMPT]


class Lab:
    """What the parts share: the weights so far, by their official names, and where they lie.

    scale: of every part's number of steps.
    """

    def __init__(self, folder: Path, seed: int, scale: float):
        self.folder, self.seed, self.scale = folder, seed, scale
        folder.mkdir(parents=True, exist_ok=True)
        self.preset = sizes()
        self.config: ModelConfig = self.preset.config
        shapes = stored(self.config)
        self.weights: dict[str, torch.nn.Parameter] = {}
        for part in shapes.values():
            for name, shape in part.items():
                start = torch.from_numpy(np.array(values(Tensor(name, TensorInfo(shape, F32)), seed)))
                self.weights[name] = torch.nn.Parameter(start)
        with torch.no_grad():
            for name, fixed in self.weights.items():
                if name.endswith(("mean-of-means", "vocoder.bwe_generator.conv_post.weight")):
                    fixed.zero_()
                elif name.endswith("std-of-means"):
                    fixed.fill_(1)

    def rng(self, *what: Any) -> np.random.Generator:
        return np.random.default_rng([self.seed, *(zlib.crc32(str(x).encode()) for x in what)])

    def module(self, graph: Graph, trained: Callable[[str], bool] = lambda name: True) -> NetworkModule:
        """A network on the lab's own weights, which all modules share."""
        found = as_module(graph)
        for name, parameter in list(found.named_parameters()):
            home, _, leaf = name.rpartition(".")
            own = self.weights[name]
            own.requires_grad_(trained(name) and not name.endswith(("-of-means", "filter", "basis")))
            found.get_submodule(home).register_parameter(leaf, own)
        return found

    def fit(
        self, part: str, modules: Iterable[torch.nn.Module], steps: int, rate: float,
        loss: Callable[[int, np.random.Generator], dict[str, torch.Tensor]],
    ) -> None:  # fmt: skip
        """AdamW on what the modules train, a cosine to zero, and the average of the last weights as the result."""
        parameters = {name: p for m in modules for name, p in m.named_parameters() if p.requires_grad}
        done = self.folder / f"{part}.safetensors"
        if done.exists():
            self._put(load_file(done))
            return
        steps = max(2, round(steps * self.scale))
        optimizer = torch.optim.AdamW(parameters.values(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
        average = {name: p.detach().clone() for name, p in parameters.items()}
        curve, first, began = [], 0, time.time()
        kept = self.folder / f"{part}.partial"
        if kept.exists():
            state = torch.load(kept)
            self._put(state["weights"])
            optimizer.load_state_dict(state["optimizer"])
            average, curve, first = state["average"], state["curve"], state["step"]
            began -= state["seconds"]
        saved = time.time()
        for step in range(first, steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1, (step + 1) / 50) * (0.5 + 0.5 * np.cos(np.pi * step / steps))
            rng = self.rng(part, step)
            torch.manual_seed(int(rng.integers(2**31)))
            losses = loss(step, rng)
            total = torch.stack(list(losses.values())).sum()
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
            decay = min(0.995, (step + 1) / (step + 10))
            with torch.no_grad():
                for name, p in parameters.items():
                    average[name].lerp_(p, 1 - decay)
            curve.append({name: float(value) for name, value in losses.items()})
            if not np.isfinite(float(total)):
                raise SystemExit(f"{part}: step {step}: the loss is {float(total)}")
            if step % max(1, steps // 20) == 0 or step == steps - 1:
                said = ", ".join(
                    f"{name} {np.mean([c[name] for c in curve[-50:] if name in c]):.4f}" for name in curve[-1]
                )
                print(f"{part}: step {step} of {steps}, {said}, {time.time() - began:.0f} s", flush=True)
            if time.time() - saved > 60:
                weights = {name: p.detach() for name, p in parameters.items()}
                state = {"weights": weights, "optimizer": optimizer.state_dict(), "average": average, "curve": curve}
                torch.save(state | {"step": step + 1, "seconds": time.time() - began}, kept)
                saved = time.time()
        self._put(average)
        save_file({name: value.contiguous() for name, value in average.items()}, done)
        (self.folder / f"{part}.json").write_text(json.dumps({"seconds": time.time() - began, "losses": curve}))
        kept.unlink(missing_ok=True)

    def _put(self, found: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in found.items():
                if name in self.weights:
                    self.weights[name].copy_(value)
                else:
                    self.weights[name] = torch.nn.Parameter(value.clone())

    # ---- what the clips are to the transformer -------------------------------------------------------------------

    def geometry(self, size: int) -> Geometry:
        return Geometry.of(self.config, size, size, FRAMES, Fraction(FPS))

    @cached_property
    def latents(self) -> dict[str, torch.Tensor]:
        """Of many clips, tokens as the transformer reads them: `half` and `whole` (clips, tokens, C), `sound`; `prompt`
        (clips) numbers `prompts()`."""
        path = self.folder / "latents.safetensors"
        if path.exists():
            return load_file(path)
        count, names = max(16, round(3000 * self.scale)), prompts()
        found: dict[str, list] = {"half": [], "whole": [], "sound": [], "prompt": []}
        encoders = {
            name: self.module(
                video_vae.trace_encoder(self.config.video_vae, 4, FRAMES, size, size, "float32")
            )
            for name, size in (("half", HALF), ("whole", SIZE))
        }
        hear = self.module(audio_vae.trace_encoder(self.config.audio_vae, 4, self.mel_frames, "float32"))
        with torch.no_grad():
            for i in range(0, count, 4):
                clips = [random_clip(self.rng("latents", i + j)) for j in range(4)]
                for name, size in (("half", HALF), ("whole", SIZE)):
                    frames = torch.stack([pixels(clip, size) for clip in clips])
                    found[name].append(torch.from_numpy(pack_video(encoders[name](frames=frames)["latent"].numpy())))
                mel = torch.from_numpy(self.mels(clips))
                found["sound"].append(torch.from_numpy(pack_audio(hear(mel=mel)["latent"].numpy())))
                found["prompt"] += [names.index(clip.prompt) for clip in clips]
        kept = {name: torch.cat(parts) for name, parts in found.items() if name != "prompt"}
        kept["prompt"] = torch.tensor(found["prompt"])
        save_file(kept, path)
        return kept

    @property
    def mel_frames(self) -> int:
        g = self.geometry(SIZE)
        return (g.audio_latents - 1) * g.audio_time_factor + 1

    def mels(self, clips: Iterable[Clip]) -> np.ndarray:
        """f32[clips, 2, mel_frames, 64]"""
        rate = self.config.audio_vae.sample_rate
        waves = np.stack([clip.sound(rate) for clip in clips])
        hop = self.config.audio_vae.mel_hop
        waves = np.pad(waves, ((0, 0), (0, 0), (0, max(0, (self.mel_frames - 1) * hop - waves.shape[-1]))))
        return log_mel(waves, self.config.audio_vae)[:, :, : self.mel_frames]

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        path = self.folder / "tokenizer.json"
        assert self.config.gemma is not None
        path.write_text(tokenizer_json(self.config.gemma, prompts()))
        return tokenize(path, prompts())

    @cached_property
    def states(self) -> torch.Tensor:
        """The text encoder's, of every prompt: (prompts, text, D, states)."""
        assert self.config.gemma is not None
        ids, mask = self.tokens
        network = self.module(gemma.trace(self.config.gemma, 1, PROMPT_TOKENS, "float32"), lambda name: False)
        found = []
        with torch.no_grad():
            for i in range(len(ids)):
                (state,) = network(**gemma.feeds(self.config.gemma, ids[i : i + 1], mask[i : i + 1])).values()
                found.append(state[0].to(torch.bfloat16))
        return torch.stack(found)

    def encode(self, network: NetworkModule, rows: Iterable[int]) -> dict[str, torch.Tensor]:
        """video_context and audio_context (rows, text, D) of the prompts `rows`."""
        rows = list(rows)
        fed = connectors.feeds(self.config.text, self.tokens[1][rows])
        return network(hidden_states=self.states[rows].float(), **fed)

    def connectors(self, count: int, trained: bool) -> NetworkModule:
        graph = connectors.trace(self.config.text, count, PROMPT_TOKENS, "float32")
        return self.module(graph, lambda name: trained)

    @cached_property
    def contexts(self) -> dict[str, torch.Tensor]:
        """Of every prompt, once the connectors are trained."""
        network, found = self.connectors(1, False), []
        with torch.no_grad():
            for i in range(len(prompts())):
                found.append({name: x.to(torch.bfloat16) for name, x in self.encode(network, [i]).items()})
        return {name: torch.cat([f[name] for f in found]) for name in found[0]}

    @cache  # noqa: B019 (there is one lab)
    def forward(self, size: str, batch: int) -> tuple[NetworkModule, dict[str, np.ndarray]]:
        """The transformer of a batch of `half` or `whole` clips, and its RoPE tables."""
        g = self.geometry(HALF if size == "half" else SIZE)
        feeds = transformer.position_feeds(self.config.transformer, video_positions(g), audio_positions(g))
        shape = transformer.ForwardShape(
            batch, g.num_video_tokens, g.audio_latents, PROMPT_TOKENS, transformer.coordinate_counts(feeds),
            video_levels=2,
        )  # fmt: skip
        return self.module(transformer.trace(self.config.transformer, shape, "float32")), feeds

    def velocity(
        self, size: str, video: torch.Tensor, sound: torch.Tensor, sigmas: torch.Tensor,
        contexts: Mapping[str, torch.Tensor], keep: torch.Tensor, sound_sigmas: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Of both streams, at the sigmas (B) of video and sound; keep (B, tokens): 1 where a token is clean."""
        network, tables = self.forward(size, len(video))
        sounding = sigmas if sound_sigmas is None else sound_sigmas
        with torch.autocast("cpu", torch.bfloat16):
            found = network(
                video_latent=video, audio_latent=sound, video_sigma=sigmas, audio_sigma=sounding,
                video_levels=torch.stack([sigmas, torch.zeros_like(sigmas)], 1), video_level_index=keep.int(),
                audio_levels=sounding[:, None], **{name: x.float() for name, x in contexts.items()}, **tables,
            )  # fmt: skip
        return found["video_velocity"], found["audio_velocity"]


def pixels(clip: Clip, size: int, **window) -> torch.Tensor:
    """f32[3, frames, size, size] in [-1, 1]."""
    return torch.from_numpy(clip.frames(size, **window) * 2 - 1).permute(3, 0, 1, 2).contiguous()


def piece(rng: np.random.Generator) -> torch.Tensor:
    """f32[3, CROP_FRAMES, HALF, HALF]: half of them a whole clip at stage 1's size, half a part of one, near its
    shape."""
    clip, first = random_clip(rng), int(rng.integers(FRAMES - CROP_FRAMES + 1))
    if rng.random() < 0.4:
        return pixels(clip, HALF, first=first, count=CROP_FRAMES)
    x, y, _ = clip.pose(np.array([first + rng.integers(CROP_FRAMES)]) / FPS)
    centre = np.array([y[0], x[0]]) * SIZE + rng.normal(0, 12, 2)
    top, left = np.clip(np.round(centre - HALF / 2), 0, SIZE - HALF).astype(int)
    return pixels(clip, SIZE, window=(top, left, HALF), first=first, count=CROP_FRAMES)


# ---- the parts ------------------------------------------------------------------------------------------------------


def train_video_vae(lab: Lab) -> None:
    c, batch = lab.config.video_vae, 4
    encode = lab.module(video_vae.trace_encoder(c, batch, CROP_FRAMES, HALF, HALF, "float32"))
    cells = ((CROP_FRAMES - 1) // c.time_factor + 1, HALF // c.space_factor, HALF // c.space_factor)
    decode = lab.module(video_vae.trace_decoder(c, batch, *cells, "float32"))

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        frames = torch.stack([piece(rng) for _ in range(batch)])
        with torch.autocast("cpu", torch.bfloat16):
            latent = encode(frames=frames)["latent"].float()
            found = decode(latent=latent + LATENT_NOISE * torch.randn_like(latent))["frames"].float()
        moved, meant = found.diff(dim=2), frames.diff(dim=2)
        return {
            "pixels": (found - frames).abs().mean(),
            "motion": 0.5 * (moved - meant).abs().mean(),
            "latents": 2e-3 * latent.square().mean(),
        }

    lab.fit("video_vae", (encode, decode), 3500, 2e-3, loss)
    _measure(lab, "vae", lambda clips: encode_video(lab, clips), axes=(0, 2, 3, 4))


def encode_video(lab: Lab, clips: list[Clip]) -> torch.Tensor:
    graph = video_vae.trace_encoder(lab.config.video_vae, len(clips), FRAMES, SIZE, SIZE, "float32")
    return lab.module(graph)(frames=torch.stack([pixels(clip, SIZE) for clip in clips]))["latent"]


def train_audio_vae(lab: Lab) -> None:
    c, batch = lab.config.audio_vae, 4
    encode = lab.module(audio_vae.trace_encoder(c, batch, lab.mel_frames, "float32"))
    decode = lab.module(audio_vae.trace_decoder(c, batch, lab.geometry(SIZE).audio_latents, "float32"))

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        mel = torch.from_numpy(lab.mels([random_clip(rng) for _ in range(batch)]))
        with torch.autocast("cpu", torch.bfloat16):
            latent = encode(mel=mel)["latent"].float()
            found = decode(latent=latent + LATENT_NOISE * torch.randn_like(latent))["mel"].float()
        return {"mel": (found - mel).abs().mean(), "latents": 2e-3 * latent.square().mean()}

    lab.fit("audio_vae", (encode, decode), 1500, 2e-3, loss)
    _measure(lab, "audio_vae", lambda clips: encode(mel=torch.from_numpy(lab.mels(clips)))["latent"], axes=(0, 2))


def _measure(lab: Lab, vae: str, encode: Callable[[list[Clip]], torch.Tensor], axes: tuple[int, ...]) -> None:
    """The autoencoder's statistics, after which its latents have mean 0 and deviation 1."""
    names = [f"{vae}.per_channel_statistics.{kind}-of-means" for kind in ("mean", "std")]
    path = lab.folder / f"{vae}_statistics.safetensors"
    if not path.exists():
        with torch.no_grad():
            found = torch.cat([encode([random_clip(lab.rng(vae, i, j)) for j in range(4)]) for i in range(24)])
        mean, std = found.mean(axes).flatten(), found.std(axes).flatten().clamp(min=1e-2)
        save_file(dict(zip(names, (mean, std), strict=True)), path)
    lab._put(load_file(path))


def train_vocoder(lab: Lab) -> None:
    c, a, batch = lab.config.vocoder.generator, lab.config.audio_vae, 4
    frames = round(MEL_SECONDS * a.sample_rate / a.mel_hop)

    def model(o):
        mel = o.input("mel", B=batch, channels=c.out_channels, time=frames, mel=a.mel_bins)
        return {"waveform": vocoder.generator(o.under("vocoder.vocoder"), c, mel)}

    network = lab.module(trace_graph("vocoder", model, "float32"))
    scales = {n: torch.hann_window(n) for n in (128, 512, 2048)}

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        clips = [random_clip(rng) for _ in range(batch)]
        mels, start = lab.mels(clips), int(rng.integers(lab.mel_frames - frames))
        waves = torch.from_numpy(np.stack([clip.sound(a.sample_rate) for clip in clips]))
        waves = F.pad(waves, (0, a.mel_hop * (start + frames)))[..., a.mel_hop * start : a.mel_hop * (start + frames)]
        found = network(mel=mels[:, :, start : start + frames])["waveform"]
        losses = {}
        for n, window in scales.items():
            ours, theirs = (
                torch.stft(w.flatten(0, 1), n, n // 4, window=window, return_complex=True).abs() for w in (found, waves)
            )
            losses[f"spectrum {n}"] = (
                (ours - theirs).norm() / theirs.norm().clamp(min=1e-3)
                + 0.5 * (torch.log(ours + 1e-3) - torch.log(theirs + 1e-3)).abs().mean()
            )
        return losses

    lab.fit("vocoder", (network,), 2500, 1e-3, loss)


def train_upsampler(lab: Lab) -> None:
    g, batch = lab.geometry(HALF), 8
    assert lab.config.upsampler is not None
    network = lab.module(
        upsampler.trace(lab.config.upsampler, batch, g.frames, g.rows, g.columns, "float32"),
        lambda name: name not in lab.weights or not name.startswith("vae."),
    )

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        rows = torch.from_numpy(rng.integers(len(lab.latents["half"]), size=batch))
        small, large = (
            lab.latents[name][rows].transpose(1, 2).unflatten(2, (g.frames, factor * g.rows, factor * g.columns))
            for name, factor in (("half", 1), ("whole", 2))
        )
        with torch.autocast("cpu", torch.bfloat16):
            found = network(latent=small + 0.1 * torch.randn_like(small))["latent"].float()
        return {"latents": (found - large).square().mean()}

    lab.fit("upsampler", (network,), 2000, 2e-3, loss)


def train_transformer(lab: Lab) -> None:
    """First with the connectors, then on what these make of every prompt."""
    for part, steps, batch, spread in (("transformer_and_connectors", 1500, 12, 4), ("transformer", 6000, 12, 0)):
        text = lab.connectors(spread, True) if spread else None
        nets = [lab.forward(size, batch)[0] for size in ("half", "whole")]
        trained = [*nets, *([text] if text else [])]
        lab.fit(part, trained, steps, 1.5e-3 if text else 1e-3, _flow(lab, text, batch, spread))
    lab.contexts  # noqa: B018 (they are wanted in memory)


def _flow(lab: Lab, text: NetworkModule | None, batch: int, spread: int):
    """Flow matching: x = (1 - s) clip + s noise, and the velocity noise - clip is asked for."""
    unguided = len(prompts()) - 2

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        size = "half" if step % 3 else "whole"
        if text is not None:  # a few prompts, several clips of each
            chosen = rng.choice(unguided, 4 * spread)
            known = lab.latents["prompt"].numpy()
            wanted = [p for p in dict.fromkeys(chosen.tolist()) if (known == p).any()][:spread]
            wanted = (wanted * spread)[:spread]
            rows = np.concatenate([rng.choice(np.flatnonzero(known == p), batch // spread) for p in wanted])
            asked = [unguided + int(rng.integers(2)) if rng.random() < DROPPED else p for p in wanted]
            with torch.autocast("cpu", torch.bfloat16):
                encoded = lab.encode(text, asked)
            contexts = {name: x.repeat_interleave(batch // spread, 0) for name, x in encoded.items()}
        else:
            rows = rng.integers(len(lab.latents["half"]), size=batch)
            asked = lab.latents["prompt"][rows].numpy()
            asked = np.where(rng.random(batch) < DROPPED, unguided + rng.integers(2, size=batch), asked)
            contexts = {name: x[asked] for name, x in lab.contexts.items()}
        video, sound = lab.latents[size][rows], lab.latents["sound"][rows]
        sigmas = torch.from_numpy(1 / (1 + np.exp(-rng.normal(0.5, 1.3, batch)))).float()
        first = torch.arange(video.shape[1]) < lab.geometry(HALF if size == "half" else SIZE).num_video_tokens // 4
        keep = (torch.from_numpy(rng.random(batch) < GIVEN[0])[:, None] & first).float()
        part = rng.random(batch)
        sounding = torch.where(torch.from_numpy(part < GIVEN[1] / 2), torch.zeros(()), sigmas)
        keep = torch.where(torch.from_numpy(part > 1 - GIVEN[1] / 2)[:, None], torch.ones(()), keep)
        noise, hiss = torch.randn_like(video), torch.randn_like(sound)
        at = (sigmas[:, None] * (1 - keep))[..., None]
        heard = sounding[:, None, None]
        v, a = lab.velocity(
            size, video + at * (noise - video), sound + heard * (hiss - sound), sigmas, contexts, keep, sounding
        )
        made, heard = (1 - keep)[..., None], (sounding > 0).float()[:, None, None]
        return {
            "video": ((v - noise + video).square() * made).sum() / made.expand_as(v).sum().clamp(min=1),
            "sound": ((a - hiss + sound).square() * heard).sum() / heard.expand_as(a).sum().clamp(min=1),
        }

    return loss


PARTS: dict[str, Callable[[Lab], None]] = {
    "video_vae": train_video_vae,
    "audio_vae": train_audio_vae,
    "vocoder": train_vocoder,
    "upsampler": train_upsampler,
    "transformer": train_transformer,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps, to try it out")
    parser.add_argument("--until", choices=PARTS, help="the last part to train")
    args = parser.parse_args(argv)
    lab = Lab(args.folder, args.seed, args.scale)
    for name, part in PARTS.items():
        part(lab)
        if name == args.until:
            return


if __name__ == "__main__":
    main()
