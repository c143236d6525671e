"""Write what a release leaves on a disk: a queue, clips, folders of unfinished runs, jobs as stored.

    PYTHONPATH=OLD:OLD/backends:OLD/kernels python tests/earlier/write.py examples/tiny-trained tests/earlier/VERSION

Run it with each release before the next one; `tests/pipelines/test_earlier.py` ends them all by today's.
Nothing of this machine is in the files: models and inputs are named without folders.
"""

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import wave
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
from PIL import Image

WHEN = 1_700_000_000  # of the model's files, which a folder of a run states
LORA = "tiny-trained-2.3-distilled-lora.safetensors"
HERE = ("--backend", "cuda", "--device", "cpu", "--model", "tiny-trained")
SIZE = {"size": "64x64", "num_frames": 9}
# stated since `segments` and `length` are gone
SEGMENTS = {"0.1.0": {"segments": 3}, "0.2.0": {"length": 1.5}}


def inputs(folder):
    """Make a video, a sound, an image and a mask here; copy them by the names that a server gives."""
    folder.mkdir()
    with av.open("v.mp4", "w") as clip:
        video = clip.add_stream("libx264", rate=24)
        sound = clip.add_stream("aac", rate=48000, layout="stereo")
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        for i in range(17):
            picture = np.full((64, 64, 3), i * 9, np.uint8)
            clip.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        clip.mux(video.encode(None))
        tone = np.sin(np.arange(34000, dtype=np.float32) * 0.05)[None].repeat(2, 0) * 0.3
        samples = av.AudioFrame.from_ndarray(tone, format="fltp", layout="stereo")
        samples.rate = 48000
        clip.mux(sound.encode(samples))
        clip.mux(sound.encode(None))
    with wave.open("s.wav", "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((np.sin(np.arange(8000) * 0.15) * 9000).astype("<i2").tobytes())
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save("i.png")
    mask = np.zeros((64, 64), np.uint8)
    mask[20:40, 20:40] = 255
    Image.fromarray(mask).save("m.png")
    digests = {}
    for name, suffix in (
        ("v.mp4", ".media"),
        ("s.wav", ".media"),
        ("i.png", ""),
        ("m.png", ".mask"),
    ):
        digests[name[0]] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        shutil.copy(name, folder / (digests[name[0]] + suffix))
    return digests


def asked(file):
    """Fields of requests by a name: every pipeline, and settings that a later release has dropped."""
    plain, clip = {"prompt": "circle", "seed": 1, **SIZE}, {"prompt": "circle", "seed": 1}
    given, image = {"video_path": [{"file_id": file["v"]}]}, {"file_id": file["i"]}
    one, extend = {**plain, "pipeline": "one-stage"}, {**clip, **given, "pipeline": "extend"}
    extend |= {"extend_frames": 8, "overlap": 9}
    retake = {**clip, **given, "pipeline": "retake", "start_time": 0.1, "end_time": 0.4}
    v2v, inpaint = ({**clip, **given, "pipeline": name} for name in ("v2v", "inpaint"))
    skips = {**plain, "steps": 8}
    long = {**one, "num_frames": 17, "overlap": 9}
    return {
        "two-stage": plain,
        "image": {**plain, "images": [image]},
        "guidance": {**plain, "video_cfg": 4, "stg_blocks": "1", "negative_prompt": "x", "n": 2},
        "seconds": {"prompt": "circle", "size": "64x64", "seconds": "1"},
        "seconds and frames": {**plain, "seconds": "1"},
        "skips": {**skips, "skip_step": 1},
        "video skips": {**skips, "video_skip_step": 1},
        "both skips": {**skips, "video_skip_step": 1, "audio_skip_step": 1},
        "step plan": {**skips, "step_plan": "0,2,4,6,7"},
        "fast": {**plain, "steps": 30, "step_plan": "fast"},
        "interval": {**plain, "guidance_interval": "0.1 0.8"},
        "prompt at": {**plain, "prompt_at": "0:0.2=a square"},
        "density": {**plain, "num_frames": 121, "size": "1024x1024", "attention_density": 0.5},
        "whole density": {**plain, "attention_density": 1},
        "hdr": {**plain, "hdr": "SRGB_LINEAR"},
        "one-stage": one,
        "hq": {**plain, "pipeline": "hq"},
        "distilled": {**plain, "pipeline": "distilled"},
        "segments": {**long, "segments": 3, "cut": "3", "segment_seeds": "2:5", "anchor": 0.3},
        "whole segments": {**long, "num_frames": 41, "segments": True, "segment_frames": 17},
        "length": {**long, "length": 2},
        "segment frames": {**long, "num_frames": 41, "segment_frames": 17, "cut": "2"},
        "long": {**one, "num_frames": 601},
        "a2v": {**plain, "pipeline": "a2v", "audio_path": [{"file_id": file["s"]}]},
        "keyframes": {**plain, "pipeline": "keyframes", "images": [image, {**image, "frame": 8}]},
        "retake": retake,
        "guided retake": {**retake, "guided": True, "steps": 5},
        "kept retake": {**retake, "keep_source": True},
        "extend": extend,
        "weak extend": {**extend, "overlap_strength": 0.5},
        "before": {**extend, "before": True},
        "v2v": {**v2v, "noise_level": 0.5},
        "inpaint": {**inpaint, "mask": [{"file_id": file["m"]}]},
        "pad": {**inpaint, "pad": "0,0,64,0"},
    }


def jobs(folder, files):
    """What a client gives and what a worker is sent, by the names of `asked`."""
    from ltx2rt.serve.admission import Admission
    from ltx2rt.serve.refusal import Refusal
    from ltx2rt.session.options import LoraSpec, ModelOptions

    lora, model = LoraSpec(Path("tiny-trained") / LORA), Path("tiny-trained")
    options = ModelOptions(backend="cuda", model=model, device="cpu", distilled_lora=lora)
    admission, found = Admission(options, Path("in"), default="two-stage"), {}
    for name, given in asked(files).items():
        with suppress(Refusal):  # what this release does not have
            job = admission.admit({"pipeline": "two-stage", **given}).job
            found[name] = {"given": given, "job": job}
    lines = (f"{json.dumps(name)}: {json.dumps(found[name])}" for name in found)
    (folder / "jobs.json").write_text("{" + ",\n".join(lines) + "}\n")


def generate(*words, until=None):
    """Run the command; killed once the file is there."""
    command = [sys.executable, "-m", "ltx2rt", "generate", *HERE, *map(str, words)]
    process = subprocess.Popen(command)
    while process.poll() is None and not (until and until.exists()):
        time.sleep(0.02)
    process.kill() if until else None
    status = process.wait()
    assert until.exists() if until else status == 0, f"{words} ended with {status}"


def clips(folder, version):
    """Files that state their settings, and the folder of a clip of which one segment is there."""
    same = ("--prompt", "circle", "--seed", 5)
    small = ("--width", 64, "--height", 64, "--num-frames", 9, "--steps", 2)
    lora = ("--distilled-lora", f"tiny-trained/{LORA}")
    generate(*same, *small, "--image", "i.png:0:0.8", "--output", folder / "image.mp4")
    generate(*same, *small, "--pipeline", "one-stage", "--output", folder / "one.webm")
    region = ("--video-path", "v.mp4", "--start-time", 0.1, "--end-time", 0.4)
    generate(*same, "--pipeline", "retake", *region, *lora, "--output", folder / "retake.mp4")
    seconds = "--duration" if version < "0.3" else "--seconds"
    sound = ("--pipeline", "t2a", seconds, 0.1, "--steps", 2)
    generate(*same, *sound, "--output", folder / "sound.wav")
    long = ("--pipeline", "one-stage", *small, "--num-frames", 17, "--overlap", 9)
    stated = SEGMENTS.get(version, {"num_frames": 33, "segment_frames": 17})
    words = [x for field, value in stated.items() for x in (f"--{field.replace('_', '-')}", value)]
    output = folder / "long.mp4"
    second = folder / "long.mp4.segments" / "0001.mov"
    generate(*same, *long, *words, "--output", output, until=second)
    for path in second.parent.iterdir():  # the encoding of the clip, and what was begun
        if not path.name.startswith(("0000.", "request")):
            path.unlink()


def kept_steps(folder):
    """A run that was stopped within its stage, where this release keeps steps."""
    import ltx2rt

    steps = iter(range(100))
    try:
        from ltx2rt.errors import Cancelled
        from ltx2rt.stages import kept_steps as _  # noqa: F401
    except ImportError:
        return
    clip = {"pipeline": "one-stage", "width": 64, "height": 64, "num_frames": 9, "steps": 6}
    with ltx2rt.open("tiny-trained", backend="cuda", device="cpu") as session, suppress(Cancelled):
        parts, stop = folder / "steps.mp4.part", lambda: next(steps) > 3
        session.generate("circle", seed=5, parts=parts, cancelled=stop, **clip)


def queue(folder, files, version):
    """The folder of a server that was killed: a job is done, others wait, one in segments."""
    data, url = folder / "queue", "http://127.0.0.1:18744"
    command = [
        sys.executable,
        "-m",
        "ltx2rt",
        "serve",
        *HERE,
        "--data",
        str(data),
        "--port",
        "18744",
    ]
    server = subprocess.Popen([*command, "--distilled-lora", f"tiny-trained/{LORA}"])
    names = {files[name[0]]: name for name in ("v.mp4", "s.wav", "i.png", "m.png")}
    fields, order = asked(files), {}
    stated = SEGMENTS.get(version, {"num_frames": 33, "segment_frames": 17})
    order = {"done": fields["one-stage"]}
    order["half"] = {**fields["one-stage"], "num_frames": 17, "overlap": 9, "steps": 2} | stated
    several = ("seconds and frames", "both skips", "a2v", "guided retake", "extend", "pad")
    order |= {name: fields[name] for name in (*several, "density")}
    while subprocess.run(["curl", "-sf", f"{url}/readyz"], stdout=subprocess.DEVNULL).returncode:
        time.sleep(0.3)
    ids = {}
    for name, given in order.items():
        form = []
        for field, value in given.items():
            ids_of = [item["file_id"] for item in value] if isinstance(value, list) else []
            form += ["-F", f"{field}=@{names[ids_of[0]]}" if ids_of else f"{field}={value}"]
        said = subprocess.run(["curl", "-s", f"{url}/v1/videos", *form], capture_output=True).stdout
        id = json.loads(said).get("id")  # none of what this release does not have
        ids |= {name: id} if id else {}
        while name == "done" and b'"completed"' not in said:
            said = subprocess.run(
                ["curl", "-s", f"{url}/v1/videos/{id}"], capture_output=True
            ).stdout
            time.sleep(0.1)
    server.kill()
    server.wait()
    time.sleep(1)  # its worker ends when it sees that
    for path in (data / "out").iterdir():
        if not path.name.startswith(ids["done"]):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with sqlite3.connect(data / "jobs.db") as file:  # checking one takes longer than making it
        none = ("started", "finished", "error", "result", "start_uptime_s", "end_uptime_s")
        known = {row[1] for row in file.execute("PRAGMA table_info(jobs)")}
        nothing = "".join(f", {column}=NULL" for column in none if column in known)
        waiting = f"status='queued', attempts=0, epoch=0{nothing}"
        file.execute(f"UPDATE jobs SET {waiting} WHERE id<>?", (ids["done"],))
        file.execute("PRAGMA journal_mode=DELETE")
        file.execute("VACUUM")
    file.close()
    (data / "lock").unlink(missing_ok=True)
    (folder / "queue.json").write_text(json.dumps(ids, indent=1) + "\n")


def main():
    from ltx2rt.version import VERSION

    model, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    os.environ |= {"SOURCE_DATE_EPOCH": str(WHEN), "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as work:
        os.chdir(work)
        shutil.copytree(model, "tiny-trained")
        for path in Path("tiny-trained").rglob("*"):
            os.utime(path, (WHEN, WHEN))
        folder.mkdir(parents=True)
        files = inputs(Path("in"))
        jobs(folder, files)
        clips(folder, VERSION)
        kept_steps(folder)
        queue(folder, files, VERSION)
        os.chdir("/")


if __name__ == "__main__":
    main()
