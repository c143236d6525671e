"""The nodes: each sends one kind of task to a server and shows the clip while it grows.

Decides which fields are widgets; all others go into `advanced` as TOML. The server checks values,
so that its own sentence is the node's error.
"""

from __future__ import annotations

import io as bytes_io
import json
import os
import shutil
import time
import tomllib
import wave
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import folder_paths
import numpy as np
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.utils import ProgressBar
from comfy_api.latest import ComfyExtension, InputImpl, io, ui
from PIL import Image
from server import PromptServer

from .client import SERVERS, Server, ServerError, Upload, read_token

Connection, Images, Loras = (io.Custom(f"LTX2RT_{kind}") for kind in ("SERVER", "IMAGES", "LORAS"))
UNSET = "default"  # the server's, or the pipeline's
AUTOMATIC = ("", 0, 0.0, UNSET, False)  # defaults that leave the choice to the server
MAX_SEED, PREVIEW_PX, MAX_PREVIEW_PX = 2**32 - 1, 512, 8192
ADDRESS = os.environ.get("LTX2RT_ADDRESS", "http://127.0.0.1:8000")
PIPELINES = (UNSET, "two-stage", "distilled", "one-stage", "hq", "keyframes")
OF_OTHER_NODES = {
    "video_path",
    "audio_path",
    "video_conditioning",
    "upscale",
}  # files of their pipelines
FRAMES, SOUND = 1, 2  # outputs of a task
FRESH_S = 10.0
seen: dict[str, Server] = {}  # servers of this process's graphs, the latest last
# the limits of these servers, and the time at which they were read
latest: dict[str, tuple[float, list[dict[str, Any]]]] = {}


def names(kind: str) -> list[str]:
    """LoRAs, or pipelines of *Text or images*, of the servers that graphs have named; of the usual
    address before the first. Asks again after FRESH_S; a silent server has LIST_S to answer."""
    asked_s, limits = latest.get("limits", (-FRESH_S, []))
    if time.monotonic() - asked_s > FRESH_S:
        limits = []
        for server in list(seen.values()) or [Server(ADDRESS, partial(read_token, "", ADDRESS))]:
            with suppress(ServerError):
                limits.append(server.limits())
        latest["limits"] = time.monotonic(), limits
    found = dict.fromkeys(PIPELINES if kind == "pipelines" else ())
    for one in limits:
        listed = one.get(kind)
        if isinstance(listed, list):
            found |= dict.fromkeys(name for name in listed if isinstance(name, str))
        elif isinstance(listed, dict):
            facts = {n: x for n, x in listed.items() if isinstance(x, dict)}
            found |= {n: None for n in facts if not OF_OTHER_NODES & {*facts[n].get("files", ())}}
    return list(found)


def of_server(name: str, kind: str, about: str) -> io.Input:
    """A list that the page gets with the nodes; any other name may be given as well. No list that
    the page fetches itself: it adds two widgets behind it, and moves the values of saved files."""
    return io.Combo.Input(name, options=names(kind), tooltip=about)


def used(node: type[io.ComfyNode]) -> set[int]:
    """The outputs of a node that others of the running graph read; all where it is not found."""
    running, _ = PromptServer.instance.prompt_queue.get_current_queue()
    own = getattr(node.hidden, "unique_id", None)
    graphs = [item[2] for item in running if own in item[2]]
    if not graphs:
        return {FRAMES, SOUND}
    links = [x for one in graphs[0].values() for x in one["inputs"].values() if isinstance(x, list)]
    return {link[1] for link in links if link[:1] == [own]}


def say(node: type[io.ComfyNode], text: str) -> None:
    """Show a line on the node that runs."""
    PromptServer.instance.send_progress_text(text, node.hidden.unique_id)


def waiting(node: type[io.ComfyNode]) -> Callable[[str], None]:
    """A function for every wait of the node: shows its line, if any, and ends the wait if the user
    cancels."""

    def wait(text: str) -> None:
        throw_exception_if_processing_interrupted()
        if text:
            say(node, text)

    return wait


