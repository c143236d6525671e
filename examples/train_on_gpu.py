"""Trains the transformer and the distilled LoRA of `examples.train_tiny` on one GPU.

    python -m examples.train_on_gpu FOLDER --model examples/tiny-trained

The autoencoders, the vocoder and the upsampler are those of MODEL, and the transformer begins as
MODEL's. FOLDER/model is what comes out. Whole steps, optimisers and all, are recorded as CUDA
graphs and replayed: they have some 5,000 small kernels, which take longer to launch than to run. A
step of 128 clips took 16 ms so on an H200. The clips' latents are made on the CPU, in 0.1 s a clip.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from examples import train_tiny
from examples.train_tiny import (
    MATRICES,
    PROMPT_TOKENS,
    SIZES_OF_CLIPS,
    TINY,
    WORDS,
    Lab,
    draw,
    draw_distilled,
    dropped,
    flow,
    keep,
    some,
    tokens_of,
    unguided_too,
)

Tensors = dict[str, torch.Tensor]
WARM_UP = 3  # steps of a kind that are launched one by one, before it is recorded
SAID = 500  # steps between two lines
RATE_STEPS = 200  # in which the rates rise to their full height
LORA_CLIPS, ALL_TOKENS_CLIPS = 32, 32  # at a time: of the LoRA, and where contexts are whole


class Muon:
    """`torch.optim.Muon` with all matrices of one shape in one product, and a rate on the
    device."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], rate: torch.Tensor):
        self.rate, groups = rate, defaultdict(list)
        for p in matrices:
            groups[p.data.flatten(1).shape].append(p)
        self.groups = groups
        self.momenta = {
            shape: torch.zeros(len(group), *shape, device=rate.device)
            for shape, group in groups.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        for (rows, columns), group in self.groups.items():
            gradients = torch.stack([p.grad.flatten(1) for p in group if p.grad is not None])
            momenta = self.momenta[(rows, columns)]
            momenta.lerp_(gradients, 0.05)
            x = gradients.lerp(momenta, 0.95).bfloat16()
            x = x.mT if rows > columns else x
            x = x / x.flatten(1).float().norm(dim=1).clamp(min=1e-7).bfloat16()[:, None, None]
            for _ in range(5):  # Newton-Schulz, with the coefficients of torch.optim.Muon
                gram = x @ x.mT
                polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
                x = torch.baddbmm(x, polynomial, x, beta=3.4445)
            x = x.mT if rows > columns else x
            x = x.float() * (-self.rate * max(1, rows / columns) ** 0.5)
            moves = [move.reshape(p.shape) for move, p in zip(x.unbind(0), group, strict=True)]
            torch._foreach_add_([p.data for p in group], moves)


def fit(
    lab: Lab,
    part: str,
    parameters: Mapping[str, torch.nn.Parameter],
    steps: int,
    rates: tuple[float, float],
    drawn: Callable[[int, np.random.Generator], tuple[str, Tensors]],
    losses: Callable[[str, Tensors], Tensors],
    decay: float,
    record: bool = True,
) -> None:
    """As `Lab.fit`. rates: of AdamW, and of Muon, 0 for AdamW alone; drawn: the kind of a step and
    what it is given; losses: of both, of which each kind is recorded; decay: of the average."""
    done = lab.folder / f"{part}.safetensors"
    if done.exists():
        lab.weights |= parameters
        lab._put(load_file(done))
        return
    cuda, began = lab.device.type == "cuda", time.time()
    adam_rate, muon_rate = (torch.zeros((), device=lab.device) for _ in rates)
    matrices = {
        name: p
        for name, p in parameters.items()
        if rates[1] and name.endswith(".weight") and p.ndim > 1 and "gate" not in name
    }
    others = [p for name, p in parameters.items() if name not in matrices]
    adam = torch.optim.AdamW(
        others, lr=adam_rate, betas=(0.9, 0.99), weight_decay=0.0, capturable=cuda, foreach=cuda
    )
    muon = Muon(matrices.values(), muon_rate)
    every = list(parameters.values())
    average = [p.detach().clone() for p in every]

    def whole(kind: str, given: Tensors) -> Tensors:
        found = losses(kind, given)
        for p in every:
            p.grad = None
        torch.stack(list(found.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        adam.step()
        muon.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, [p.data for p in every], 1 - decay)
        return {name: value.detach() for name, value in found.items()}

    places: dict[str, Tensors] = {}
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, Tensors]] = {}
    count, curve, last = defaultdict[str, int](int), [], []
    for step in range(steps):
        slowed = min(1, (step + 1) / RATE_STEPS) * (0.5 + 0.5 * np.cos(np.pi * step / steps))
        adam_rate.fill_(rates[0] * slowed)
        muon_rate.fill_(rates[1] * slowed)
        kind, given = drawn(step, lab.rng(part, step))
        for name, x in given.items():
            places.setdefault(kind, {}).setdefault(name, torch.empty_like(x, device=lab.device))
            places[kind][name].copy_(x)
        if record and cuda and kind not in graphs and count[kind] == WARM_UP:
            graph = torch.cuda.CUDAGraph()
            for p in every:
                p.grad = None
            with torch.cuda.graph(graph):
                graphs[kind] = graph, whole(kind, places[kind])
        if kind in graphs:
            graph, found = graphs[kind]
            graph.replay()
        elif cuda:
            side = torch.cuda.Stream()  # as recording wants it
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found = whole(kind, places[kind])
            torch.cuda.current_stream().wait_stream(side)
        else:
            found = whole(kind, places[kind])
        count[kind] += 1
        last.append(torch.stack(list(found.values())).clone())
        if (step + 1) % SAID == 0 or step == steps - 1:
            rows = torch.stack(last).tolist()
            curve += [dict(zip(found, row, strict=True)) for row in rows]
            last.clear()
            means = dict(zip(found, np.mean(rows, 0), strict=True))
            if not np.isfinite(list(means.values())).all():
                raise SystemExit(f"{part}: step {step}: the losses are {means}")
            said = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
            print(f"{part}: step {step + 1} of {steps}, {said}, {time.time() - began:.0f} s")
    with torch.no_grad():
        for p, mean in zip(every, average, strict=True):
            p.copy_(mean)
            p.grad = None
    lab.weights |= parameters
    keep({name: p.detach().cpu().contiguous() for name, p in parameters.items()}, done)
    facts = {"seconds": time.time() - began, "losses": curve}
    (lab.folder / f"{part}.json").write_text(json.dumps(facts))


