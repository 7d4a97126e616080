"""Triton's softmax of a chunk of logits, in Triton's interpreter; prints what it found as JSON."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from rlmath.actor import softmax_tables, softmax_triton
from rlmath.actor.head import Head, HeadLinear
from rlmath.actor.logprobs import Distribution, VocabSlice
from rlmath.commands.selfcheck.kernels import compare_fingerprints, compare_softmax
from rlmath.commands.selfcheck.record import Record
from rlmath.device import choose_platform
from tests.contracts.fake_cuda import LiveBytes

TEMPERATURE = 0.5


def main():
    softmax_triton.BLOCK = 16  # Several blocks of a small vocabulary.
    found = {
        "exact": {name: exact(*case) for name, case in CASES.items()},
        "head": head(),
        "gradcheck": gradcheck(),
        "selfcheck": selfcheck(),
        "row_bytes": row_bytes(),
        "ranks": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (folder,), nprocs=2)
        found["ranks"] = [json.loads(Path(folder, f"{one}.json").read_text()) for one in (0, 1)]
    json.dump(found, sys.stdout)


def row_bytes(rows=64):
    """Bytes that forward and backward allocate, over the rows, without a group of tensor ranks."""
    vocab = VocabSlice(0, 40, TEMPERATURE, None, lambda x: x.sum(1))
    logits = torch.randn(rows, 50)
    local, mine = torch.arange(rows) % 40, torch.ones(rows, dtype=torch.bool)
    with LiveBytes("cpu") as forward:
        log_z, log_probs, entropy = softmax_triton.statistics(vocab, logits, local, mine)
    with LiveBytes("cpu") as backward:
        softmax_triton.write_gradient(
            vocab, logits, log_z, entropy, local, mine, log_probs, entropy
        )
    return [forward.peak / rows, backward.peak / rows]


# Type of the logits; rows, entries with padding, valid ones; what the logits are multiplied with.
CASES = {
    "float32": (torch.float32, 7, 50, 45, 3.0),
    "one block": (torch.float32, 3, 9, 9, 3.0),
    "whole blocks": (torch.float32, 3, 48, 48, 3.0),
    "a block of padding": (torch.float32, 3, 80, 33, 3.0),
    "one row": (torch.float32, 1, 50, 45, 3.0),
    "no row": (torch.float32, 0, 50, 45, 3.0),
    "wide": (torch.float32, 5, 50, 45, 3e3),
    "equal": (torch.float32, 5, 50, 45, 0.0),
    "bfloat16": (torch.bfloat16, 7, 50, 45, 3.0),
    "float64": (torch.float64, 7, 50, 45, 3.0),
}


def exact(dtype, rows, width, valid, scale):
    """Largest differences from torch's softmax and autograd in float64, over the largest value."""
    random = torch.Generator().manual_seed(rows + width)
    logits = (scale * torch.randn(rows, width, generator=random)).to(dtype)
    local = torch.randint(valid, (rows,), generator=random)
    mine = torch.arange(rows) % 3 != 1
    of_log_probs, of_entropy = torch.randn(2, rows, generator=random, dtype=torch.float64)
    kept = torch.promote_types(dtype, torch.float32)
    vocab = VocabSlice(0, valid, TEMPERATURE, None, lambda x: x.sum(1))

    x = logits.double().requires_grad_()
    log_p = (x[:, :valid] / TEMPERATURE).log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    log_z = (x[:, :valid] / TEMPERATURE).logsumexp(1)
    log_probs = log_p.gather(1, local[:, None]).squeeze(1)
    # A target of another slice has no logit here: its log-prob is 0 - log Z of what is left.
    answer = softmax_triton.statistics(vocab, logits, local, mine)
    top = (x[:, :valid] / TEMPERATURE).amax(1) if rows else log_z
    wanted = (log_z, torch.where(mine, log_probs, top - log_z), entropy)
    result = {
        name: difference(one, other)
        for name, one, other in zip(("log_z", "log_probs", "entropy"), answer, wanted, strict=True)
    }
    for name, weight in (("gradient", of_entropy), ("without_entropy", None)):
        (grad,) = torch.autograd.grad(
            torch.where(mine, of_log_probs * log_probs, -of_log_probs * log_z).sum()
            + (0.0 if weight is None else (weight * entropy).sum()),
            x,
            retain_graph=True,
        )
        written = logits.clone()
        softmax_triton.write_gradient(
            vocab,
            written,
            log_z.detach().to(kept),
            entropy.detach().to(kept),
            local,
            mine,
            of_log_probs.to(kept),
            None if weight is None else weight.to(kept),
        )
        result[name] = difference(written, grad)
        result["padding"] = float(written[:, valid:].abs().sum())
    return result


