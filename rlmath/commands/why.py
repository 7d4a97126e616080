"""``rlmath why RUN STEP/PROBLEM/INDEX``: the records of one sample."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.commands.explain.outcomes import reward_parts
from rlmath.commands.grade import REASONS
from rlmath.commands.report.tokens import Trace, Traces, columns_of
from rlmath.errors import UserError, printable
from rlmath.monitor.digests import PHASES
from rlmath.monitor.run_folder import Row, RunFolder, row_key
from rlmath.monitor.run_settings import flat
from rlmath.rollout.ledger import LEDGER_FILE, Event, events

# Characters of a text, numbers of a list, and rows of a table that are shown without --whole.
_CHARACTERS, _NUMBERS, _ROWS = 1200, 24, 8
_ENDS = {
    "stop": "the model ended it",
    "length": "it was cut off at the limit",
    "failed": "its tools did not work, and nothing graded it",
}


@dataclass(frozen=True)
class Address:
    step: int
    problem: str
    index: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read one; a problem's id may hold slashes. Raises argparse.ArgumentTypeError: it is
        none."""
        step, _, rest = text.partition("/")
        problem, _, index = rest.rpartition("/")
        if not problem or not step.isdigit() or not index.isdigit():
            raise argparse.ArgumentTypeError(
                f"{text} is not STEP/PROBLEM/INDEX, such as 12/train.jsonl:345/0"
            )
        return cls(int(step), problem, int(index))

    @property
    def key(self) -> str:
        """``PROBLEM/INDEX``, within its step."""
        return f"{self.problem}/{self.index}"


@dataclass(frozen=True)
class Recorded:
    """Everything that a run has recorded of a sample."""

    run: RunFolder
    address: Address
    row: Row
    group: Sequence[Row]  # All samples of its problem, the sample among them, by index.
    settings: Mapping[str, Any]  # Settings in force when it was sampled, nested as in YAML.
    # Digests and numbers of the step that sampled it; None: they are gone.
    sampled: Mapping[str, Any] | None
    # The step that trained on it, which is a later one when its group was carried over; None: no
    # step has.
    trained_in: int | None
    # Digests and numbers of that step; None: gone, or no such step.
    update: Mapping[str, Any] | None
    # Its tokens in the update; None: they were not kept (runner.token_samples).
    trace: Trace | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, runner.run_dir")
    parser.add_argument(
        "sample",
        type=Address.parse,
        metavar="STEP/PROBLEM/INDEX",
        help="as `rlmath explain` and the report name it, such as 12/train.jsonl:345/0",
    )
    parser.add_argument("--whole", action="store_true", help="print long texts and tables in full")


def run(options: argparse.Namespace) -> int:
    """Print the records of a sample. Returns the exit code. Raises UserError: the run, the step or
    the sample is not there."""
    found = read_sample(RunFolder(options.run_dir), options.sample)
    _show("Prompt", prompt_lines(found, options.whole))
    _show("Generation", generation_lines(found, options.whole))
    _show("Grading", grading_lines(found))
    _show("Rewards", reward_lines(found))
    _show(f"Group: {len(found.group)} samples of {options.sample.problem}", group_lines(found))
    _show("Update", update_lines(found, options.whole))
    return 0


def read_sample(run: RunFolder, address: Address) -> Recorded:
    """Recorded values of a sample. Raises UserError: the step or the sample is not there, or the
    run's settings are not."""
    if address.step not in run.training_steps:
        raise run.no_samples(f"step {address.step}")
    rows = {row_key(row): row for row in run.rows(run.training_steps[address.step])}
    group = sorted(
        (row for row in rows.values() if row["problem_id"] == address.problem),
        key=lambda row: int(row["index"]),
    )
    if address.key not in rows:
        raise UserError(_not_there(address, rows, group))
    row, settings = rows[address.key], run.settings_of(address.step)
    sampled = run.details(address.step)
    step = training_step(run.folder, row, group, sampled)
    update = None if step is None else run.details(step)
    trace = Traces(run.folder).of(row)
    return Recorded(run, address, row, group, settings, sampled, step, update, trace)


