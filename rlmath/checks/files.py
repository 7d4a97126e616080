"""Checks of disk and machine: model, data, run folder, memory, space."""

from __future__ import annotations

import functools
import glob
import math
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmath.algorithms.advantages import needs_value_model
from rlmath.checkpoint import checkpoint_bytes, held_bytes
from rlmath.checkpoint.fetch import split_url
from rlmath.checkpoint.manifest import MANIFEST
from rlmath.checkpoint.remote import is_url, url_problem
from rlmath.checks.benchmarks import data_of
from rlmath.checks.data_rows import CHECK_S, PEEKED_ROWS, rows_of
from rlmath.checks.layout import GIB
from rlmath.checks.machine import Machine, unwritable
from rlmath.checks.weight_files import folder_problems
from rlmath.config.algorithm import ReferenceKind
from rlmath.config.arithmetic import RunLayout
from rlmath.config.benchmarks import HELD_OUT, benchmarks_of
from rlmath.config.data_sources import DATA_SOURCES
from rlmath.config.hub_names import is_hub, parts_of
from rlmath.config.lora import adapters_of
from rlmath.config.placeholders import unfilled_part
from rlmath.config.schema import Config, DataConfig, DType, MalformedRow
from rlmath.data.fields import field_of, has_field, no_such_field, refuse_images
from rlmath.data.files import MalformedRowError, Row
from rlmath.data.prompts import chat_messages
from rlmath.data.rows import Target, answers_in, read_value, responses_in
from rlmath.data.source_stream import first_rows
from rlmath.errors import ModelError, UserError
from rlmath.model.chat import has_chat_template
from rlmath.model.folder import TINY
from rlmath.model.hub import is_hub_model
from rlmath.model.lora import adapter_parameters
from rlmath.model.published import hub_address, hub_refusal
from rlmath.model.spec import ModelSpec, read_model_spec
from rlmath.utils.sizes import in_words

_PATTERN = re.compile(r"[*?\[\]]")


def model_folder(config: Config) -> Iterator[str]:
    """The folder exists, is complete, and has an architecture that the actor supports."""
    path = config.model.path
    own = path == TINY or config.eval.checkpoint is not None
    yield from vllm_pattern(
        *(("runner.run_dir", config.runner.run_dir) if own else ("model.path", path))
    )
    if is_hub_model(path):  # Its files are looked at when they have been downloaded.
        if (refused := hub_refusal(path)) is not None:
            yield f"model.path={path}: {refused}"
        return
    if path != TINY and not Path(path).is_dir():
        left = unfilled_part(path)
        what = f"no such folder; {_where_from(config)}"
        if left is not None:
            what = f"{left} was not filled in; write what it stands for"
        yield f"model.path={path}: {what}"
        return
    try:
        model = read_model_spec(path)
    except ModelError as error:
        yield f"model.path={path}: {error}"
        return
    if path != TINY:
        yield from (f"model.path={path}: {problem}" for problem in folder_problems(Path(path)))
    expected = config.model.architecture
    if expected is not None and expected != model.architecture:
        yield (
            f"model.architecture={expected}: the model in {path} is a {model.architecture}; use "
            "that, or null"
        )
    if config.data.apply_chat_template and not has_chat_template(path):
        yield (
            f"data.apply_chat_template=true: the tokenizer in {path} has no chat template; set it "
            "to false and give data.prompt_template"
        )


def vllm_pattern(key: str, path: str) -> Iterator[str]:
    """vLLM looks for weights with ``glob``, which reads a folder's name as a pattern as well."""
    absolute = str(Path(path).absolute())
    if glob.has_magic(absolute):
        yield (
            f"{key}={path}: vLLM finds no file below a folder with any of *, ? and [ in its name "
            f"({absolute}); rename it, or give a link to it: "
            f"ln -s {shlex.quote(absolute)} {shlex.quote(_PATTERN.sub('_', absolute))}"
        )


def _where_from(config: Config) -> str:
    path = Path(config.model.path)
    if Path(config.runner.run_dir).absolute() in path.absolute().parents:
        return "run bash launchers/quickstart.sh, or the run's own launcher, which makes it"
    known = hub_address(path.name)
    if known is not None:
        local, refused = shlex.quote(str(path)), hub_refusal(known)
        if refused is not None:
            return f"{known} is on the hub, but {refused}"
        return f"fetch it with hf download {known} --local-dir {local}, or give model.path={known}"
    return (
        "give a Hugging Face folder, or a model of the hub as ORGANIZATION/NAME, which is "
        "downloaded; tiny is a small random one"
    )


