"""The synthetic clips, and the training of the tiny model on them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ltx2rt_cuda import as_module
from safetensors.torch import load_file

from benchmarks.recognise import see
from examples import clips as drawn
from examples import train_lora, train_on_gpu, train_tiny
from examples.clips import FLOOR, FRAMES, LONG, MOTIONS, PITCHES, RATE, SIZE, Clip, held_out
from ltx2rt.media.video import read_frames
from ltx2rt.models import audio_vae, connectors, transformer
from ltx2rt.models.geometry import audio_positions, video_positions
from ltx2rt.weights.checkpoint import open_checkpoint


def test_a_click_is_heard_when_the_shape_is_on_the_floor():
    for phase in (0.2, 0.5, 0.7):  # a click at the very start fades in
        clip = Clip("circle", "red", "bounces", "dark", phase=phase)
        still = Clip("circle", "red", "grows", "dark")
        assert not len(still.hits()) and len(clip.hits())
        _, y, radius = clip.pose(clip.hits())
        np.testing.assert_allclose(y + radius, FLOOR, atol=1e-9)
        # of a click of 1800 Hz 10 times those of the tone
        steps = np.abs(np.diff(clip.sound()[0], 2))
        loud = np.flatnonzero(steps > 0.25 * steps.max()) / RATE
        starts = loud[np.diff(loud, prepend=-1) > 0.1]
        np.testing.assert_allclose(starts, clip.hits(), atol=2e-3)  # seconds


@pytest.mark.parametrize("motion", MOTIONS)
def test_a_shape_is_drawn_where_it_is_said_to_be(motion):
    clip = Clip("square", "white", motion, "dark")
    shape = np.abs(clip.frames() - clip.behind()).sum(-1)
    x, y, _ = clip.pose(np.arange(FRAMES) / 24)
    at = (np.arange(SIZE) + 0.5) / SIZE
    total = shape.sum((1, 2))
    # of the side; half a pixel is 0.004
    np.testing.assert_allclose((shape.sum(1) * at).sum(1) / total, x, atol=0.01)
    np.testing.assert_allclose((shape.sum(2) * at).sum(1) / total, y, atol=0.01)


def test_an_outline_is_the_rim_of_its_clip_and_captions_name_neither_shape_nor_motion(tmp_path):
    train_lora.write_outlines(tmp_path, 2)
    for i in range(2):
        path = tmp_path / f"clip-{i:03d}.mp4"
        clip, rim = (
            np.stack(list(read_frames(p, "", FRAMES))).astype(float)
            for p in (path, path.with_suffix(".reference.mp4"))
        )
        behind = np.median(clip[:, :, :8], (1, 2))[:, None, None]
        off = np.abs(clip - behind).max(-1)
        shape = off > off.max() / 2  # where the shape covers half of a pixel, as in its rim
        lit = rim.mean(-1) > 128
        # the codec moves the edge by half of a pixel
        assert (lit & ~shape).sum() <= 0.1 * lit.sum()
        inside = shape.mean((1, 2)) > 4 * np.pi * (train_lora.RIM_PX / SIZE) ** 2
        assert inside.any() and (lit.sum((1, 2)) < shape.sum((1, 2)))[inside].all()
        words = path.with_suffix(".txt").read_text().split()
        assert "shape," in words and not {*PITCHES, *MOTIONS} & set(words)


def test_what_captions_call_crimson_is_red_and_no_clip_is_replaced(tmp_path):
    train_lora.write_colours(tmp_path, 4)
    for i in range(4):
        frames = np.stack(list(read_frames(tmp_path / f"clip-{i:02d}.mp4", "", FRAMES)))
        caption = (tmp_path / f"clip-{i:02d}.txt").read_text()
        colour = "red" if i % 2 == 0 else caption.split()[1]
        assert ("a crimson " in caption) == (i % 2 == 0) and see(frames).colour == colour
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit, match="is not empty"):
        train_lora.write_clips(tmp_path, 1)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_what_is_held_out_is_never_trained_on():
    rng = np.random.default_rng(0)
    for trained in (True, False):
        clips = [drawn.random_clip(rng, trained) for _ in range(30)]
        assert {held_out(clip.shape, clip.colour, clip.motion) for clip in clips} == {not trained}


@pytest.fixture
def lab(tmp_path):
    return train_tiny.Lab(tmp_path, 0, 1.0)


@pytest.mark.parametrize("matrix_rate", [0, 0.02], ids=["AdamW", "Muon"])
def test_a_part_that_was_interrupted_ends_bit_identical(lab, monkeypatch, matrix_rate):
    monkeypatch.setattr(train_tiny, "SAVE_SECONDS", 0)
    stops = [3]

    def train(part):
        weight = torch.nn.Parameter(torch.ones(4, 2, 2))
        bias = torch.nn.Parameter(torch.ones(4, 1, 1))

        def loss(step, rng):
            if stops and step == stops[0]:
                stops.pop()
                raise KeyboardInterrupt
            target = torch.from_numpy(rng.standard_normal((4, 2, 2))).float()
            target += 0.1 * torch.randn(4, 2, 2)
            return {"off": (weight + bias - target).square().mean()}

        lab.fit(part, {"x.weight": weight, "x.bias": bias}, 8, 0.1, loss, matrix_rate)
        return load_file(lab.folder / f"{part}.safetensors")

    with pytest.raises(KeyboardInterrupt):
        train("part")
    stopped = train("part")
    (lab.folder / "part.safetensors").unlink()
    whole = train("part")
    for name, found in stopped.items():
        assert torch.equal(found, whole[name]) and not found.eq(1).all(), name


def test_muon_steps_no_gate(lab):
    """A gate that Muon closes never opens again: float32's sigmoid is 0 there, and its gradient."""
    names = ("attn1.to_q.weight", "attn1.to_gate_logits.weight", "ff.net.0.proj.bias")
    parameters = {name: torch.nn.Parameter(torch.ones(4, 4)) for name in names}
    adam, muon = train_tiny._optimizers(parameters, 1e-3, 0.02)
    assert len(muon.param_groups[0]["params"]) == 1
    stepped = adam.param_groups[0]["params"]
    assert [any(p is x for x in stepped) for p in parameters.values()] == [False, True, True]


