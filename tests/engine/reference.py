"""The same model in transformers, in float32: what the engines have to agree with."""

import random

import ray
import torch
from transformers import AutoModelForCausalLM

from rlmath.engines.requests import Request
from rlmath.rollout.seeds import request_seed
from rlmath.rollout.weight_sync import Verification, sync_weights
from rlmath.weights.fingerprint import add
from rlmath.weights.slices import Rotation

VOCABULARY = 261
END_OF_TEXT_ID = 256


class Reference:
    """A model whose weights can be moved away from the folder's."""

    def __init__(self, folder):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def tensors(self):
        return {name: t.detach().clone() for name, t in self._model.state_dict().items()}

    @torch.no_grad()
    def perturb(self, seed):
        """Move every weight; gives the new tensors."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * parameter.std() * noise + 0.01 * noise)
        return self.tensors()

    def load(self, tensors):
        """Take these weights."""
        self._model.load_state_dict(tensors)

    def use(self, kind):
        """Let the matrices of the layers multiply as this class does."""
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
                module.__class__ = kind

    @torch.no_grad()
    def logits(self, prompt, sample):
        """Float32 [response tokens, vocabulary], at temperature 1."""
        tokens = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
        return self._model(tokens).logits[0, len(prompt) - 1 : -1].float()

    def log_probs(self, prompt, sample, temperature):
        """Log-probability of each response token. Float32 of its length."""
        log_probs = torch.log_softmax(self.logits(prompt, sample) / temperature, dim=-1)
        chosen = torch.tensor(tokens(sample)).unsqueeze(1)
        return log_probs.gather(1, chosen).squeeze(1)

    @torch.no_grad()
    def with_cache(self, prompt, sample, past, kept, end):
        """Log-probs of the first ``end`` response tokens where the first ``kept`` tokens, prompt
        included, are in a cache; not a number where they are not computed. And the cache then."""
        whole = torch.tensor([*prompt, *tokens(sample)])[: len(prompt) + end]
        given = self._model(whole[None, kept:], past_key_values=past, use_cache=True)
        log_probs = torch.log_softmax(given.logits[0, :-1].float(), dim=-1)
        chosen = log_probs.gather(1, whole[kept + 1 :, None]).squeeze(1)
        found = torch.full((len(whole) - 1,), torch.nan)
        found[kept:] = chosen
        return found[len(prompt) - 1 :].numpy(), given.past_key_values

    def largest_difference(self, prompts, samples, temperature):
        """Between the engines' log-probabilities and this model's, over all response tokens."""
        return max(
            float(
                (self.log_probs(prompts[s.problem_id], s, temperature) - torch.tensor(s.log_probs))
                .abs()
                .max()
            )
            for s in samples
        )


class Actor:
    """Fake actor of ``sync_weights``: the senders, waited for."""

    def __init__(self, senders):
        self._senders = senders

    def begin_room(self):
        return []

    def make_room(self, part, meanwhile=None):
        return []

    def send_weights(self, version):
        ray.get([sender.send_weights.remote(version) for sender in self._senders])

    def weights_fingerprints(self, part=None):
        found = ray.get(self._senders[0].weights_fingerprints.remote(part))
        return found


def check_slices(pool, shapes, *, packed=True):
    """The fingerprints of a round's slices have to add up to those of all weights."""
    whole = frozenset(name for name in shapes if ".experts." in name)
    rotation = Rotation(shapes, packed=packed, whole=whole)
    total = [{} for _ in pool.engines]
    while not total[0] or not rotation.is_at_start:
        part, _ = rotation.pop(rotation.work / 6)
        for sums, held in zip(total, pool.weights_fingerprints(part), strict=True):
            assert {name.removesuffix("_scale") for name in held} == set(part)
            for name, value in held.items():
                assert value is not None
                sums[name] = add(sums.get(name, 0), value)
    assert total == pool.weights_fingerprints()


def send(senders, pool, verify_every=0):
    """Give the engines the senders' weights as the next version."""
    version = pool.weights_version + 1
    actor = Actor(senders if isinstance(senders, list) else [senders])
    sync_weights(actor, pool, version, Verification(verify_every))
    return version


def counts(pool):
    """Requests in each engine, and tokens that it has generated since its start."""
    asked = [one.__ray_call__.remote(lambda engine: engine._loop.counts()) for one in pool.engines]
    return ray.get(asked)


def random_prompts(count, length, seed=0):
    """Prompts of ordinary characters."""
    rng = random.Random(seed)
    return {
        f"problem-{i}": tuple(rng.randrange(32, 127) for _ in range(length)) for i in range(count)
    }


def make_requests(prompts, samples, *, max_tokens=24, temperature=1.0, top_p=1.0, step=0):
    return [
        Request(
            problem_id,
            index,
            prompt,
            max_tokens,
            temperature,
            top_p,
            request_seed(0, step, problem_id, index),
        )
        for problem_id, prompt in prompts.items()
        for index in range(samples)
    ]


def tokens(sample):
    return tuple(sample.token_ids.tolist())


def by_key(samples):
    return {(sample.problem_id, sample.index): sample for sample in samples}
