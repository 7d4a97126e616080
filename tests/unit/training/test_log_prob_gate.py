"""The gate, the mismatch metrics and the correction, on a batch with planted differences."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_step import StepResult
from rlmath.actor.settings import UpdateResult
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.correction import CorrectionConfig, CorrectionTotals
from rlmath.config.load import load
from rlmath.config.schema import RunnerConfig
from rlmath.monitor import open_monitor
from rlmath.training import gate
from rlmath.training.checks.base import AfterUpdate, BeforeUpdate
from rlmath.training.checks.log_probs import LogProbAgreement
from rlmath.training.gate import TAIL_SEEDS, AlignmentError
from rlmath.training.mismatch import choose_correction, correction_metrics, mismatch_metrics
from tests.support.batches import batch_of_lengths

GIVEN = ["model.path=tiny", "runner.run_dir=r"]


@pytest.fixture(autouse=True)
def experts(monkeypatch):
    """Number of experts of the model; the last one set counts."""
    found = [0]
    monkeypatch.setattr(
        gate, "read_model_spec", lambda _: SimpleNamespace(experts=found[-1], layers=2)
    )
    return found


def batch_of(differences, versions):
    """Sequences whose actor's log-probs are -1 and whose engine's are lower by ``differences``."""
    flat = torch.tensor([d for row in differences for d in row])
    return batch_of_lengths(
        [2] * len(differences),
        [len(row) for row in differences],
        weights_versions=torch.tensor(versions),
        engine_log_probs=-1.0 - flat,
        advantages=torch.ones_like(flat),
        old_log_probs=torch.full_like(flat, -1.0),
    )


def alignment_of(batch, stale_kv=False):
    """As two ranks report it, each its last sequence first."""
    parts = []
    for rank in range(min(2, len(batch))):
        rows = list(range(rank, len(batch), 2))[::-1]
        part = batch.select(rows)
        parts.append(
            Alignment.of_batch(
                part,
                part.old_log_probs,
                torch.zeros(part.loss_mask.numel()),
                4,
                places=torch.tensor(rows),
                stale_kv=stale_kv,
            )
        )
    return Alignment.join(parts)


def test_tokens_of_a_sequence_of_two_versions_count_by_their_own():
    """The first two tokens were sampled by version 2, and differ for a good reason."""
    batch = batch_of([[math.log(3.0), math.log(2.0), 1e-6], [0.0]], versions=[4, 4])
    ages = torch.tensor([2, 2, 0, 0], dtype=torch.uint8)
    batch = dataclasses.replace(batch, token_ages=ages)
    found = alignment_of(batch)
    assert found.fresh.tokens == 2 and found.fresh.abs_max == pytest.approx(1e-6, rel=0.2)
    assert found.farthest[found.places.argsort()][0, 1] == 2
    metrics = mismatch_metrics(found)
    assert metrics["mismatch/lag_2/token_count"] == metrics["mismatch/lag_0/token_count"] == 2
    assert metrics["mismatch/lag_2/mean_w"] == pytest.approx(2.5)
    assert "alignment/mean_exp_abs_diff" in check(session_of("model.dtype=float32"), batch)
    stale = dataclasses.replace(batch, token_ages=torch.tensor([2, 0, 0, 0], dtype=torch.uint8))
    with pytest.raises(AlignmentError, match="response token 1 of sequence 0"):
        check(session_of("model.dtype=float32"), stale)


def test_stale_keys_and_values_leave_responses_of_one_version_to_judge():
    """Sequence 0 is of versions 2 and 4, sequence 1 of 4 alone, sequence 2 of 3 alone."""
    batch = batch_of([[0.1, 0.2, 0.3], [1e-6, 0.0], [0.4]], versions=[4, 4, 3])
    ages = torch.tensor([2, 2, 0, 0, 0, 0], dtype=torch.uint8)
    batch = dataclasses.replace(batch, token_ages=ages)
    usual, found = alignment_of(batch), alignment_of(batch, stale_kv=True)
    assert usual.fresh.tokens == 3 and usual.fresh.abs_max == pytest.approx(0.3)
    assert found.fresh.tokens == 2 and found.fresh.abs_max == pytest.approx(1e-6, rel=0.2)
    farthest = found.farthest[found.places.argsort()][:, 0].tolist()
    assert farthest == pytest.approx([0.0, 1e-6, 0.4], rel=0.2)
    # The effect of importance weights is measured over all tokens, as ever.
    shown = [mismatch_metrics(one) for one in (found, usual)]
    apart = {name for name in shown[0] if shown[0][name] != shown[1][name]}
    assert apart and all(name.startswith("alignment/") for name in apart)


def test_the_farthest_token_of_each_sequence_is_of_its_newest_weights():
    """The first of equal ones; none in an empty response, nor where no token can be compared."""
    rows = [[], [0.1, math.nan, math.nan], [0.25, 0.5, 0.5], [0.9, 0.125], [0.9, 0.3], []]
    ages = torch.tensor([*(0, 0, 0), *(0, 0, 0), *(2, 0), *(2, 0)], dtype=torch.uint8)
    sampled = torch.tensor([True] * 9 + [False])
    batch = batch_of(rows, versions=[4] * len(rows))
    batch = dataclasses.replace(batch, token_ages=ages, model_mask=sampled)
    found = Alignment.of_batch(batch, batch.old_log_probs, torch.zeros(10), 4).farthest
    places = [(0.0, 0), (math.inf, 1), (0.5, 1), (0.125, 1), (0.0, 0), (0.0, 0)]
    assert found[:, :2].tolist() == [list(row) for row in places]
    assert found[3, 2:].tolist() == [-1.0, -1.125] and math.isnan(found[1, 3])
    assert not found[[0, 5]].any()


class Actor:
    """Log-probs of -1 that another rounding moves by ``noise``, at every second token; and weights
    whose fingerprints are planted."""

    def __init__(self, noise, fingerprints=None):
        self.noise, self.fingerprints = noise, fingerprints or {"a": 1, "b": 2}
        self.probed: list[int] = []

    def log_probs(self, batch, name="policy", seed=0):
        values = torch.full((batch.engine_log_probs.numel(),), -1.0)
        if name != "policy":
            self.probed.append(len(batch))
            values[::2] += self.noise
        return values, values

    def weights_fingerprints(self, part=None):
        return self.fingerprints


def session_of(*overrides, noise=0.0, sleeps=False, data_parallel=1):
    pool = SimpleNamespace(
        weights_version=4,
        spec=SimpleNamespace(sleeps=sleeps, device="cuda", enforce_eager=False, adapters=None),
        weights_fingerprints=lambda part=None: [{"a": 1, "b": 2}],
    )
    return SimpleNamespace(
        config=load([*GIVEN, *overrides]),
        layout=SimpleNamespace(actor=SimpleNamespace(data_parallel=data_parallel)),
        sampling=SimpleNamespace(pool=pool),
        actor=Actor(noise),
        check=LogProbAgreement(),
    )


def check(session, batch, step=1, gate=True, updated=False, monitor=None):
    """The metrics of a step's alignment, and what its check says."""
    plan = StepPlan(gate=gate)
    trained = SimpleNamespace(sequences=batch)
    alignment = alignment_of(batch)
    if updated:
        report = StepResult(None, None, UpdateResult([], {}, None, alignment=alignment))
        found = session.check.after_update(
            AfterUpdate(session, monitor, step, plan, trained, report, (), {})
        )
    else:
        found = session.check.before_update(
            BeforeUpdate(session, monitor, step, plan, (), (), trained, alignment)
        )
    return mismatch_metrics(alignment) | found