class ServerNode(io.ComfyNode):
    """The server that makes clips: at an address, or started by this node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "LTX2RTServer",
            "LTX2RT Server",
            "ltx2rt",
            [
                io.String.Input("address", default=ADDRESS, tooltip="of `ltx2rt serve`"),
                io.String.Input(
                    "token",  # the name and place of the widget that held a token itself
                    "token file",
                    default="",
                    tooltip="a file with a line `ADDRESS TOKEN`, if the server asks for one; empty: "
                    "LTX2RT_TOKEN, as ComfyUI was started with it",
                ),
                io.String.Input(
                    "model",
                    default="",
                    tooltip="a model's file or folder: starts a server of it on "
                    "this machine instead, and ends it with ComfyUI. `models` stands "
                    "for ComfyUI's own folder",
                ),
                io.String.Input(
                    "command", default="ltx2rt", tooltip="starts ltx2rt, if there is a model"
                ),
                io.String.Input("arguments", default="", tooltip="more for `ltx2rt serve`"),
            ],
            [Connection.Output(display_name="server")],
            [io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **widgets: Any) -> Any:
        """A started server may have ended since: the node always runs, which takes no time."""
        return float("nan") if widgets.get("model") else ""

    @classmethod
    def execute(cls, address, token, model, command, arguments) -> io.NodeOutput:
        if model:
            path = folder_paths.models_dir if model == "models" else model
            found = SERVERS.serving(command, path, arguments, waiting(cls))
        else:
            read_token(token, address)  # refuse a wrong one here
            found = Server(address, partial(read_token, token, address))
        if seen.pop(found.root, None) is None:
            latest.clear()
        seen[found.root] = found
        return io.NodeOutput(found)


class ImageNode(io.ComfyNode):
    """A picture at a place in the clip; nodes in a row give several."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "LTX2RTImage",
            "LTX2RT Image at frame",
            "ltx2rt",
            [
                io.Image.Input("image"),
                io.String.Input("frame", default="0", tooltip="0, last, 2.5s, 50%"),
                io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.05),
                Images.Input("more", optional=True),
            ],
            [Images.Output(display_name="images")],
        )

    @classmethod
    def execute(cls, image, frame, strength, more=()) -> io.NodeOutput:
        return io.NodeOutput((*(more or ()), (single(image, "image"), frame, strength)))


