"""The data that travels between the parts, in the order in which it travels.

    Problem -> Sample -> GradedSample -> Group -> TrainingBatch -> MicroBatch

Each is frozen: a part makes new data from the data that it got. Letters in shapes: ``N``
sequences of a batch, ``T`` tokens of all of them (prompt and response), ``R`` response tokens of
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from rlmath.utils.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "cut", "failed"]
# Weights versions and the first token that each sampled, ascending in both, the first token 0.
Spans = tuple[tuple[int, int], ...]
# Who wrote a segment of a response: the model, a tool or environment, or the template around that.
SegmentKind = Literal["model", "observation", "glue"]
# Segments, each with the place of its first token, ascending, the first token 0. A last one
# without a token says what comes next.
Segments = tuple[tuple[SegmentKind, int], ...]
ONE_TURN: Segments = (("model", 0),)
# Fields of a TrainingBatch with an item for each sequence.
_BY_SEQUENCE = (
    *("prompt_lengths", "response_lengths", "route_lengths"),
    *("group_ids", "weights_versions", "rewards"),
)


@dataclass(frozen=True)
class Problem:
    """A prompt with its accepted answers."""

    id: str  # Stable over runs: the data file's name and the row in it.
    prompt: str  # The text that the engine continues, with any chat markers already in it.
    prompt_token_ids: tuple[int, ...]  # prompt as tokens, which engine and actor read.
    answers: tuple[str, ...]  # Accepted answers; any of them is right.
    # All fields of the data row, unchanged, for rewards that take them.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # The chat messages that prompt was rendered from, for rewards that want them; None: without a
    # chat template.
    messages: tuple[Mapping[str, str], ...] | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion of one problem.

    Tokens and log-probs stay arrays from the engine's step loop to the ranks: a step has tens of
    millions of them, and an object for each would cost five times the memory and most of the
    driver's time.
    """

    problem_id: str  # The problem that it answers.
    index: int  # Its place in the problem's group, from 0.
    # [n] int32, response tokens, the end-of-sequence token included when it was sampled; in several
    # turns, also the observations between them.
    token_ids: NDArray[np.int32]
    # [n] float32, the engine's log-probability of each of token_ids, under the distribution that it
    # sampled from (temperature applied), and 0 where the model sampled none. vLLM computes it in
    # float32.
    log_probs: NDArray[np.float32]
    text: str  # The response without special tokens.
    # stop (the model ended it), length (truncated: a budget ran out), cut (unfinished: a later step
    # continues it), or failed (its environment could not answer, so nothing grades it). Training
    # sees no cut ones.
    finish_reason: FinishReason
    spans: Spans  # Weights versions that sampled, each with the place of its first token.
    seed: int  # Seed of this request's random stream.
    engine: int  # Index of the engine that produced it.
    # [m, MoE layers, experts of a token] uint8, or int16 beyond 256 experts: the experts that the
    # engine sent the first m tokens of prompt and response to. The last token that was sampled went
    # through no layer, so m is one less than the tokens. None: the engine returned none.
    routes: NDArray[Any] | None = None
    # Digest of the prompt's tokens as the engine read them, see
    # rlmath.engines.requests.prompt_digest; None: not known.
    prompt_digest: int | None = None
    segments: Segments = ONE_TURN  # Who wrote which tokens.
    # Tool, status and seconds of each call, in order.
    calls: tuple[tuple[str, str, float], ...] = ()
    texts: tuple[str, ...] = ()  # The text of each segment with tokens; empty: text is one turn.
    failure: str | None = None  # Why its environment could not answer, if it failed.
    environment_reward: float | None = None  # The environment's; None: it gave none.

    @property
    def weights_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.spans[-1][0]

    @property
    def awaits_observation(self) -> bool:
        """Whether the model has ended its turn and no answer follows yet."""
        kind, start = self.segments[-1]
        return kind != "model" and start == len(self.token_ids)

    def pieces(self) -> list[tuple[SegmentKind, int, int]]:
        """Kind, first token and last but one of each segment that has tokens."""
        ends = [*(start for _, start in self.segments[1:]), len(self.token_ids)]
        found = ((kind, a, b) for (kind, a), b in zip(self.segments, ends, strict=True))
        return [one for one in found if one[1] < one[2]]

    @property
    def model_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        if self.segments == ONE_TURN:
            return len(self.token_ids)
        return sum(b - a for kind, a, b in self.pieces() if kind == "model")

    def model_mask(self) -> NDArray[np.bool_]:
        """``[n]``, which tokens the model sampled."""
        import numpy as np

        mask: NDArray[np.bool_] = np.zeros(len(self.token_ids), np.bool_)
        for kind, a, b in self.pieces():
            mask[a:b] = kind == "model"
        return mask

    def model_part(self) -> Sample:
        """The sample as rewards and measures of the model's own writing see it: tokens and text of
        the model's segments alone."""
        if self.segments == ONE_TURN:
            return self
        mask, pieces = self.model_mask(), zip(self.pieces(), self.texts, strict=True)
        return replace(
            self,
            token_ids=self.token_ids[mask],
            # An evaluation's journal keeps none.
            log_probs=self.log_probs[mask] if len(self.log_probs) else self.log_probs,
            text="".join(text for (kind, _, _), text in pieces if kind == "model"),
            spans=((self.weights_version, 0),),
            routes=None,
            segments=ONE_TURN,
            texts=(),
        )

    def log_prob(self) -> float:
        """Log-probability of the whole response, in nats, summed in float64."""
        return float(self.log_probs.sum(dtype="float64"))

    def token_ages(self) -> NDArray[np.uint8]:
        """``[n]``, how many versions older than the last token's weights each token's are."""
        import numpy as np

        versions, starts = np.array(self.spans, np.int64).T
        lengths = np.diff(starts, append=len(self.token_ids))
        return np.repeat(versions[-1] - versions, lengths).astype(np.uint8)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        mine, theirs = dict(vars(self)), dict(vars(other))
        names = ("token_ids", "log_probs", "routes")
        arrays = [(mine.pop(name), theirs.pop(name)) for name in names]
        return mine == theirs and all(_bytes(a) == _bytes(b) for a, b in arrays)

    def __hash__(self) -> int:
        return hash((self.problem_id, self.index, self.seed))


