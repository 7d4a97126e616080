"""A teacher (``algorithm.distill_coef``): settings, folder, vocabulary and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmath.checks.files import vllm_pattern
from rlmath.checks.layout import cpu_cache_problem, cpu_heads_problem, tensor_parallel_problems
from rlmath.checks.linear_attention import cpu_kernel_problems
from rlmath.checks.weight_files import folder_problems, vocabulary
from rlmath.config.arithmetic import teacher_sequence_tokens
from rlmath.config.schema import Config, Device, DType
from rlmath.config.settings import by_key, value_of, value_text
from rlmath.config.teacher import ENGINE_SETTINGS
from rlmath.errors import ModelError, UserError
from rlmath.model.folder import TINY
from rlmath.model.hub import is_hub_model
from rlmath.model.spec import ModelSpec, read_model_spec
from rlmath.rewards.http_json import Endpoint


def teacher_problems(config: Config, device: Device) -> Iterator[str]:
    """A message for each setting of a training run's teacher that cannot work."""
    algorithm, teacher = config.algorithm, config.teacher
    if not algorithm.distill_coef:
        if algorithm.advantage == "teacher":
            yield (
                "algorithm.advantage=teacher: nothing is learned from rewards, and "
                "algorithm.distill_coef=0 learns nothing from a teacher; set that to 1, or use "
                "another advantage"
            )
        return
    yield from _objective(config)
    if teacher.path is None:
        yield (
            f"algorithm.distill_coef={algorithm.distill_coef:g}: needs a teacher; give its folder "
            "as teacher.path, or set distill_coef to 0"
        )
        return
    if teacher.url is not None:
        yield from _of_server(config)
    yield from teacher_folder(config, device)


def _objective(config: Config) -> Iterator[str]:
    algorithm, temperature = config.algorithm, config.rollout.temperature
    if temperature != 1:
        yield (
            f"rollout.temperature={temperature:g}: vLLM gives the teacher's log-probs of a prompt "
            "at temperature 1, and their difference from the policy's at another would teach it "
            "to make up for the temperature; use 1"
        )
    if algorithm.advantage == "teacher" and algorithm.whiten_tokens:
        yield (
            "algorithm.whiten_tokens=true: advantage=teacher has nothing to whiten before the "
            "teacher's term, which is added last; set it to false"
        )


def _of_server(config: Config) -> Iterator[str]:
    try:
        Endpoint.parse(config.teacher.url or "")
    except ValueError as error:
        yield f"teacher.url={config.teacher.url}: {error}, such as http://host:8000/v1"
    for name in ENGINE_SETTINGS:
        setting = by_key()[f"teacher.{name}"]
        found = value_of(config, setting.key)
        if found != setting.default:
            yield (
                f"{setting.key}={value_text(found)}: is about engines of the run, and "
                "teacher.url has the teacher on a server; leave it at "
                f"{value_text(setting.default)}"
            )


def teacher_folder(config: Config, device: Device) -> Iterator[str]:
    """The folder is complete, has the policy's vocabulary, and takes the longest sequence."""
    path, on_server = config.teacher.path, config.teacher.url is not None
    assert path is not None
    if not Path(path).is_dir():
        hint = (
            f"; fetch it with hf download {path} --local-dir models/{path.rpartition('/')[2]} and "
            "give that folder"
            if is_hub_model(path)
            else "; give a Hugging Face folder"
        )
        yield f"teacher.path={path}: no such folder{hint}"
        return
    if not on_server:
        yield from vllm_pattern("teacher.path", path)
        try:
            model = read_model_spec(path)
        except ModelError as error:
            yield f"teacher.path={path}: {error}"
            return
        problems = list(folder_problems(Path(path)))
        yield from (f"teacher.path={path}: {problem}" for problem in problems)
        if problems:
            return
        yield from _sizes(config, model, device)
    yield from _vocabulary(config, path)


def _sizes(config: Config, model: ModelSpec, device: Device) -> Iterator[str]:
    teacher, needed = config.teacher, teacher_sequence_tokens(config)
    yield from tensor_parallel_problems("teacher", teacher.tensor_parallel, model, 0)
    if needed > model.max_positions:
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        yield (
            f"teacher.path={teacher.path}: {prompt} prompt + {response} response + 1 token that "
            f"vLLM samples after what it scores = {needed} tokens, but the teacher has "
            f"{model.max_positions} positions; use rollout.max_response_tokens="
            f"{model.max_positions - prompt - 1} or less, or another teacher"
        )
    if device is Device.cpu:
        dtype = teacher.dtype or config.model.dtype
        value_bytes = 4 if dtype is DType.float32 else 2
        yield from cpu_kernel_problems("teacher", model, dtype)
        yield from cpu_heads_problem("teacher.path", model)
        yield from cpu_cache_problem(
            "teacher.cpu_kv_cache_gib",
            teacher.cpu_kv_cache_gib,
            model,
            needed,
            teacher.tensor_parallel,
            value_bytes,
        )


def _vocabulary(config: Config, path: str) -> Iterator[str]:
    """The teacher reads the policy's token ids: each has to mean the same token."""
    own_path = config.model.path
    if own_path != TINY and not Path(own_path).is_dir():
        return  # Reported elsewhere, or checked after the download.
    try:
        own, other = vocabulary_in(own_path), vocabulary_in(path)
    except UserError as error:
        yield f"teacher.path={path}: its vocabulary cannot be compared with the policy's: {error}"
        return
    different = [i for i in sorted(own) if other.get(i) != own[i]]
    if different:
        first = different[0]
        theirs = repr(other[first]) if first in other else "no token"
        yield (
            f"teacher.path={path}: its vocabulary is not the policy's: token {first} is "
            f"{own[first]!r} in model.path={own_path}, and {theirs} in the teacher's tokenizer "
            f"({len(different):,} of {len(own):,} differ); its log-probs would be of other tokens. "
            "Take a teacher of the policy's family"
        )


def vocabulary_in(path: str) -> dict[int, str]:
    """:func:`vocabulary` of a folder. Raises UserError: it has no tokenizer.json that can be
    read."""
    file = Path(path) / "tokenizer.json"
    try:
        if path == TINY:
            from rlmath.model.tiny_tokenizer import fast_tokenizer

            return vocabulary(fast_tokenizer().to_str())
        return vocabulary(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}: {error})") from error
