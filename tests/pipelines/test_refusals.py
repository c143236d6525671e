"""What pipelines and flags refuse, in one line, before a tensor is read, with nothing written."""

import os
import shlex

import numpy as np
import pytest
from PIL import Image

from ltx2rt.media import hdr
from ltx2rt.media.output import write_wav
from ltx2rt.pipelines import make_request
from ltx2rt.weights.files import TensorFile, write_arrays
from tests.conftest import refused
from tests.pipelines.test_ic_lora import lora_with, movie
from tests.pipelines.test_retake import write, write_light


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    """A folder with the files that the rows name."""
    folder, model = tmp_path_factory.mktemp("files"), tiny("tiny-2.3", "official")
    (folder / "model").symlink_to(model)
    (folder / "newer").symlink_to(tiny("tiny-2.5", "official"))
    sides = {"clip": (17, {}), "silent": (9, {"sound_s": 0}), "short": (8, {})}
    sides |= {"wide": (17, {"size": (256, 128)}), "slow": (20, {"fps": 12})}
    sides |= {"long": (489, {"size": (32, 32), "sound_s": 0})}
    for name, (frames, how) in sides.items():
        write(folder / f"{name}.mp4", frames, **how)
    movie(folder / "ref.mov", 17)
    for name, frames in (("one", 1), ("twelve", 12), ("mask", 16)):
        movie(folder / f"{name}.mov", frames, (128, 64) if name != "mask" else (64, 64))
    os.mkfifo(folder / "fifo.mp4")
    (folder / "text.mp4").write_text("no video")
    (folder / "cut.mp4").write_bytes((folder / "clip.mp4").read_bytes()[:-3000])
    for name, size in (("32", (32, 32)), ("64", (64, 64)), ("", (256, 128))):
        Image.new("RGB", size).save(folder / f"black{name}.png")
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 16000)).astype(np.float32)
    write_wav(folder / "song.wav", noise, 16000)
    write_wav(folder / "short.wav", np.ones((2, 320), np.float32) / 2, 16000)
    write_wav(folder / "silent.wav", np.ones((2, 16000), np.float32) * 1e-4, 16000)
    for name in ("light", "sizes"):
        write_light(folder / name, 9)
    odd = hdr.exr_bytes(np.zeros((2, 2, 3)), "ACESCG")
    (folder / "sizes" / "frame_00004.exr").write_bytes(odd)
    (folder / "a.exr").write_bytes(odd)
    (folder / "none").mkdir()
    own = "model/tiny-2.3-distilled-lora", "newer/tiny-2.5-distilled-lora"
    for name, i, factor in (("half", 0, 2), ("third", 0, 3), ("fine", 1, 3)):
        lora_with(folder / f"{own[i]}.safetensors", folder / f"{name}.safetensors", factor)
    wrong = np.zeros((1, 128, 1, 2, 2), "f"), np.full((1, 128, 1, 1, 2), np.nan, "f")
    write_arrays(folder / "latents", {f"image.{i}": x for i, x in enumerate(wrong)})
    return folder


