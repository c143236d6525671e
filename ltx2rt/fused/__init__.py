"""Fused ops: several ops at once, which model text never writes. One file each.

A file has all that the core knows of an op: its typing rule and its definition, by the ops that it
stands for, computed in float32 and rounded once; its work (`flops`); and the pattern by which
`passes.fuse` finds it. A backend has a function of its name.
"""

from importlib import import_module

from ltx2rt.fused.pattern import PATTERNS

# In the order in which their patterns are looked for.
FILES = (
    "norm_modulate",
    "qk_norm_rope",
    "linear_gelu",
    "head_gate",
    "pixel_norm_silu",
    "padded_conv",
    "snake_beta",
)
for _name in FILES:
    import_module(f"ltx2rt.fused.{_name}")

__all__ = ["PATTERNS"]
