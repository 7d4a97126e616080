"""Each family whose adapters vLLM computes, in an engine, against transformers."""

from dataclasses import replace

import pytest
from adapters import Trainer
from reference import make_requests, random_prompts

from rlmath.checks.lora import UNMERGED_FAMILIES
from rlmath.model.lora import Lora, default_targets
from rlmath.model.spec import read_model_spec
from rlmath.rollout.pool import RolloutPool
from tests.support.models import SMALL, make_for_engines

pytestmark = pytest.mark.long


@pytest.mark.parametrize("family", UNMERGED_FAMILIES)
def test_an_engine_computes_the_adapters_of(ray_session, log_dir_spec, tmp_path, family):
    folder = make_for_engines(family, tmp_path / "model", **SMALL)
    model = read_model_spec(folder)
    assert model.family.name == family
    lora = Lora(4, 6.0, default_targets(model), layers=(0, 2))
    spec = replace(log_dir_spec, model_path=str(folder), adapters=lora, max_sequence_tokens=128)
    prompts = random_prompts(4, 20)
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        trainer = Trainer(pool, folder, lora)
        for seed in (1, 2):
            wanted = trainer.sync(seed)
            (held,) = pool.weights_fingerprints()
            assert {name: held[name] for name in trainer.sent} == {
                name: wanted[name] for name in trainer.sent
            }
            found = list(pool.generate(make_requests(prompts, samples=2)))
            assert trainer.reference.largest_difference(prompts, found, 1.0) < 1e-4
