"""Instruments: they measure and show what the runtime does, and the runtime needs none of them.

    make        random checkpoints in the real layouts (`weights make`, `--preset`)
    probe       one network on given tensors
    ahead       programs compiled for devices that are not here (`compile`)
    compare     the distance of two clips

A reader of the runtime may skip this room: only its commands import it, and a contract of
pyproject.toml holds that.
"""
