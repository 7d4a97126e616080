"""Straightforward float64 implementations, in loops over Python numbers, to compare with.

Written from the formulas in docs/algorithms.md and not from the code under test.
"""

import math
from fractions import Fraction
from itertools import combinations


def groups_of(group_ids):
    table = {}
    for index, group in enumerate(group_ids):
        table.setdefault(group, []).append(index)
    return table


def mean(values):
    """Exact, then rounded once: the mean of equal numbers is that number."""
    return float(sum(map(Fraction, values)) / len(values))


def std(values):
    if len(values) < 2:
        return 0.0
    m = mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - 1))


def repeat(values, counts):
    return [v for v, n in zip(values, counts, strict=True) for _ in range(int(n))]


def _with_reward(rewards, members):
    return [i for i in members if not math.isnan(rewards[i])]


def dr_grpo(rewards, group_ids):
    out = [0.0] * len(rewards)
    for members in groups_of(group_ids).values():
        scored = _with_reward(rewards, members)
        for i in scored:
            out[i] = rewards[i] - mean([rewards[j] for j in scored])
    return out


def grpo(rewards, group_ids, epsilon=1e-6, leave_one_out=False):
    out = [0.0] * len(rewards)
    for members in groups_of(group_ids).values():
        scored = _with_reward(rewards, members)
        for i in scored:
            base = [rewards[j] for j in scored if not leave_one_out or j != i]
            if len(scored) > 1:
                spread = std([rewards[j] for j in scored])
                out[i] = (rewards[i] - mean(base)) / (spread + epsilon)
    return out


def rloo(rewards, group_ids):
    out = [0.0] * len(rewards)
    for members in groups_of(group_ids).values():
        scored = _with_reward(rewards, members)
        for i in scored:
            others = [rewards[j] for j in scored if j != i]
            out[i] = rewards[i] - mean(others) if others else 0.0
    return out


def whiten_tokens(values, counts, epsilon=1e-6):
    tokens = repeat(values, counts)
    if len(set(tokens)) < 2:
        return [0.0] * len(values)
    m, s = mean(tokens), std(tokens)
    return [(v - m) / (s + epsilon) if n else 0.0 for v, n in zip(values, counts, strict=True)]


def reinforce_pp(rewards, group_ids, token_counts):
    counts = [0 if math.isnan(r) else n for r, n in zip(rewards, token_counts, strict=True)]
    return whiten_tokens([0.0 if math.isnan(r) else r for r in rewards], counts)


def reinforce_pp_baseline(rewards, group_ids, token_counts):
    counts = [0 if math.isnan(r) else n for r, n in zip(rewards, token_counts, strict=True)]
    return whiten_tokens(dr_grpo(rewards, group_ids), counts)


def batch_std(rewards, group_ids, epsilon=1e-6):
    spread = std([r for r in rewards if not math.isnan(r)])
    return [a / (spread + epsilon) for a in dr_grpo(rewards, group_ids)]


def gdpo(table, group_ids, weights):
    columns = [grpo([row[k] for row in table], group_ids) for k in range(len(weights))]
    total = [
        sum(w * c[i] for w, c in zip(weights, columns, strict=True)) for i in range(len(table))
    ]
    counts = [0 if all(math.isnan(v) for v in row) else 1 for row in table]
    return whiten_tokens(total, counts)


def pass_at_k(rewards, group_ids, k, epsilon=1e-6):
    """By going through every set of k samples."""
    out = [0.0] * len(rewards)
    for members in groups_of(group_ids).values():
        scored = _with_reward(rewards, members)
        if not scored:
            continue
        size = min(k, len(scored))
        sets = [(s, float(any(rewards[j] > 0 for j in s))) for s in combinations(scored, size)]
        m = mean([r for _, r in sets])
        spread = math.sqrt(m * (1 - m))
        for i in scored:
            mine = [r for s, r in sets if i in s]
            out[i] = (mean(mine) - m) / (spread + epsilon)
    return out


def gae(rewards, values, lengths, gamma, lam):
    """From the definition: the discounted sum of temporal differences."""
    advantages, start = [], 0
    for n in lengths:
        r, v = rewards[start : start + n], [*values[start : start + n], 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            advantages.append(sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, n)))
        start += n
    return advantages


def token_weights(kind, mask, lengths, group_ids, constant_length=None):
    sequence = repeat(range(len(lengths)), lengths)
    counts = [
        sum(m for m, s in zip(mask, sequence, strict=True) if s == i) for i in range(len(lengths))
    ]
    taking_part = [i for i, n in enumerate(counts) if n]
    groups = {group_ids[i] for i in taking_part}
    in_group = {g: sum(counts[i] for i in taking_part if group_ids[i] == g) for g in groups}
    out = []
    for m, s in zip(mask, sequence, strict=True):
        if not m:
            out.append(0.0)
            continue
        n_sequences = len(taking_part)
        out.append(
            {
                "token_mean": lambda: 1 / sum(counts),
                "seq_mean_token_mean": lambda: 1 / n_sequences / counts[s],  # noqa: B023
                "seq_mean_token_sum": lambda: 1 / n_sequences,  # noqa: B023
                "seq_sum_constant": lambda: 1 / n_sequences / constant_length,  # noqa: B023
                "prompt_mean": lambda: 1 / len(groups) / in_group[group_ids[s]],  # noqa: B023
            }[kind]()
        )
    return out


def policy_losses(name, log_probs, old, advantages, mask, sequence, s):
    """Loss of each unmasked token (0 at others); one advantage may differ from token to token."""
    ratio = [math.exp(a - b) if m else 1.0 for a, b, m in zip(log_probs, old, mask, strict=True)]
    logs = [a - b if m else 0.0 for a, b, m in zip(log_probs, old, mask, strict=True)]
    low, high = 1 - getattr(s, "clip_low", 1), 1 + getattr(s, "clip_high", math.inf)
    clip = lambda x: min(max(x, low), high)  # noqa: E731

    def over_sequence(values, t):
        mine = [v for v, m, q in zip(values, mask, sequence, strict=True) if m and q == sequence[t]]
        return math.exp(mean(mine))

    def cap(loss, a):
        return min(loss, -s.dual_clip * a) if s.dual_clip is not None and a < 0 else loss

    def surrogate(r, a):
        return cap(-min(r * a, clip(r) * a), a)

    out = []
    for t, a in enumerate(advantages):
        if not mask[t]:
            out.append(0.0)
        elif name == "ppo_clip":
            out.append(surrogate(ratio[t], a))
        elif name in ("gspo", "gspo_token"):
            out.append(surrogate(over_sequence(logs, t), a))
        elif name == "cispo":
            out.append(-clip(ratio[t]) * a * log_probs[t])
        elif name == "sapo":
            tau = s.tau_positive if a > 0 else s.tau_negative
            out.append(-4 / tau / (1 + math.exp(-tau * (ratio[t] - 1))) * a)
        elif name == "gmpo":
            bounded = [
                math.log(min(r, high) if b > 0 else max(r, low) if b < 0 else r)
                for r, b in zip(ratio, advantages, strict=True)
            ]
            out.append(cap(-a * over_sequence(bounded, t), a))
        elif name == "dppo":
            p, q = math.exp(log_probs[t]), math.exp(old[t])
            if s.divergence.name == "tv":
                far = abs(p - q) > s.limit
            else:
                far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) > s.limit
            away = (a > 0 and p > q) or (a < 0 and p < q)
            out.append(0.0 if far and away else cap(-ratio[t] * a, a))
        elif name == "reinforce":
            out.append(-a * log_probs[t])
    return out