def difference(one, other):
    if not other.numel():
        return 0.0
    other = other.detach()
    return float((one.double() - other).detach().abs().max() / other.abs().max().clamp_min(1.0))


def run_head(triton, distribution, given):
    """Log-probs, entropies, and gradients of hidden states and weight."""
    hidden, weight = (given[name].clone().requires_grad_() for name in ("hidden", "weight"))
    found = Head(weight, HeadLinear(triton=triton), False).log_probs(
        hidden, given["rows"], given["targets"], distribution
    )
    (found[0] * given["factor"] - 0.3 * found[1] * given["factor"] ** 2).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [*found, hidden.grad, weight.grad]


def material(vocab, padded, dtype=torch.float32):
    random = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(40, 12, generator=random, dtype=dtype),
        "weight": torch.randn(padded, 12, generator=random, dtype=dtype),
        "rows": torch.randperm(40, generator=random)[:25].sort().values,
        "targets": torch.randint(vocab, (25,), generator=random),
        "factor": torch.randn(25, generator=random, dtype=dtype),
    }


def head():
    """The whole function, against that of tables."""
    distribution = Distribution(TEMPERATURE, 50)
    one, other = (run_head(triton, distribution, material(50, 56)) for triton in (True, False))
    return max(difference(a, b.double()) for a, b in zip(one, other, strict=True))


def gradcheck():
    """Check two rows and a vocabulary of 20 entries: the interpreter takes a millisecond a row."""
    random = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 3, generator=random, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(22, 3, generator=random, dtype=torch.float64, requires_grad=True)
    product, distribution = HeadLinear(triton=True), Distribution(TEMPERATURE, 20)
    rows, targets = torch.arange(2), torch.tensor([3, 19])

    def function(hidden, weight):
        return Head(weight, product, False).log_probs(hidden, rows, targets, distribution)

    return bool(torch.autograd.gradcheck(function, (hidden, weight)))


def selfcheck():
    """Record of ``rlmath selfcheck gpu``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record.jsonl")
        compare_softmax(choose_platform("cpu"), Record(path), 40, 3, torch.float32)
        compare_fingerprints(choose_platform("cpu"), Record(path), rows=9)
        return [json.loads(line) for line in path.read_text().splitlines()]


def rank(number, folder):
    """One of two tensor ranks, for a vocabulary in both slices and in the first alone."""
    softmax_triton.BLOCK = 16
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    found = {}
    for vocab in (50, 20):
        given = material(vocab, 56)
        alone = run_head(False, Distribution(TEMPERATURE, vocab), given)
        own = slice(28 * number, 28 * (number + 1))
        distribution = Distribution(TEMPERATURE, vocab, number, dist.group.WORLD)
        split = run_head(True, distribution, given | {"weight": given["weight"][own]})
        alone[3] = alone[3][own]
        found[str(vocab)] = max(
            difference(a, b.double()) for a, b in zip(split, alone, strict=True)
        )
    Path(folder, f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


assert softmax_tables.statistics.__annotations__ == softmax_triton.statistics.__annotations__

if __name__ == "__main__":
    main()