class LoraNode(io.ComfyNode):
    """A LoRA of the server's folder; nodes in a row give several."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "LTX2RTLoRA",
            "LTX2RT LoRA",
            "ltx2rt",
            [
                of_server("name", "loras", "a file of the server's --loras, without suffix"),
                io.Float.Input("strength", default=1.0, min=-10.0, max=10.0, step=0.05),
                io.Combo.Input("stage", options=["both", "stage1", "stage2"]),
                Loras.Input("more", optional=True),
            ],
            [Loras.Output(display_name="loras")],
        )

    @classmethod
    def validate_inputs(cls, name) -> bool:
        """The server says which names there are."""
        return True

    @classmethod
    def execute(cls, name, strength, stage, more=()) -> io.NodeOutput:
        own = {"name": name, "strength": strength} | ({} if stage == "both" else {"stage": stage})
        return io.NodeOutput((*(more or ()), own))


class Task(io.ComfyNode):
    """The part that all tasks share. title, name: of the node. pipeline: of its jobs, "" for the
    server's choice. sockets: inputs that are files, by field. own: other widgets of the task."""

    title = name = pipeline = about = ""
    sockets: tuple[io.Input, ...] = ()
    own: tuple[io.Input, ...] = ()
    sized = True  # the task has a size and a length

    @classmethod
    def define_schema(cls) -> io.Schema:
        size = (
            io.Int.Input("width", default=0, min=0, max=8192, step=2, tooltip="0: automatic"),
            io.Int.Input("height", default=0, min=0, max=8192, step=2, tooltip="0: automatic"),
            io.Float.Input(
                "seconds",
                "duration",
                default=0.0,
                min=0.0,
                max=3600.0,
                step=0.1,
                tooltip="seconds; 0: the default",
            ),
        )
        return io.Schema(
            cls.name,
            cls.title,
            "ltx2rt",
            [
                Connection.Input("server"),
                io.String.Input("prompt", multiline=True, dynamic_prompts=True),
                io.String.Input(
                    "negative_prompt", multiline=True, default="", tooltip="empty: the model's"
                ),
                *cls.sockets,
                *cls.own,
                *(size if cls.sized else ()),
                io.Int.Input("steps", default=0, min=0, max=1000, tooltip="0: the pipeline's"),
                io.Int.Input("seed", default=0, min=0, max=MAX_SEED, control_after_generate=True),
                io.String.Input(
                    "advanced",
                    multiline=True,
                    default="",
                    tooltip="more fields of a request, as TOML: video_cfg = 4.0",
                ),
                io.Boolean.Input(
                    "enhance_prompt",
                    default=False,
                    optional=True,  # earlier workflows lack it
                    tooltip="have the server's --prompt-enhancer write the prompt out",
                ),
                Loras.Input("loras", optional=True),
            ],
            [
                io.Video.Output(display_name="video"),
                io.Image.Output(display_name="frames"),
                io.Audio.Output(display_name="sound"),
                io.Int.Output(display_name="seed"),
            ],
            [io.Hidden.unique_id],
            cls.about,
        )

    @classmethod
    def fingerprint_inputs(cls, **widgets: Any) -> Any:
        """Whether frames or sound are read: the node has to give them, from the clip it has."""
        return sorted(used(cls) & {FRAMES, SOUND})

    @classmethod
    def execute(cls, server, **widgets: Any) -> io.NodeOutput:
        fields, uploads = cls.request(widgets)
        wait, wanted = waiting(cls), used(cls)
        folder = Path(folder_paths.get_temp_directory())
        made = folder / f"ltx2rt-{digest(server.root, fields, uploads)}.mp4"
        if not made.is_file():  # else only its outputs are read now
            video = follow(cls, server, server.send(fields, uploads, wait))
            folder.mkdir(parents=True, exist_ok=True)
            partial_file = made.with_suffix(".partial")
            partial_file.write_bytes(server.content(video, wait))
            made.with_suffix(".seed").write_text(str(video["x"]["seed"]))
            partial_file.replace(made)
        clip = InputImpl.VideoFromFile(str(made))
        frames = clip.get_components().images if FRAMES in wanted else None
        sound = sound_of(made) if SOUND in wanted else None
        return io.NodeOutput(clip, frames, sound, int(made.with_suffix(".seed").read_text()))

    @classmethod
    def request(cls, widgets: dict[str, Any]) -> tuple[dict[str, Any], list[Upload]]:
        """The fields of a job, and its files. Values that stand for a default are left out. Raises
        ServerError for TOML that is none."""
        widgets = dict(widgets)
        try:
            more = tomllib.loads(widgets.pop("advanced", ""))
        except tomllib.TOMLDecodeError as error:
            raise ServerError(f"advanced: {error}; write lines such as video_cfg = 4.0") from None
        fields: dict[str, Any] = {"pipeline": cls.pipeline} if cls.pipeline else {}
        uploads: list[Upload] = []
        if loras := widgets.pop("loras", None):
            fields["loras"] = list(loras)
        files = {socket.id for socket in cls.sockets}
        if (sheet := widgets.pop("sheet", None)) is not None:
            uploads.append(Upload("video_conditioning", "sheet.png", png(single(sheet, "sheet"))))
        images = list(widgets.pop("images", None) or ())
        if (first := widgets.pop("image", None)) is not None:
            images.insert(0, (single(first, "first_frame"), "0", 1.0))
        if (last := widgets.pop("last_frame", None)) is not None:
            images.append((single(last, "last_frame"), "last", 1.0))
        if images:
            fields["images"] = []
        for number, (pixels, frame, strength) in enumerate(images):
            uploads.append(Upload(f"image{number}", "image.png", png(pixels)))
            place = int(frame) if frame.lstrip("-").isdigit() else frame
            fields["images"].append(
                {"file": f"image{number}", "frame": place, "strength": strength}
            )
        for name, value in widgets.items():
            if name in files:
                if value is not None:
                    uploads.append(Upload(name, *encoded(value)))
            elif name in ("seed", "prompt") or not automatic(name, value, cls.own):
                fields[name] = value
        return fields | more, uploads


