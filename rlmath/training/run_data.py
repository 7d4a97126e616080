"""What a run trains on and is evaluated on, loaded while its ranks and engines start.

Importing transformers takes two seconds. A thread begins it at once: the driver waits for Ray next.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence

from rlmath.config.schema import Config
from rlmath.data import Example, load_examples, load_problems, load_tokenizer
from rlmath.evaluation.held_out import HeldOut, load_held_out
from rlmath.types import Problem
from rlmath.utils.paused_collector import paused_collector


class RunData:
    """The problems of a run.

    Attributes:
        problems: To train on. Loaded by :meth:`load`, like the rest.
        held_out: To be evaluated on.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.problems: Sequence[Problem] = ()
        self.held_out: Sequence[HeldOut] = ()
        self._import = _import_transformers()

    def load(self) -> list[Problem]:
        """Read all problems; says what became of their rows.

        Returns:
            Those to train on and those to be evaluated on.

        Raises:
            UserError: As :func:`rlmath.data.load_problems`.
        """
        data = self._config.data
        self._import.join()
        with paused_collector():
            tokenizer = load_tokenizer(self._config.model.path)
            self.problems, report = load_problems(data.train_paths, data, tokenizer)
            print("training problems:", report.describe(data.max_prompt_tokens), flush=True)
            self.held_out = load_held_out(self._config, tokenizer)
        return [*self.problems, *(p for one in self.held_out for p in one.problems)]


class SftData:
    """The worked examples of a run of supervised fine-tuning.

    Attributes:
        examples: Loaded by :meth:`load`.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.examples: Sequence[Example] = ()
        self._import = _import_transformers()

    def load(self) -> tuple[()]:
        """Read all examples; says what became of their rows.

        Returns:
            Nothing: none of it is sampled.

        Raises:
            UserError: As :func:`rlmath.data.load_examples`.
        """
        sft, data = self._config.sft, self._config.data
        self._import.join()
        with paused_collector():
            tokenizer = load_tokenizer(self._config.model.path)
            self.examples, report = load_examples(
                sft.train_paths, data, sft.response_key, tokenizer
            )
        print("worked examples:", report.describe(data.max_prompt_tokens), flush=True)
        return ()


def _import_transformers() -> threading.Thread:
    name = "transformers.models.auto.tokenization_auto"
    thread = threading.Thread(target=importlib.import_module, args=(name,), daemon=True)
    thread.start()
    return thread