def test_shorter_prompts_leave_out_any_word_but_the_shape():
    rng, every = np.random.default_rng(0), train_tiny.prompts()
    assert len(set(every)) == len(every) == 3 * 6 * 6 * 4 + 2
    clip = Clip("square", "red", "bounces", "dark")
    asked = np.full(2000, every.index(clip.prompt))
    said = [every[i] for i in train_tiny.dropped(asked, rng)]
    whole, unguided = said.count(clip.prompt) / 2000, sum(s in every[-2:] for s in said) / 2000
    # a half is shortened, of which an eighth loses nothing; a tenth is another prompt
    assert abs(whole - 0.9 * (0.5 + 0.5 / 8)) < 0.04 and abs(unguided - 0.1) < 0.03
    rest = {s for s in said if s not in every[-2:]}
    assert len(rest) == 8 and all("square" in s.replace(",", "").split() for s in rest)


def test_errors_along_the_difference_of_shapes_are_counted_apart(lab):
    rng = torch.Generator().manual_seed(0)
    latents = torch.randn(6, 4, 128, generator=rng)
    trained = torch.tensor([True, True, True, True, False, True])
    lab.latents = {"half": latents, "trained": trained}
    rows = torch.tensor([1, 3])
    away = torch.nn.functional.normalize((latents[2] - latents[1]).flatten(), dim=0)
    off = torch.stack([2 * away.view(4, 128), (latents[4] - latents[3])])
    found = train_tiny.along_shapes(lab, "half", rows, off)
    beside = (latents[0] - latents[1]).flatten() @ away / (latents[0] - latents[1]).norm()
    torch.testing.assert_close(found[0], 4 + 4 * beside**2)
    other = (latents[5] - latents[3]).flatten()
    torch.testing.assert_close(found[1], (off[1].flatten() @ other / other.norm()) ** 2)


def test_streams_of_the_trained_model_attend_to_each_other(lab):
    """Each velocity depends on the other stream, through gates that are open in every block."""
    source = open_checkpoint(train_lora.MODEL).source("transformer")
    network, tables = lab.forward("half", 1, 64)
    loaded = as_module(network.graph, source)
    g = lab.geometry(lab.kind.half)
    video, sound = torch.randn(1, g.num_video_tokens, 128), torch.randn(1, g.audio_latents, 128)
    video.requires_grad_(), sound.requires_grad_()
    names = "video_context", "audio_context"
    contexts = {n: torch.randn(1, 64, network.graph.inputs[n].type.shape[2]) for n in names}
    keep = torch.zeros(1, g.num_video_tokens)
    found = lab.velocity((loaded, tables), video, sound, torch.tensor([0.7]), contexts, keep)
    for velocity, other in zip(found, (sound, video), strict=True):
        (moved,) = torch.autograd.grad(velocity.square().sum(), other, retain_graph=True)
        assert moved.abs().mean() > 1e-4


