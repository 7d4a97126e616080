"""Takes a stage of a model through forward and backward passes in FP8 on Transformer Engine's
fake, and prints what its products saw, as JSON. For a separate process.

    python -m tests.contracts.te_fp8_program
"""

import json
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.contracts.te_layers_program import hf_config, with_stand_in
from tests.support.batches import batch_of_lengths

RECOMPUTE = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective", "recompute_modules": ("mlp",)},
}
MICRO_BATCHES = 3
_COPIES = "_fp8_workspaces"


@contextmanager
def one_rank():
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def describe(platform, recompute):
    """A minibatch in two runs of the schedule, with passes without gradients around them."""
    from rlmath.actor.fp8 import prepare_for_fp8, without_fp8
    from rlmath.actor.head import head_of
    from rlmath.actor.model import ModelSettings, build_model
    from rlmath.actor.optimizer import wrap_chunks
    from rlmath.actor.packing import pack
    from rlmath.actor.schedule import of_log_probs, run_schedule
    from rlmath.model.fp8_training import Fp8Training
    from rlmath.model.parallel import Layout
    from rlmath.model.spec import model_spec
    from rlmath.types import MicroBatch
    from tests.contracts import te_stand_in_fp8 as stand_in

    fp8 = Fp8Training("hybrid", "blockwise")
    spec = model_spec(hf_config("qwen2", tied=False).to_dict())
    settings = ModelSettings(torch.bfloat16, logits="chunked", fp8=fp8, **recompute)
    model = build_model(spec, Layout(1, 1, 1), platform, settings, 256)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.2)
    models = wrap_chunks([model], distributed_optimizer=False, overlap=False)
    prepare_for_fp8([model, *models])
    lengths = torch.tensor([7, 30, 12][:MICRO_BATCHES])
    responses = lengths // 2
    tokens = torch.randint(0, spec.vocab, (int(lengths.sum()),))
    batch = batch_of_lengths(lengths - responses, responses, tokens=tokens)
    packed = [
        pack(batch, MicroBatch((i,), int(lengths[i])), platform, Layout(1, 1, 1), 0, fp8.block)
        for i in range(len(lengths))
    ]

    def log_probs_of(_, log_probs, __):
        return -log_probs.sum(), log_probs.detach().clone()

    on_output = of_log_probs(
        log_probs_of, temperature=1.0, vocab_size=spec.vocab, head=head_of(model)
    )

    def products():
        """Distinct, with how often."""
        seen = [(one.recipe, one.is_first, one.rows) for one in stand_in.PRODUCTS]
        stand_in.PRODUCTS.clear()
        return [[*one, seen.count(one)] for one in dict.fromkeys(seen)]

    def forward():
        model.eval()
        with torch.no_grad():
            found = run_schedule(models, packed, on_output, backward=False, shortest=packed[0])
            return torch.cat(found)

    def backward():
        """The gradient of a layer."""
        model.train()
        models[0].zero_grad_buffer()
        run_schedule(models, packed, on_output, backward=True, shortest=packed[0])
        return model.decoder.layers[0].mlp.linear_fc2.weight.main_grad.clone()

    def copies():
        return sum(len(getattr(m, _COPIES, ())) for m in model.modules())

    stand_in.PRODUCTS.clear()
    found = {"dtypes": sorted({str(p.dtype) for p in model.parameters()})}
    found["config"] = {key: getattr(model.config, key) for key in ("fp8", "fp8_recipe")}
    found["fp8_param"] = model.config.fp8_param
    before = forward()
    found["forward"], found["copies after forward"] = products(), copies()
    with without_fp8(model):
        plain = forward()
    found["without"] = products()
    found["moved by FP8"] = float((before - plain).abs().max())
    found["again"] = torch.equal(before, forward())
    stand_in.PRODUCTS.clear()
    found["gradient"] = bool(backward().abs().max() > 0)
    found["backward"], found["copies after backward"] = products(), copies()
    with torch.no_grad():  # As an optimizer step, or a reference model that changes places.
        model.decoder.layers[0].mlp.linear_fc2.weight.mul_(1.5)
    after = forward()
    found["stale"] = torch.equal(after, before)
    found["quantizing"] = sorted(
        {name.rpartition(".")[2] for name, m in model.named_modules() if hasattr(m, _COPIES)}
    )
    return found


def main():
    """One answer for each kind of recomputation."""
    platform, _ = with_stand_in()
    import megatron.core.transformer.attention as attention

    import rlmath.actor.model as model

    replaced = attention
    replaced.apply_rotary_pos_emb = lambda t, *_, **__: t
    model.require_fp8 = lambda _: None
    with one_rank():
        print(json.dumps({name: describe(platform, kind) for name, kind in RECOMPUTE.items()}))


if __name__ == "__main__":
    main()
