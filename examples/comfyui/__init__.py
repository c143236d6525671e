"""Nodes for ComfyUI: link this folder into its `custom_nodes`."""

from .nodes import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
