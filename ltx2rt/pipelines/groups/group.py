"""A group: the flags of one feature, their refusals, and their part in making a clip.

A group is a frozen dataclass; its fields are flags. A request has the fields of all its groups.
Facts that other groups or stages read are filled into the draft of a clip, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from ltx2rt.config import ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.models.geometry import Geometry
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.conditioning import Conditioning
from ltx2rt.stages.source_sound import SourceSound
from ltx2rt.stages.stage import Stage
from ltx2rt.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ltx2rt.pipelines.clip import Clip, Draft
    from ltx2rt.pipelines.request import Request


@dataclass(frozen=True)
class Added:
    """Additions of a group to a denoising stage. fields: in place of the stage's defaults. given:
    conditionings, after those of earlier groups. before, after: stages around it."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[Conditioning, ...] = ()
    before: tuple[Stage, ...] = ()
    after: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class Group:
    """shapes: decides size or length, and fills its draft before the groups that read these."""

    shapes: ClassVar[bool] = False

    def check(self, request: Request) -> None:
        """Refuse values that no model could satisfy. Reads no file. Raises InputError."""

    def check_options(self, request: Request, options: ModelOptions) -> None:
        """Refuse model flags that do not go with these. Raises InputError."""

    def from_options(
        self, request: Request, options: ModelOptions, checkpoint: Checkpoint
    ) -> dict[str, Any]:
        """Return fields that the model's flags and files decide. Raises InputError."""
        return {}

    def length(self, request: Request) -> tuple[int | None, Fraction] | None:
        """Number of frames and rate, by flags or by a file that is there; None: other groups say.
        Raises InputError."""
        return None

    def splits(self, request: Request) -> bool:
        """Return whether the clip is made in segments. Raises InputError."""
        return False

    def negates(self, request: Request) -> bool:
        """Return whether the run reads the negative prompt."""
        return False

    def into(self, draft: Draft, model: ModelConfig) -> None:
        """Fill the draft: defaults that the model decides, facts of files. Raises InputError."""

    def fits(self, clip: Clip, model: ModelConfig) -> None:
        """Refuse values that do not go with the clip as it is filled. Raises InputError."""

    def remarks(self, clip: Clip, model: ModelConfig) -> Iterator[str]:
        """Sentences for the user before a clip is made."""
        return iter(())

    def stages(self, clip: Clip, name: str, geometry: Geometry, tiling: str) -> Added:
        """Return additions to the denoising stage `name`. tiling: mode of `plan_encoder_tiles`."""
        return Added()

    def whole_sound(self, clip: Clip, model: ModelConfig) -> SourceSound | None:
        """Return the sound of a file that all of the clip is made for."""
        return None


def refuse_beside(**given: Any) -> None:
    """Refuse two flags that exclude each other. Raises InputError naming both."""
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(names) > 1:
        raise InputError(f"{names[1]}: given beside {names[0]}; leave one of the two out")


def refuse_in_segments(request: Request, name: str) -> None:
    """Raises InputError for a flag that does not go with a clip in segments, if it is one."""
    if request.in_segments:
        raise InputError(f"{name}: does not go with a clip in segments; leave it out")
