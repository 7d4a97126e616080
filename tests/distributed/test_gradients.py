"""Each parameter's gradient, of each family on each layout, is that of autograd on transformers.

On real gloo ranks, in float32, against float64 on one process. Ranks that have the same parameter
have the same gradient to the last bit, and the norm that clips counts every parameter once.
``test_megatron_faults.py`` shows what this finds.
"""

import itertools
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.model.parallel import Layout
from rlmath.model.spec import read_model_spec
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.hf_files import HfFolderReader
from tests.support.actors import build, in_float64, make_batch
from tests.support.models import make_config, perturb

DENSE = ("qwen2", "qwen3", "olmo3", "qwen3_5")
EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next")
# These add only the names of their files, or a part of another's.
MORE_DENSE = ("qwen2_tied", "llama3", "mistral", "phi3", "olmo2")
MORE_EXPERTS = ("qwen3_235b", "qwen3_5_moe")
# Their state is one rank's.
LINEAR = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
PLAN = StepPlan(objective=ObjectiveSettings(entropy_coef=0.01))
# Relative to the largest element: rounding in float32. Half a sum over two ranks would be 0.5.
LIMIT = 2e-4


@dataclass(frozen=True)
class Setup:
    """A layout, and what else decides who adds up which gradients."""

    layout: Layout
    sequence_parallel: bool = True
    distributed: bool = True
    overlap: bool = False
    # The output layer's gradient as on GPUs, which have no whole logits.
    logits: str = "whole"

    def __str__(self):
        return (
            f"{self.layout}{'' if self.sequence_parallel else ', no SP'}"
            f"{'' if self.distributed else ', optimizer on each rank'}"
            f"{', overlapped' if self.overlap else ''}"
            f"{', chunked' if self.logits == 'chunked' else ''}"
        )

    def families(self, dense, experts):
        """Families that this layout can train; see ``rlmath/checks/layout.py``."""
        layout = self.layout
        takes_experts = layout.context_parallel == 1 and (
            layout.tensor_parallel == 1 or self.sequence_parallel
        )
        found = (
            *(dense if layout.expert_parallel == 1 else ()),
            *(experts if takes_experts else ()),
        )
        return tuple(one for one in found if layout.context_parallel == 1 or one not in LINEAR)


COMMON = (
    Setup(Layout(2, 1, 2), logits="chunked"),
    # Dense models' default. Norms of heads are added up over tensor ranks all the same.
    Setup(Layout(2, 1, 1), sequence_parallel=False),
    Setup(Layout(1, 2, 1, context_parallel=2, virtual_stages=2), overlap=True, logits="chunked"),
    Setup(Layout(2, 1, 2, expert_parallel=4), distributed=False),
)


def every_setup():
    """All of two and four ranks; virtual stages where there are two stages of four layers."""
    for tp, pp, cp, dp in itertools.product((1, 2, 4), repeat=4):
        if tp * pp * cp * dp not in (2, 4):
            continue
        for virtual, ep in itertools.product((1, 2), (1, 2, 4)):
            if (virtual > 1 and pp != 2) or tp * dp % ep or (ep > 1 and cp > 1):
                continue
            layout = Layout(
                tp, pp, dp, context_parallel=cp, expert_parallel=ep, virtual_stages=virtual
            )
            shares = cp * dp > 1
            yield Setup(layout)
            if tp > 1 and ep == 1:
                yield Setup(layout, sequence_parallel=False)
            if shares:
                yield Setup(layout, distributed=False, overlap=True, logits="chunked")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By family, made when asked for: its folder, and the gradients of its files' tensors."""
    return Models(tmp_path_factory.mktemp("gradients"))


