"""The trials of a search, in Optuna's journal: what to try next, what came out, and when to give up on one.

Every suggestion depends only on the search's seed, the trial's number, the setting's name and the trials that were
there when it was made. So a search with one job that is killed and resumed makes the same trials.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from steppe.errors import RunError, one_line
from steppe.results.file_names import JOURNAL
from steppe.runtime.files import explain_write_errors, require_inside
from steppe.runtime.rng import Streams
from steppe.settings import Value
from steppe.tuning.space import Space, distribution, holds

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

State = Literal["running", "complete", "pruned", "failed"]
_NAME = "steppe"
_COMPLETE_BEFORE_PRUNING = 5
_TASKS_BEFORE_PRUNING = 2  # after one task nothing can be forgotten yet
_RANDOM_TRIALS = 10


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: Its number, from 0.
        state: Whether it is running, complete, pruned or failed.
        values: The settings that it tries.
        score: Its objective; None unless it is complete.
        scores: The mean over the tasks seen, by the number of them.
        note: Why it was pruned or failed.
    """

    number: int
    state: State
    values: dict[str, Value]
    score: float | None = None
    scores: dict[int, float] = field(default_factory=dict)
    note: str = ""


class Trials:
    """The trials of one search. Only one process at a time may use them.

    Args:
        out: The directory of the search, which holds the journal and is locked by this process.
        space: The values to try.
        kinds: The types of the settings.
        first: The values of the first trial.
        seed: The seed of all suggestions.
        minimize: Whether lower scores are better.

    Raises:
        RunError: Optuna is not installed, or the journal is damaged.
    """

    def __init__(
        self,
        out: Path,
        space: Space,
        kinds: Mapping[str, type],
        first: Mapping[str, Value],
        *,
        seed: int,
        minimize: bool = False,
    ) -> None:
        self._minimize, self._streams = minimize, Streams(seed)
        self._distributions = {name: distribution(tried, kinds[name]) for name, tried in space.items()}
        self._study = _open(out, minimize=minimize)
        if not self._study.get_trials(deepcopy=False):
            self._study.enqueue_trial({name: first[name] for name in space if holds(space[name], first[name])})

    def all(self) -> list[Trial]:
        """The trials so far, in order."""
        return [_as_trial(frozen) for frozen in self._frozen() if frozen.state.name != "WAITING"]

    def ask(self) -> Trial:
        """Start a new trial."""
        number = len(self.all())
        self._study.sampler = self._sampler(number, "")
        return self._suggest(self._study.ask())

    def resume(self, number: int) -> Trial:
        """Return a trial that was interrupted, with all its values, even if it was interrupted before it had them."""
        return self._suggest(self._optuna_trial(number))

    def _suggest(self, trial: optuna.trial.Trial) -> Trial:
        for name, values in self._distributions.items():
            self._study.sampler = self._sampler(trial.number, name)
            _suggest(trial, name, values)
        return _as_trial(self._frozen()[trial.number])

    def _sampler(self, number: int, name: str) -> optuna.samplers.BaseSampler:
        import optuna

        seed = self._streams.derive_seed(f"search trial {number} {name}") % 2**32
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=_RANDOM_TRIALS, multivariate=False, constant_liar=True
        )

    def report(self, number: int, tasks: int, score: float) -> bool:
        """Record the mean score over the tasks seen.

        Args:
            number: The trial.
            tasks: How many tasks it has seen.
            score: The mean.

        Returns:
            Whether to give up on the trial: it is worse than the median of the complete trials at this point.
        """
        frozen = self._frozen()[number]
        if tasks not in frozen.intermediate_values:
            self._optuna_trial(number).report(score, tasks)
        others = [
            other.scores[tasks]
            for other in self.all()
            if other.state == "complete" and other.number < number and tasks in other.scores
        ]
        if tasks < _TASKS_BEFORE_PRUNING or len(others) < _COMPLETE_BEFORE_PRUNING:
            return False
        median = statistics.median(others)
        return score > median if self._minimize else score < median

    def finish(self, number: int, score: float) -> None:
        """Record the objective of a trial."""
        if math.isfinite(score):
            self._study.tell(number, score)
        else:
            self.prune(number, "the score is not finite")

    def prune(self, number: int, note: str) -> None:
        """Record that a trial was ended early, because it was worse than others, or diverged."""
        self._end(number, note, pruned=True)

    def fail(self, number: int, note: str) -> None:
        """Record that a trial failed for a reason that says nothing about its values."""
        self._end(number, note, pruned=False)

    def _end(self, number: int, note: str, *, pruned: bool) -> None:
        from optuna.trial import TrialState

        self._optuna_trial(number).set_user_attr("note", note)
        self._study.tell(number, state=TrialState.PRUNED if pruned else TrialState.FAIL)

    def _optuna_trial(self, number: int) -> optuna.trial.Trial:
        import optuna

        return optuna.trial.Trial(self._study, self._frozen()[number]._trial_id)

    def best(self) -> Trial | None:
        """The complete trial with the best score, the first of several; None if none is complete."""
        complete = [trial for trial in self.all() if trial.score is not None]
        sign = -1 if self._minimize else 1
        return max(complete, key=lambda trial: (sign * float(trial.score or 0), -trial.number), default=None)

    def importances(self) -> dict[str, float]:
        """How much of the differences between complete trials each setting explains; empty if there are too few."""
        import optuna

        scores = {trial.score for trial in self.all() if trial.score is not None}
        if len(scores) < 4:
            return {}
        with warnings.catch_warnings(), suppress(ValueError, RuntimeError, ZeroDivisionError):
            warnings.simplefilter("ignore")
            found = optuna.importance.get_param_importances(self._study)
            return {name: float(value) for name, value in found.items() if math.isfinite(value)}
        return {}

    def _frozen(self) -> list[optuna.trial.FrozenTrial]:
        found: list[optuna.trial.FrozenTrial] = self._study.get_trials(deepcopy=False)
        return found