def test_the_gate_looks_at_samples_of_the_present_weights_alone():
    session = session_of("alignment.max_mean_exp_abs_diff=1.05")
    assert check(session, batch_of([[0.0, 0.0], [0.7]], [4, 3]))["alignment/max_abs_diff"] == 0.0
    apart = batch_of([[0.0, 0.0], [0.7]], versions=[3, 4])
    with pytest.raises(
        AlignmentError, match=r"2\.013753 over 1 tokens.*response token 0 of sequence 1"
    ):
        check(session, apart)
    assert check(session, apart, gate=False)["alignment/mean_exp_abs_diff"] > 2
    old = check(session, batch_of([[0.0, 0.0], [0.7]], [3, 3]))
    assert not [name for name in old if name.startswith("alignment")]
    assert not session.actor.probed, "a limit that is given needs no measurement"


def test_a_sensitive_token_is_rounded_in_several_ways_before_it_counts():
    """One rounding moves no token by more than 0.01, another one as far as the engine is."""
    one_token = batch_of([[0.3] + [0.0] * 79, [0.0] * 80], [4, 4])

    class Sensitive(Actor):
        def log_probs(self, batch, name="policy", seed=0):
            values, entropy = super().log_probs(batch, name, seed)
            if name == "noise" and seed == TAIL_SEEDS[5]:
                assert len(batch) == 1, "the others are not far away"
                values[0] += 0.2
            return values, entropy

    session = session_of("model.dtype=bfloat16")
    session.actor = Sensitive(0.01)
    check(session, one_token)
    session.actor = Actor(0.01)
    with pytest.raises(AlignmentError, match=r"largest difference 0\.3 nats \(limit 0\.03\)"):
        check(session, one_token)


