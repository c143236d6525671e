"""The part of ComfyUI that the nodes call, so that they run where it is not installed.

A node's schema keeps what it was given; a VIDEO is a real file, trimmed or not, as in ComfyUI.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import av
import numpy as np

NODES = Path(__file__).parents[2] / "examples/comfyui"


class Interrupted(BaseException):
    """ComfyUI's Cancel was pressed."""


class Input:
    def __init__(self, id, display_name=None, *, optional=False, tooltip=None, **how):
        self.id, self.display_name, self.optional, self.how = id, display_name, optional, how
        self.default = how.get("default")


class Kind:
    """One of `io`'s types of a socket or widget."""

    Input = Input

    def Output(self, id=None, display_name=None):
        return display_name or id


class Schema:
    def __init__(
        self, node_id, display_name, category, inputs, outputs, hidden=(), description="", **more
    ):
        self.node_id, self.inputs, self.outputs, self.more = node_id, inputs, outputs, more


class NodeOutput:
    def __init__(self, *result, ui=None):
        self.result, self.ui = result, ui


class Node:
    hidden = SimpleNamespace(unique_id="3", prompt={})


class VideoFromFile:
    def __init__(self, file, *, start_time=0.0, duration=0.0):
        self.__file, self.__window = file, (start_time, duration)

    def get_stream_source(self):
        return self.__file

    def get_duration(self):
        with av.open(self.__file) as file:
            whole = file.duration / av.time_base
        start, duration = self.__window
        return min(duration or whole, whole - start)

    def save_to(self, path, format="auto", codec="auto", metadata=None):
        start, _ = self.__window
        with av.open(self.__file) as file:
            frames = [f.to_ndarray(format="rgb24") for f in file.decode(video=0)]
            rate = file.streams.video[0].average_rate
        first = round(start * rate)
        write(path, frames[first : first + round(self.get_duration() * rate)], rate)

    def get_components(self):
        with av.open(self.__file) as file:
            frames = [f.to_ndarray(format="rgb24") for f in file.decode(video=0)]
        return SimpleNamespace(images=np.stack(frames) / np.float32(255), audio=None)


class VideoFromComponents:
    """Frames without a file: ComfyUI cannot write them without a name."""

    def __init__(self, frames, rate=24):
        self.frames, self.rate = frames, rate

    def get_stream_source(self):
        raise ValueError("Could not determine output format")

    def save_to(self, path, format="auto", codec="auto", metadata=None):
        write(path, self.frames, self.rate)


def write(path, frames, rate):
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        file.mux(stream.encode())


class ComfyUI:
    """What the stand-ins were told, and what they tell. cancelled: Cancel was pressed. running: the
    graph that runs."""

    def __init__(self, folder: Path):
        self.folder, self.cancelled, self.said, self.running = folder, False, [], {}

    def modules(self) -> dict[str, ModuleType]:
        """As `sys.modules` names them."""
        kinds = {name: Kind() for name in "Int Float String Boolean Combo".split()}
        kinds |= {name: Kind() for name in "Image Mask Audio Video".split()}
        io = SimpleNamespace(
            ComfyNode=Node, Schema=Schema, NodeOutput=NodeOutput, Custom=lambda name: Kind(),
            Input=Input, Hidden=SimpleNamespace(unique_id="UNIQUE_ID", prompt="PROMPT"), **kinds,
            RemoteOptions=SimpleNamespace, FolderType=SimpleNamespace(output="output"),
        )  # fmt: skip
        impl = SimpleNamespace(VideoFromFile=VideoFromFile, VideoFromComponents=VideoFromComponents)
        ui = SimpleNamespace(SavedResult=lambda *facts: facts, PreviewVideo=list)
        bar = SimpleNamespace(update_absolute=lambda *about: None)
        queue = SimpleNamespace(get_current_queue=lambda: ([(0, "id", self.running, {}, [])], []))
        routes = SimpleNamespace(get=lambda path: lambda answer: answer)
        instance = SimpleNamespace(
            routes=routes,
            send_progress_text=lambda text, node: self.said.append(text),
            prompt_queue=queue,
        )
        parts: dict[str, dict[str, Any]] = {
            "comfy": {},
            "comfy.model_management": {"throw_exception_if_processing_interrupted": self.look},
            "comfy.utils": {"ProgressBar": lambda *about: bar},
            "comfy_api": {},
            "comfy_api.latest": {"ComfyExtension": object, "InputImpl": impl, "io": io, "ui": ui},
            "server": {"PromptServer": SimpleNamespace(instance=instance)},
            "folder_paths": {
                "models_dir": str(self.folder / "models"),
                "get_temp_directory": lambda: str(self.folder / "temp"),
                "get_output_directory": lambda: str(self.folder / "output"),
                "get_save_image_path": self.place,
            },
        }
        modules = {name: ModuleType(name) for name in parts}
        for name, module in modules.items():
            vars(module).update(parts[name])
        return modules

    def look(self) -> None:
        if self.cancelled:
            raise Interrupted

    def place(self, prefix: str, output: str) -> tuple[str, str, int, str, str]:
        """Folder, name, number, part of the folder, prefix."""
        folder = Path(output) / Path(prefix).parent
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder), Path(prefix).name, 1, str(Path(prefix).parent), prefix

    def nodes(self) -> ModuleType:
        """The nodes, loaded as ComfyUI loads a folder of `custom_nodes`."""
        sys.modules.update(self.modules())
        how = {"submodule_search_locations": [str(NODES)]}
        spec = importlib.util.spec_from_file_location("ltx2rt_nodes", NODES / "__init__.py", **how)
        assert spec and spec.loader
        package = sys.modules["ltx2rt_nodes"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        return sys.modules["ltx2rt_nodes.nodes"]
