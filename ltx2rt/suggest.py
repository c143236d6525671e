"""The name that a user may have meant by an unknown one: a near spelling, or a peer's word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.75  # likeness out of 1, as difflib measures it
PEERS = {  # words of other programs -> ours, all as `_key` gives them
    "cfg": ("videocfg", "audiocfg"),
    "cfgscale": ("videocfg", "audiocfg"),
    "guidance": ("videocfg", "audiocfg"),
    "guidancescale": ("videocfg", "audiocfg"),
    "cfgguidancescale": ("videocfg", "audiocfg"),
    "stg": ("videostg", "audiostg"),
    "stgscale": ("videostg", "audiostg"),
    "numinferencesteps": ("steps",),
    "inferencesteps": ("steps",),
    "samplesteps": ("steps",),
    "frames": ("numframes",),
    "videolength": ("seconds", "numframes"),
    "framerate": ("fps",),
    "negative": ("negativeprompt",),
    "images": ("image",),
    "initimage": ("image",),
    "firstframe": ("image",),
    "video": ("videopath",),
    "audio": ("audiopath",),
    "photo": ("image",),
    "picture": ("image",),
    "song": ("audiopath",),
    "music": ("audiopath",),
    "sound": ("audiopath",),
    "clip": ("videopath",),
    "extend": ("extendframes",),
    "extendseconds": ("extendframes",),
    "continue": ("extendframes",),
    "redo": ("starttime",),
    "remove": ("maskbox",),
    "box": ("maskbox",),
    "strength": ("noiselevel",),
    "style": ("lora",),
    "checkpoint": ("model",),
    "checkpointpath": ("model",),
    "ckpt": ("model",),
    "gemma": ("textencoder",),
    "gemmaroot": ("textencoder",),
    "precision": ("dtype",),
    "gpus": ("numgpus", "devices"),
    "numdevices": ("numgpus", "devices"),
    "gpu": ("cuda", "devicekind"),
    "nvidia": ("cuda",),
    "torch": ("cuda",),
    "pytorch": ("cuda",),
    "jax": ("tpu",),
    "xla": ("tpu",),
    "fp8": ("float8",),
    "e4m3": ("float8",),
    "float8e4m3fn": ("float8",),
    "fp16": ("bfloat16",),
    "float16": ("bfloat16",),
    "half": ("bfloat16",),
    "bf16": ("bfloat16",),
    "fp32": ("float32",),
    "t2v": ("twostage",),
    "i2v": ("twostage",),
    "v2v": ("iclora",),
    "learningrate": ("lr",),
    "epochs": ("steps",),
    "numepochs": ("steps",),
    "maxtrainsteps": ("steps",),
    "maxtrainepochs": ("steps",),
    "networkdim": ("rank",),
    "networkrank": ("rank",),
    "lorarank": ("rank",),
    "networkalpha": ("alpha",),
    "loraalpha": ("alpha",),
    "batchsize": ("batch",),
    "trainbatchsize": ("batch",),
    "gradientaccumulationsteps": ("accumulate",),
    "lrscheduler": ("schedule",),
    "lrwarmupsteps": ("warmup",),
    "saveeverynsteps": ("saveevery",),
    "checkpointingsteps": ("saveevery",),
    "networkweights": ("init",),
    "resolution": ("buckets",),
    "resolutionbuckets": ("buckets",),
    "dataset": ("data",),
    "traindatadir": ("data",),
    "outputdir": ("output",),
    "o": ("output",),
    "m": ("model",),
    "p": ("prompt",),
    "run": ("generate",),
    "inspect": ("weightsinspect",),
    "fetch": ("weightsfetch",),
    "download": ("weightsfetch",),
    "merge": ("weightsmerge",),
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` may mean, None if none is near."""
    by_key = {_key(one): one for one in reversed(list(known))}
    key = _key(name[:80])
    for meant in (key, *PEERS.get(key, ())):
        if meant in by_key:
            return by_key[meant]
    near = get_close_matches(key, by_key, 1, LIKENESS)
    return by_key[near[0]] if near else None


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the end of an error, or nothing."""
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