def test_engines_in_fp8_are_judged_by_the_actors_own_products_in_fp8():
    """FP8 moves ten times as far as rounding alone; the plain noise is reported beside."""

    class InFp8(Actor):
        def log_probs(self, batch, name="policy", seed=0):
            values, _ = super().log_probs(batch, name, seed)
            if name == "quantized_noise":
                values[::2] += 9 * self.noise
            return values, values

    away = batch_of([[0.15, 0.0] * 8], versions=[4])
    for overrides, passes in (
        (["rollout.quantization=fp8"], True),
        (["rollout.kv_cache_dtype=fp8"], True),
        ([], False),
    ):
        session = session_of("model.dtype=bfloat16", *overrides)
        session.actor = InFp8(0.01)
        if passes:
            found = check(session, away)
            plain = found["alignment/unquantized_noise_excess"]
            assert plain == pytest.approx(0.5 * math.expm1(0.01), rel=1e-3)
            assert found["alignment/noise_excess"] == pytest.approx(0.5 * math.expm1(0.1), rel=1e-3)
        else:
            with pytest.raises(AlignmentError):
                check(session, away)
    with pytest.raises(AlignmentError, match="in FP8 is"):
        session = session_of("model.dtype=bfloat16", "rollout.quantization=fp8")
        session.actor = InFp8(0.01)
        check(session, batch_of([[0.35, 0.0] * 8], versions=[4]))


def test_limits_are_multiples_of_the_rounding_noise():
    """Half of the tokens move by 0.02: the mean moves by 0.01, of which twice is allowed."""
    noisy = [0.02, 0.0] * 8
    for factor, passes in ((1.9, True), (2.1, False)):
        session = session_of("model.dtype=bfloat16", noise=0.02)
        batch = batch_of([[factor * one for one in noisy]], versions=[4])
        if passes:
            found = check(session, batch)
            assert found["alignment/noise_excess"] == pytest.approx(0.0101, abs=1e-4)
            assert found["alignment/noise_ratio"] == pytest.approx(1.92, abs=0.02)
        else:
            with pytest.raises(AlignmentError, match=r"limit 1\.0202.*2 and 3 times that"):
                check(session, batch)
    # One token alone, which the mean does not show.
    session = session_of("model.dtype=bfloat16", noise=0.02)
    one = batch_of([[0.061] + [0.0] * 15], versions=[4])
    with pytest.raises(AlignmentError, match=r"largest difference 0\.061 nats \(limit 0\.06\)"):
        check(session, one)


def test_float32_has_least_limits():
    session = session_of("model.dtype=float32", noise=0.0)
    assert check(session, batch_of([[9e-6] * 4], versions=[4]))
    with pytest.raises(AlignmentError, match=r"limit 1\.00001\)"):
        check(session, batch_of([[1.1e-5] * 4], versions=[4]))
    with pytest.raises(AlignmentError, match=r"limit 0\.001\)"):
        check(session, batch_of([[1.1e-3] + [0.0] * 999], versions=[4]))


def test_a_few_tokens_of_an_moe_may_take_other_experts(experts):
    """A rounding decides between two nearly equal ones; with other weights all tokens differ."""
    session = session_of("model.dtype=float32")
    rest = [[1e-6] * 499 for _ in range(4)]
    one = batch_of([[0.34, *rest[0]], *rest[1:]], versions=[4] * 4)
    with pytest.raises(AlignmentError, match=r"limit 0\.001\)"):
        check(session, one)
    experts.append(8)
    assert check(session, one)["alignment/rerouted_tokens"] == 1
    assert "alignment/rerouted_tokens" not in check(session, batch_of(rest, [4] * 4), step=2)
    # Too many; the others beyond the limits too; not a number; other weights.
    many = batch_of([[0.34] * 3 + rest[0], [0.2] * 2 + rest[1], *rest[2:]], versions=[4] * 4)
    with pytest.raises(AlignmentError):
        check(session, many, step=50)
    others = batch_of([[0.34, *rest[0]], [2e-5] * 2000], versions=[4] * 2)
    with pytest.raises(AlignmentError):
        check(session, others, step=100)
    with pytest.raises(AlignmentError):
        check(session, batch_of([[math.nan, *rest[0]], *rest[1:]], [4] * 4), step=150)
    session.actor.fingerprints = {"a": 1, "b": 3}
    with pytest.raises(AlignmentError, match="b differs"):
        check(session, one, step=200)


