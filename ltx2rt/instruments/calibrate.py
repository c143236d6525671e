"""`calibrate`: which steps of a schedule a model can leave out, and what each plan costs.

    exact runs -> search in their trajectories -> candidates run on half of the prompts -> the best
    of them run on the other half, beside an ordinary schedule of as many evaluations

Decides how a candidate is judged: by the largest ratio of its distance from the exact clips to that
of the ordinary schedule, in picture and sound, in the median and the worst clip. Below 1 it is
closer in all of them. Every run's result is kept in a folder, so that a calibration that was cut
off goes on; the same flags give the same plans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ltx2rt.atomic_file import alone_in, replacing
from ltx2rt.errors import InputError, concerning
from ltx2rt.flags import flagged
from ltx2rt.instruments.compare import PSNR_CAP_DB, RATE, compare_sound
from ltx2rt.media.sound import resample
from ltx2rt.models.step_plan import StepPlan
from ltx2rt.models.step_search import Recorded, best_plan, jump_costs
from ltx2rt.pipelines.groups.steps import AllSkips
from ltx2rt.pipelines.groups.text import Prompt
from ltx2rt.pipelines.step_plans import FORMAT
from ltx2rt.run.report import model_of, named, options_of
from ltx2rt.run.run import Run
from ltx2rt.session.session import Session
from ltx2rt.stages.denoise import Denoise
from ltx2rt.stages.schedule import shifted_sigmas
from ltx2rt.text_files import read_json, read_text

ABOUT, MEASURES, AGAIN = "about.json", "measures.json", "remove it, and it is made again"
# weights of sound's error in a search; each gives candidates of both orders
SOUND_WEIGHTS = (1.0, 4.0)
LEAST = 1e-9  # distance below which clips are equal
Measures = Mapping[str, float]


class CalibrationRuns:
    """The runs of a request's prompts, exact and by plan; each is made once and kept in a folder.
    request: resolved, with a seed and without a plan; prompt i runs with seed + i. say: is given a
    line for each run. Raises InputError if the folder holds runs of another calibration."""

    def __init__(
        self,
        session: Session,
        request: Any,
        prompts: Sequence[str],
        folder: Path,
        say: Callable[[str], None],
    ):
        self.session, self.request, self.prompts = session, request, tuple(prompts)
        self.folder, self.say = folder, say
        of_clips, settings = flagged(Prompt, AllSkips), request.settings(named)
        kept = {name: value for name, value in settings.items() if name not in of_clips}
        self.about = {
            "model": model_of(session),
            "settings": kept | {"options": options_of(session)},
            "prompts": [*self.prompts],
        }
        self._alone = ExitStack()
        self._open()
        path = folder / MEASURES
        self.measures: dict[str, dict[str, float]] = {}
        if path.exists():
            with concerning("--output"):
                self.measures = read_json(path, {str: {str: float}}, AGAIN)

    def _open(self) -> None:
        path, text = self.folder / ABOUT, json.dumps(self.about, sort_keys=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._alone.enter_context(alone_in(self.folder, "--output"))
        except OSError as error:
            wrong = f"cannot be made for the runs ({error.strerror}); move what is there"
            raise self._refused(wrong) from error
        if not path.exists():
            if any(self.folder.iterdir()):
                raise self._refused("holds files of something else; move them")
            with replacing(path) as partial:
                partial.write_text(text)
        elif read_text(path) != text:
            raise self._refused("holds runs of other flags or another model; remove the folder")

    def _refused(self, wrong: str) -> InputError:
        return InputError(f"--output: {self.folder} {wrong}, or choose another name")

    def exact(self, number: int) -> Mapping[str, np.ndarray]:
        """A prompt's exact run: latents and x0 by stream, `frames` and `waveform`, if made."""
        path = self.folder / f"exact-{number}.npz"
        if not path.exists():
            made = self._make(replace(self.request), number, keep=True)
            with replacing(path) as partial, partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **made)
            self.say(f"exact run {number + 1} of {len(self.prompts)}")
        try:
            if not path.is_file():
                raise ValueError("it is no regular file")
            with path.open("rb") as file, np.load(file) as kept:
                return dict(kept)
        except (OSError, ValueError, BadZipFile) as error:
            raise InputError(f"--output: {path} is damaged ({error}); {AGAIN}") from error

    def recorded(self, number: int) -> Recorded:
        """The trajectory of an exact run."""
        kept = self.exact(number)
        streams = [name for name in ("video", "audio") if f"{name}.x0" in kept]
        return Recorded(
            {name: kept[f"{name}.latents"] for name in streams},
            {name: kept[f"{name}.x0"] for name in streams},
        )

    def measured(self, way: Mapping[str, Any], number: int) -> Measures:
        """How close the prompt's clip is to the exact one. way: flags and their values."""
        name = f"{number} {json.dumps(way, sort_keys=True)}"
        if name not in self.measures:
            exact = self.exact(number)
            made = self._make(replace(self.request, **way), number)
            self.measures[name] = distance(exact, made)
            with replacing(self.folder / MEASURES) as partial:
                partial.write_text(json.dumps(self.measures, indent=1))
            shown = " ".join(f"{key}={value:.4g}" for key, value in self.measures[name].items())
            self.say(f"{_words(way)}, prompt {number + 1} of {len(self.prompts)}: {shown}")
        return self.measures[name]

    def _make(self, request: Any, number: int, keep: bool = False) -> dict[str, np.ndarray]:
        request = replace(request, prompt=self.prompts[number], seed=request.seed + number)
        run = Run(self.session, request)
        run.make(keep=keep)
        made: dict[str, np.ndarray] = {}
        if (frames := run.pictures()) is not None:
            made["frames"] = frames
        if (waveform := run.waveform()) is not None:
            made["waveform"] = resample(waveform, run.sample_rate, RATE).astype(np.float32)
        if keep:
            stage = next(x for x in run.plan.stages if isinstance(x, Denoise))  # which is planned
            for name in stage.made:
                start, steps, x0 = (
                    run.state.record[f"{stage.name}.{name}.{what}"]
                    for what in ("start", "steps", "x0")
                )
                made |= {f"{name}.latents": np.concatenate([start, steps]), f"{name}.x0": x0}
        return made

    def close(self) -> None:
        """Let another calibration have the folder."""
        self._alone.close()

    def remove(self) -> None:
        """Remove the files of these runs, and the folder if nothing else is in it."""
        names = [f"exact-{number}.npz" for number in range(len(self.prompts))]
        for name in (*names, MEASURES, ABOUT):
            (self.folder / name).unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    @cached_property
    def halves(self) -> tuple[range, range]:
        """The numbers of the prompts to search on and of those that are held out."""
        middle = (len(self.prompts) + 1) // 2
        return range(middle), range(middle, len(self.prompts))


