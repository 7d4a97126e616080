"""How a sample came about: the prompt, its tokens, and the generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmath.commands.why.batch import Step
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.prompts import Encoder
from rlmath.errors import UserError
from rlmath.monitor.digests import digest_prompt, same_item
from rlmath.rollout.sampler import max_response_tokens
from rlmath.rollout.seeds import request_seed


def prompt_lines(step: Step, whole: bool) -> Iterator[str]:
    """The prompt as the engine got it."""
    data, row = step.config.data, step.row
    template = "as it is in the data"
    if data.apply_chat_template:
        system = "no system prompt" if data.system_prompt is None else f"{data.system_prompt!r}"
        template = f"chat template of the model's tokenizer; system prompt: {system}"
    if data.prompt_template is not None:
        template += f"; data.prompt_template {data.prompt_template!r}"
    yield f"rendering: {template}"
    yield from _text(row["prompt"], whole)
    try:
        tokens = prompt_tokens(step)
    except UserError as error:
        yield f"{row.get('prompt_tokens')} tokens (which ones cannot be said: {error})"
        return
    yield f"{len(tokens)} tokens: {_shortened(list(tokens), whole)}"
    noted = step.noted("prompts", "problems", step.address.problem)
    if noted is not None:
        same = same_item(digest_prompt(tokens), noted[0])
        yield (
            "they are those that the engine got"
            if same
            else ("they are NOT those that the engine got: the tokenizer has changed since")
        )


def prompt_tokens(step: Step) -> tuple[int, ...]:
    """The prompt's token ids.

    Raises:
        UserError: The model's tokenizer is not there any more.
    """
    folder = Path(step.config.model.path)
    encoder = Encoder(LightTokenizer(folder))
    plain = not step.config.data.apply_chat_template
    (tokens,) = encoder.encode([step.row["prompt"]], add_first_tokens=plain)
    return tokens


def spans_of(step: Step) -> list[tuple[int, int]]:
    """Weights versions of the sample, each with its first token; of one that is not in the file
    (of an earlier rlmath) the version that it names."""
    spans = step.row.get("spans") or [[step.row["weights_version"], 0]]
    return [(int(version), int(start)) for version, start in spans]


def admitted_in(step: Step) -> int:
    """The step that the sample was begun for, of which its seed and limit are.

    Not always the one after its weights: engines sample ahead under some schedules.
    """
    row, run_seed = step.row, step.config.runner.seed
    first = spans_of(step)[0][0] + 1
    for number in range(first, max(first, int(row["step"])) + 1):
        if request_seed(run_seed, number, row["problem_id"], int(row["index"])) == row["seed"]:
            return number
    return first


def generation_lines(step: Step, whole: bool) -> Iterator[str]:
    """Seed, engine, weights and end of the sample, and its text."""
    config, row, address = step.config, step.row, step.address
    admitted = admitted_in(step)
    seed = request_seed(config.runner.seed, admitted, address.problem, address.index)
    of = f"of runner.seed={config.runner.seed}, step {admitted}, problem and index"
    yield f"seed {row['seed']}" + (f" ({of})" if seed == row["seed"] else f", but {seed} is {of}")
    limit = max_response_tokens(config, admitted)
    yield (
        f"engine {row.get('engine')}, weights version {row.get('weights_version')} (those after "
        f"step {row.get('weights_version')}), temperature {config.rollout.temperature:g}, at most "
        f"{limit} tokens"
    )
    if len(spans_of(step)) > 1:
        parts = [f"{version} from token {start}" for version, start in spans_of(step)]
        yield f"sampled by {len(parts)} versions of the weights: {', '.join(parts)}"
    ends = {"stop": "the model ended it", "length": "it was cut off at the limit"}
    reason = row.get("finish_reason")
    yield f"{row['response_tokens']} tokens; finish reason {reason}: {ends.get(str(reason), '?')}"
    yield from _text(row["response"], whole)
    noted = step.noted("rollout_log_probs", "samples", address.key)
    if noted is not None and row["response_tokens"]:
        mean = noted[1] / row["response_tokens"]
        yield f"rollout log-probs: sum {noted[1]:.6g}, mean {mean:.4g} nats per token"
    if "token_ids" in row:
        yield f"tokens: {_shortened(row['token_ids'], whole)}"
        yield f"log-probs: {_shortened(row['log_probs'], whole)}"


def _text(text: str, whole: bool, most: int = 1200) -> Iterator[str]:
    left_out = len(text) - most
    if not whole and left_out > 0:
        half = most // 2
        text = f"{text[:half]}\n[… {left_out} characters; --whole shows them …]\n{text[-half:]}"
    yield from (f"| {line}" for line in text.split("\n"))


def _shortened(values: list[object], whole: bool, most: int = 24) -> str:
    if whole or len(values) <= most:
        return str(values)
    half = most // 2
    return (
        f"[{', '.join(map(str, values[:half]))}, … {len(values) - most} more …, "
        f"{', '.join(map(str, values[-half:]))}]"
    )