class Models:
    def __init__(self, folder):
        self._folder, self._made = folder, {}

    def __getitem__(self, family):
        if family not in self._made:
            self._made[family] = self._make(family)
        return self._made[family]

    def _make(self, family):
        import transformers

        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            make_config(family), dtype=torch.float32
        )
        perturb(model, 0.1)
        folder = str(self._folder / family)
        model.save_pretrained(folder)
        return folder, self._gradients(folder, str(self._folder / f"{family}_gradients"))

    def _gradients(self, folder, written):
        batch = make_batch()
        hf, log_probs, entropies = in_float64(folder, batch)
        mask = batch.loss_mask
        terms = batch.advantages.double() * log_probs + 0.01 * entropies
        (-(terms * mask).sum() / mask.sum()).backward()
        for parameter in hf.parameters():
            parameter.data = parameter.grad
        # Files have the names by which gradients are gathered; the model stacks its experts.
        hf.save_pretrained(written)
        with HfFolderReader(written, read_model_spec(folder)) as reader:
            names = [one for one in reader.names() if not one.endswith("e_score_correction_bias")]
            return {name: reader.read(name) for name in names}


def complete(model):
    """All-gather the sums of gradients, of which the distributed optimizer has a part per rank."""
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def gradient_of(parameter, values, dim, start):
    """In place of a parameter's values; the routers' biases have none."""
    gradient = getattr(parameter, "main_grad", None)
    return (
        torch.zeros_like(values)
        if gradient is None
        else gradient.narrow(dim, start, values.size(dim))
    )


def contiguous_sums():
    """Fail where Megatron would drop a sum over tensor ranks: of what is not contiguous it sums a
    copy."""
    from megatron.core.tensor_parallel import mappings

    sum_of = mappings._reduce

    def check_sum(values, group):
        assert values.is_contiguous(), "a sum over tensor ranks is dropped"
        return sum_of(values, group)

    return mock.patch.object(mappings, "_reduce", check_sum)


def run(layout, platform, folders, batch, setup):
    """Gradients of each model, where two ranks differ, and the norm, on this rank."""
    found = {}
    for family, folder in folders.items():
        actor = build(
            layout,
            platform,
            folder,
            model=ModelSettings(
                torch.float32, sequence_parallel=setup.sequence_parallel, logits=setup.logits
            ),
            overlap_gradients=setup.overlap,
            optimizer={"distributed": setup.distributed},
        )
        norm_of = actor.gradient_norm

        def look(actor=actor, norm_of=norm_of, family=family):
            norm = norm_of()
            if setup.distributed:
                for model in actor.models:
                    complete(model)
            gatherer = BucketGatherer(actor.chunks, actor.spec, actor.parallel, merge=gradient_of)
            gathered = itertools.chain.from_iterable(gatherer.gather(None))
            whole = {name: tensor.clone() for name, tensor in gathered}
            found[family] = whole, gatherer.find_drift(), norm
            return norm

        actor.gradient_norm = look
        with contiguous_sums():
            actor.update(batch, PLAN, seed=0)
    return found


def wrong(found, expected):
    """Errors in the gradients of a rank, one line for each parameter."""
    gradients, drifted, norm = found
    if drifted:
        yield drifted
    largest = max(float(one.abs().max()) for one in expected.values())
    for name, right in expected.items():
        # An expert that no token goes to has none.
        scale = max(float(right.abs().max()), 1e-5 * largest)
        off = float((gradients[name].double() - right).abs().max()) / scale
        if not off < LIMIT:
            ratio = float((gradients[name] * right).sum() / (right * right).sum())
            yield f"{name} is off by {off:.2g} of its largest element ({ratio:.4g} times right)"
    right = sum(float((one**2).sum()) for one in expected.values()) ** 0.5
    if norm != pytest.approx(right, rel=1e-4):
        yield f"the norm is {norm / right:.4g} times the right one"


def check(ranks, models, setup, families):
    folders = {family: models[family][0] for family in families}
    of_ranks = ranks.run(setup.layout, run, folders, make_batch(), setup)
    problems = [
        f"{family} on {setup}, rank {rank}: {problem}"
        for rank, found in enumerate(of_ranks)
        for family in families
        for problem in wrong(found[family], models[family][1])
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("setup", COMMON, ids=str)
def test_each_parameters_gradient_is_that_of_transformers(ranks, models, setup):
    check(ranks, models, setup, setup.families(DENSE, EXPERTS))


@pytest.mark.long
@pytest.mark.parametrize("setup", every_setup(), ids=str)
def test_each_parameters_gradient_on_every_layout(ranks, models, setup):
    families = setup.families(DENSE + MORE_DENSE, EXPERTS + MORE_EXPERTS)
    check(ranks, models, setup, families)
