"""A run that is driven from Python, with the loop of ``rlmath train``."""

from __future__ import annotations

import atexit
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.api.given import PARTS, Given
from rlmath.checks import start
from rlmath.config.load import compose_settings
from rlmath.config.quoting import path_override
from rlmath.config.schema import Config
from rlmath.config.settings import replace_values
from rlmath.errors import UserError
from rlmath.types import Group
from rlmath.utils.ending_signals import ending_by_exit

if TYPE_CHECKING:
    from rlmath.training.attempt import Training
    from rlmath.training.supervise import Events

# A process has one Ray, so at most one run with ranks and engines.
_open: list[Run] = []


@dataclass(frozen=True)
class Step:
    """A step that is done, logged and, where it was due, saved.

    Attributes:
        number: The step, from 1. After a restart from a checkpoint steps come again.
        metrics: Its line of ``metrics.jsonl``, such as ``rollout/accuracy``; see docs/metrics.md.
        groups: The groups that it trained on: each a problem with its graded samples.
    """

    number: int
    metrics: Mapping[str, float]
    groups: Sequence[Group]


class Run:
    """A training run that is driven from Python; made by :meth:`from_config`.

    Iterating trains: each item is a :class:`Step`. Ranks and engines start with the first step, or
    with the first other thing that needs them, and stay until :meth:`close`. A loop that was left
    continues with the next step when it is entered again. Ctrl-C and errors of the run close it; it
    then continues from its newest checkpoint, here, in another process or with :attr:`command`.

    A context manager that closes the run at its end. A process has one open run: opening another
    one closes it.

    Attributes:
        folder: The run folder, with the same files as from the command line.
        command: The command line that continues the run, with all that was given in Python.
        number: The last step that is done.
    """

    def __init__(self, config: Config, command: str) -> None:
        self.folder, self.command, self.number = Path(config.runner.run_dir), command, 0
        self._config = config
        self._events: Events | None = None
        self._was_opened = self._is_finished = False

    @classmethod
    def from_config(
        cls,
        *overrides: str,
        rewards: Sequence[Any] | None = None,
        data: Iterable[Mapping[str, Any]] | None = None,
        eval_data: Iterable[Mapping[str, Any]] | None = None,
        config_dir: str | Path | None = None,
        **parts: Any,
    ) -> Run:
        """Compose and check settings; nothing is started.

        What is given in Python replaces the setting of its name. A function is used by name if
        other processes can import it. Otherwise it is sent by value, and its source is kept with
        its hash in ``given/`` of the run folder, so that a resume with other source is refused.

        Args:
            *overrides: Settings as on the command line: ``"experiment=quickstart"``.
            rewards: Reward functions or names of rewards, or pairs of one and its weight.
            data: Training problems; a row is a dictionary of a problem's fields, of which
                ``data.prompt_key`` and ``data.answer_key`` name two. Read once, to the end. Rows of
                an object with ``state_dict`` and ``load_state_dict`` are taken as they are needed,
                without end, and a resume continues with the next one.
            eval_data: Held-out problems, each a dictionary; read once.
            config_dir: A folder with your own groups of settings.
            **parts: ``loss``, ``advantage``, ``aggregation``, ``kl_estimator``, ``correction``,
                ``group_filter``, ``curriculum``, ``data_source``, ``verifier``, ``transport``,
                ``environment`` or ``engine_arguments``: a function or class, or the name of one, as
                in docs/extending.md. Lists of them: ``trackers``, ``tools``, ``benchmarks`` (with
                settings, as pairs), ``phase_observers``, ``step_checks`` and ``families``.

        Raises:
            UserError: Settings, files or what is given cannot work; one message has all problems.
        """
        if unknown := parts.keys() - PARTS.keys():
            raise UserError(
                f"Run.from_config has no argument {', '.join(sorted(unknown))}; parts are "
                f"{', '.join(PARTS)}"
            )
        if data is not None and parts.get("data_source") is not None:
            raise UserError("Run.from_config: data and data_source are both training problems")
        words = [*_for_machine(overrides), *overrides]
        placeholder = [] if data is None else ["data.train_paths=[given]"]
        first = compose_settings([*words, *placeholder], config_dir)
        given = Given(first.config.runner.run_dir, first.config.plugins)
        with given.restoring():
            if rewards is not None:
                given.rewards(rewards)
            for argument, value in parts.items():
                if value is not None:
                    given.part(argument, value)
            if data is not None:
                given.rows("data", "data.train_paths", data)
            if eval_data is not None:
                given.rows("eval_data", "data.eval_paths", eval_data)
            words += given.overrides
            config = compose_settings(words, config_dir).config
            if _is_quickstart(overrides):
                words += _own_model(config)
                config = compose_settings(words, config_dir).config
            ready = start.ready(config, "train")
        ready.report()
        folder = [] if config_dir is None else ["--config-dir", str(config_dir)]
        resume = [word for word in words if not word.startswith("runner.resume=")]
        line = ["rlmath", "train", *folder, *resume, "runner.resume=auto"]
        return cls(ready.config, shlex.join(line))

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """Train the next step.

        Raises:
            Exception: The error that ended the run, which has saved what it can.
        """
        from rlmath.training.loop import Finished, StepDone

        while not self._is_finished:
            event = self._next(None)
            if isinstance(event, StepDone):
                return Step(event.number, event.metrics, event.groups)
            self._is_finished = isinstance(event, Finished)
        raise StopIteration

    def save(self, folder: str | Path) -> None:
        """Write the current model to a Hugging Face folder, and compare each tensor with the
        ranks'.

        A run that comes to its last step also exports its model to ``hf/`` of the run folder, and
        its checkpoints are there in any case.

        Raises:
            UserError: The folder is the run's own, or the written model is not the trained one.
        """
        from rlmath.api.between_steps import save

        if Path(folder).absolute() == self.folder.absolute():
            raise UserError(
                f"save: {folder} is the run folder; give another one, such as {self.folder}/saved"
            )
        self._ask(lambda training: save(training, Path(folder)))

    def evaluate(self, benchmark: str | None = None, **settings: Any) -> dict[str, float]:
        """Sample and grade a benchmark with the current model.

        Responses and results are written to ``evaluation/step_NNNNNN`` of the run folder. Responses
        are no longer than the run's engines have room for; a shorter limit than the published one
        is printed.

        Args:
            benchmark: A built-in one, such as ``aime24``, or one of your own with its ``path``;
                ``None``: the problems of ``data.eval_paths``.
            **settings: Settings of the benchmark, as in ``eval.benchmarks``: ``path``, ``samples``,
                ``temperature``, ``max_response_tokens``, ...

        Returns:
            Figures by name, such as ``accuracy``; see docs/metrics.md.

        Raises:
            UserError: The benchmark is not known, or its file cannot be read.
        """
        from rlmath.api.between_steps import evaluate, with_benchmark

        config = with_benchmark(self._config, benchmark, settings)
        return dict(self._ask(lambda training: evaluate(training, config, self.number)))

    def sample(
        self,
        prompts: Sequence[str],
        *,
        samples: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> list[list[str]]:
        """Sample responses with the current model.

        Args:
            prompts: Problems; they become prompts as the training data's do.
            samples: Number of responses to each prompt.
            temperature: Sampling temperature, 0: greedy; ``None``: ``rollout.temperature``.
            max_tokens: Longest response; ``None``: ``rollout.max_response_tokens``.

        Returns:
            The responses of each prompt.

        Raises:
            UserError: A prompt and its response are longer than the engines have room for.
        """
        from rlmath.api.between_steps import Sampling, sample

        wanted = Sampling(tuple(prompts), samples, temperature, max_tokens, self.number)
        return list(self._ask(lambda training: sample(training, wanted)))

    def close(self) -> None:
        """End ranks and engines; what is not saved yet is saved. The run can be opened again."""
        events, self._events = self._events, None
        if self in _open:
            _open.remove(self)
        if events is None:
            return
        if self._is_finished:
            for _ in events:
                pass
        else:
            events.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._events is None else "open"
        return f"<Run {self.folder}, step {self.number} of {self._config.runner.steps}, {state}>"

    def _ask(self, ask: Callable[[Training], Any]) -> Any:
        """The answer to something that is done with the run between two steps."""
        from rlmath.training.loop import Answer

        def careful(training: Training) -> tuple[Any, UserError | None]:
            try:
                return ask(training), None
            except UserError as error:  # An error of the request; the run is unchanged.
                return None, error

        event = None
        while not isinstance(event, Answer):  # A part of the run may fail meanwhile: it restarts.
            event = self._next(careful)
        value, error = event.value
        if error is not None:
            raise error
        return value

    def _next(self, ask: Callable[[Training], Any] | None) -> Any:
        """The loop's next event; the run is opened if it is not."""
        from rlmath.training.loop import Opened, StepDone

        try:
            opened = self._events
            event = next(self._open_events()) if opened is None else opened.send(ask)
        except BaseException:
            self._events = None
            self.close()
            print(f"continue the run with: {self.command}", flush=True)
            raise
        if isinstance(event, Opened):
            self.number = event.training.done
        elif isinstance(event, StepDone):
            self.number = event.number
        return event

    def _open_events(self) -> Events:
        for other in list(_open):
            print(f"closing the run in {other.folder}: a process has one open run", flush=True)
            other.close()
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # Before Ray's own, which was registered when it was imported.
        config = self._config
        if self._was_opened:
            config = replace_values(config, {"runner.resume": "auto"})
        self._was_opened, self._is_finished = True, False
        _open.append(self)
        self._events = _events(config)
        return self._events


def _events(config: Config) -> Events:
    """The loop's, with the caller's handlers of signals put back at its end."""
    from rlmath.training.loop import steps

    with ending_by_exit():
        yield from steps(config)


def _close_all() -> None:
    for run in list(_open):
        run.close()


def _is_quickstart(overrides: Sequence[str]) -> bool:
    from rlmath.quickstart import EXPERIMENTS

    return any(one in overrides for one in EXPERIMENTS)


def _for_machine(overrides: Sequence[str]) -> list[str]:
    if not _is_quickstart(overrides):
        return []
    from rlmath.checks.machine import Machine
    from rlmath.quickstart.run import for_machine

    return for_machine(Machine.here(), overrides)


def _own_model(config: Config) -> list[str]:
    """The setting of the quickstart's model after its warm start, which is made if it is missing;
    nothing where the settings name another model."""
    from rlmath.checks.machine import Machine
    from rlmath.quickstart.run import warm_start

    run_dir = Path(config.runner.run_dir)
    if Path(config.model.path) != run_dir / "model":
        return []
    tuned = run_dir / "sft"
    if not (tuned / "config.json").is_file():
        tuned = warm_start(config, Machine.here())
    return [path_override("model.path", tuned)]