def train_transformer(lab: Lab, prompt: np.ndarray, steps: int, batch: int) -> None:
    contexts = lab.contexts
    nets = {size: lab.forward(size, batch, WORDS) for size in SIZES_OF_CLIPS}

    def drawn(step: int, rng: np.random.Generator) -> tuple[str, Tensors]:
        size = SIZES_OF_CLIPS[step % 2]
        at = draw(lab, size, rng.choice(lab.rows, batch), rng)
        asked = dropped(prompt[at["rows"].numpy()], rng)
        more = {"asked": asked, "tokens": tokens_of(rng, WORDS)}
        return size, at | {name: torch.from_numpy(x) for name, x in more.items()}

    def losses(size: str, at: Tensors) -> Tensors:
        return flow(lab, nets[size], size, some(contexts, at["asked"], at["tokens"]), at)

    parameters = lab.trained(*(net for net, _ in nets.values()))
    fit(lab, "transformer", parameters, steps, (1e-3, MATRICES), drawn, losses, 0.998)


def train_on_all_tokens(lab: Lab, prompt: np.ndarray, steps: int) -> None:
    """With the connectors, a few prompts at a time, four clips of each. The connectors read numpy
    arrays, so these steps are not recorded."""
    batch, known = ALL_TOKENS_CLIPS, prompt[lab.rows]
    nets = {size: lab.forward(size, batch, PROMPT_TOKENS) for size in SIZES_OF_CLIPS}
    text = lab.connectors(batch // 4)

    def drawn(step: int, rng: np.random.Generator) -> tuple[str, Tensors]:
        wanted = rng.choice(np.unique(known), batch // 4)
        rows = np.concatenate([rng.choice(lab.rows[known == p], 4) for p in wanted])
        size = SIZES_OF_CLIPS[step % 2]
        asked = {"asked": torch.from_numpy(dropped(wanted, rng))}
        return size, draw(lab, size, rows, rng) | asked

    def losses(size: str, at: Tensors) -> Tensors:
        encoded = lab.encode(text, at["asked"].tolist())
        found = {name: x.repeat_interleave(4, 0) for name, x in encoded.items()}
        return flow(lab, nets[size], size, found, at)

    parameters = lab.trained(text, *(net for net, _ in nets.values()))
    part = "transformer_and_connectors"
    fit(lab, part, parameters, steps, (6e-4, 0.0), drawn, losses, 0.98, record=False)
    del lab.contexts


def train_lora(lab: Lab, prompt: np.ndarray, steps: int) -> None:
    words, contexts, factors = 4 * WORDS, lab.contexts, train_tiny.lora_factors(lab)
    pairs = {
        size: train_tiny.pair_of(lab, factors, size, LORA_CLIPS, words) for size in SIZES_OF_CLIPS
    }

    def drawn(step: int, rng: np.random.Generator) -> tuple[str, Tensors]:
        size = SIZES_OF_CLIPS[step % 2]
        at = draw_distilled(lab, size, rng.choice(lab.rows, LORA_CLIPS), rng)
        asked = unguided_too(prompt[at["rows"].numpy()])
        more = {"asked": asked, "tokens": tokens_of(rng, words)}
        return size, at | {name: torch.from_numpy(x) for name, x in more.items()}

    def losses(size: str, at: Tensors) -> Tensors:
        text = some(contexts, at["asked"], at["tokens"])
        return train_tiny.distilled(lab, pairs[size], size, text, at)

    fit(lab, "lora", factors, steps, (2e-3, 0.0), drawn, losses, 0.99)


def move(lab: Lab, device: torch.device) -> None:
    """Weights and clips to the device."""
    lab.device = device
    for p in lab.weights.values():
        p.data = p.data.to(device)
    lab.live = {name: x.to(device) for name, x in lab.live.items()}
    lab.latents = {name: x.to(device) for name, x in lab.latents.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a model of examples.train_tiny")
    parser.add_argument("--clips", type=int, default=12_000, help="that are trained on")
    parser.add_argument("--batch", type=int, default=128, help="clips of a step")
    parser.add_argument("--steps", type=int, default=12_000, help="of the transformer")
    parser.add_argument("--all-tokens-steps", type=int, default=650)
    parser.add_argument("--lora-steps", type=int, default=1500)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = True
    lab = Lab(args.folder, args.seed, 1.0, replace(TINY, clips=args.clips), args.model)
    prompt = lab.latents["prompt"].numpy()
    lab.rows  # noqa: B018 (from the latents on the host)
    move(lab, torch.device(args.device))
    train_transformer(lab, prompt, args.steps, args.batch)
    train_on_all_tokens(lab, prompt, args.all_tokens_steps)
    train_lora(lab, prompt, args.lora_steps)
    for p in lab.weights.values():
        p.data = p.data.cpu()
    train_tiny.write_model(lab)
    train_tiny.draw_losses(lab)


if __name__ == "__main__":
    main()