class TextNode(Task):
    name, title = "LTX2RTText", "LTX2RT Text or images to video"
    about = "A clip with sound from a prompt, and from pictures at any of its frames."
    sockets = (
        io.Image.Input("image", "first_frame", optional=True),
        Images.Input("images", optional=True),
        io.Image.Input("last_frame", optional=True),
    )
    own = (
        of_server("pipeline", "pipelines", "default: the server's choice by what it is given"),
        io.Float.Input("fps", default=24.0, min=1.0, max=120.0, step=0.001),
    )

    @classmethod
    def validate_inputs(cls, pipeline) -> bool:
        """The server says which names there are."""
        return True


class SoundNode(Task):
    name, title, pipeline = "LTX2RTSound", "LTX2RT Sound to video", "a2v"
    about = "A clip that moves with a song or a voice."
    sockets = (
        io.Audio.Input("audio_path", "sound"),
        io.Image.Input("image", "first_frame", optional=True),
    )


class RedoNode(Task):
    name, title, pipeline = "LTX2RTRedo", "LTX2RT Redo a part", "retake"
    about = "New picture, sound or both between two times; all else stays."
    sockets, sized = (io.Video.Input("video_path", "video"),), False
    own = (
        io.Float.Input(
            "start_time", default=0.0, min=0.0, max=86400.0, step=0.05, tooltip="seconds"
        ),
        io.Float.Input("end_time", default=1.0, min=0.0, max=86400.0, step=0.05, tooltip="seconds"),
        io.Combo.Input(
            "keep", options=[UNSET, "video", "audio"], tooltip="leave one of them as it is"
        ),
    )

    @classmethod
    def request(cls, widgets: dict[str, Any]) -> tuple[dict[str, Any], list[Upload]]:
        fields, uploads = super().request(widgets)
        return {"start_time": 0.0} | fields, uploads


class ContinueNode(Task):
    name, title, pipeline = "LTX2RTContinue", "LTX2RT Continue", "extend"
    about = "Frames that go on from a clip's end, or lead to its start."
    sockets, sized = (io.Video.Input("video_path", "video"),), False
    own = (
        io.Int.Input("extend_frames", default=48, min=8, max=4096, step=8, tooltip="frames to add"),
        io.Boolean.Input("before", default=False, tooltip="add them in front"),
    )


class RegionNode(Task):
    name, title, pipeline = "LTX2RTRegion", "LTX2RT Region", "inpaint"
    about = "New content where the mask is white."
    sockets, sized = (io.Video.Input("video_path", "video"), io.Mask.Input("mask")), False
    own = (io.Int.Input("mask_grow", default=0, min=0, max=512, tooltip="pixels"),)


class RestyleNode(Task):
    name, title, pipeline = "LTX2RTRestyle", "LTX2RT Restyle", "v2v"
    about = "The clip again, in the words of the prompt."
    sockets, sized = (io.Video.Input("video_path", "video"),), False
    own = (io.Float.Input("noise_level", default=0.7, min=0.05, max=1.0, step=0.05),)