def test_a_token_of_an_moe_may_make_up_the_mean(experts):
    """One below the limit of the largest difference, of a model whose roundings change routes: the
    mean of exp|difference| of a healthy Qwen3-MoE was above its limit for one token of 2,560."""
    session = session_of("model.dtype=float32")
    one = batch_of([[9e-4] + [1e-6] * 39], versions=[4])
    with pytest.raises(AlignmentError, match=r"limit 1\.00001\)"):
        check(session, one)
    experts.append(8)
    assert check(session, one)["alignment/rerouted_tokens"] == 1
    with pytest.raises(AlignmentError):
        check(session, batch_of([[9e-4] * 2 + [1e-6] * 38], versions=[4]), step=50)
    session.actor.fingerprints = {"a": 1, "b": 3}
    with pytest.raises(AlignmentError, match="b differs"):
        check(session, one, step=100)


def test_not_a_number_is_outside_any_limit():
    session = session_of("model.dtype=bfloat16", noise=0.02)
    with pytest.raises(AlignmentError, match="response token 1 of sequence 0"):
        check(session, batch_of([[0.0, math.nan]], versions=[4]))


def test_an_actor_that_computes_no_numbers_is_no_difference_to_the_engine():
    session = session_of("model.dtype=float32")
    batch = batch_of([[0.0, math.nan], [0.0, 0.0]], versions=[4, 4])
    log_probs = torch.tensor([-1.0, math.nan, -1.0, -1.0])
    for engine in (log_probs, batch.engine_log_probs.nan_to_num(-1.0)):
        one = dataclasses.replace(batch, old_log_probs=log_probs, engine_log_probs=engine)
        with pytest.raises(AlignmentError, match=r"token 1 of sequence 0.* is nan.*optimizer\.lr"):
            check(session, one, step=2)
        with pytest.raises(AlignmentError, match=r"is nan.*weights in model\.path"):
            check(session, one, step=1)
    assert session.actor.probed == []


def test_the_noise_is_measured_again_before_a_step_fails_and_now_and_then():
    session = session_of("model.dtype=bfloat16", noise=0.02)
    near, far = batch_of([[0.02, 0.0]], versions=[4]), batch_of([[0.06, 0.0]], versions=[4])
    # As after a resume: step 3 has to measure. What it finds is no curve.
    for step in range(3, 8):
        assert not any("noise" in name for name in check(session, near, step))
    assert session.actor.probed == [1]
    session.actor.noise = 0.06  # The weights have changed.
    check(session, far, 8)
    assert session.actor.probed == [1, 1]
    logged = [
        step for step in range(9, 70) if "alignment/noise_ratio" in check(session, near, step)
    ]
    assert logged == [33, 65]
    assert session.actor.probed == [1] * 4
    check(session, near, 120)  # With alignment.every=60.
    assert session.actor.probed == [1] * 5


def test_the_probe_is_a_few_sequences_of_the_whole_batch(monkeypatch):
    monkeypatch.setattr(gate, "PROBE_TOKENS", 12)
    batch = batch_of([[0.0] * 4] * 8, versions=[4, 4, 3, 4, 4, 4, 4, 4])
    probed = batch.weights_versions, batch.sequence_lengths
    # Sequences of six tokens: two have the 12 that are wanted.
    assert gate.probe(*probed, 4, least=1) == [0, 4]
    # As many as the data-parallel ranks need, of older weights if there is no other way.
    assert gate.probe(*probed, 4, least=4) == [0, 1, 4, 6]
    assert gate.probe(*probed, 4, least=8) == list(range(8))
    assert gate.probe(*probed, 3, least=2) == [0, 2]
    assert gate.probe(*probed, 9, least=2) == []
    # Their differences are not judged.
    session = session_of("model.dtype=bfloat16", noise=0.02, data_parallel=2)
    check(session, batch_of([[0.0] * 4, [0.5] * 4], versions=[4, 3]))
    assert session.actor.probed == [2]


