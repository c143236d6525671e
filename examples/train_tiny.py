"""Trains a tiny model of the LTX-2.3 architecture on synthetic clips, with the graphs that run it.

    python -m examples.train_tiny FOLDER             # goes on where it was stopped
    python -m examples.train_tiny FOLDER --long examples/tiny-trained    # of 256x256, 121 frames

Every network is trained by itself, in the order of `PARTS`; what is done is in FOLDER and is not
done again. The seed decides every clip and every noise. At the end FOLDER/model is a checkpoint
that `ltx2rt generate` takes, and FOLDER/losses.png shows how the losses fell.

The text encoder stays random: it only has to tell words apart. So does the second half of the
vocoder, which adds what is above 8 kHz: its last convolution is zero, for the clips have nothing
there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ltx2rt_cuda import as_module
from ltx2rt_cuda.module import NetworkModule
from PIL import Image, ImageDraw
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.nn.utils import parametrize

from examples.clips import (
    BACKGROUNDS,
    COLOURS,
    FPS,
    FRAMES,
    MOTIONS,
    PITCHES,
    SIZE,
    Clip,
    held_out,
    random_clip,
    sentence,
)
from ltx2rt.config import GemmaConfig, ModelConfig, VaeStage
from ltx2rt.graph import Graph
from ltx2rt.graph import trace as trace_graph
from ltx2rt.instruments.make import plan_checkpoint, tokenizer_json
from ltx2rt.instruments.tensors import (
    F32,
    INVERSE_BASIS,
    Tensor,
    lora_tensors,
    stored,
    values,
)
from ltx2rt.models import audio_vae, connectors, gemma, transformer, upsampler, video_vae, vocoder
from ltx2rt.models.catalog import PROMPT_TOKENS
from ltx2rt.models.geometry import (
    Geometry,
    audio_positions,
    pack_audio,
    pack_video,
    video_positions,
)
from ltx2rt.models.mel import log_mel
from ltx2rt.release import NEGATIVE_PROMPT
from ltx2rt.stages.schedule import DISTILLED_SIGMAS
from ltx2rt.stages.tokenizer import tokenize
from ltx2rt.weights.files import TensorInfo, write_tensors
from ltx2rt.weights.presets import SIZES, Preset, of_sizes
from ltx2rt.weights.presets import gemma as gemma_sizes

SHAPE_WEIGHT, AROUND = (
    12,
    9,
)  # weights of a shape's pixels, which are few, and of those about it, or it would come out too big
# the rate of Muon, which gets the video autoencoder as far as AdamW at 1e-3 in a third of the steps
MATRICES = 0.02
LATENT_NOISE = (
    0.4  # share of the latents' deviation, added in training: neighbours must decode to neighbours
)
# Channels of the latents that are used, of 128 and of 8; the others are 0. A velocity has as many
# directions of noise as channels, and a transformer of these widths cannot carry 128.
LIVE = {"vae": 32, "audio_vae": 2}
LOUD, QUIET = 0.0, -6.0  # log-mel of a tone, and of what is next to nothing
SIDE_WEIGHT = 3  # weight of the difference between the channels, which is smaller than their mean
GAIN = 0.5  # deviation of what each channel is made louder by in training, natural logarithm
BOUNCING = 0.25  # share of clips that bounce beside those that do by chance: there is most to learn
AGAIN = 0.25  # share of the rates, where a training goes on
# Shares of prompts that leave words out, so that each word is learnt by itself, and of those that
# are the empty or the negative one, for classifier-free guidance.
SHORTENED, DROPPED = 0.5, 0.1
# Weight, over the number of a clip's tokens, of the error along the difference between a clip and
# the same one with another shape: one direction of some 2,000, which a mean over all of them hardly
# sees. Its square grows as the tokens do.
APART = 3.2
LEVELS = 1.2, 1.6  # mean and deviation of the noise levels' logits
# Weight in the transformer's loss of a token that is unlike the clip's others: a shape's on its
# background, a click's beside the tone.
RARE = {"": 3.0, "audio_": 6.0}
WORDS, FIRST = (
    64,
    24,
)  # tokens of a context in most of the training, of which the first are those of every prompt
SIZES_OF_CLIPS = "half", "whole"
STEPS_DRAWN = np.array([2, 1, 1, 1, 2, 3, 3, 3]) / 16  # how often each distilled step is trained
GIVEN = 0.3, 0.1  # shares of clips with a clean first frame, and with a clean sound or video
GUIDANCE, SUBSTEPS = 3.0, 2  # guidance of the teacher that is distilled
MEL_SECONDS = 0.2  # length of the pieces that the vocoder is trained on
SOUNDS = 1000  # clips whose sound the audio networks are trained on
SHARD_BYTES = 1_900_000
SAVE_SECONDS = 60  # what an interruption costs at most


@dataclass(frozen=True)
class Kind:
    """A model's clips: square ones of `size` pixels a side, `frames` of them, and half as large
    in stage 1. clips, steps: of the transformer's training, batch: its clips at a time, of half and
    of whole size; others: share of the steps of what is trained after another model."""

    name: str
    size: int
    frames: int
    clips: int
    steps: int
    batch: tuple[int, int]
    others: float = 1.0

    @property
    def half(self) -> int:
        return self.size // 2

    def of(self, clip: Clip) -> Clip:
        return replace(clip, seconds=self.frames / FPS, scale=SIZE / self.size)


TINY = Kind("tiny-trained-2.3", SIZE, FRAMES, 3000, 21_500, (16, 16))
LONG = Kind("long-trained-2.3", 2 * SIZE, 121, 1200, 3000, (16, 4), 0.5)  # 1,024 video tokens


def sizes() -> Preset:
    """Sizes of a checkpoint of at most 12 MB in bfloat16. Fewer, larger steps from mel to sound
    than the released vocoder's: a generator halves its channels at each."""
    text = gemma_sizes(480, 64, 2, 4, 2, 16, 64, 16)
    own = replace(
        SIZES["tiny-2.3"], layers=4, gemma=text, encoder_widths=(16, 32, 32, 32, 32),
        audio_multipliers=(1, 2, 2),
        vocoder_hidden=64, extension_hidden=16, connector_layers=1, lora_rank=8,
    )  # fmt: skip
    made = of_sizes(own, TINY.name)
    c = made.config
    assert c.vocoder.bandwidth_extension
    sound = replace(
        c.vocoder,
        stft_size=256,
        generator=replace(
            c.vocoder.generator, upsample_rates=(5, 4, 4, 2), upsample_kernels=(11, 8, 8, 4)
        ),
        bandwidth_extension=replace(
            c.vocoder.bandwidth_extension,
            upsample_rates=(6, 5, 4, 2),
            upsample_kernels=(12, 11, 8, 4),
        ),
    )
    widths = (
        64,
        32,
        32,
        32,
        16,
    )  # channels of the decoder, more at the end than the released one's would be at this size
    pairs = zip(widths[:-1], widths[1:], ((2, 2, 2), (2, 2, 2), (2, 1, 1), (1, 2, 2)), strict=True)
    stages = [
        stage
        for before, after, stride in pairs
        for stage in (
            VaeStage("sample", before, after, stride=stride, residual=False),
            VaeStage("res", after, after, num_layers=1),
        )
    ]
    picture = replace(c.video_vae, decoder=(c.video_vae.decoder[0], *stages))
    return replace(
        made,
        config=replace(
            c, video_vae=picture, audio_vae=replace(c.audio_vae, base_channels=16), vocoder=sound
        ),
    )