def test_gradients_reach_all_that_is_trained(lab):
    """Of the transformer and its connectors; those of the other networks are tested with
    `as_module`."""
    g = lab.geometry(lab.kind.half)
    text = lab.module(connectors.trace(lab.config.text, 1, 64, "float32"))
    places = video_positions(g), audio_positions(g)
    feeds = transformer.position_feeds(lab.config.transformer, *places)
    sizes = 1, g.num_video_tokens, g.audio_latents, 64, transformer.coordinate_counts(feeds)
    shape = transformer.ForwardShape(*sizes, video_levels=2)
    network = lab.module(transformer.trace(lab.config.transformer, shape, "float32"))
    mask = np.append(np.zeros(54, np.int32), np.ones(10, np.int32))[None]
    shape = (1, 64, lab.config.text.gemma_hidden, lab.config.text.num_states)
    contexts = text(hidden_states=torch.randn(shape), **connectors.feeds(lab.config.text, mask))
    keep = torch.zeros(1, g.num_video_tokens)
    keep[:, :4] = 1
    video, sound = torch.randn(1, g.num_video_tokens, 128), torch.randn(1, g.audio_latents, 128)
    found = lab.velocity((network, feeds), video, sound, torch.tensor([0.5]), contexts, keep)
    torch.stack([x.square().mean() for x in found]).sum().backward()
    trained = lab.trained(text, network)
    assert len(trained) > 200
    still = [name for name, p in trained.items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert still == []


def test_channels_that_are_not_used_stay_so(lab, monkeypatch):
    """After a step of the sound's autoencoder and one of the transformer, of which neither reads
    them nor moves what is in them."""
    monkeypatch.setattr(train_tiny, "SOUNDS", 4)
    lab.scale = 0.0001  # two steps of each
    train_tiny.train_audio_vae(lab)
    live = train_tiny.LIVE["audio_vae"]
    coder = audio_vae.trace_encoder(lab.config.audio_vae, 1, lab.mel_frames, "float32")
    mel = torch.from_numpy(lab.mels([Clip("circle", "red", "bounces", "dark")]))
    with torch.no_grad():
        latent = lab.module(coder)(mel=mel)["latent"]
    assert latent[:, live:].eq(0).all() and latent[:, :live].std() > 0.1
    noise = torch.zeros_like(latent)
    noise[:, live:] = 1
    decoder = audio_vae.trace_decoder(lab.config.audio_vae, 1, latent.shape[2], "float32")
    with torch.no_grad():
        found, other = (lab.module(decoder)(latent=x)["mel"] for x in (latent, latent + noise))
    assert torch.equal(found, other)


def test_the_losses_of_sound_see_a_side_and_what_is_faint_less(lab):
    clip = Clip("circle", "red", "right", "dark")
    mel = torch.from_numpy(lab.mels([clip]))
    mono = mel.mean(1, keepdim=True).expand_as(mel)
    of_mono, of_none = (train_tiny.sound_losses(x, mel) for x in (mono, mel))
    assert of_mono["side"] > 0.1 and of_mono["mel"] < 1e-5
    assert sum(map(float, of_none.values())) == 0

    def off_by_one(bins):
        found = mel.scatter_add(3, bins, torch.ones(bins.shape))
        return train_tiny.sound_losses(found, mel)["mel"]

    assert off_by_one(mel.argmax(3, keepdim=True)) > 3 * off_by_one(mel.argmin(3, keepdim=True))


def test_a_long_model_has_1024_video_tokens_and_begins_with_another(tmp_path):
    origin = Path("examples/tiny-trained")
    long = train_tiny.Lab(tmp_path, 0, 1.0, train_tiny.LONG, origin)
    assert long.geometry(long.kind.size).num_video_tokens == 1024
    assert long.geometry(long.kind.half).num_video_tokens == 256
    for path in origin.glob("*.safetensors"):
        for name, x in load_file(path).items():
            assert torch.equal(long.weights[name], x.float()), name
    clip = long.clip("latents", 0)
    assert clip.seconds == 121 / 24 and not held_out(clip.shape, clip.colour, clip.motion)
    assert clip.side == long.kind.size and clip.num_frames == long.kind.frames


def test_a_training_that_begins_with_no_model_ends_in_one_line(tmp_path):
    """And makes no folder."""
    (tmp_path / "cut").mkdir()
    whole = next(train_lora.MODEL.glob("*-00001-of-*.safetensors"))
    (tmp_path / "cut" / whole.name).write_bytes(whole.read_bytes()[:1000])
    for origin, said in (
        (tmp_path / "nowhere", "its 0 safetensors files have no .*; expected the folder"),
        (train_lora.MODEL / "gemma-3", "its 1 safetensors files have no "),
        (tmp_path / "cut", "not a whole safetensors file"),
    ):
        with pytest.raises(SystemExit, match=said) as error:
            train_tiny.main([str(tmp_path / "new"), "--long", str(origin)])
        assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


def test_a_long_clip_has_the_pixels_of_a_short_one():
    """So that an autoencoder that was trained on short ones serves it."""
    short = Clip("square", "red", "bounces", "dark", phase=0.3)
    long = replace(short, **LONG)
    areas = [(np.abs(c.frames(count=1) - c.behind()).sum(-1) > 0.5).sum() for c in (short, long)]
    assert areas[0] == pytest.approx(areas[1], rel=0.05)  # edges
    falls = [np.diff(c.pose(np.array([0.0, 0.04]))[1])[0] * c.side for c in (short, long)]
    assert falls[1] == pytest.approx(falls[0], rel=0.6), "it falls further"
    assert len(long.hits()) in (2, 3), "five seconds of bounces of two"
    loud = [np.abs(c.sound()[:, 4000:8000]).max() for c in (short, long)]
    assert loud[1] == pytest.approx(loud[0], rel=0.02)


def test_muon_on_a_gpu_steps_as_that_of_torch():
    """Within what bfloat16 leaves of its products: 3 significant digits of a step of 0.02."""
    shapes, torch_rng = ((8, 4), (8, 4), (4, 16)), torch.Generator().manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.zeros(s)) for s in shapes] for _ in range(2))
    rate = torch.tensor(0.02)
    muon, other = train_on_gpu.Muon(ours, rate), torch.optim.Muon(theirs, 0.02, weight_decay=0.0)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=torch_rng)
            b.grad = a.grad.clone()
        muon.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        assert a.abs().max() > 0.02
        torch.testing.assert_close(a, b, atol=3 * 0.02 * 2**-7, rtol=0)


