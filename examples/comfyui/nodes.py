"""The nodes: each sends one kind of task to a server and shows the clip while it grows.

Decides which fields are widgets; all others go into `advanced` as TOML. The server checks values,
so that its own sentence is the node's error.
"""

from __future__ import annotations

import io as bytes_io
import tomllib
import wave
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import folder_paths
import numpy as np
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.utils import ProgressBar
from comfy_api.latest import ComfyExtension, InputImpl, io
from PIL import Image
from server import PromptServer

from .client import SERVERS, Server, ServerError, Upload, read_token

Connection, Images, Loras = (io.Custom(f"LTX2RT_{kind}") for kind in ("SERVER", "IMAGES", "LORAS"))
UNSET = "default"  # the server's, or the pipeline's
MAX_SEED, PREVIEW_PX, MAX_PREVIEW_PX = 2**32 - 1, 512, 8192


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
                io.String.Input(
                    "address", default="http://127.0.0.1:8000", tooltip="of `ltx2rt serve`"
                ),
                io.String.Input(
                    "token",  # the name and place of the widget that held a token itself
                    "token file",
                    default="",
                    tooltip="a file with this user's token, if the server asks for one; empty: "
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
            return io.NodeOutput(SERVERS.serving(command, path, arguments, waiting(cls)))
        read_token(token)  # refuse a wrong one here
        return io.NodeOutput(Server(address, partial(read_token, token)))


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
        return io.NodeOutput((*(more or ()), (image[0], frame, strength)))


class LoraNode(io.ComfyNode):
    """A LoRA of the server's folder; nodes in a row give several."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "LTX2RTLoRA",
            "LTX2RT LoRA",
            "ltx2rt",
            [
                io.String.Input(
                    "name", tooltip="as /v1/loras lists it: a file of --loras, without suffix"
                ),
                io.Float.Input("strength", default=1.0, min=-10.0, max=10.0, step=0.05),
                io.Combo.Input("stage", options=["both", "stage1", "stage2"]),
                Loras.Input("more", optional=True),
            ],
            [Loras.Output(display_name="loras")],
        )

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
                "seconds", default=0.0, min=0.0, max=3600.0, step=0.1, tooltip="0: the default"
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
    def execute(cls, server, **widgets: Any) -> io.NodeOutput:
        fields, uploads = cls.request(widgets)
        wait = waiting(cls)
        video = follow(cls, server, server.send(fields, uploads, wait))
        path = Path(folder_paths.get_temp_directory()) / f"{video['id']}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.content(video, wait))
        clip = InputImpl.VideoFromFile(str(path))
        parts = clip.get_components()
        return io.NodeOutput(clip, parts.images, parts.audio, video["x"]["seed"])

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
            uploads.append(Upload("video_conditioning", "sheet.png", png(sheet[0])))
        images = list(widgets.pop("images", None) or ())
        if (first := widgets.pop("image", None)) is not None:
            images.insert(0, (first[0], "0", 1.0))
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
            elif name in ("seed", "prompt") or value not in ("", 0, 0.0, UNSET, False):
                fields[name] = value
        return fields | more, uploads


class TextNode(Task):
    name, title = "LTX2RTText", "LTX2RT Text or images to video"
    about = "A clip with sound from a prompt, and from pictures at any of its frames."
    sockets = (io.Image.Input("image", optional=True), Images.Input("images", optional=True))
    own = (
        io.Combo.Input(
            "pipeline", options=[UNSET, "two-stage", "distilled", "one-stage", "hq", "keyframes"]
        ),
        io.Float.Input("fps", default=24.0, min=1.0, max=120.0, step=0.001),
    )


class SoundNode(Task):
    name, title, pipeline = "LTX2RTSound", "LTX2RT Sound to video", "a2v"
    about = "A clip that moves with a song or a voice."
    sockets = (io.Audio.Input("audio_path", "sound"), io.Image.Input("image", optional=True))


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
        io.Image.Input("image", optional=True),
    )
    own = (
        io.Float.Input("conditioning_attention_strength", default=1.0, min=0.0, max=1.0, step=0.05),
    )


class UpscaleNode(Task):
    name, title, pipeline = "LTX2RTUpscale", "LTX2RT Upscale", "upscale"
    about = "The clip at twice its size, by the IC-LoRA near the server's model or of `loras`."
    sockets, sized = (io.Video.Input("upscale", "video"),), False


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
        file = bytes_io.BytesIO()
        source = value.get_stream_source() if hasattr(value, "get_stream_source") else file
        if isinstance(source, str):
            return Path(source).name, Path(source).read_bytes()
        value.save_to(file, format="mp4")
        return "clip.mp4", file.getvalue()
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
        return [ServerNode, *tasks, ImageNode, LoraNode]


async def comfy_entrypoint() -> Extension:
    return Extension()