def training_step(
    run_dir: Path, row: Row, group: Sequence[Row], details: Mapping[str, Any] | None
) -> int | None:
    """The step that trained on a sample, by the ledger, which has the seed of its group's first
    sample, or without one by the digests of the step that sampled it; ``None``: none has."""
    path = run_dir / LEDGER_FILE
    if row.get("dropped") is not None:
        return None
    by_digests = details is None or row_key(row) in details["keys"].get("sequences", [])
    without_ledger = int(row["step"]) if by_digests else None
    if not path.is_file():
        return without_ledger
    who = row["problem_id"], group[0].get("seed")
    ordinals: set[int] = set()
    for event in events(path):
        if event["event"] == Event.admitted:
            if (event["problem"], event.get("seed", who[1])) == who:
                ordinals.add(event["group"])
        elif event["event"] == Event.trained and event["group"] in ordinals:
            return int(event["step"])
        elif event["event"] == Event.lost and event["group"] in ordinals:
            return without_ledger
    return None if ordinals else without_ledger


def prompt_lines(found: Recorded, whole: bool) -> Iterator[str]:
    data = flat(found.settings.get("data", {}))
    template = "as it is in the data"
    if data.get("apply_chat_template"):
        system = data.get("system_prompt")
        said = "no system prompt" if system is None else f"system prompt: {system!r}"
        template = f"chat template of the model's tokenizer; {said}"
    if data.get("prompt_template") is not None:
        template += f"; data.prompt_template {data['prompt_template']!r}"
    yield f"rendering: {template}"
    yield from _text(found.row["prompt"], whole)
    yield f"{found.row.get('prompt_tokens')} tokens"


def generation_lines(found: Recorded, whole: bool) -> Iterator[str]:
    row, rollout = found.row, flat(found.settings.get("rollout", {}))
    version, spans = row.get("weights_version"), row.get("spans") or ()
    yield (
        f"seed {row.get('seed')}, engine {row.get('engine')}, weights version {version} (those "
        f"after step {version}), temperature {rollout.get('temperature')}, at most "
        f"{rollout.get('max_response_tokens')} tokens"
    )
    if len(spans) > 1:
        parts = ", ".join(f"{one} from token {start}" for one, start in spans)
        yield f"sampled by {len(spans)} versions of the weights: {parts}"
    reason = str(row.get("finish_reason"))
    yield f"{row['response_tokens']} tokens; finish reason {reason}: {_ENDS.get(reason, '?')}"
    yield from turn_lines(row, whole)
    for words, total in _numbers(found.sampled, "samples", found.address.key):
        if words == "the rewards":
            continue
        mean = total / max(1, row["response_tokens"])
        yield f"{words}: sum {total:.6g}, mean {mean:.4g} per token"
    if "token_ids" in row:
        yield f"tokens: {_shorten(row['token_ids'], whole)}"
        yield f"log-probs: {_shorten(row['log_probs'], whole)}"


def turn_lines(row: Row, whole: bool) -> Iterator[str]:
    """The response; in several turns by segment, with its calls."""
    if "segments" not in row:
        yield from _text(row["response"], whole)
        return
    yield f"{row['model_tokens']} tokens are the model's own; only those count in the loss"
    for number, (tool, status, seconds) in enumerate(row["calls"], start=1):
        yield f"call {number}: {tool}, {status}, {seconds:.3g} s"
    if "failure" in row:
        yield f"no answer came: {row['failure']}"
    for kind, tokens, text in row["segments"]:
        yield f"── {kind}, {tokens} tokens"
        yield from _text(text, whole)


def grading_lines(found: Recorded) -> Iterator[str]:
    row = found.row
    if row.get("status") == "ungraded":
        yield "no reward asked the grader about this sample"
        return
    method = str(row.get("method"))
    yield f"{row.get('status')}: answer {row.get('answer')!r}, accepted {row.get('accepted')}"
    yield f"the layer {method} decided: {REASONS.get(method, method)}"


def reward_lines(found: Recorded) -> Iterator[str]:
    row = found.row
    for name, value in (row.get("rewards") or {}).items():
        yield f"{name}: could not score it" if value is None else f"{name}: {value:g}"
    if row.get("reward") is None:
        yield "total: none; it takes no part in its group's statistics nor in the loss"
        return
    parts = [f"{name} {part:+g}" for name, part in reward_parts(row, found.settings).items()]
    yield f"total: {row['reward']:g}; weighted: {', '.join(parts)}"