CLIP, PART = "--video-path clip.mp4 ", "--video-path clip.mp4 --start-time 0.1 --end-time 0.3 "
LIGHT = "--start-time 0.1 --end-time 0.2 --hdr ACESCG --video-path "
REF = (
    "--width 256 --height 128 --num-frames 17 --lora half.safetensors --video-conditioning ref.mov "
)
WIDE = REF.replace("ref.mov", "wide.mp4")
PARTS = "--width 64 --height 64 --steps 1 --num-frames 57 --segment-frames 25 --overlap 9 "
ONE = "--width 64 --height 64 --steps 1 --num-frames 17 "
IMAGE = "--width 128 --height 64 --num-frames 17 --image "
# fmt: off
REFUSED = {
    "retake": {
        "--start-time 0.1 --end-time 0.3": "--video-path: none, but the retake pipeline starts",
        PART + "--video-path gone.mp4": "--video-path: gone.mp4 does not exist",
        PART + "--video-path none": "is a folder with no pictures",
        PART + "--video-path fifo.mp4": "is no regular file, expected a file",
        PART + "--video-path text.mp4": "text.mp4 is no readable video",
        PART + "--video-path cut.mp4": "cut.mp4 is",
        "--video-path long.mp4 --start-time 0 --end-time 20": "regenerated at once; do it in parts",
        PART + "--video-path silent.mp4 --keep audio": "silent.mp4 has no sound",
        PART + "--keep audio --sound new": "--sound: new, but --keep audio keeps the file's",
        CLIP + "--start-time 0.1": "--end-time: none",
        CLIP + "--end-time 0.1": "--start-time: none",
        PART + "--start-time=-0.1": "--start-time: -0.1, expected 0 or more",
        PART + "--start-time 0.3": "--end-time: 0.3, expected more than --start-time 0.3",
        PART + "--end-time 0.8": "clip.mp4 ends at 0.7083 s",
        PART + "--start-time 0.7 --end-time 0.708": "--start-time: 0.7 s is after the last audio",
        PART + "--start-time 0.709 --end-time 0.71 --keep audio": "is after the last video token",
        PART + "--width 63": "--width: 63",
        PART + "--num-frames 17": "--num-frames: the file",
        PART + "--fps 24": "--fps: the file of --video-path decides",
        PART + "--auto-duration 1 2": "--auto-duration: the file",
        PART + "--keep video --no-audio": "--no-audio: with --keep video nothing would be made",
        PART + "--steps 9": "--steps: 8 distilled steps are made, without guidance",
        PART + "--video-cfg 2": "--video-cfg: 8 distilled steps are made, without guidance",
        PART + "--image a.png": "--image: the retake pipeline does not read it",
        PART + "--output clip.mp4": "--output",
        LIGHT + "clip.mp4": "is no folder of EXR images; convert it, or",
        LIGHT + "light --end-time 1": "light ends at 0.3750 s; end there",
        LIGHT + "none": "is no folder of EXR images",
        LIGHT + "sizes": "sizes is a folder with images of several sizes",
    },
    "v2v": {
        CLIP + "--noise-level 0": "--noise-level: 0, expected more than 0 and at most 1",
        CLIP + "--sound old": "--sound: 'old', expected one of keep, noise, new",
        CLIP + "--skip-step 1": "does not read it",
        CLIP + "--steps 3": "add --guided",
        CLIP + "--guided --nag 5": "--nag: for steps without guidance",
        "": "--video-path: none, but the v2v pipeline starts from a clip",
        "--video-path silent.mp4 --sound noise": "--sound: noise, but silent.mp4 has no sound",
        CLIP + "--num-videos 2 --sound new": "--num-videos: 2, but new sound is made for one",
        CLIP + "--hdr ACESCG": "--hdr: the v2v pipeline does not read it; leave it out",
    },
    "inpaint": {
        CLIP: "--mask: none, and no --mask-box",
        CLIP + "--pad 1,2,3": "--pad: '1,2,3', expected LEFT,TOP,RIGHT,BOTTOM",
        CLIP + "--pad=32,0,0,-32": "--pad: -32 pixels, expected 0 or more",
        CLIP + "--pad 32,0,0,0 --mask-grow 600": "--mask-grow: 600, expected 0 to 512",
        CLIP + "--pad 32,0,0,0 --mask-fill red": "expected one of mean, green, none",
        CLIP + "--mask black64.png": "black64.png is black, and nothing would be made",
        CLIP + "--mask mask.mov": "mask.mov has 16 frames, the clip has 17; pass an image",
        CLIP + "--mask black32.png": "black32.png is 32x32, the clip 64x64",
        CLIP + "--mask text.mp4": "--mask: text.mp4 is no readable video",
        CLIP + "--mask gone.png": "--mask: gone.png does not exist",
        CLIP + "--mask-box 60,0,40,10": "--mask-box: 60,0,40,10 reaches beyond the clip",
        CLIP + "--mask-box 0,0,40": "--mask-box: '0,0,40', expected LEFT,TOP,WIDTH,HEIGHT",
        CLIP + "--mask-box 0,0,40,10 --mask black64.png": "--mask-box: given beside --mask",
    },
    "extend": {
        CLIP + "--guidance-interval 0 1": "add --guided",
        CLIP + "--overlap 16": "--overlap: 16, expected 8*k + 1; the nearest are 9 and 17",
        CLIP + "--overlap 25": "has 17 frames, --overlap 25 needs as many",
        CLIP + "--loop 2 --extend-frames 16": "16 beside --loop 2, which adds 15",
        CLIP + "--loop 0": "--loop: 0, expected 1 to 100000",
        CLIP + "--extend-frames 800": "the model's limit is 20 s; at most 464",
        CLIP + "--loop 2 --before": "--loop: given beside --before",
        CLIP + "--seconds 1 --loop 2": "--loop: given beside --seconds",
        CLIP + "--join slow.mp4": "slow.mp4 has 12 fps, expected 24 as",
        CLIP + "--join gone.mp4": "--join: gone.mp4 does not exist",
        CLIP + "--segment-frames 25": "--segment-frames: the extend pipeline does not read it",
    },
    "a2v": {
        "": "--audio-path: the a2v pipeline makes a clip for a sound, none was given",
        "--audio-path gone.wav": "--audio-path: gone.wav does not exist",
        "--audio-path song.wav --audio-start-time=-1": "--audio-start-time: -1, expected 0 or more",
        "--audio-path song.wav --audio-max-duration 0": "--audio-max-duration: 0, expected more",
        "--audio-path song.wav --audio-start-time 1.1": "its sound ends before 1.1 s",
        "--audio-path text.mp4": "no readable sound",
    },
    "dubit": {
        "--lora half.safetensors": "--video-path: none, but the dubit pipeline starts from a clip",
        CLIP + "--lora half.safetensors --num-videos 2": "--num-videos: 2, but dubit makes one",
        CLIP + "--lora half.safetensors --reference-strength 1.5": "expected 0 to 1",
        CLIP + "--lora half.safetensors --num-frames 9": "--num-frames: the file of --video-path",
        "--lora half.safetensors --video-path silent.mp4": "has no sound, whose voices dubit keeps",
        "--lora half.safetensors --video-path short.mp4": "has 8 frames, expected 9 or more",
        CLIP: "the dubit pipeline needs the LoRA (*dubit*.safetensors), and none is near",
        CLIP + "--lora half.safetensors third.safetensors": "--lora: 2 given, dubit takes one",
        CLIP + "--lora half.safetensors:1:stage1": "is for stage1, dubit merges it in all",
    },
    "hdr-ic-lora": {
        "--lora half.safetensors --video-path light": "holds EXR images, expected a clip of 8 bits",
    },
    "ic-lora": {
        "--lora half.safetensors": "the ic-lora pipeline follows reference videos, none was given",
        "--video-conditioning ref.mov": "--lora: the ic-lora pipeline needs the LoRA",
        "--video-conditioning gone.mov": "--video-conditioning: gone.mov does not exist",
        REF + "ref.mov:1.5": "strength 1.5 of",
        REF + "light": "is a folder of EXR images; add --hdr",
        REF + "--conditioning-attention-strength 1.01": "attention-strength: 1.01, expected 0 to 1",
        REF + "--conditioning-attention-mask one.mov": "one.mov has 1 frame, expected 3 or more",
        REF + "--conditioning-attention-mask twelve.mov": "twelve.mov has 12 frames, expected 3",
        REF + "--width 192": "--width: 192, expected divisible by 128 (ic-lora with a LoRA for",
        REF + "--height 64": "--height: 64, expected divisible by 128",
        REF + "--lora half.safetensors:1:stage2": "is for stage 2, where the ic-lora pipeline",
        REF + "--lora third.safetensors": "reference_downscale_factor is 2 in",
        REF + "--skip-stage-2 --audio-from stage2": "--audio-from: stage2, which --skip-stage-2",
        REF + "--output ref.mov": "ref.mov",
        REF + "ref.mov --pad 32,0,0,0": "--pad: does not go with several --video-conditioning",
        REF + "--pad 9999999999999,0,0,0": "--pad: the clip has 256x128, 17 frames at 24 fps",
        REF + "--pad 32,0,0,0 --skip-stage-2": "--pad: does not go with --skip-stage-2",
        REF + "--hdr ACESCG --pad 32,0,0,0": "have 8 bits; leave out --pad or it",
        WIDE + "--mask black.png": "is black, and nothing would be made",
        WIDE + "--mask black.png --width 128": "--mask: the clip has 128x128, 17 frames at 24",
        WIDE + "--mask black.png --num-frames 25": "--mask: the clip has 256x128, 25 frames",
    },
    "dfr": {
        "--num-frames 17": "--pipeline: dfr, but LTX-2.3 has no vector for keyframes",
        "--model newer --num-frames 1": "--num-frames: 1, expected 9 or more",
        "--model newer --temporal-upsample-rounds 3": "--temporal-upsample-rounds: 3, expected 0",
        "--model newer --temporal-upsample-rounds 2 --fps 120": "120 fps become 480, expected at",
        "--model newer --num-videos 2": "--num-videos: 2, but dfr makes one",
        "--model newer --num-frames 17 --width 128 --height 64 --lora fine.safetensors":
            "fine.safetensors is for references of 1/3 the size and 1/1 the frames",
    },
    "distilled": {
        ONE.replace("--steps 1 ", "") + "--sigmas shift=2": "distilled steps take no shift",
        "--guidance-interval 0 1": "--guidance-interval: the distilled pipeline does not read it",
        "--nag 0.5": "--nag: '0.5', expected SCALE",
        "--nag 11:2:1.5": "ALPHA from 0 to 1",
        "--nag 11:2:1:3": "expected SCALE",
        "--nag ''": "expected SCALE",
        "--negative-prompt red": "--negative-prompt: distilled has no guidance; add --nag 11",
        "--num-generated-keyframes 2": "2, but LTX-2.3 has no vector for keyframes",
        "--stage2-sampler ancestral": "--stage2-sampler: ancestral, but LTX-2.3 takes euler",
    },
    "two-stage": {
        IMAGE + "latent:0:0": "latent:0 is a tensor of --latents-in, which is not given",
        ONE + "--latents-in latents": "has no tensor video_latent, but image.0",
        ONE + "--steps 2 --latents-in latents": "no --image latent:K:FRAME reads it",
        IMAGE + "latent:3:0 --latents-in latents": "has no tensor image.3, but image.0",
        IMAGE + "latent:0:0 --latents-in latents": "expected float32 [1, 128, 1, 1, 2]",
        IMAGE + "latent:0:0 --latents-in gone": "--latents-in: gone",
        IMAGE + "latent:1:0 --latents-in latents": "latents: image.1 holds NaN",
    },
    "one-stage": {
        ONE + "--sigmas 0.5,1": "expected levels that fall from at most 1",
        ONE + "--sigmas stage3=1": "expected levels from 1 to 0",
        ONE + "--sigmas 1 0.5 0.7": "expected levels that fall from at most 1",
        ONE + "--sigmas 0": "expected levels that fall from at most 1",
        ONE + "--sigmas 1,0.5 stage2=0.4": "the one-stage pipeline has one stage",
        ONE + "--sigmas 1,0.5": "--steps: 1, but --sigmas has 2 levels",
        ONE + "--sigmas 1 shift=2": "stage1 and shift are both of one stage",
        ONE + "--image a.exr": "is an EXR file; add --hdr",
        ONE + "--hdr ACESCG --image black64.png": "is no EXR file; convert it",
        ONE + "--hdr REC709": "expected one of SRGB_LINEAR, ACESCG, ACESCCT",
        ONE + "--hdr-transfer pq": "--hdr-transfer: pq, but the clip is not in high",
        ONE + "--hdr ACESCG --hdr-transfer gamma": "expected one of hlg, pq",
        ONE + "--output %05d.exr": "is for clips in high dynamic range; add --hdr",
        ONE + "--hdr ACESCG --output a.webm": "cannot hold it; write *.mp4, *.mov",
        ONE + "--audio-conditioning song.wav:1.5": "--audio-conditioning: strength 1.5 of",
        ONE + "--audio-conditioning gone.wav": "--audio-conditioning: gone.wav does not exist",
        ONE + "--audio-conditioning text.mp4": "--audio-conditioning: text.mp4: no readable sound",
        ONE + "--audio-conditioning short.wav": "holds 0.0200 s of sound, expected more than",
        ONE + "--audio-conditioning silent.wav": "is silent, below -60 dB",
        ONE + "--audio-conditioning song.wav --audio-conditioning-at end": "expected one of",
        ONE + "--voice song.wav --audio-conditioning song.wav": "--voice: given beside",
        ONE + "--voice silent.wav": "is silent, below -60 dB",
        ONE + "--voice song.wav --voice-guidance=-1": "--voice-guidance: -1, expected 0 or more",
        ONE + "--voice-guidance 2": "--voice-guidance: there is no voice to guide by",
        ONE + "--audio-conditioning-at before": "--audio-conditioning-at: there is no sound to",
        ONE + "--guidance-interval 0.9 0.1": "--guidance-interval: '0.9 0.1', expected START STOP",
        ONE + "--guidance-interval 0.1 nan": "expected START STOP",
        ONE + "--guidance-interval 0 1 --skip-step 1": "given beside --skip-step",
        ONE + "--guidance-interval 0 1 --step-plan 0,4,8": "given beside --step-plan",
        ONE + "--steps 4 --guidance-interval 0 0.05": "0 0.05 holds none of the 4 steps",
        ONE + "--prompt-at rain": "--prompt-at: 'rain', expected START:END=TEXT, such as",
        ONE + "--prompt-at 0:1%=rain": "expected START:END=TEXT",
        ONE + "--prompt-at a:1=rain": "expected START:END=TEXT",
        ONE + "--prompt-at 1..2:3=rain": "expected START:END=TEXT",
        ONE + "--prompt-at 0:1=": "is empty",
        ONE + "--prompt-at 2:1=rain": "from 2 to 1",
        ONE + "--prompt-at 0:9=rain": "ends at 9 s, but the clip at 0.7083 s",
        ONE + "--prompt-at 0%:120%=rain": "ends at 0.85 s",
        ONE + "--prompt-softness 0": "--prompt-softness: 0, expected more than 0 and at most 1",
        ONE + f"--prompt-at '0:0.5={'rain ' * 2000}'": "tokens together, the model reads 1024",
        PARTS + "--prompt-at 0:1=rain": "--prompt-at: does not go with a clip in segments",
        ONE + "--cut 2": "--cut: the clip has one segment; give --segment-frames, fewer",
        ONE + "--segment-seed 2:1": "--segment-seed: the clip has one segment",
        PARTS + "--audio-conditioning song.wav": "--audio-conditioning-at start: does not go with",
        PARTS + "--overlap 10": "--overlap: 10, expected 8*k + 1; the nearest are 9 and 17",
        PARTS + "--overlap 25": "--overlap: 25, but a segment has 25 frames; give fewer",
        PARTS + "--seconds 2": "--seconds: given beside --num-frames",
        PARTS + "--prompt x --prompt ' '": "--prompt: one is empty",
        PARTS + "--prompt x --prompt x --prompt x": "--prompt: 4 are given, but the clip has 3",
        PARTS + "--prompt x --prompt x --enhance-prompt": "--enhance-prompt: writes one prompt",
        PARTS + "--num-frames 801 --segment-frames 801": "--segment-frames: 801 frames are over",
        PARTS + "--auto-duration 1 2": "--auto-duration:",
        PARTS + "--num-frames 100001": "--num-frames: 100001 frames are 4167 s, expected at most",
        PARTS + "--segment-frames 26": "--segment-frames: 26, expected 8*k + 1",
        PARTS + "--cut 1": "--cut: segment 1, expected 2 to 3",
        PARTS + "--cut 4": "--cut: segment 4, expected 2 to 3",
        PARTS + "--cut 2,2": "--cut: segment 2 is given twice",
        PARTS + "--cut x": "--cut: 'x', expected numbers of segments such as 3 or 3,5",
        PARTS + "--segment-seed 0:1": "--segment-seed: segment 0, expected 1 to 3",
        PARTS + "--segment-seed 2:1 2:3": "--segment-seed: segment 2 is given twice",
        PARTS + "--segment-seed 2": "--segment-seed: '2', expected SEGMENT:SEED such as 3:77",
        PARTS + "--segment-seed 2:-1": "--segment-seed: seed -1, expected 0 to 2^64 - 1",
    },
}
# fmt: on


