"""Groups of flags, each for one feature of a clip, and those that many pipelines list.

A group has a default value, so that a pipeline's list says its defaults: `Steps(15)`.
"""

from __future__ import annotations

from ltx2rt.pipelines.groups.group import Group
from ltx2rt.pipelines.groups.guidance import ByChoice, Guidance, Nag
from ltx2rt.pipelines.groups.images import GeneratedKeyframes, Hdr
from ltx2rt.pipelines.groups.seeds import NoiseFile, Seed, Videos
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.pipelines.groups.size import Length, Motion
from ltx2rt.pipelines.groups.sound import Sounding, SoundToFollow, Voice
from ltx2rt.pipelines.groups.source_clip import FileSize, SourceClip
from ltx2rt.pipelines.groups.steps import Interval, Sigmas, Skips, Steps
from ltx2rt.pipelines.groups.text import Enhancing, NegativePrompt, Prompt, PromptsByTime

RUN: tuple[Group, ...] = (Videos(), Seed(), NoiseFile(), Enhancing())
NEW = (Prompt(), Length(), Motion(), *RUN)
PICTURES = (PromptsByTime(), Hdr(), Sounding(), GeneratedKeyframes(), Sigmas())
GUIDED = (NegativePrompt(), Steps(), Skips(), Interval(), Guidance())
NAGGED = (NegativePrompt(), Nag())
SEGMENTED = (SoundToFollow(), Voice(), Segments())
FROM_CLIP = (Prompt(), SourceClip(), Motion(), *RUN, Sounding(), FileSize())
GIVEN_CLIP = (*FROM_CLIP, *GUIDED, Nag(), ByChoice())  # steps are distilled, or guided by choice