def group_lines(found: Recorded) -> Iterator[str]:
    for row in found.group:
        here = "→" if row["index"] == found.row["index"] else " "
        reward, answer = row.get("reward"), row.get("answer")
        said = "no answer" if answer is None else f"answer {str(answer)[:40]!r}"
        yield (
            f"{here} {row['index']:>3}  reward {'none' if reward is None else f'{reward:g}':>8}  "
            f"{row.get('status')!s:<10} {row['response_tokens']:>6} tokens  {said}"
        )
    if found.row.get("dropped") is not None:
        yield f"algorithm.filter dropped the group: {found.row['dropped']}"


def update_lines(found: Recorded, whole: bool) -> Iterator[str]:
    """The records of the step that trained on the sample: sums over its tokens, its minibatch
    and weight in the loss, and its tokens."""
    if found.trained_in is None or not (found.update or {}).get("keys", {}).get("sequences"):
        yield _not_trained(found)
        return
    if found.trained_in != found.address.step:
        yield f"the group was carried over: step {found.trained_in} trained on it"
    for words, total in _numbers(found.update, "sequences", found.address.key):
        yield f"{words}: sum over its {found.row['response_tokens']} tokens {total:.6g}"
    if found.trace is None:
        yield (
            "minibatch, weight in the loss and values by token are kept of a few samples of a step "
            "(runner.token_samples), and this is none of them"
        )
        return
    sample = found.trace[0]
    yield (
        f"minibatch {sample.minibatch + 1}; each of its tokens weighs {sample.weight:.6g} in the "
        "minibatch's loss"
    )
    if sample.discarded:
        yield "the minibatch was discarded: nothing was learned from it"
    yield from _table(columns_of(found.row, found.trace) or {}, whole)


def _not_trained(found: Recorded) -> str:
    if found.row.get("dropped") is not None:
        return f"none: algorithm.filter dropped the group ({found.row['dropped']})"
    if found.trained_in is None:
        last = found.run.last_step or found.address.step
        return f"none yet: the group is carried over, and no step up to {last} has trained on it"
    if found.update is None:
        return "not known: the step's file with digests is gone (runner.samples_keep_gib)"
    return "none: the step was skipped, as too few groups passed the filter"


def _numbers(details: Mapping[str, Any] | None, of: str, key: str) -> Iterator[tuple[str, float]]:
    """Words and number of each phase that recorded one of a sample or a sequence."""
    keys: list[str] = (details or {}).get("keys", {}).get(of, [])
    if details is None or key not in keys:
        return
    for phase in PHASES:
        numbers = details["numbers"].get(phase.name) if phase.of == of else None
        if numbers is not None and isinstance(number := numbers[keys.index(key)], int | float):
            yield phase.words, number


def _not_there(address: Address, rows: Mapping[str, Row], group: Sequence[Row]) -> str:
    if group:
        return f"problem {address.problem} has samples 0 to {len(group) - 1} in step {address.step}"
    problems = list(dict.fromkeys(row["problem_id"] for row in rows.values()))
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return (
        f"step {address.step} did not sample the problem {address.problem}; it sampled "
        f"{', '.join(problems[:5])}{more}"
    )


def _show(title: str, lines: Iterable[str]) -> None:
    print(title)
    print("".join(f"  {printable(line)}\n" for line in lines), flush=True)


def _text(text: str, whole: bool) -> Iterator[str]:
    left_out = len(text) - _CHARACTERS
    if not whole and left_out > 0:
        half = _CHARACTERS // 2
        text = f"{text[:half]}\n[… {left_out} characters; --whole shows them …]\n{text[-half:]}"
    yield from (f"| {line}" for line in text.split("\n"))


def _shorten(values: Sequence[object], whole: bool) -> str:
    if whole or len(values) <= _NUMBERS:
        return str(values)
    half = _NUMBERS // 2
    ends = [", ".join(map(str, part)) for part in (values[:half], values[-half:])]
    return f"[{ends[0]}, … {len(values) - _NUMBERS} more …, {ends[1]}]"


def _table(columns: Mapping[str, Sequence[Any]], whole: bool) -> Iterator[str]:
    """Values by token; without ``whole`` those on either end of the response."""
    yield "token  " + "".join(f"{name:>12}" for name in columns)
    rows = list(zip(*columns.values(), strict=True))
    for place, row in enumerate(rows):
        if whole or len(rows) <= _ROWS or not _ROWS // 2 <= place < len(rows) - _ROWS // 2:
            yield f"{place:>5}  " + "".join(f"{value:>12.5g}" for value in row)
        elif place == _ROWS // 2:
            yield f"  ... {len(rows) - _ROWS} more"