WORDS_OF = (
    (*PITCHES,),
    (*COLOURS, None),
    (*MOTIONS, None),
    (*BACKGROUNDS, None),
)  # of the parts of a prompt; None: it is left out


@cache
def prompts() -> tuple[str, ...]:
    """Every sentence, in the order of `WORDS_OF`, then the empty and the negative prompt."""
    return *itertools.starmap(sentence, itertools.product(*WORDS_OF)), "", NEGATIVE_PROMPT


class Lab:
    """State that the parts share: the weights so far, by their official names, and where they lie.

    scale: of every part's number of steps. origin: folder of a model whose weights this one begins
    with.
    """

    def __init__(
        self, folder: Path, seed: int, scale: float, kind: Kind = TINY, origin: Path | None = None
    ):
        self.folder, self.seed, self.scale, self.kind = folder, seed, scale, kind
        self.device = torch.device("cpu")  # of modules that are made
        self.preset = sizes()
        self.config: ModelConfig = self.preset.config
        shapes = stored(self.config)
        self.weights: dict[str, torch.nn.Parameter] = {}
        for part in shapes.values():
            for name, shape in part.items():
                start = torch.from_numpy(
                    np.array(values(Tensor(name, TensorInfo(shape, F32)), seed))
                )
                self.weights[name] = torch.nn.Parameter(start)
        with torch.no_grad():
            for name, fixed in self.weights.items():
                if name.endswith(("mean-of-means", "vocoder.bwe_generator.conv_post.weight")):
                    fixed.zero_()
                elif name.endswith("std-of-means"):
                    fixed.fill_(1)
                elif name.endswith(
                    "learnable_registers"
                ):  # much the same, and so easily told from words
                    fixed.copy_(fixed[:1] + 0.1 * fixed)
                elif name.endswith(
                    "coder.conv_in.conv.bias"
                ):  # or the norms after it hide how bright a plain area is
                    fixed.mul_(10)
                elif ".resblocks." in name and ".convs2." in name:
                    fixed.mul_(0.1)  # nearly linear at first, or hundreds of steps find no tone
            for name, parameter in self.weights.items():
                if name.startswith("vocoder.vocoder.") and not name.endswith("filter"):
                    grown = 2 if parameter.ndim > 1 else 1  # the mean of two has half the variance
                    parameter.copy_(grown * apart(parameter))
            for name in ("audio_vae.encoder.conv_in.conv", "vocoder.vocoder.conv_pre"):
                weight, bias = (self.weights[f"{name}.{leaf}"] for leaf in ("weight", "bias"))
                weight.div_(-QUIET / 2)  # log-mels of -12 to 0 are to come as -2 to 2
                bias.sub_(QUIET * weight.flatten(1).sum(1))
            # Half of the features tell the channels apart, or none would: they differ by little.
            weight, bias = (
                self.weights[f"audio_vae.encoder.conv_in.conv.{leaf}"]
                for leaf in ("weight", "bias")
            )
            features = len(weight) // 2
            left, right = weight[features:].chunk(2, 1)
            left.mul_(4)
            right.copy_(-left)
            bias[features:].zero_()
            left, right = self.weights["audio_vae.decoder.conv_out.conv.weight"]
            right.copy_(left)
            right[len(right) // 2 :].neg_()
            self.weights["audio_vae.decoder.conv_out.conv.bias"].fill_(1.5 * QUIET)
            for vae, live in LIVE.items():
                for leaf in ("weight", "bias"):
                    self.weights[f"{vae}.encoder.conv_out.conv.{leaf}"][live:].zero_()
                self.weights[f"{vae}.decoder.conv_in.conv.weight"][:, live:].zero_()
            self.weights["initial_conv.weight"][:, LIVE["vae"] :].zero_()
            for leaf in ("weight", "bias"):
                self.weights[f"final_conv.{leaf}"][LIVE["vae"] :].zero_()
            for stream, live in self.live.items():
                ends = ("patchify_proj", np.s_[:, ~live]), ("proj_out", np.s_[~live])
                for end, rest in ends:
                    for leaf in ("weight",) if end == "patchify_proj" else ("weight", "bias"):
                        self.weights[f"model.diffusion_model.{stream}{end}.{leaf}"][rest] = 0
        if origin:
            self._begin_with(origin)
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime):
            if path.stem != "latents":
                self._put(load_file(path))

    @cached_property
    def live(self) -> dict[str, torch.Tensor]:
        """bool[128] for the tokens of video and of sound (`audio_`): the channels that are used."""
        bins = self.config.audio_vae.latent_mel_bins
        counts = {"": LIVE["vae"], "audio_": LIVE["audio_vae"] * bins}
        return {kind: torch.arange(128) < count for kind, count in counts.items()}

    def weight(self, kind: str, latents: torch.Tensor) -> torch.Tensor:
        """The weight in a loss of each number of latents (B, tokens, 128), 1 in the mean of the
        channels that are used: more the further a token is from the median of its clip's."""
        off = (latents - latents.median(1, keepdim=True).values) * self.live[kind]
        far = off.square().sum(-1, keepdim=True).sqrt()
        far = far / far.amax(1, keepdim=True).clamp(min=1e-6)
        weight = 1 + (RARE[kind] - 1) * (2 * far - 0.5).clamp(0, 1)
        return weight / weight.mean(1, keepdim=True) * self.live[kind]

    def rng(self, *what: Any) -> np.random.Generator:
        return np.random.default_rng([self.seed, *(zlib.crc32(str(x).encode()) for x in what)])

    def module(
        self, graph: Graph, trained: Callable[[str], bool] = lambda name: True
    ) -> NetworkModule:
        """A network on the lab's own weights, which all modules share."""
        found = as_module(graph, device=self.device)
        for name in [name for name, _ in found.named_parameters()]:
            home, _, leaf = name.rpartition(".")
            own = self.weights[name]
            own.requires_grad_(
                trained(name) and not name.endswith(("-of-means", "filter", "basis"))
            )
            found.get_submodule(home).register_parameter(leaf, own)
        return found

    def fit(
        self, part: str, parameters: Mapping[str, torch.nn.Parameter], steps: int, rate: float,
        loss: Callable[[int, np.random.Generator], dict[str, torch.Tensor]],
        matrix_rate: float = 0.0,
    ) -> None:  # fmt: skip
        """AdamW, or Muon at `matrix_rate` for matrices and kernels, a cosine to zero, and the
        average of the last weights as the result."""
        self.weights |= parameters
        done = self.folder / f"{part}.safetensors"
        if done.exists():
            self._put(load_file(done))
            return
        steps = max(2, round(steps * self.scale))
        optimizers = _optimizers(parameters, rate, matrix_rate)
        average = {name: p.detach().clone() for name, p in parameters.items()}
        curve, first, began = [], 0, time.time()
        kept = self.folder / f"{part}.partial"
        if kept.exists():
            state = torch.load(kept)
            self._put(state["weights"])
            for optimizer, kept_state in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept_state)
            average, curve, first = state["average"], state["curve"], state["step"]
            began -= state["seconds"]
        saved = time.time()
        for step in range(first, steps):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    slowed = min(1, (step + 1) / 50) * (0.5 + 0.5 * np.cos(np.pi * step / steps))
                    group["lr"] = float(group["initial_lr"] * slowed)
            rng = self.rng(part, step)
            torch.manual_seed(int(rng.integers(2**31)))
            losses = loss(step, rng)
            total = torch.stack(list(losses.values())).sum()
            for p in parameters.values():
                p.grad = None
            total.backward()
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            decay = min(0.995, (step + 1) / (step + 10))
            with torch.no_grad():
                for name, p in parameters.items():
                    average[name].lerp_(p, 1 - decay)
            curve.append({name: float(value.detach()) for name, value in losses.items()})
            if not torch.isfinite(total):
                raise SystemExit(f"{part}: step {step}: the loss is {float(total.detach())}")
            if step % max(1, steps // 40) == 0 or step == steps - 1:
                said = ", ".join(
                    f"{name} {np.mean([c[name] for c in curve[-50:] if name in c]):.4f}"
                    for name in curve[-1]
                )
                print(
                    f"{part}: step {step} of {steps}, {said}, {time.time() - began:.0f} s",
                    flush=True,
                )
            if time.time() - saved >= SAVE_SECONDS:
                weights = {name: p.detach() for name, p in parameters.items()}
                state = {"weights": weights, "average": average, "curve": curve}
                state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
                torch.save(state | {"step": step + 1, "seconds": time.time() - began}, kept)
                saved = time.time()
        self._put(average)
        keep({name: value.contiguous() for name, value in average.items()}, done)
        (self.folder / f"{part}.json").write_text(
            json.dumps({"seconds": time.time() - began, "losses": curve})
        )
        kept.unlink(missing_ok=True)

    @staticmethod
    def trained(*modules: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        return {name: p for m in modules for name, p in m.named_parameters() if p.requires_grad}

    def _begin_with(self, model: Path) -> None:
        """The weights of a model of this module. Ends the program if it is none."""
        files, found = sorted(model.rglob("*.safetensors")), {}
        for path in files:
            try:
                found |= {name: x.float() for name, x in load_file(path).items()}
            except SafetensorError as error:
                raise SystemExit(f"{path}: not a whole safetensors file ({error})") from None
        for name, p in self.weights.items():
            if name != INVERSE_BASIS and (name not in found or found[name].shape != p.shape):
                raise SystemExit(
                    f"{model}: its {len(files)} safetensors files have no {name} of shape "
                    f"{tuple(p.shape)}; expected the folder of a model of examples.train_tiny, "
                    "such as examples/tiny-trained"
                )
        self._put(found)

    def _put(self, found: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in found.items():
                if name in self.weights:
                    self.weights[name].copy_(value)
                else:
                    self.weights[name] = torch.nn.Parameter(value.clone())

    # ---- what the clips are to the transformer ---------------------------------------------------

    def geometry(self, size: int) -> Geometry:
        return Geometry.of(self.config, size, size, self.kind.frames, Fraction(FPS))

    @cached_property
    def latents(self) -> dict[str, torch.Tensor]:
        """Many clips, each with every shape one after the other: tokens as the transformer reads
        them: `half` and `whole` (clips, tokens, C), `sound`; `prompt` (clips) numbers `prompts()`;
        `trained` (clips): whether it is one to train on."""
        path = self.folder / "latents.safetensors"
        if path.exists():
            return load_file(path)
        count, names = max(16, round(self.kind.clips * self.scale)), prompts()
        sides = {"half": self.kind.half, "whole": self.kind.size}
        found: dict[str, list] = {
            name: [] for name in ("half", "whole", "sound", "prompt", "trained")
        }
        encoders = {
            name: self.module(
                video_vae.trace_encoder(
                    self.config.video_vae, 1, self.kind.frames, size, size, "float32"
                )
            )
            for name, size in sides.items()
        }
        hear = self.module(
            audio_vae.trace_encoder(self.config.audio_vae, 1, self.mel_frames, "float32")
        )
        with torch.no_grad():
            for i, shape in itertools.product(range(-(-count // len(PITCHES))), PITCHES):
                clip = replace(self.clip("latents", i), shape=shape)
                for name, size in sides.items():
                    with torch.autocast("cpu", torch.bfloat16):
                        latent = encoders[name](frames=pixels(clip, size)[None])["latent"].float()
                    found[name].append(torch.from_numpy(pack_video(latent.numpy())))
                mel = torch.from_numpy(self.mels([clip]))
                found["sound"].append(torch.from_numpy(pack_audio(hear(mel=mel)["latent"].numpy())))
                found["prompt"].append(torch.tensor([names.index(clip.prompt)]))
                trained = not held_out(clip.shape, clip.colour, clip.motion)
                found["trained"].append(torch.tensor([trained]))
        kept = {name: torch.cat(parts) for name, parts in found.items()}
        keep(kept, path)
        return kept

    def clip(self, *what: Any) -> Clip:
        """One that is trained on; a part of them bounce who would not by chance."""
        rng = self.rng(*what)
        clip = bouncing(rng) if rng.random() < BOUNCING else random_clip(rng)
        return self.kind.of(clip)

    @cached_property
    def rows(self) -> np.ndarray:
        """Numbers of the clips of `latents` that are trained on."""
        return np.flatnonzero(self.latents["trained"].numpy())

    def first_frame(self, video: torch.Tensor) -> torch.Tensor:
        """(B, tokens): 1 where a token is of the first latent frame."""
        frames = self.geometry(self.kind.size).frames
        first = torch.arange(video.shape[1]) < video.shape[1] // frames
        return first.float().expand(len(video), -1)

    def noise(self, kind: str, like: torch.Tensor) -> torch.Tensor:
        """Noise of the tokens' shape, in the channels that are used. kind: a key of `live`."""
        return torch.randn_like(like) * self.live[kind]

    @cached_property
    def sounds(self) -> dict[str, torch.Tensor]:
        """Many clips: their `mel` (SOUNDS, 2, mel_frames, 64), `wave` (SOUNDS, 2, samples) and the
        second of a `hit`, -1 without one."""
        hop, a = self.config.audio_vae.mel_hop, self.config.audio_vae
        found: dict[str, list] = {"mel": [], "wave": [], "hit": []}
        for i in range(SOUNDS):
            clip, rng = self.clip("sounds", i), self.rng("hit", i)
            wave = clip.sound(a.sample_rate)
            wave = np.pad(wave, ((0, 0), (0, max(0, hop * self.mel_frames - wave.shape[-1]))))
            found["mel"].append(log_mel(wave[None], a)[0, :, : self.mel_frames])
            found["wave"].append(wave[:, : hop * self.mel_frames])
            found["hit"].append(rng.choice(clip.hits()) if len(clip.hits()) else -1.0)
        return {name: torch.from_numpy(np.stack(x).astype(np.float32)) for name, x in found.items()}

    @property
    def mel_frames(self) -> int:
        g = self.geometry(self.kind.size)
        return (g.audio_latents - 1) * g.audio_time_factor + 1

    def mels(self, clips: Iterable[Clip]) -> np.ndarray:
        """f32[clips, 2, mel_frames, 64]"""
        rate = self.config.audio_vae.sample_rate
        waves = np.stack([clip.sound(rate) for clip in clips])
        hop = self.config.audio_vae.mel_hop
        waves = np.pad(
            waves, ((0, 0), (0, 0), (0, max(0, (self.mel_frames - 1) * hop - waves.shape[-1])))
        )
        return log_mel(waves, self.config.audio_vae)[:, :, : self.mel_frames]

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        path = self.folder / "tokenizer.json"
        assert self.config.gemma is not None
        whole = itertools.product(PITCHES, COLOURS, MOTIONS, BACKGROUNDS)
        said = [*itertools.starmap(sentence, whole), "", NEGATIVE_PROMPT]
        # Word by word, or its tokens would join them.
        words = [f" {word}" for prompt in said for word in prompt.split(" ")]
        path.write_text(tokenizer_json(self.config.gemma, words))
        return tokenize(path, prompts())

    @cached_property
    def states(self) -> torch.Tensor:
        """The text encoder's, of every prompt: (prompts, text, D, states)."""
        assert isinstance(self.config.gemma, GemmaConfig)
        ids, mask = self.tokens
        network = self.module(
            gemma.trace(self.config.gemma, 1, PROMPT_TOKENS, "float32"), lambda name: False
        )
        found = []
        with torch.no_grad():
            for i in range(len(ids)):
                (state,) = network(
                    **gemma.feeds(self.config.gemma, ids[i : i + 1], mask[i : i + 1])
                ).values()
                found.append(state[0].to(torch.bfloat16))
        return torch.stack(found)

    def encode(self, network: NetworkModule, rows: Iterable[int]) -> dict[str, torch.Tensor]:
        """video_context and audio_context (rows, text, D) of the prompts `rows`."""
        rows = list(rows)
        fed = connectors.feeds(self.config.text, self.tokens[1][rows])
        return network(hidden_states=self.states[rows].float(), **fed)

    def connectors(self, count: int) -> NetworkModule:
        return self.module(connectors.trace(self.config.text, count, PROMPT_TOKENS, "float32"))

    @cached_property
    def contexts(self) -> dict[str, torch.Tensor]:
        """Contexts of every prompt, by the connectors as they are now: video and audio (prompts,
        text, D)."""
        network, found = self.connectors(1), []
        with torch.no_grad():
            for i in range(len(prompts())):
                found.append(
                    {name: x.to(torch.bfloat16) for name, x in self.encode(network, [i]).items()}
                )
        return {name: torch.cat([f[name] for f in found]) for name in found[0]}

    @cache  # noqa: B019 (there is one lab)
    def forward(
        self, size: str, batch: int, words: int, own: bool = True
    ) -> tuple[NetworkModule, dict[str, Any]]:
        """The transformer of a batch of `half` or `whole` clips under contexts of `words` tokens,
        and its RoPE tables. own: on the lab's weights as they are; else to be changed."""
        g = self.geometry(self.kind.half if size == "half" else self.kind.size)
        feeds = transformer.position_feeds(
            self.config.transformer, video_positions(g), audio_positions(g)
        )
        shape = transformer.ForwardShape(
            batch,
            g.num_video_tokens,
            g.audio_latents,
            words,
            transformer.coordinate_counts(feeds),
            video_levels=2,
        )
        network = self.module(
            transformer.trace(self.config.transformer, shape, "float32"), lambda name: own
        )
        tables = {name: torch.from_numpy(table) for name, table in feeds.items()}
        return network, {name: table.to(self.device) for name, table in tables.items()}

    def velocity(
        self, forward: tuple[NetworkModule, dict[str, Any]], video: torch.Tensor,
        sound: torch.Tensor,
        sigmas: torch.Tensor, contexts: Mapping[str, torch.Tensor], keep: torch.Tensor,
        sound_sigmas: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Velocities of both streams, at the sigmas (B) of video and sound; keep (B, tokens): 1
        where a token is clean."""
        network, tables = forward
        sounding = sigmas if sound_sigmas is None else sound_sigmas
        found = network(
            video_latent=video, audio_latent=sound, video_sigma=sigmas, audio_sigma=sounding,
            video_levels=torch.stack([sigmas, torch.zeros_like(sigmas)], 1),
            video_level_index=keep.int(),
            audio_levels=sounding[:, None], **{name: x.float() for name, x in contexts.items()},
            **tables,
        )  # fmt: skip
        return found["video_velocity"], found["audio_velocity"]


def keep(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file whole: what is there counts as done."""
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    unfinished.replace(path)


def _optimizers(
    parameters: Mapping[str, torch.nn.Parameter], rate: float, matrix_rate: float
) -> list[torch.optim.Optimizer]:
    def is_matrix(name: str) -> bool:
        """Not a gate: Muon's steps are as large where the gradient vanishes, and would close it
        for good."""
        matrix = name.endswith(".weight") and parameters[name].ndim > 1
        return bool(matrix_rate) and matrix and "gate" not in name

    matrices = [p for name, p in parameters.items() if is_matrix(name)]
    others = [p for name, p in parameters.items() if not is_matrix(name)]
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    found: list[torch.optim.Optimizer] = [adam]
    if matrices:
        muon = torch.optim.Muon(
            [torch.nn.Parameter(p.data.flatten(1)) for p in matrices], matrix_rate, weight_decay=0.0
        )

        def flat_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for flat, p in zip(optimizer.param_groups[0]["params"], matrices, strict=True):
                flat.grad = None if p.grad is None else p.grad.flatten(1)

        muon.register_step_pre_hook(flat_gradients)
        found.append(muon)
    for optimizer in found:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return found


def apart(x: torch.Tensor) -> torch.Tensor:
    """A weight of the vocoder, or its gradient, without what joins its halves, and with the same in
    both: one makes the left channel from the left mels, the other the right from the right. Where
    halves may mix, both channels come out alike."""
    if x.ndim < 2:
        first, second = x.chunk(2)
        return ((first + second) / 2).repeat(2)
    blocks = [half.chunk(2, 1) for half in x.chunk(2)]
    own = (blocks[0][0] + blocks[1][1]) / 2
    nothing = torch.zeros_like(own)
    return torch.cat([torch.cat([own, nothing], 1), torch.cat([nothing, own], 1)])


def pixels(clip: Clip, size: int, **part) -> torch.Tensor:
    """f32[3, frames, size, size] in [-1, 1]."""
    return as_pixels(clip.frames(size, **part))


def as_pixels(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames * 2 - 1).permute(3, 0, 1, 2).contiguous()


def ramp(part: float) -> float:
    """0 in the first half of a training, when the picture is learnt and noise would hide it; then
    up to 1."""
    return min(1.0, max(0.0, 4 * part - 2))


def disturbed(latent: torch.Tensor, part: float) -> torch.Tensor:
    """With noise, in units of each channel's deviation."""
    strength = LATENT_NOISE * ramp(part)
    axes = (0, *range(2, latent.ndim))
    return latent + strength * latent.detach().std(axes, keepdim=True) * torch.randn_like(latent)


# ---- the parts -----------------------------------------------------------------------------------


def train_video_vae(lab: Lab) -> None:
    c, steps, frames = lab.config.video_vae, 6000, 17
    nets = []
    for size, batch in ((SIZE // 2, 4), (SIZE, 2)):
        cells = ((frames - 1) // c.time_factor + 1, size // c.space_factor, size // c.space_factor)
        encode = lab.module(video_vae.trace_encoder(c, batch, frames, size, size, "float32"))
        decode = lab.module(video_vae.trace_decoder(c, batch, *cells, "float32"))
        nets.append((size, batch, (encode, decode)))

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Small clips first, which is where most is learnt; then at either stage's size."""
        size, batch, (encode, decode) = nets[step % 3 > 0 if 2 * step > steps else 0]
        clips = [lab.clip(*rng.integers(2**31, size=2).tolist()) for _ in range(batch)]
        shown, weight = examples_of(clips, rng, size, frames)
        with torch.autocast("cpu", torch.bfloat16):
            latent = encode(frames=shown)["latent"].float()
            found = decode(latent=disturbed(latent, step / steps))["frames"].float()
        return picture_losses(found, shown, weight)

    trained = lab.trained(*(net for *_, pair in nets for net in pair))
    lab.fit("video_vae", trained, steps, 1e-3, loss, MATRICES)
    network = encode_video(lab)
    _measure(
        lab,
        "vae",
        lambda clip: network(frames=pixels(clip, lab.kind.size)[None])["latent"],
        axes=(0, 2, 3, 4),
    )


def bouncing(rng: np.random.Generator) -> Clip:
    while (clip := random_clip(rng)).motion != "bounces":
        pass
    return clip


def examples_of(
    clips: list[Clip], rng: np.random.Generator, size: int, frames: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames of clips (B, 3, frames, size, size), and the weights of their pixels (B, 1, ...)."""
    shown, plain = [], []
    for clip in clips:
        first = int(rng.integers(round(clip.seconds * FPS) - frames + 1))
        shown.append(pixels(clip, size, first=first, count=frames))
        plain.append(as_pixels(clip.behind(size)))
    pictures = torch.stack(shown)
    there = ((pictures - torch.stack(plain)).abs().amax(1, keepdim=True) > 0.02).float()
    return pictures, 1 + SHAPE_WEIGHT * F.max_pool3d(
        there, (1, AROUND, AROUND), 1, (0, AROUND // 2, AROUND // 2)
    )


def picture_losses(
    found: torch.Tensor, shown: torch.Tensor, weight: torch.Tensor
) -> dict[str, torch.Tensor]:
    off = found - shown
    return {
        "weighted": (weight * (off.abs() + off.square())).mean() / weight.mean(),
        "pixels": off.detach().abs().mean(),
    }


def encode_video(lab: Lab) -> NetworkModule:
    size, frames = lab.kind.size, lab.kind.frames
    return lab.module(
        video_vae.trace_encoder(lab.config.video_vae, 1, frames, size, size, "float32")
    )


def train_audio_vae(lab: Lab) -> None:
    c, batch = lab.config.audio_vae, 4
    encode = lab.module(audio_vae.trace_encoder(c, batch, lab.mel_frames, "float32"))
    decode = lab.module(
        audio_vae.trace_decoder(c, batch, lab.geometry(SIZE).audio_latents, "float32")
    )

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        mel = lab.sounds["mel"][torch.from_numpy(rng.integers(SOUNDS, size=batch))]
        mel = louder(mel, gains(rng, batch))
        with torch.autocast("cpu", torch.bfloat16):
            latent = encode(mel=mel)["latent"].float()
            found = decode(latent=disturbed(latent, step / steps))["mel"].float()
        return sound_losses(found, mel)

    steps = 3500
    lab.fit("audio_vae", lab.trained(encode, decode), steps, 2e-3, loss, MATRICES)
    hear = lab.module(audio_vae.trace_encoder(c, 1, lab.mel_frames, "float32"))
    _measure(
        lab,
        "audio_vae",
        lambda clip: hear(mel=torch.from_numpy(lab.mels([clip])))["latent"],
        axes=(0, 2),
    )


def gains(rng: np.random.Generator, batch: int) -> torch.Tensor:
    """By what each channel is made louder, f32[batch, 2, 1], natural logarithm."""
    return torch.from_numpy(rng.normal(0, GAIN, (batch, 2, 1))).float()


def louder(mel: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Log-mels (B, 2, time, mel) of the same sounds with each channel at a level of its own."""
    return torch.where(mel > QUIET, mel + gain[..., None], mel)


def sound_losses(found: torch.Tensor, mel: torch.Tensor) -> dict[str, torch.Tensor]:
    """The distance in what both channels have in common and in what they differ in, weighed most
    where it is loud."""
    weight = 1 + 8 * ((mel.amax(1) - QUIET) / (LOUD - QUIET)).clamp(0, 1)
    off = found - mel
    both, side = off.sum(1).abs() / 2, (off[:, 0] - off[:, 1]).abs() / 2
    return {
        "mel": (weight * both).mean() / weight.mean(),
        "side": SIDE_WEIGHT * (weight * side).mean() / weight.mean(),
    }


def _measure(
    lab: Lab, vae: str, encode: Callable[[Clip], torch.Tensor], axes: tuple[int, ...]
) -> None:
    """The autoencoder's statistics, after which its latents have mean 0 and deviation 1."""
    names = [f"{vae}.per_channel_statistics.{kind}-of-means" for kind in ("mean", "std")]
    path = lab.folder / f"{vae}_statistics.safetensors"
    if not path.exists():
        with torch.no_grad():
            found = torch.cat([encode(lab.clip(vae, i)) for i in range(96)])
        mean, std = found.mean(axes).flatten(), found.std(axes).flatten()
        std = torch.where(std > 0, std.clamp(min=1e-2), torch.ones(()))  # 0: a channel is not used
        keep(dict(zip(names, (mean, std), strict=True)), path)
    lab._put(load_file(path))


def train_vocoder(lab: Lab) -> None:
    c, a, batch = lab.config.vocoder.generator, lab.config.audio_vae, 4
    hop = a.mel_hop
    frames = round(MEL_SECONDS * a.sample_rate / hop)

    def model(o):
        mel = o.input("mel", B=batch, channels=c.out_channels, time=frames, mel=a.mel_bins)
        return {"waveform": vocoder.generator(o.under("vocoder.vocoder"), c, mel)}

    network = lab.module(trace_graph("vocoder", model, "float32"))
    scales = {n: torch.hann_window(n) for n in (128, 512, 2048)}

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """The losses of pieces with a click where there is one, at several loudnesses."""
        waves, mels = [], []
        for row in rng.integers(SOUNDS, size=batch).tolist():
            at = int(rng.integers(lab.mel_frames - frames + 1))
            hit = (
                lab.sounds["hit"][row] * a.sample_rate / hop
            )  # a piece with a click where there is one
            if hit >= 0:
                early = float(hit) - rng.uniform(0.1, 0.9) * frames
                at = int(np.clip(early, 0, lab.mel_frames - frames))
            mels.append(lab.sounds["mel"][row, :, at : at + frames])
            waves.append(lab.sounds["wave"][row, :, hop * at : hop * (at + frames)])
        gain = gains(rng, batch)
        found = network(mel=louder(torch.stack(mels), gain))["waveform"].flatten(0, 1)
        waves = (torch.stack(waves) * gain.exp()).flatten(0, 1)
        losses = {}
        for n, window in scales.items():
            ours, theirs = (
                torch.stft(w, n, n // 4, window=window, return_complex=True).abs()
                for w in (found, waves)
            )
            off = (ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)
            faint = (torch.log(ours + 1e-3) - torch.log(theirs + 1e-3)).abs().mean()
            losses[f"spectrum {n}"] = off.mean() + 0.5 * faint
        return losses

    trained = lab.trained(network)
    for parameter in trained.values():
        parameter.register_hook(apart)
    lab.fit("vocoder", trained, 2000, 1e-3, loss, MATRICES / 4)


def train_upsampler(lab: Lab) -> None:
    g, batch = lab.geometry(lab.kind.half), 8
    assert lab.config.upsampler is not None
    network = lab.module(
        upsampler.trace(lab.config.upsampler, batch, g.frames, g.rows, g.columns, "float32"),
        lambda name: name not in lab.weights or not name.startswith("vae."),
    )

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        rows = torch.from_numpy(rng.choice(lab.rows, batch))
        small, large = (
            lab.latents[name][rows]
            .transpose(1, 2)
            .unflatten(2, (g.frames, factor * g.rows, factor * g.columns))
            for name, factor in (("half", 1), ("whole", 2))
        )
        with torch.autocast("cpu", torch.bfloat16):
            noise = torch.randn_like(small) * lab.live[""][:, None, None, None]
            found = network(latent=small + 0.1 * noise)["latent"].float()
        return {"latents": (found - large).square().mean() * 128 / LIVE["vae"]}

    lab.fit("upsampler", lab.trained(network), 1500, 1e-3, loss)


def train_transformer(lab: Lab) -> None:
    """First on some of every context's tokens, which is most of the time saved; then on all, with
    the connectors."""
    batches, contexts = dict(zip(SIZES_OF_CLIPS, lab.kind.batch, strict=True)), lab.contexts
    nets = [lab.forward(size, batch, WORDS)[0] for size, batch in batches.items()]

    def short(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        size = SIZES_OF_CLIPS[step % 2]
        at = draw(lab, size, rng.choice(lab.rows, batches[size]), rng)
        asked = dropped(lab.latents["prompt"][at["rows"]].numpy(), rng)
        text = some(contexts, asked, tokens_of(rng, WORDS))
        return flow(lab, lab.forward(size, batches[size], WORDS), size, text, at)

    slower = 1 if lab.kind is TINY else AGAIN
    rates = slower * 1e-3, slower * MATRICES
    lab.fit("transformer", lab.trained(*nets), lab.kind.steps, rates[0], short, rates[1])
    text, known = (
        lab.connectors(min(batches.values()) // 4),
        lab.latents["prompt"][lab.rows].numpy(),
    )
    batch = min(batches.values())
    nets = [lab.forward(size, batch, PROMPT_TOKENS)[0] for size in SIZES_OF_CLIPS]

    def full(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """A few prompts, four clips of each."""
        wanted = rng.choice(np.unique(known), batch // 4)
        rows = np.concatenate([rng.choice(lab.rows[known == p], 4) for p in wanted])
        encoded = lab.encode(text, dropped(wanted, rng))
        found = {name: x.repeat_interleave(4, 0) for name, x in encoded.items()}
        size = SIZES_OF_CLIPS[step % 2]
        at = draw(lab, size, rows, rng)
        return flow(lab, lab.forward(size, batch, PROMPT_TOKENS), size, found, at)

    lab.fit(
        "transformer_and_connectors",
        lab.trained(text, *nets),
        round(200 * lab.kind.others),
        3e-4,
        full,
    )
    del lab.contexts


def dropped(asked: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Numbers of prompts (B), of which some leave words out, and some are the empty or the negative
    one."""
    sizes = [len(words) for words in WORDS_OF]
    parts = np.stack(np.unravel_index(asked, sizes), 1)
    last = np.array(sizes) - 1  # the number of what is left out
    out = (rng.random(parts.shape) < 0.5) & (rng.random(len(asked)) < SHORTENED)[:, None]
    out[:, 0] = False  # the shape, which is always said
    said = np.ravel_multi_index(list(np.where(out, last, parts).T), sizes)
    unguided = len(prompts()) - 2 + rng.integers(2, size=len(asked))
    return np.where(rng.random(len(asked)) < DROPPED, unguided, said)


def tokens_of(rng: np.random.Generator, words: int) -> np.ndarray:
    """Numbers of the first tokens of a context, which are words, and of a few of the registers
    after them: `words` in all."""
    return np.append(
        np.arange(FIRST), FIRST + rng.choice(PROMPT_TOKENS - FIRST, words - FIRST, replace=False)
    )


def some(contexts: Mapping[str, torch.Tensor], asked: Any, tokens: Any) -> dict[str, torch.Tensor]:
    """These tokens (tokens) of the contexts of the prompts `asked` (B)."""
    return {name: x[asked[:, None], tokens] for name, x in contexts.items()}


def draw(
    lab: Lab, size: str, rows: np.ndarray, rng: np.random.Generator
) -> dict[str, torch.Tensor]:
    """For clips `rows` (B): the noise levels of picture and sound, `sigmas` and `sounding` (B), and
    `keep` (B, tokens), 1 where a token is clean."""
    batch, part = len(rows), rng.random(len(rows))
    sigmas = torch.from_numpy(1 / (1 + np.exp(-rng.normal(*LEVELS, batch)))).float()
    first = lab.first_frame(lab.latents[size][:batch])
    keep = first * torch.from_numpy(rng.random(batch) < GIVEN[0])[:, None].float()
    keep = torch.where(torch.from_numpy(part > 1 - GIVEN[1] / 2)[:, None], torch.ones(()), keep)
    sounding = torch.where(torch.from_numpy(part < GIVEN[1] / 2), torch.zeros(()), sigmas)
    return {"rows": torch.from_numpy(rows), "sigmas": sigmas, "sounding": sounding, "keep": keep}


def flow(
    lab: Lab, forward, size: str, contexts: Mapping[str, torch.Tensor],
    at: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Flow matching: x = (1 - s) clip + s noise, and the velocity noise - clip is asked for. at: of
    `draw`."""
    keep, sounding, rows = at["keep"], at["sounding"], at["rows"]
    whole = lab.latents["whole"].shape[1]
    video, sound = lab.latents[size][rows], lab.latents["sound"][rows]
    noise, hiss = (lab.noise(kind, like) for kind, like in (("", video), ("audio_", sound)))
    levels, heard = (at["sigmas"][:, None] * (1 - keep))[..., None], sounding[:, None, None]
    v, a = lab.velocity(
        forward,
        video + levels * (noise - video),
        sound + heard * (hiss - sound),
        at["sigmas"] * (1 - keep.amin(1)),
        contexts,
        keep,
        sounding,
    )
    # In the channels that are used; v is 0 in the others, and so is what it ought to be.
    made, heard = (1 - keep)[..., None], (sounding > 0).float()[:, None, None]
    off, unheard = (v - noise + video) * made, (a - hiss + sound) * heard
    made, heard = made * lab.weight("", video), heard * lab.weight("audio_", sound)
    return {
        "video": (off.square() * made).sum() / made.expand_as(v).sum().clamp(min=1),
        "sound": (unheard.square() * heard).sum() / heard.expand_as(a).sum().clamp(min=1),
        "shape": APART / whole * along_shapes(lab, size, rows, off).mean(),
    }


def along_shapes(lab: Lab, size: str, rows: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """Squares of what `off` (B, tokens, C) has along the differences between clips `rows` and those
    with the other shapes (B): of those that are trained on."""
    shapes = len(PITCHES)
    others = [rows // shapes * shapes + (rows + i) % shapes for i in range(1, shapes)]
    found = []
    for other in others:
        away = F.normalize((lab.latents[size][other] - lab.latents[size][rows]).flatten(1))
        along = (off.flatten(1) * away).sum(1).square()
        found.append(along * lab.latents["trained"][other])
    return torch.stack(found).sum(0)


class LowRank(torch.nn.Module):
    """A matrix plus up @ down."""

    def __init__(self, down: torch.nn.Parameter, up: torch.nn.Parameter):
        super().__init__()
        self.down, self.up = down, up

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def train_lora(lab: Lab) -> None:
    """One step from a distilled level to the next is to reach what the guided transformer reaches
    in several."""
    batch, words, factors = min(lab.kind.batch) // 2, 4 * WORDS, lora_factors(lab)
    pairs = {size: pair_of(lab, factors, size, batch, words) for size in SIZES_OF_CLIPS}
    contexts = lab.contexts

    def loss(step: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        size = SIZES_OF_CLIPS[step % 2]
        at = draw_distilled(lab, size, rng.choice(lab.rows, batch), rng)
        asked = unguided_too(lab.latents["prompt"][at["rows"]].numpy())
        return distilled(lab, pairs[size], size, some(contexts, asked, tokens_of(rng, words)), at)

    lab.fit("lora", factors, round(600 * lab.kind.others), 2e-3, loss)


def lora_factors(lab: Lab) -> dict[str, torch.nn.Parameter]:
    """Those of a model that this one begins with, or new ones that change nothing yet."""
    found = {}
    for name, tensor in lora_tensors(lab.config, stored(lab.config), lab.preset.lora_rank).items():
        value = torch.from_numpy(np.array(values(tensor, lab.seed), np.float32)).to(lab.device)
        if name in lab.weights:
            value.copy_(lab.weights[name].detach())
        elif name.endswith("lora_B.weight"):
            value.zero_()
        found[name] = torch.nn.Parameter(value)
    return found


def pair_of(lab: Lab, factors: Mapping[str, torch.nn.Parameter], size: str, batch: int, words: int):
    """The transformer under the factors, and as it is, for twice as many clips."""
    student = lab.forward(size, batch, words, own=False)
    for name in factors:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            pair = LowRank(factors[name], factors[f"{module}.lora_B.weight"])
            layer = student[0].get_submodule(f"model.{module}")
            parametrize.register_parametrization(layer, "weight", pair)
    return student, lab.forward(size, 2 * batch, words, own=False)


def unguided_too(asked: np.ndarray) -> np.ndarray:
    """Prompts, and the negative one as often behind them."""
    return np.append(asked, np.full(len(asked), len(prompts()) - 1))


def draw_distilled(
    lab: Lab, size: str, rows: np.ndarray, rng: np.random.Generator
) -> dict[str, torch.Tensor]:
    """For clips `rows` (B): `start` and `end` (B), neighbouring distilled levels, and `keep` (B,
    tokens), 1 where a token is clean."""
    levels = torch.from_numpy(DISTILLED_SIGMAS.copy())
    which = torch.from_numpy(rng.choice(len(levels) - 1, len(rows), p=STEPS_DRAWN))
    first = lab.first_frame(lab.latents[size][: len(rows)])
    keep = first * torch.from_numpy(rng.random(len(rows)) < GIVEN[0])[:, None].float()
    return {
        "rows": torch.from_numpy(rows),
        "start": levels[which],
        "end": levels[which + 1],
        "keep": keep,
    }


def distilled(
    lab: Lab, pair, size: str, text: Mapping[str, torch.Tensor], at: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """pair: of `pair_of`; text: of the prompts and the negative one; at: of `draw_distilled`."""
    (student, teacher), batch = pair, len(at["rows"])
    video, sound = lab.latents[size][at["rows"]], lab.latents["sound"][at["rows"]]
    start, end, keep = at["start"], at["end"], at["keep"]
    made = (1 - keep)[..., None]
    x = video + start[:, None, None] * made * (lab.noise("", video) - video)
    y = sound + start[:, None, None] * (lab.noise("audio_", sound) - sound)
    begun = x, y
    with torch.no_grad():
        for i in range(SUBSTEPS):
            now, after = (start + (end - start) * j / SUBSTEPS for j in (i, i + 1))
            v, a = lab.velocity(
                teacher,
                torch.cat([x, x]),
                torch.cat([y, y]),
                now.repeat(2),
                text,
                keep.repeat(2, 1),
            )
            guided = [
                cond + (GUIDANCE - 1) * (cond - uncond) for cond, uncond in (v.chunk(2), a.chunk(2))
            ]
            move = (after - now)[:, None, None]
            x, y = x + move * made * guided[0], y + move * guided[1]
    length = (end - start)[:, None, None]
    own = {name: x[:batch] for name, x in text.items()}
    v, a = lab.velocity(student, *begun, start, own, keep)
    return {
        "video": ((v - (x - begun[0]) / length).square() * made).mean(),
        "sound": (a - (y - begun[1]) / length).square().mean(),
    }


# ---- what is left of it --------------------------------------------------------------------------


def write_model(lab: Lab) -> None:
    """FOLDER/model: the official layout in bfloat16, in shards of at most SHARD_BYTES."""
    lab.tokens  # noqa: B018 (writes the tokenizer)
    plan, model = (
        plan_checkpoint(lab.preset, lab.kind.name, "official"),
        lab.folder / "model",
    )
    plan.tensors[f"{lab.kind.name}.safetensors"].pop(INVERSE_BASIS)  # which nothing reads
    plan.texts["gemma-3/tokenizer.json"] = (lab.folder / "tokenizer.json").read_text()
    shutil.rmtree(model, ignore_errors=True)

    def value(tensor: Tensor) -> np.ndarray:
        if tensor.name not in lab.weights:  # weights of a tower that nothing reads
            return values(tensor, lab.seed)
        return lab.weights[tensor.name].detach().numpy().astype(tensor.info.dtype)

    for path, tensors in plan.tensors.items():
        shards: list[dict[str, Tensor]] = [{}]
        for name, tensor in tensors.items():
            if sum(t.info.nbytes for t in shards[-1].values()) + tensor.info.nbytes > SHARD_BYTES:
                shards.append({})
            shards[-1][name] = tensor
        whole, home = model / path, {}
        whole.parent.mkdir(parents=True, exist_ok=True)
        for i, shard in enumerate(shards, 1):
            file = (
                whole
                if len(shards) == 1
                else whole.with_stem(f"{whole.stem}-{i:05}-of-{len(shards):05}")
            )
            infos = {name: tensor.info for name, tensor in shard.items()}
            write_tensors(
                file, infos, lambda name, shard=shard: value(shard[name]), plan.metadata[path]
            )
            home |= dict.fromkeys(shard, file.name)
        if len(shards) > 1:
            size = sum(tensor.info.nbytes for tensor in tensors.values())
            index = {"metadata": {"total_size": size}, "weight_map": home}
            plan.texts[f"{path}.index.json"] = json.dumps(index, separators=(",", ":")) + "\n"
    for path, text in plan.texts.items():
        (model / path).write_text(text)


def draw_losses(lab: Lab) -> None:
    """FOLDER/losses.png: of every part, its losses over its steps, both logarithmic and each over
    its own range."""
    width, height, colours = 360, 200, [(200, 40, 40), (40, 90, 200), (30, 140, 60)]
    found = [
        (path.stem, json.loads(path.read_text())) for path in sorted(lab.folder.glob("*.json"))
    ]
    found = [(name, data["losses"], data["seconds"]) for name, data in found if "losses" in data]
    columns = 3
    sheet = Image.new("RGB", (columns * width, -(-len(found) // columns) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (part, curve, seconds) in enumerate(found):
        left, top = i % columns * width + 10, i // columns * height + 10
        draw.text((left, top), f"{part}: {len(curve)} steps, {seconds:.0f} s", fill="black")
        for j, name in enumerate(curve[0]):
            y = np.maximum([c[name] for c in curve], 1e-6)
            size = max(1, len(y) // 60)
            y = np.log(np.array([part.mean() for part in np.array_split(y, -(-len(y) // size))]))
            low, high = y.min(), max(y.max(), y.min() + 1e-6)
            x = left + np.linspace(0, width - 30, len(y))
            line = top + 65 + (height - 90) * (high - y) / (high - low)
            draw.line(list(zip(x.tolist(), line.tolist(), strict=True)), fill=colours[j], width=2)
            said = f"{name}: {np.exp(y[0]):.3g} to {np.exp(y[-1]):.3g}"
            draw.text((left, top + 14 + 14 * j), said, fill=colours[j])
    sheet.save(lab.folder / "losses.png")


PARTS: dict[str, Callable[[Lab], None]] = {
    "video_vae": train_video_vae,
    "audio_vae": train_audio_vae,
    "vocoder": train_vocoder,
    "upsampler": train_upsampler,
    "transformer": train_transformer,
    "lora": train_lora,
}
OF_LONG = ("transformer", "lora")  # what is trained on


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--long",
        type=Path,
        metavar="MODEL",
        help="train one of 256x256 and 121 frames, whose transformer begins as that of this model",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the number of steps, to try it out"
    )
    parser.add_argument(
        "--part", choices=PARTS, help="train this one alone; those before it are done"
    )
    args = parser.parse_args(argv)
    kind, parts = (LONG, OF_LONG) if args.long else (TINY, PARTS)
    lab = Lab(args.folder, args.seed, args.scale, kind, args.long)
    for name in parts:
        if args.part in (None, name):
            PARTS[name](lab)
    if args.part is None:
        write_model(lab)
        draw_losses(lab)


if __name__ == "__main__":
    main()