@pytest.mark.parametrize(
    ("sent", "sleeps", "updated", "said"),
    [
        ({"a": 1, "b": 2}, False, False, r"all 2 tensors .* are equal .* forward pass"),
        ({"a": 1, "b": 3}, False, False, r"engine 0, at weights version 4, .* b differs"),
        ({"a": 1, "b": 3}, True, False, "sleeping engines drop their weights"),
        ({"a": 1, "b": 3}, False, True, "the actor was updated since"),
    ],
)
def test_a_failure_says_which_tensors_differ(sent, sleeps, updated, said):
    session = session_of("model.dtype=bfloat16", noise=0.02, sleeps=sleeps)
    session.actor.fingerprints = sent
    with pytest.raises(AlignmentError, match=said):
        check(session, batch_of([[0.5, 0.5]], versions=[4]), updated=updated)


def test_gate_distinguishes_actor_noise_from_engine_mismatch():
    session = session_of("model.dtype=bfloat16", noise=0.02)
    apart = batch_of([[0.0, 0.0], [0.0, 0.5], [0.0]], versions=[4, 4, 4])
    with pytest.raises(AlignmentError, match=r"token 1 of sequence 1.* the same log-prob again"):
        check(session, apart)
    # The engine was right: the actor's pass over the step was not.
    wrong = dataclasses.replace(
        apart,
        old_log_probs=torch.tensor([-1.0, -1.0, -1.0, -1.5, -1.0]),
        engine_log_probs=torch.full((5,), -1.0),
    )
    with pytest.raises(AlignmentError, match=r"now computes -1\.0000: its own .* do not repeat"):
        check(session_of("model.dtype=bfloat16", noise=0.02), wrong)


def test_gate_limits_repeated_diagnoses():
    session = session_of("model.dtype=bfloat16", noise=0.02)
    apart = batch_of([[0.5, 0.5]], versions=[4])
    for step in range(3, 3 + gate.NOISE_EVERY):
        with pytest.raises(
            AlignmentError, match="forward pass" if step == 3 else "See the message of step 3"
        ):
            check(session, apart, step)
        assert session.actor.probed == [1] * (1 if step < 33 else 2)
    with pytest.raises(AlignmentError, match="forward pass"):
        check(session, apart, 3 + gate.NOISE_EVERY)


def test_a_failed_gate_stops_or_warns(tmp_path, capsys):
    apart = batch_of([[0.5, 0.5], [0.7]], versions=[4, 4])
    session = session_of("alignment.on_fail=stop")
    with open_monitor(tmp_path, RunnerConfig(), 3) as monitor:
        with pytest.raises(AlignmentError, match="rlmath validate"):
            check(session, apart, monitor=monitor)
        assert check(session, apart, 6, gate=False, monitor=monitor)
        warned = session_of("alignment.on_fail=warn")
        assert "warning" not in capsys.readouterr().err
        assert check(warned, apart, monitor=monitor)
        assert "mean exp|logp_actor - logp_engine| is 1.77" in capsys.readouterr().err


def test_auto_writes_down_what_it_took_and_why(tmp_path, capsys):
    same = alignment_of(batch_of([[0.0, 0.0], [0.0]], versions=[0, 0])).loss
    apart = alignment_of(batch_of([[0.0, 0.0], [math.log(8.0)]], versions=[0, 0])).loss
    auto = CorrectionConfig("auto")
    with open_monitor(tmp_path, RunnerConfig(), 3) as monitor:
        chosen = [
            choose_correction(auto, seen, monitor, step)
            for step, seen in enumerate((same, apart, apart), start=1)
        ]
    assert [one.kind for one in chosen] == ["none", "token_mask", "token_mask"]
    lines = [json.loads(x) for x in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [line["choice"] for line in lines] == ["none", "token_mask", "token_mask"]
    assert "effective sample size" in lines[1]["reason"]
    assert capsys.readouterr().out.count("takes token_mask") == 1
    totals = CorrectionTotals(3, 2, 1, 0, 0, 2.0)
    figures = correction_metrics(chosen[1], totals)
    assert figures["correction/rejected_tokens"] == pytest.approx(1 / 3)
    assert figures["correction/kind"] == 2
    # Totals of ranks add up.
    both = correction_metrics(chosen[1], totals + CorrectionTotals(3, 2, 0, 1, 1, 3.0))
    assert both["correction/rejected_tokens"] == pytest.approx(1 / 6)
    assert both["correction/mean_weight"] == pytest.approx(5 / 6)