def _waits_for_launcher(config: Config, path: str) -> bool:
    """Whether a launcher makes model and problems in the run's folder, and did not run yet."""
    folder = Path(config.runner.run_dir).absolute()
    return all(
        folder in Path(one).absolute().parents and not Path(one).exists()
        for one in (path, config.model.path)
    )


def data_files(config: Config, command: str) -> Iterator[str]:
    """The files exist, and their rows have the fields: those that can be read in ``CHECK_S``.

    A file that the run's launcher makes with the model is missing once, as the model.
    """
    data, sft, until = config.data, config.sft, time.monotonic() + CHECK_S
    if command == "sft":
        yield from _path_errors("sft.train_paths", sft.train_paths, "worked examples")
        for path in dict.fromkeys(sft.train_paths):
            target = responses_in(sft.response_key)
            yield from _data_file(data, "sft.train_paths", path, target, until)
        return
    if command == "train":
        if data.source is not None:
            yield from _data_source(data)
        else:
            yield from _path_errors("data.train_paths", data.train_paths, "problems")
        if data.train_weights and len(data.train_weights) != len(data.train_paths):
            yield (
                f"data.train_weights={data.train_weights}: {len(data.train_weights)} weights for "
                f"{len(data.train_paths)} data.train_paths; give one for each, or none"
            )
        if any(not 0 < weight < math.inf for weight in data.train_weights):
            yield f"data.train_weights={data.train_weights}: each has to be more than 0 and finite"
        for path in dict.fromkeys(data.train_paths):
            if not _waits_for_launcher(config, path):
                target = answers_in(data.answer_key)
                yield from _data_file(data, "data.train_paths", path, target, until)
    elif not config.eval.benchmarks:
        yield from _path_errors("data.eval_paths", data.eval_paths, "problems")
    for benchmark in benchmarks_of(config):
        section = "data" if benchmark.name == HELD_OUT else benchmark.key
        target = answers_in(benchmark.data.answer_key, f"{section}.answer_key")
        for path in benchmark.paths:
            if _waits_for_launcher(config, path):
                continue
            for problem in _data_file(benchmark.data, benchmark.key, path, target, until):
                yield problem + data_of(config, benchmark) * (not Path(path).exists())


def _data_source(data: DataConfig) -> Iterator[str]:
    """Its first rows have the fields."""
    if data.train_paths:
        yield (
            f"data.source={data.source}: gives all training problems, so that data.train_paths="
            f"{data.train_paths} would not be read; leave one of them out"
        )
    if not data.shuffle:
        yield (
            f"data.shuffle=false: does nothing, as data.source={data.source} has its own order; "
            "leave it out"
        )
    if DATA_SOURCES.has(str(data.source)):
        try:
            rows = first_rows(data, PEEKED_ROWS)
        except UserError as error:
            yield str(error)
            return
        target = answers_in(data.answer_key)
        yield from [one for row in rows if (one := _row_problem(data, row, target))][:1]


def _path_errors(key: str, paths: list[str], what: str) -> Iterator[str]:
    if not paths:
        or_benchmarks = (
            ", or known benchmarks, such as eval.benchmarks=[{name: aime24}]"
            if key == "data.eval_paths"
            else ""
        )
        yield (
            f"{key} is empty: give files with {what}, such as {key}=[{what.split()[-1]}.jsonl]"
            f"{or_benchmarks}"
        )
    for path in dict.fromkeys(paths):
        if paths.count(path) > 1:
            yield f"{key}: {path} is given {paths.count(path)} times; give it once"


def _data_file(
    data: DataConfig, key: str, path: str, target: Target, until: float
) -> Iterator[str]:
    try:
        if is_hub(path):
            parts_of(path)  # Its rows are looked at when it is fetched, at the start of the run.
        else:
            yield from first_problem(data, path, target, until)
    except UserError as error:
        yield f"{key}: {error}"


def first_problem(data: DataConfig, path: str, target: Target, until: float = 0.0) -> Iterator[str]:
    """The first error in the rows of a file, with its place: in the first few rows, and in those
    that are read by the time ``until`` of the monotonic clock.

    With ``malformed_rows=skip`` a malformed row is left out when the run reads it. Rows are then
    read up to the first that can be used: a file without any is refused. Raises UserError: the file
    is missing, empty, of another kind, or cannot be read.
    """
    skip = data.malformed_rows is MalformedRow.skip
    first = None
    for count, row in enumerate(rows_of(path)):
        if not skip and count >= PEEKED_ROWS and time.monotonic() > until:
            return
        problem = _row_problem(data, row, target)
        if skip and problem is None:
            return
        first = first or problem
        if first and not skip:
            rest = "; fix it, or leave such rows out with data.malformed_rows=skip" if count else ""
            yield first + rest
            return
    if first:
        yield first