class _HeldLock:
    """In place of a lock of Optuna: this process holds the directory's lock, which a killed one does not leave."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _suggest(trial: optuna.trial.Trial, name: str, values: BaseDistribution) -> None:
    from optuna import distributions

    if isinstance(values, distributions.CategoricalDistribution):
        trial.suggest_categorical(name, values.choices)
    elif isinstance(values, distributions.IntDistribution):
        trial.suggest_int(name, values.low, values.high, log=values.log)
    elif isinstance(values, distributions.FloatDistribution):
        trial.suggest_float(name, values.low, values.high, log=values.log)


def require_optuna() -> None:
    """Raise a RunError if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise RunError("a search needs Optuna 5; run: pip install 'steppe[search]'.") from error


def _open(out: Path, *, minimize: bool) -> optuna.Study:
    require_optuna()
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = require_inside(out, out / JOURNAL)
    with explain_write_errors(file):
        _drop_torn_line(file)
    try:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(file), _HeldLock()))
        direction = "minimize" if minimize else "maximize"
        return optuna.create_study(storage=storage, study_name=_NAME, direction=direction, load_if_exists=True)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise RunError(
            f"cannot read {file} as a journal of Optuna: {one_line(error)}; choose another --out."
        ) from error


def _drop_torn_line(file: Path) -> None:
    """Remove the end of a line that a killed process did not finish; the next one would be appended to it."""
    if not file.exists():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as journal:
            journal.truncate(whole)


def _as_trial(frozen: optuna.trial.FrozenTrial) -> Trial:
    states: dict[str, State] = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    state = states.get(frozen.state.name, "running")
    score = frozen.value if state == "complete" else None
    note: Any = frozen.user_attrs.get("note", "")
    return Trial(frozen.number, state, dict(frozen.params), score, dict(frozen.intermediate_values), str(note))
