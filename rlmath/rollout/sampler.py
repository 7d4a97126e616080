"""The groups of a step: problems sampled and graded, kept or dropped and replaced."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlmath.algorithms.advantages import ADVANTAGES
from rlmath.algorithms.curriculum import CURRICULA, staged_length
from rlmath.algorithms.dynamic_sampling import GroupPool, PoolCounts
from rlmath.algorithms.filters import drop_reasons
from rlmath.batching.from_groups import apply_truncation_penalty
from rlmath.config.actor import RoutingReplay
from rlmath.config.options import CURRICULUM_OPTIONS, FILTER_OPTIONS
from rlmath.config.rollout import has_turns, keeps_kv, overlap_of
from rlmath.config.schema import Config
from rlmath.data import Stream
from rlmath.engines.requests import Request
from rlmath.rollout.collect import LOOK_EVERY_S, Collector, Grading, SamplingCancelled
from rlmath.rollout.group_state import group_from_state, group_to_state
from rlmath.rollout.imposed_lengths import with_imposed_length
from rlmath.rollout.journal import SampleJournal
from rlmath.rollout.lag import LengthTotals, lag_metrics
from rlmath.rollout.ledger import Event, Ledger, LedgerError
from rlmath.rollout.live_group import LiveGroup
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.round import Round, Sampled
from rlmath.rollout.schedule import live_target, steps_that_train
from rlmath.rollout.seeds import in_environment, requests_for
from rlmath.rollout.step_sampling import SamplingParts, StepSampling
from rlmath.types import Group, Problem


class Sampler:
    """Takes problems from a stream and has them sampled until a step has its groups.

    One thread may be in :meth:`generate` while another one calls :meth:`poll`, :meth:`take`,
    :meth:`stop` and :meth:`cancel`.

    Args:
        at_least_groups: Fewest groups of a step.
        ledger: The run's ledger; ``None``: one in memory.
        journal: The run's journal; ``None``: a crash loses unfinished samples.
        on_kept: Called with each group that passed the filter, while others are sampled.
    """

    def __init__(
        self,
        config: Config,
        stream: Stream,
        at_least_groups: int = 1,
        ledger: Ledger | None = None,
        journal: SampleJournal | None = None,
        on_kept: Callable[[Group], None] = lambda _: None,
    ) -> None:
        algorithm = config.algorithm
        self._config, self._stream = config, stream
        self._at_least = at_least_groups
        self._groups: GroupPool[Group] = GroupPool(
            algorithm.prompts_per_step,
            algorithm.filter,
            reads_rewards=ADVANTAGES.traits(algorithm.advantage).reads_rewards,
            options=FILTER_OPTIONS.of(config),
        )
        curriculum = CURRICULA.get(algorithm.curriculum.kind)
        self._rates = curriculum(algorithm.curriculum, CURRICULUM_OPTIONS.of(config))
        # Number of problems requested so far, over all steps, which orders groups.
        self._asked = 0
        self.ledger = ledger or Ledger()
        self.journal = journal or SampleJournal()
        self._on_kept = on_kept
        self._overlap = overlap_of(config.rollout)
        self._max_lag = self._overlap.max_lag
        self._wants_routes = config.actor.routing_replay is RoutingReplay.engine
        # Last step that may train each group that was admitted under other settings and may exceed
        # the present ones' age.
        self._last_steps: dict[int, int] = {}
        # ``K`` and ``G`` of the live groups that a checkpoint brought, until the next step begins.
        self._resumed_with: list[int] | None = None
        # Unfinished groups, and the steps that admitted those that wait for an update.
        self._live: dict[int, LiveGroup] = {}
        self._kept_since: dict[int, int] = {}
        # Steps that trained fewer groups than prompts_per_step, which makes others older.
        self._short_steps: list[int] = []
        self._lengths = LengthTotals()
        # Number of groups to have running or waiting.
        self._live_target = algorithm.prompts_per_step
        # The current sampling, the grading of the one before, and events not yet in the ledger.
        self._work: StepSampling | None = None
        self._grading: Grading | None = None
        self._events: list[dict[str, Any]] = []
        self.round: Round | None = None  # Sampled groups that no step has taken yet.
        # Guards the sampler; notified when there are new requests or grades.
        self.changed = threading.Condition()
        # Whether sampling has to end, or to fail.
        self._stopped = self._cancelled = False
        # Problems skipped in this step because of their cooldown.
        self._skipped = 0

    @property
    def is_sampled(self) -> bool:
        """Whether the next step's sampling is done, so that :meth:`take` can follow."""
        return self.round is not None and not self.round.is_open

    def generate(
        self,
        step: int,
        pool: RolloutPool,
        collector: Collector,
        while_grading: Callable[[], Any] = contextlib.nullcontext,
        weights: str | None = None,
        *,
        ahead: bool = False,
    ) -> Round:
        """Sample and grade until a step has its groups, or may request no more; where responses are
        cut at the weight sync, until :meth:`stop`. Raises SamplingCancelled: after :meth:`cancel`.

        Args:
            step: The optimization step that trains the groups, from 1.
            while_grading: A context manager for the time in which engines are idle and grades are
                awaited.
            weights: Identity of the sampling weights, for the journal; ``None``: unknown.
            ahead: Whether the step before is still in progress: the engines have that one's
                weights, and the ledger records the groups as admitted in it.
        """
        assert not self.is_sampled, f"step {step} was already sampled"
        with self.changed:
            work = self.open(step - ahead, collector, while_grading, is_taken=ahead)
            requests = work.begin()
        more = functools.partial(self._more, work)
        # A pool that is to be cut waits for it.
        until_cut = {"outlasts_engines": True} if self._overlap.cuts_at_sync else {}
        with self.journal.step(step, weights) as journal:
            for sample in pool.generate(requests, more, journal, **until_cut):
                with self.changed:
                    work.take(sample)
            journal.print_reused(step)
        return self.close(step - ahead)

    def _more(self, work: StepSampling, engines_idle: bool) -> list[Request]:
        with self.changed:
            while not self._stopped:
                if self._cancelled:
                    raise SamplingCancelled
                requests = work.more(engines_idle)
                self.changed.notify_all()
                if requests or not (engines_idle and self._overlap.cuts_at_sync):
                    return requests
                self.changed.wait(LOOK_EVERY_S)
        return []

    def stop(self) -> None:
        """Let :meth:`generate` add no more requests. It ends when the pool is cut."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()

    def cancel(self) -> None:
        """Let :meth:`generate` fail within seconds, at the next answer of an engine."""
        self._cancelled = True

    def open(
        self,
        step: int,
        collector: Collector,
        while_grading: Callable[[], Any] = contextlib.nullcontext,
        *,
        is_taken: bool = False,
    ) -> StepSampling:
        """Begin to sample; :meth:`close` ends it.

        Args:
            while_grading: See :meth:`generate`.
            is_taken: Whether the step has its groups already.
        """
        self._admit_resumed(step + is_taken)
        overlap, steps_left = self._overlap, self._max_lag
        if overlap.cuts_at_sync:  # Do not begin groups that no step will train on.
            steps_left = max(0, self._config.runner.steps - step)
        self._work = StepSampling(
            step,
            self._parts(step + is_taken, step, collector),
            self._live.values(),
            steps_left=steps_left,
            live_groups=None if overlap.cuts_at_sync else self._live_target,
            before=self._grading,
            is_taken=is_taken,
            while_grading=while_grading,
        )
        self._live = self._work.unfinished
        return self._work

    def poll(self) -> bool:
        """Take finished grades. Returns whether the step can take its groups."""
        with self.changed:
            if self._work is None:
                return self.is_sampled
            self._work.poll()
            return self._work.is_ready

    def take(self, step: int) -> Sampled:
        """Take the groups of a step, which is sampled, or ready while its sampling continues.

        In the latter case ``finished`` has these groups and those dropped since the step before.
        """
        with self.changed:
            work = self._work
            if work is not None:
                self._gather(work)
            done, self.round = self.round, None
            assert done is not None and done.step == step, f"step {step} was not sampled"
            groups, counts = self._pop(step)
            finished = [group for _, group in sorted(done.finished.items())]
            if work is not None:
                work.is_taken = True
                finished = [*groups, *(g for g in finished if g.problem.id in done.dropped)]
            metrics = done.metrics | self._metrics(counts, len(groups), step)
            if self._max_lag:
                self._lengths.add(done.finished.values(), groups)
                live = [sample for group in self._live.values() for sample in group.known_samples()]
                metrics |= lag_metrics(groups, step - 1) | self._lengths.bias(live)
        return Sampled(
            groups=tuple(groups),
            finished=tuple(finished),
            metrics=metrics,
            shortage=self._shortage(counts, len(groups)),
            dropped=done.dropped,
            engines=done.engines,
        )

    def close(self, step: int) -> Round:
        """End the sampling of a step, whose remaining samples are all finished or cut. Returns the
        groups that no step has taken yet."""
        with self.changed:
            work, self._work, self._stopped = self._work, None, False
            assert work is not None and work.step == step, f"step {step} is not being sampled"
            self._live = dict(sorted(work.unfinished.items()))
            # Pending grades are not asked for again.
            is_graded = any(group.is_complete for group in self._live.values())
            self._grading = work.grading if is_graded else None
            done = self._gather(work)
            if self._overlap.budget_tokens is not None:
                target = self._config.algorithm.prompts_per_step
                self._live_target = live_target(len(work.cut_groups), target, self._max_lag)
            if work.is_taken:
                self._write_events(step)
            return done

    def _gather(self, work: StepSampling) -> Round:
        """Add what was graded since the last call to the round of the step that takes next."""
        finished, dropped, events = work.split()
        # In an order independent of engines: the first event of each group comes first.
        self._events = sorted(events, key=lambda event: event["group"])
        step = work.step + work.is_taken
        self._update_rates(finished, step)
        before = self.round or Round(step, {}, {})
        self.round = Round(
            step,
            before.finished | finished,
            before.dropped | dropped,
            before.metrics | self._work_metrics(work),
            before.engines,
            is_open=self._overlap.cuts_at_sync,
        )
        return self.round

    def _write_events(self, step: int) -> None:
        """Write the outcomes of groups since the step took its own."""
        events, self._events = self._events, []
        live = self._live.keys() | {ordinal for ordinal, _ in self._groups.carried_over}
        admitted = {event["group"] for event in events if event["event"] == Event.admitted}
        left = sorted(live & admitted)
        events += [{"event": Event.carried_over, "group": ordinal} for ordinal in left]
        self.ledger.write(step, events)
        self.ledger.check(step, live)

    def _parts(self, step: int, now: int, collector: Collector) -> SamplingParts:
        """The shared parts of sampling for a step, where ``now`` is the step that admits."""
        algorithm = self._config.algorithm
        self._skipped, seen = 0, self._ids_in_use()

        def admit(count: int) -> list[LiveGroup]:
            problems = self._next_problems(count, step, seen)
            return [self._admit(problem, step, now) for problem in problems]

        return SamplingParts(
            kept=self._groups,
            kept_since=self._kept_since,
            last_steps=self._last_steps,
            groups_per_step=algorithm.prompts_per_step,
            overlap=self._overlap,
            keeps_kv=keeps_kv(self._config.rollout),
            admit=admit,
            grading=collector.begin(algorithm.group_size),
            graded=self._with_penalty,
            on_kept=self._on_kept,
        )

    def _pop(self, step: int) -> tuple[list[Group], PoolCounts]:
        """The step's groups; writes the fate of all groups to the ledger."""
        self._admit_resumed(step)
        groups, counts = self._groups.pop(self._at_least)
        left = {ordinal for ordinal, _ in self._groups.carried_over}
        trained = sorted(self._kept_since.keys() - left)
        self._check_lag(step, trained)
        for ordinal in trained:
            del self._kept_since[ordinal]
        live = sorted(left | self._live.keys())
        self._last_steps = {o: last for o, last in self._last_steps.items() if o in live}
        events = [{"event": Event.trained, "group": ordinal} for ordinal in trained]
        events += [{"event": Event.carried_over, "group": ordinal} for ordinal in live]
        happened, self._events = self._events, []
        self.ledger.write(step, [*happened, *events])
        self.ledger.check(step, live)
        if len(groups) < self._config.algorithm.prompts_per_step:
            self._short_steps.append(step)
        return groups, counts

    def max_response_tokens(self, step: int) -> int:
        """Longest response in a step, counted from 1, in tokens."""
        stages = self._config.algorithm.curriculum.length_stages
        if not stages:
            return self._config.rollout.max_response_tokens
        return staged_length(
            step - 1, [(stage.first_step - 1, stage.max_response_tokens) for stage in stages]
        )

    def _ids_in_use(self) -> dict[str, int]:
        """Occurrence number, within its step, of each problem that is live or whose group was
        dropped for the next step."""
        ids = [group.problem.id for group in self._live.values()]
        if self.round is not None:
            ids += [group.problem.id for group in self.round.finished.values()]
        ids += [group.problem.id for _, group in self._groups.carried_over]
        seen: dict[str, int] = {}
        for id_ in ids:
            seen[self._data_id(id_)] = max(seen.get(self._data_id(id_), 0), _number(id_))
        return seen

    def _update_rates(self, finished: Mapping[int, Group], step: int) -> None:
        if not self._config.algorithm.curriculum.cooldown:
            return
        for _, group in sorted(finished.items()):
            graded = [s.correct for s in group.samples if s.correct is not None]
            self._rates.update(self._data_id(group.problem.id), sum(graded), len(graded), step)

    def _next_problems(self, count: int, step: int, seen: dict[str, int]) -> list[Problem]:
        """The next problems off cooldown, with their own ids.

        At an epoch's end a problem may come twice in a step. When a whole epoch is on cooldown,
        its problems are taken nevertheless.
        """
        cooldown = self._config.algorithm.curriculum.cooldown
        problems: list[Problem] = []
        in_a_row = 0
        while len(problems) < count:
            (problem,) = self._stream.next(1)
            waits = cooldown and self._rates.is_on_cooldown(problem.id, step)
            if waits and in_a_row < len(self._stream):
                self._skipped += 1
                in_a_row += 1
                continue
            in_a_row = in_a_row if waits else 0
            number = seen[problem.id] = seen.get(problem.id, 0) + 1
            if number > 1:
                problem = dataclasses.replace(problem, id=f"{problem.id}#{number}")
            problems.append(problem)
        return problems

    def _admit(self, problem: Problem, step: int, now: int) -> LiveGroup:
        config = self._config
        ordinal = self._asked
        self._asked += 1
        requests = requests_for(
            [problem],
            samples=config.algorithm.group_size,
            max_tokens=self.max_response_tokens(step),
            temperature=config.rollout.temperature,
            run_seed=config.runner.seed,
            step=step,
            wants_routes=self._wants_routes,
        )
        if has_turns(config.rollout):
            requests = in_environment(requests, [problem])
        if config.rollout.ignore_eos:
            mean_tokens = config.rollout.imposed_mean_tokens
            requests = [with_imposed_length(one, mean_tokens) for one in requests]
        return LiveGroup(ordinal, now, problem, tuple(requests))

    def _with_penalty(self, group: Group) -> Group:
        algorithm = self._config.algorithm
        return apply_truncation_penalty(
            group, algorithm.truncated, algorithm.truncated_penalty, algorithm.truncated_factor
        )

    def _check_lag(self, step: int, trained: Sequence[int]) -> None:
        """Check that no group is trained later than ``rollout.max_lag`` allows."""
        if not self._max_lag:
            return
        for ordinal in trained:
            admitted = self._kept_since[ordinal]
            short = sum(1 for one in self._short_steps if one >= admitted)
            last = max(admitted + self._max_lag, self._last_steps.get(ordinal, 0))
            if step > last + short:
                raise LedgerError(
                    f"step {step} trains group {ordinal}, which step {admitted} admitted: "
                    f"{step - admitted} steps are more than the {last - admitted} of "
                    f"rollout.max_lag={self._max_lag} and {short} steps that trained too few "
                    "groups. This is a bug in rlmath."
                )

    def _admit_resumed(self, step: int) -> None:
        """Let live groups of a checkpoint, if admitted under other settings, be as old as it takes
        to train them under the present ones. ``step``: the next step."""
        before, self._resumed_with = self._resumed_with, None
        if before is None or before == self._lag_settings():
            return
        live = sorted(self._live.keys() | self._kept_since.keys())
        self._last_steps = steps_that_train(live, step, self._config.algorithm.prompts_per_step)

    def _lag_settings(self) -> list[int]:
        return [self._max_lag, self._config.algorithm.prompts_per_step]

    def _work_metrics(self, work: StepSampling) -> dict[str, float]:
        """Metrics that only the sampling has."""
        metrics: dict[str, float] = {}
        if self._config.algorithm.curriculum.cooldown:
            metrics["curriculum/skipped_problems"] = float(self._skipped)
        if self._overlap.cuts:
            unfinished = sum(group.unfinished for group in self._live.values())
            metrics |= {
                "sampling/live_groups": float(len(self._live)),
                "sampling/cut_samples": float(unfinished),
                "sampling/continued_samples": float(work.continued),
                "sampling/recomputed_tokens": float(work.recomputed_tokens),
            }
        return metrics

    def _data_id(self, problem_id: str) -> str:
        """The id in the data of a problem that may have occurred several times in a step."""
        return problem_id if problem_id in self._stream else problem_id.rpartition("#")[0]

    def _metrics(self, counts: PoolCounts, trained: int, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {
            "sampling/requested_groups": counts.requested,
            "sampling/kept_groups": counts.kept,
            **{f"sampling/dropped_{r}": counts.dropped.get(r, 0) for r in drop_reasons()},
            "sampling/carried_over_groups": counts.carried_over,
            "sampling/trained_groups": trained,
            "curriculum/max_response_tokens": self.max_response_tokens(step),
        }
        if counts.pass_rate is not None:
            metrics["sampling/pass_rate"] = counts.pass_rate
        if self._config.algorithm.curriculum.cooldown:
            metrics["curriculum/problems_on_cooldown"] = self._rates.on_cooldown(step + 1)
        return {name: float(value) for name, value in metrics.items()}

    def _shortage(self, counts: PoolCounts, trained: int) -> str:
        wanted = self._config.algorithm.prompts_per_step
        most_rounds = self._config.algorithm.filter.max_rounds
        # With one round no group is replaced, so smaller steps are what was chosen.
        if trained == wanted or (trained and most_rounds == 1):
            return ""
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(counts.dropped.items()))
        what = (
            f"trains on {trained} groups instead of prompts_per_step={wanted}"
            if trained
            else f"was skipped: only {counts.carried_over} of the required {self._at_least} groups "
            "passed the filter"
            + ("; they are carried over to the next step" if counts.carried_over else "")
        )
        return (
            f"{counts.requested} groups were sampled (algorithm.filter.max_rounds={most_rounds}); "
            f"dropped: {reasons or 'none'}. The step {what}"
        )

    # -- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Place in the data, groups that are not trained yet, and running pass rates."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The state of now, put into words when it is called: groups of a step are a lot to
        encode, and most steps make no checkpoint."""
        # Groups and samples do not change, only their containers.
        kept = sorted(self._groups.carried_over, key=lambda pair: pair[0])
        done = self.round
        live = [group.copy() for group in self._live.values()]
        in_use = [group.problem.id for _, group in kept] + [group.problem.id for group in live]
        if done is not None:
            in_use += [group.problem.id for group in done.finished.values()]
        plain: dict[str, Any] = {
            "stream": self._stream.snapshot([self._data_id(id_) for id_ in in_use])(),
            "asked": self._asked,
            "pass_rates": copy.deepcopy(self._rates.state()),
            "kept_since": [[ordinal, step] for ordinal, step in sorted(self._kept_since.items())],
            "short_steps": list(self._short_steps),
            "lengths": [list(self._lengths.finished), list(self._lengths.trained)],
            "live_target": self._live_target,
            "last_steps": [[ordinal, step] for ordinal, step in sorted(self._last_steps.items())],
            "lag_settings": self._lag_settings()
            if self._resumed_with is None
            else self._resumed_with,
            "tally": self._groups.tally(),
            "ledger_events": self.ledger.balance.events,
        }

        def encode() -> dict[str, Any]:
            self.ledger.sync()  # No resume without the events that the state counts.
            return plain | {
                "carried_over": [[order, group_to_state(group)] for order, group in kept],
                "live": [group.to_state() for group in live],
                "round": None if done is None else done.to_state(dict(kept)),
            }

        return encode

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint. Raises UserError: it was made with other data or in another
        order."""
        self._stream.load_state_dict(state["stream"])
        self._asked = int(state["asked"])
        self._rates.load_state(state["pass_rates"])
        carried_over = []
        for order, saved in state["carried_over"]:
            problem = self._problem(saved["problem_id"])
            carried_over.append((int(order), group_from_state(saved, problem)))
        self._groups.set_carried_over(carried_over)
        self._groups.set_tally(state["tally"])
        if (done := state["round"]) is not None:
            self.round = Round.from_state(done, dict(carried_over), self._problem)
        since, now = dict(state["kept_since"]), self.ledger.balance.step
        self._kept_since = {ordinal: since.get(ordinal, now) for ordinal, _ in carried_over}
        self._short_steps = list(state["short_steps"])
        self._lengths = LengthTotals(*(tuple(one) for one in state["lengths"]))
        self._live_target = state["live_target"]
        self._live = {
            saved["ordinal"]: LiveGroup.from_state(
                saved,
                self._problem(saved["problem_id"]),
                wants_routes=self._wants_routes,
                in_environment=has_turns(self._config.rollout),
            )
            for saved in state["live"]
        }
        self._last_steps = dict(state["last_steps"])
        self._resumed_with = state["lag_settings"]
        held = {ordinal: group.problem.id for ordinal, group in carried_over}
        held |= {ordinal: group.problem.id for ordinal, group in self._live.items()}
        self.ledger.adopt(held, state["ledger_events"])
        self.ledger.check(self.ledger.balance.step, held)

    def _problem(self, id_: str) -> Problem:
        return dataclasses.replace(self._stream[self._data_id(id_)], id=id_)


def _number(problem_id: str) -> int:
    """How often a problem had come in a step when it was given this id."""
    number = problem_id.rpartition("#")[2]
    return int(number) if "#" in problem_id and number.isdigit() else 1