def calibrate(runs: CalibrationRuns, evaluations: Sequence[int]) -> dict[str, Any]:
    """The document of `--step-plan FILE`."""
    searched, held_out = runs.halves
    steps = runs.request.steps
    sigmas = shifted_sigmas(steps)
    recorded = [runs.recorded(number) for number in searched]
    weights = SOUND_WEIGHTS if len(recorded[0].x0) > 1 else (1.0,)
    costs = [jump_costs(recorded, sigmas, {"audio": weight}) for weight in weights]
    plans = []
    for count in evaluations:
        candidates = dict.fromkeys(
            str(best_plan(cost, count, order)) for cost in costs for order in (2, 1)
        )
        found: dict[str, Any] = {"evaluations": count, "share": round(count / steps, 4)}
        rival = {"steps": count}
        theirs = [runs.measured(rival, n) for n in searched]
        scores = {
            text: score([runs.measured({"step_plan": text}, n) for n in searched], theirs)
            for text in candidates
        }
        chosen = min(scores, key=lambda text: scores[text])
        ways = {"price": {"step_plan": chosen}, "rival": rival}
        for name, way in ways.items():
            found[name] = {
                part: prices([runs.measured(way, n) for n in numbers])
                for part, numbers in (("calibration", searched), ("held_out", held_out))
            }
        ours, others = ([runs.measured(way, n) for n in held_out] for way in ways.values())
        ratio = {"calibration": scores[chosen], "held_out": score(ours, others)}
        found["ratio"] = {part: round(value, 4) for part, value in ratio.items()}
        if found["ratio"]["held_out"] >= 1:
            found["advice"] = f"--steps {count} is closer to the exact clip in one measure"
        plan = StepPlan.parse(chosen)
        assert plan is not None
        plans.append(found | {"evaluate": [*plan.evaluate], "order": plan.order})
    texts = "\n".join(runs.prompts).encode()
    return {
        "format": FORMAT,
        "steps": steps,
        "sigmas": [float(sigma) for sigma in sigmas],
        "plans": plans,
        "model": runs.about["model"],
        "generation": runs.session.config.release.name,
        "settings": runs.about["settings"],
        "prompts": {"count": len(runs.prompts), "sha256": hashlib.sha256(texts).hexdigest()},
    }


def distance(exact: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]) -> dict[str, float]:
    """psnr_db of the frames; audio_corr and mel_l1 of the sound, as in `compare`."""
    found: dict[str, float] = {}
    if "frames" in exact:
        squared = float(((exact["frames"].astype(np.float32) - made["frames"]) ** 2).mean())
        found["psnr_db"] = 10 * np.log10(255**2 / squared) if squared else PSNR_CAP_DB
    if "waveform" in exact:
        sound = compare_sound(*(x["waveform"].astype(np.float64) for x in (exact, made)))
        found |= {name: sound[name] for name in ("audio_corr", "mel_l1") if sound[name] is not None}
    return found


def prices(measures: Sequence[Measures]) -> dict[str, list[float]]:
    """The median and the worst of each measure."""
    worst = {"psnr_db": min, "audio_corr": min, "mel_l1": max}
    names = [name for name in worst if all(name in found for found in measures)]
    return {
        name: [
            round(float(value), 6)
            for values in [[found[name] for found in measures]]
            for value in (np.median(values), worst[name](values))
        ]
        for name in names
    }


def score(ours: Sequence[Measures], theirs: Sequence[Measures]) -> float:
    """The largest ratio of distances, ours to theirs: of pictures (RMSE) and sound (log-mel), in
    the median and in the worst clip."""
    ratios = []
    for name, far in (("psnr_db", lambda db: 10 ** (-db / 20)), ("mel_l1", float)):
        if all(name in found for found in (*ours, *theirs)):
            a, b = ([max(far(found[name]), LEAST) for found in of] for of in (ours, theirs))
            ratios += [float(np.median(a) / np.median(b)), max(a) / max(b)]
    return max(ratios)


def table(document: Mapping[str, Any]) -> str:
    """Prices of the plans as text: a line for each plan and for its rival."""
    lines = []
    for plan in document["plans"]:
        steps = ",".join(map(str, plan["evaluate"]))
        lines.append(f"{plan['evaluations']} of {document['steps']} steps: {steps}")
        for name, who in (("price", "this plan"), ("rival", f"--steps {plan['evaluations']}")):
            shown = [
                f"{key} {median:.4g} ({worst:.4g})"
                for key, (median, worst) in plan[name]["held_out"].items()
            ]
            lines.append(f"  {who}: {', '.join(shown)}")
        if "advice" in plan:
            lines.append(f"  {plan['advice']}")
    return "\n".join(lines)


def _words(way: Mapping[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in way.items())