class ReferencesNode(Task):
    name, title, pipeline = "LTX2RTReferences", "LTX2RT References (IC-LoRA)", "ic-lora"
    about = "A clip that follows a control video, or a sheet of pictures, by an IC-LoRA of `loras`."
    sockets = (
        io.Video.Input("video_conditioning", "reference", optional=True),
        io.Image.Input("sheet", optional=True),
        io.Image.Input("image", "first_frame", optional=True),
    )
    own = (
        io.Float.Input("conditioning_attention_strength", default=1.0, min=0.0, max=1.0, step=0.05),
    )


class UpscaleNode(Task):
    name, title, pipeline = "LTX2RTUpscale", "LTX2RT Upscale", "upscale"
    about = "The clip at twice its size, by the IC-LoRA near the server's model or of `loras`."
    sockets, sized = (io.Video.Input("upscale", "video"),), False


class SaveNode(io.ComfyNode):
    """The server's file, byte for byte."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "LTX2RTSave",
            "LTX2RT Save clip as made",
            "ltx2rt",
            [
                io.Video.Input("video"),
                io.String.Input("filename_prefix", default="video/ltx2rt"),
            ],
            [],
            [],
            "Save the file that the server made, with its marks (XMP, C2PA), and without the "
            "workflow, which *Save Video* puts in.",
            is_output_node=True,
        )

    @classmethod
    def execute(cls, video, filename_prefix) -> io.NodeOutput:
        folder, name, number, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        source = whole_file(video)
        suffix = source.suffix if source else ".mp4"
        path = Path(folder) / f"{name}_{number:05}_{suffix}"
        if source:
            shutil.copyfile(source, path)
        else:
            video.save_to(str(path))
        saved = ui.SavedResult(path.name, subfolder, io.FolderType.output)
        return io.NodeOutput(ui=ui.PreviewVideo([saved]))


def automatic(name: str, value: Any, own: tuple[io.Input, ...]) -> bool:
    """Whether a widget leaves the choice to the server: it is at its default, if that means so."""
    defaults = {one.id: getattr(one, "default", None) for one in own}
    return value in AUTOMATIC and defaults.get(name) in (None, *AUTOMATIC)


def single(pixels: Any, name: str) -> Any:
    """The picture of a batch of one. Raises ServerError."""
    if len(pixels) != 1:
        advice = "take one by *Image From Batch*, or place several by *LTX2RT Image at frame*"
        raise ServerError(f"{name}: {len(pixels)} pictures in one batch, expected one; {advice}")
    return pixels[0]


def digest(address: str, fields: dict[str, Any], uploads: list[Upload]) -> str:
    """One name for equal tasks."""
    found = sha256(json.dumps([address, fields], sort_keys=True, default=str).encode())
    for one in uploads:
        found.update(f"\0{one.field}\0{one.name}\0{len(one.data)}\0".encode("utf-8", "replace"))
        found.update(one.data)
    return found.hexdigest()[:32]


def sound_of(path: Path) -> dict[str, Any] | None:
    """A file's sound as ComfyUI's AUDIO, without its pictures; None if it has none."""
    import av
    import torch

    with av.open(str(path)) as file:
        if not file.streams.audio:
            return None
        rate, resampled = file.streams.audio[0].rate, av.AudioResampler("fltp")
        parts = [
            part.to_ndarray()
            for frame in file.decode(audio=0)
            for part in resampled.resample(frame)
        ]
    return {"waveform": torch.from_numpy(np.concatenate(parts, 1))[None], "sample_rate": rate}


def whole_file(video: Any) -> Path | None:
    """The file of a VIDEO; None of a trimmed one, and of one that was made of frames."""
    if isinstance(video, InputImpl.VideoFromFile):
        source = video.get_stream_source()
        if isinstance(source, str):
            whole_s = InputImpl.VideoFromFile(source).get_duration()
            if abs(whole_s - video.get_duration()) < 1e-3:
                return Path(source)
    return None


def follow(node: type[io.ComfyNode], server: Server, sent: dict[str, Any]) -> dict[str, Any]:
    """The finished video. Meanwhile shows progress, and cancels the job if ComfyUI stops it.
    Raises ServerError, or ComfyUI's exception of an interrupt."""
    bar, shown, video = ProgressBar(100, node.hidden.unique_id), None, sent
    wait = waiting(node)
    try:
        for video in server.follow(sent, wait):
            wait("")
            if shown != (shown := (video["progress"], video["x"]["preview"])):
                say(node, status(video))
                picture = shown_preview(server.preview(video, wait))
                bar.update_absolute(video["progress"], 100, picture)
    except ServerError:
        raise
    except BaseException:
        server.cancel(video)
        raise
    return video