@pytest.mark.parametrize(
    ("pipeline", "words", "says"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows.items()],
)
def test_refusals(place, command, monkeypatch, pipeline, words, says):
    read = TensorFile.read

    def read_given(file, *how):
        assert file.path.name == "latents", "a tensor of the model was read"
        return read(file, *how)

    monkeypatch.chdir(place)
    monkeypatch.setattr(TensorFile, "read", read_given)
    start = (
        "generate --backend cuda --device cpu --model model --prompt fox --output x.mp4 --seed 3"
    )
    before = sorted(place.iterdir())
    status, out, err = command(*shlex.split(f"{start} --pipeline {pipeline} {words}"))
    *notes, error = err.splitlines()
    assert status == 2 and says in error and not out, err
    assert error.startswith("ltx2rt: error: ") and not notes
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(("pipeline", "given", "says"), [
    ("three-stage", {}, "--pipeline: 'three-stage', expected one of two-stage"),
    ("inpaint", {"video_path": "a.mp4", "pad": (0.5, 0, 0, 0)}, "--pad: .*expected LEFT,TOP"),
    ("distilled", {"nag": []}, "--nag: '', expected SCALE"),
    ("hdr-ic-lora", {"hdr": None}, "--hdr: 'None', expected"),
    ("one-stage", {"guidance_interval": (0.5, 2)}, "'0.5 2', expected START STOP"),
    ("one-stage", {"prompt_at": [(-1, 2, "rain")]}, "from -1 to 2"),
    ("one-stage", {"prompt_at": [("a",)]}, "--prompt-at"),
    ("retake", {"images": [("a.png", 0)]}, "images: the retake pipeline does not read it"),
    ("dubit", {"image": "a.png:0"}, "unknown keyword .image."),
    ("one-stage", {"segment_prompts": ("x",)}, "--prompt: several: the clip has one segment"),
])  # fmt: skip
def test_values_of_python_that_are_refused(pipeline, given, says):
    with refused(says):
        make_request(pipeline, prompt="a fox", **given)