def _row_problem(data: DataConfig, row: Row, target: Target) -> str | None:
    if isinstance(row.fields, MalformedRowError):
        return f"{row.place}: {row.fields}"
    prompt_setting = target.setting.replace("answer_key", "prompt_key")
    if "prompt_key" not in prompt_setting:
        prompt_setting = "data.prompt_key"
    prompt = Target(prompt_setting, data.prompt_key, functools.partial(_contents, data))
    for one in (prompt, target):
        if not has_field(row.fields, one.key):
            fields = no_such_field(row.fields, one.setting, one.key)
            return f"{one.setting}={one.key}: {row.place} has no such field; {fields}"
        try:
            refuse_images(row.fields)
            read_value(field_of(row.fields, one.key), one.read)
        except MalformedRowError as error:
            return f"{one.setting}={one.key}: {row.place}: {error}"
    return None


def _contents(data: DataConfig, prompt: Any) -> tuple[str, ...]:
    """Contents of the chat messages of a prompt field; the tokenizer is looked at elsewhere."""
    return tuple(
        one["content"] for one in chat_messages(prompt, data.apply_chat_template is not False)
    )


def run_dir(config: Config) -> Iterator[str]:
    path = config.runner.run_dir
    if reason := unwritable(path):
        yield f"runner.run_dir={path}: {reason}; give another folder, or make room"


def resume(config: Config) -> Iterator[str]:
    """``runner.resume`` names a checkpoint; whether it is complete is seen when it is read."""
    how = config.runner.resume
    if is_url(how):
        if problem := url_problem(split_url(how)[0], writes=False):
            yield f"runner.resume={how}: {problem}"
        return
    if how in ("auto", "never") or (Path(how) / MANIFEST).is_file():
        return
    what = "has no " + MANIFEST if Path(how).is_dir() else "is no folder"
    yield (
        f"runner.resume={how}: {what}; expected auto, never or the folder of a checkpoint, such as "
        f"{Path(config.runner.run_dir) / 'checkpoints' / 'step_000012'}"
    )


def memory(
    config: Config, model: ModelSpec, layout: RunLayout, machine: Machine, command: str
) -> Iterator[str]:
    """On one CPU machine: weights, gradients, optimizer and caches fit its memory."""
    if config.cluster.nodes > 1 or config.cluster.ray_address is not None:
        return
    parameters, value_bytes = model.num_parameters, _value_bytes(config)
    # Copies of an MoE share the experts, or tensor ranks each have them whole.
    actor = config.actor
    copies = 1.0 if actor.expert_parallel == 1 else actor.tensor_parallel / actor.expert_parallel
    of_a_copy = int(parameters + model.num_expert_parameters * (copies - 1))
    parts: list[tuple[str, int]] = []

    def add(count: int, what: str, each: int, size: int = of_a_copy) -> None:
        parts.append((f"{count} {what} x {each} bytes a parameter", count * size * each))

    if command != "evaluate":
        # Gradients and Adam's two moments are float32; bfloat16 weights keep a float32 copy.
        optimizer_bytes = 8 + (4 if value_bytes == 2 else 0)
        optimizers = 1 if actor.distributed_optimizer else layout.actor.copies
        actors, what = layout.actor.copies, "actor(s)"
        value_model = command == "train" and needs_value_model(config.algorithm.advantage)
        lora = adapters_of(actor.lora, model, seed=0)
        if lora is not None:
            # Every tensor rank has the half of an adapter that is not shared.
            trained = actors * adapter_parameters(model, lora) * actor.tensor_parallel
            frozen = f"{actors} actor(s) x {value_bytes} bytes a parameter, frozen"
            parts.append((frozen, actors * of_a_copy * value_bytes))
            each = value_bytes + 4 + optimizer_bytes
            parts.append((f"adapters x {each} bytes a parameter", trained * each))
            actors, optimizers = (actors, optimizers) if value_model else (0, 0)
            what = "value model(s)"
        elif value_model:
            optimizers, actors, what = 2 * optimizers, 2 * actors, "actor(s) and value model(s)"
        if actors:
            add(actors, what, value_bytes + 4)
            add(optimizers, "optimizer state(s)", optimizer_bytes, parameters)
    # Under LoRA the reference is the policy without its adapters.
    if command == "train" and config.algorithm.kl_coef > 0 and not actor.lora.rank:
        # Beside the reference itself, the policy's weights while the reference is in their place.
        what = f"reference model(s) of algorithm.kl_coef={config.algorithm.kl_coef:g}"
        add(layout.actor.copies, what, _reference_bytes(config) + value_bytes)
    if command != "sft":
        add(layout.engines, "engine(s)", value_bytes, parameters)
        cache_gib, ranks = config.rollout.cpu_kv_cache_gib, layout.engine_ranks
        what = f"{ranks} x rollout.cpu_kv_cache_gib {cache_gib:g}"
        parts.append((what, int(ranks * cache_gib * GIB)))
    if command == "train":
        parts += _teacher_memory(config, layout)
    total = sum(size for _, size in parts)
    if total > machine.memory_bytes:
        sums = " + ".join(f"{size / GIB:.1f} GiB ({what})" for what, size in parts)
        yield (
            f"model.path={config.model.path}: {parameters / 1e9:.2f} billion parameters need "
            f"{sums} = {total / GIB:.1f} GiB, but this machine has "
            f"{machine.memory_bytes / GIB:.1f} GiB; use a smaller model or cache, fewer copies "
            "or engines, or GPUs"
        )