@dataclass(frozen=True)
class Repetition:
    """How much a response repeats itself; see ``monitor/repetition.py``."""

    compression_ratio: float  # Compression ratio of the end of its text.
    repeated_ngrams: float  # Share of the n-grams of its last tokens that came before.
    is_repetitive: bool  # Whether either is past its limit.


@dataclass(frozen=True)
class GradedSample:
    """A sample with its reward."""

    sample: Sample  # The completion.
    # Weighted total of the rewards; None when nothing could score it. Such a sample takes no part
    # in its group's statistics nor in the loss.
    reward: float | None
    correct: bool | None  # Whether the final answer is right; None when no grader looked.
    # The grader's status (correct, wrong, no_answer, bad_gold, timeout, error), or ungraded.
    status: str
    answer: str | None = None  # The answer that the grader extracted.
    # Each reward separately, by name, before weighting.
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    # The grader's layer that decided, such as exact or sympy; None when no grader looked.
    method: str | None = None
    # Whether the grader saw the box alone, as the text beside it is in a language that has no table
    # of words.
    untabled: bool = False
    repetition: Repetition | None = field(default=None, compare=False)  # None if not measured.


@dataclass(frozen=True)
class Group:
    """All samples of one problem."""

    problem: Problem
    samples: tuple[GradedSample, ...]


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences to train on, ragged and without padding: rows are laid end to end."""

    tokens: Tensor  # [T] int32, prompt and response of each sequence.
    prompt_lengths: Tensor  # [N] int64, in tokens.
    response_lengths: Tensor  # [N] int64, in tokens.
    group_ids: Tensor  # [N] int64; sequences of one problem share one.
    weights_versions: Tensor  # [N] int64, that sampled the last token of each sequence.
    rewards: Tensor  # [N] float32.
    engine_log_probs: Tensor  # [R] float32, from the engine that sampled.
    loss_mask: Tensor  # [R] bool; false tokens are read but take no part in the loss.
    # [R] float32, per response token; None until they are computed.
    advantages: Tensor | None = None
    # [R] float32, of the actor before this step's first update.
    old_log_probs: Tensor | None = None
    # [R] float32, of the reference model; None when there is none.
    ref_log_probs: Tensor | None = None
    # [R] float32, factors of the tokens' weights in the policy term alone (mismatch correction, top
    # entropy), not in the KL and entropy terms; None: 1 each.
    policy_factors: Tensor | None = None
    # [R] float32, of the value model before each token; None: there is none.
    values: Tensor | None = None
    returns: Tensor | None = None  # [R] float32, the targets of the value model.
    # [R] uint8, how many weights versions older than those of its sequence's last token the weights
    # that sampled it are; None: 0 each, no sequence has two versions.
    token_ages: Tensor | None = None
    # [R] float32, of a teacher at temperature 1; None: there is none.
    teacher_log_probs: Tensor | None = None
    # [S, MoE layers, experts of a token], those of each sequence's sample end to end (see
    # Sample.routes); None: no sample has any.
    routes: Tensor | None = None
    # [N] int64, how many tokens of each sequence, from its first, have routes; S together.
    route_lengths: Tensor | None = None
    # [R] bool, which response tokens the model sampled, and not an environment; None: all. Only
    # those may be in the loss.
    model_mask: Tensor | None = None

    def __len__(self) -> int:
        return int(self.prompt_lengths.numel())

    @property
    def sequence_lengths(self) -> Tensor:
        """``[N]`` int64, prompt and response together, in tokens."""
        return self.prompt_lengths + self.response_lengths

    @property
    def loss_token_counts(self) -> Tensor:
        """``[N]`` int64, response tokens of each sequence that take part in the loss."""
        return _true_counts(self.loss_mask, self.response_lengths)

    @property
    def model_lengths(self) -> Tensor:
        """``[N]`` int64, response tokens of each sequence that the model sampled."""
        if self.model_mask is None:
            return self.response_lengths
        return _true_counts(self.model_mask, self.response_lengths)

    def part(self, first: int, count: int) -> TrainingBatch:
        """``count`` adjacent sequences; shares this batch's memory."""

        def rows(lengths: Tensor) -> slice:
            return slice(int(lengths[:first].sum()), int(lengths[: first + count].sum()))

        return self._rows(slice(first, first + count), rows, lambda values, chosen: values[chosen])

    def select(self, indices: Sequence[int]) -> TrainingBatch:
        """The batch of these sequences alone, in this order."""
        chosen = torch.as_tensor(list(indices), dtype=torch.int64)
        return self._rows(chosen, lambda lengths: _slices(lengths, chosen), _concatenate)

    def _rows(
        self,
        sequences: Any,
        rows_of: Callable[[Tensor], Any],
        pick: Callable[[Tensor, Any], Tensor],
    ) -> TrainingBatch:
        """Some of the sequences. ``rows_of``: by the number of a field's items in each sequence,
        which of them to take. ``pick``: takes them."""
        rows = {"tokens": rows_of(self.sequence_lengths)}
        if self.route_lengths is not None:
            rows["routes"] = rows_of(self.route_lengths)
        responses = rows_of(self.response_lengths)
        found: dict[str, Tensor] = {}
        for name in (one.name for one in fields(TrainingBatch)):
            values = getattr(self, name)
            if values is not None and name in _BY_SEQUENCE:
                found[name] = values[sequences]
            elif values is not None:
                found[name] = pick(values, rows.get(name, responses))
        return TrainingBatch(**found)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the model together, packed into one row of ``t`` tokens."""

    # Indices into the batch that was cut, in the order in which they are packed.
    sequences: tuple[int, ...]
    # Tokens of all of them, each whole (the row has fewer where they share a prompt), before any
    # padding that a kernel asks for.
    num_tokens: int


def _bytes(array: Any) -> bytes | None:
    import numpy as np

    return None if array is None else np.asarray(array).tobytes()


def _true_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    """``[N]``, how many of each row's items are true."""
    ends = torch.cumsum(lengths, 0)
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(mask, 0)])
    return counts[ends] - counts[ends - lengths]


def _slices(lengths: Tensor, rows: Tensor) -> list[slice]:
    """Where ``rows`` are in an array whose row ``i`` has ``lengths[i]`` items."""
    ends = torch.cumsum(lengths, 0)
    starts = ends - lengths
    return [slice(*ends) for ends in zip(starts[rows].tolist(), ends[rows].tolist(), strict=True)]


def _concatenate(values: Tensor, slices: Sequence[slice]) -> Tensor:
    return torch.cat([values[one] for one in slices]) if slices else values[:0]