def shown_preview(data: bytes | None) -> tuple[str, Image.Image, int] | None:
    """A preview as the progress bar takes it; None without a JPEG of a fitting size."""
    try:
        picture = Image.open(bytes_io.BytesIO(data or b""), formats=["JPEG"])
        if max(picture.size) <= MAX_PREVIEW_PX:
            picture.load()
            return "JPEG", picture, PREVIEW_PX
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        pass
    return None


def status(video: dict[str, Any]) -> str:
    """A line such as "stage1, step 3 of 30, 41 s left"."""
    x = video["x"]
    if video["status"] == "queued":
        return f"waiting, {x['queue_position']} before it" if x["queue_position"] else "waiting"
    words = [x["stage"] or video["status"]]
    if x["steps"]:
        words.append(f"step {x['step']} of {x['steps']}")
    if x["eta_s"]:
        words.append(f"{x['eta_s']:.0f} s left")
    return ", ".join(words)


def encoded(value: Any) -> tuple[str, bytes]:
    """Name and bytes of a file for a VIDEO, an AUDIO or a MASK (frames, rows, columns)."""
    if isinstance(value, dict):
        return "sound.wav", wav(value)
    if hasattr(value, "save_to"):
        if source := whole_file(value):
            return source.name, source.read_bytes()
        with TemporaryDirectory() as folder:
            path = Path(folder) / "clip.mp4"
            value.save_to(str(path))
            return path.name, path.read_bytes()
    if len(value) == 1:
        return "mask.png", png(value[0])
    return "mask.mov", movie(value)


def png(pixels: Any) -> bytes:
    """f32[H, W, 3] or [H, W] in [0, 1] as a file."""
    file = bytes_io.BytesIO()
    Image.fromarray(levels(pixels)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def levels(pixels: Any) -> np.ndarray:
    return np.rint(pixels.cpu().numpy().clip(0, 1) * 255).astype(np.uint8)


def movie(frames: Any) -> bytes:
    """f32[F, H, W] in [0, 1] as a lossless video."""
    import av

    file = bytes_io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        stream: Any = container.add_stream("png", rate=24)
        stream.height, stream.width = frames.shape[1:]
        stream.pix_fmt = "gray"
        for packet in _packets(stream, frames):
            container.mux(packet)
    return file.getvalue()


def _packets(stream: Any, frames: Any) -> Iterator[Any]:
    import av

    for frame in frames:
        yield from stream.encode(av.VideoFrame.from_ndarray(levels(frame), format="gray"))
    yield from stream.encode()


def wav(sound: dict[str, Any]) -> bytes:
    """{"waveform": f32[1, C, N], "sample_rate"} as a file of 16 bits."""
    samples = np.rint(sound["waveform"][0].cpu().numpy().T.clip(-1, 1) * 32767).astype("<i2")
    file = bytes_io.BytesIO()
    with wave.open(file, "wb") as to:
        to.setparams((samples.shape[1], 2, sound["sample_rate"], 0, "NONE", ""))
        to.writeframes(samples.tobytes())
    return file.getvalue()


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        tasks = (
            TextNode,
            SoundNode,
            RedoNode,
            ContinueNode,
            RegionNode,
            RestyleNode,
            ReferencesNode,
            UpscaleNode,
        )
        return [ServerNode, *tasks, ImageNode, LoraNode, SaveNode]


async def comfy_entrypoint() -> Extension:
    return Extension()