def _teacher_memory(config: Config, layout: RunLayout) -> list[tuple[str, int]]:
    teacher = config.teacher
    if not layout.teacher_engines or teacher.path is None:
        return []
    try:
        parameters = read_model_spec(teacher.path).num_parameters
    except ModelError:
        return []  # The check of the teacher's folder reports it.
    value_bytes = 4 if (teacher.dtype or config.model.dtype) is DType.float32 else 2
    engines, ranks = layout.teacher_engines, layout.teacher_ranks
    return [
        (
            f"{engines} engine(s) of the teacher x {value_bytes} bytes a parameter",
            engines * parameters * value_bytes,
        ),
        (
            f"{ranks} x teacher.cpu_kv_cache_gib {teacher.cpu_kv_cache_gib:g}",
            int(ranks * teacher.cpu_kv_cache_gib * GIB),
        ),
    ]


def disk(config: Config, model: ModelSpec, machine: Machine, command: str) -> Iterator[str]:
    """The checkpoints that are kept, one that is being written, and the HF folder fit the disk.

    When a run resumes, its earlier checkpoints are among those that are kept, so that their room
    counts as free.
    """
    runner, value_bytes, parameters = config.runner, _value_bytes(config), model.num_parameters
    algorithm = config.algorithm
    lora = adapters_of(config.actor.lora, model, seed=0)
    trained = parameters if lora is None else adapter_parameters(model, lora)
    checkpoint = checkpoint_bytes(trained, value_bytes, config.actor.distributed_optimizer)
    best, save_every, folder = 0, config.sft.save_every, "sft_checkpoints"
    if command == "train":
        if needs_value_model(algorithm.advantage):  # The value model is of the policy's size.
            checkpoint += checkpoint_bytes(
                parameters, value_bytes, config.actor.distributed_optimizer
            )
        if algorithm.kl_coef > 0 and algorithm.reference.kind is not ReferenceKind.frozen:
            checkpoint += trained * _reference_bytes(config)
        best = int(runner.best_metric is not None)
        save_every, folder = runner.save_every, "checkpoints"
    # A training run is saved at its end, whatever save_every says.
    # One is held while it is uploaded.
    more = 1 + best + int(runner.mirror is not None)
    kept = runner.keep_checkpoints + more if save_every else int(command == "train")
    hf_bytes = parameters * value_bytes
    needed = kept * checkpoint + hf_bytes
    held = held_bytes(Path(runner.run_dir) / folder) if runner.resume == "auto" else 0
    free = machine.free_bytes(runner.run_dir)
    if needed <= free + held:
        return
    fitting = (free + held - hf_bytes) // checkpoint - more if save_every else 0
    yield (
        f"runner.run_dir={runner.run_dir}: {kept} checkpoints (kept ones and one being written) x "
        f"{in_words(checkpoint)} and a Hugging Face folder make {in_words(needed)}, but "
        f"{in_words(free)} are free there"
        + (f" and earlier checkpoints hold {in_words(held)}" if held else "")
        + "; use another disk"
        + (f", or runner.keep_checkpoints={fitting}" if fitting >= 1 else "")
    )


def _reference_bytes(config: Config) -> int:
    """Bytes of one parameter of the reference model; an average is kept in float32."""
    averaged = config.algorithm.reference.kind is ReferenceKind.averaged
    return 4 if averaged else _value_bytes(config)


def _value_bytes(config: Config) -> int:
    return 4 if config.model.dtype is DType.float32 else 2
