"""The benchmarks that rlmath knows by name, with the settings their results are published with.

A benchmark is a file of problems and how it is sampled. What ``eval.benchmarks`` says itself comes
first, then the published settings (``eval.published_settings``), then ``eval.*`` and ``data.*``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmath.config.rollout import has_turns
from rlmath.config.schema import BenchmarkItem, Config, DataConfig
from rlmath.model.chat import is_instruct
from rlmath.plugins import Registry

# The instruction that the R1 and Qwen2.5-Math reports sample with.
BOXED = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
# Name of the problems of data.eval_paths among benchmarks.
HELD_OUT = "held_out"


@dataclass(frozen=True)
class Published:
    file: str = ""
    prompt_key: str = "problem"
    answer_key: str = "answer"
    samples: int = 1
    temperature: float = 0.6
    top_p: float = 0.95
    max_response_tokens: int = 32768


# Temperature 0.6, top-p 0.95, 32,768 tokens and 64 samples of AIME: DeepSeek-R1 (2025), section 3,
# and what the reports that follow it use. MATH-500 at 0.7: the recipes that rlmath's are compared
# with. Where nothing is published per benchmark there are as many samples as make about 2,000
# responses, and at least 4; GSM8K has problems enough for one sample each.
PUBLISHED = {
    "aime24": Published("aime24.jsonl", "problem", "answer", samples=64),
    "aime25": Published("aime25.jsonl", "problem", "answer", samples=64),
    "amc23": Published("amc23.jsonl", "question", "answer", samples=64),
    "math500": Published("math500.jsonl", "problem", "answer", samples=4, temperature=0.7),
    "gpqa_diamond": Published("gpqa_diamond.jsonl", "problem", "answer", samples=8),
    "minerva": Published("minerva_math.jsonl", "problem", "solution", samples=8),
    "olympiadbench": Published("olympiadbench.jsonl", "question", "final_answer", samples=4),
    "gsm8k": Published("gsm8k_test.jsonl", "question", "answer", samples=1),
}


# Benchmarks of plug-ins: a function of its options that returns the rows, mappings as in a file,
# with how they are sampled where ``eval.benchmarks`` does not say.
BENCHMARKS: Registry[Callable[[Any], Iterable[Mapping[str, Any]]], Published] = Registry(
    "eval.benchmarks[].name", Published
)


def find_published(name: str) -> Published | None:
    """The settings of a known benchmark or of a plug-in's; ``None``: it is neither."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    return BENCHMARKS.traits(name) if BENCHMARKS.has(name) else None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark with every setting decided."""

    name: str
    key: str
    paths: tuple[str, ...]  # Files with its problems.
    data: DataConfig
    samples: int
    temperature: float
    top_p: float
    max_response_tokens: int
    max_problems: int | None  # Maximum number, the first ones; None: all.
    # Name in BENCHMARKS of the function for its rows; None: rows are in files.
    plugin: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: bool = False  # Whether the model uses rollout.tools and rollout.environment.

    @property
    def length_key(self) -> str:
        """The setting that says how long a response may be."""
        return "eval" if self.name == HELD_OUT else self.key

    @property
    def title(self) -> str:
        return "held-out problems" if self.name == HELD_OUT else self.name

    def describe(self) -> str:
        samples = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        options = "".join(f", {name} {value}" for name, value in self.options.items())
        rows = ", ".join(self.paths) or f"of a plug-in{options}"
        return (
            f"{self.title}: {rows}; {samples} each, temperature {self.temperature:g}, "
            f"top-p {self.top_p:g}, {self.max_response_tokens:,} tokens"
            + (", chat template" if self.data.apply_chat_template else "")
            + (", with tools" if self.tools else "")
        )


def benchmarks_of(config: Config) -> list[Benchmark]:
    """Benchmarks of a run: the problems of ``data.eval_paths``, then ``eval.benchmarks``."""
    found = []
    settings = config.eval
    longest = settings.max_response_tokens or config.rollout.max_response_tokens
    if config.data.eval_paths:
        found.append(
            Benchmark(
                name=HELD_OUT,
                key="data.eval_paths",
                paths=tuple(config.data.eval_paths),
                data=config.data,
                samples=settings.samples,
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_response_tokens=longest,
                max_problems=config.data.max_eval_problems,
                tools=_uses_tools(config),
            )
        )
    found += [_resolve(config, i, item, longest) for i, item in enumerate(settings.benchmarks)]
    return found


def longest_response_tokens(config: Config, *, trains: bool) -> int:
    """Longest response of a run, in tokens.

    Args:
        trains: Whether it also samples for training.
    """
    lengths = [benchmark.max_response_tokens for benchmark in benchmarks_of(config)]
    return max([*lengths, *([config.rollout.max_response_tokens] * (trains or not lengths))])


def _resolve(config: Config, index: int, item: BenchmarkItem, longest: int) -> Benchmark:
    known = find_published(item.name)
    published = known if config.eval.published_settings else None
    data, settings = config.data, config.eval
    # The prompt of the published results; a plug-in's rows have their own.
    reported = published is not None and bool(published.file)

    def pick(name: str, general: Any) -> Any:
        """Value given nearest to the benchmark; 0 is a value."""
        said = (getattr(item, name), getattr(published, name, None), general)
        return next((value for value in said if value is not None), None)

    chat, template = item.apply_chat_template, item.prompt_template
    if chat is None:
        chat = is_instruct(config.model.path) if reported else data.apply_chat_template
    if template is None:
        template = BOXED if reported else data.prompt_template
    is_plugin = known is not None and not known.file and item.path is None
    in_folder = str(Path(settings.data_dir) / known.file) if known and known.file else None
    path = item.path or in_folder
    return Benchmark(
        name=BENCHMARKS.name(item.name) if is_plugin else item.name,
        key=f"eval.benchmarks[{index}]",
        paths=() if path is None else (path,),
        data=dataclasses.replace(
            data,
            prompt_key=item.prompt_key or (known.prompt_key if known else data.prompt_key),
            answer_key=item.answer_key or (known.answer_key if known else data.answer_key),
            apply_chat_template=chat,
            system_prompt=data.system_prompt if chat else None,
            prompt_template=template,
        ),
        samples=pick("samples", settings.samples),
        temperature=pick("temperature", settings.temperature),
        top_p=pick("top_p", settings.top_p),
        max_response_tokens=pick("max_response_tokens", longest),
        max_problems=pick("max_problems", data.max_eval_problems),
        plugin=item.name if is_plugin else None,
        options=item.options,
        tools=_uses_tools(config),
    )


def _uses_tools(config: Config) -> bool:
    return config.eval.tools and has_turns(config.rollout)