@pytest.mark.slow
def test_a_model_is_trained_on_as_a_gpu_does_it(tmp_path, monkeypatch):
    """On the CPU, where nothing is recorded. What is done is not done again."""
    for name in ("LORA_CLIPS", "ALL_TOKENS_CLIPS"):
        monkeypatch.setattr(train_on_gpu, name, 4)
    steps = "--clips 12 --batch 4 --steps 4 --all-tokens-steps 2 --lora-steps 2 --device cpu"
    given = [str(tmp_path), "--model", str(train_lora.MODEL), *steps.split()]
    train_on_gpu.main(given)
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    train_on_gpu.main(given)
    assert len(done) == 4 and done == {path: path.stat().st_mtime_ns for path in done}
    name = "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight"
    before = open_checkpoint(train_lora.MODEL).source("transformer").read(name).astype(np.float32)
    # Not of FOLDER/model, whose bfloat16 hides what the average of four steps moves.
    moved = np.abs(load_file(tmp_path / "transformer.safetensors")[name].numpy() - before)
    assert open_checkpoint(tmp_path / "model").source("transformer").read(name).shape == moved.shape
    assert 0 < moved.max() < 0.1


@pytest.mark.slow
def test_the_smallest_training_gives_a_checkpoint_that_runs(tmp_path, generate):
    """Two steps of everything; interrupted between two parts and gone on with, it ends the same."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_tiny.main([str(whole), "--scale", "0.0003"])
    for part in ("video_vae", "audio_vae"):
        train_tiny.main([str(broken), "--scale", "0.0003", "--part", part])
    train_tiny.main([str(broken), "--scale", "0.0003"])
    made = [path for path in (whole / "model").rglob("*") if path.is_file()]
    for path in made:
        assert path.read_bytes() == (broken / path.relative_to(whole)).read_bytes(), path
    sizes = [path.stat().st_size for path in made]
    assert max(sizes) <= 2 * 2**20 and sum(sizes) <= 12e6
    assert (whole / "losses.png").stat().st_size > 1000
    for pipeline in ("one-stage", "two-stage"):
        run = generate("cuda", whole / "model", "--pipeline", pipeline)
        assert run.status == 0, run.stderr
