"""Engines without vLLM: an engine's own code around a loop that draws samples."""

from types import SimpleNamespace

import numpy as np

from rlmath.engines.engine import RolloutEngine
from rlmath.engines.requests import Progress, Request
from rlmath.model.tiny_tokenizer import END_OF_TEXT, fast_tokenizer
from rlmath.types import Sample
from tests.unit.training.stubs.ranks import PRINTS

# Samples of an answer at most.
AT_ONCE = 2

# Tokens of the tiny model that are letters, and the one that ends a response.
TOKENIZER = fast_tokenizer()
LETTERS = tuple(TOKENIZER.encode("AZ").ids)
END = TOKENIZER.token_to_id(END_OF_TEXT)


class StubEngine(RolloutEngine):
    """An engine with its own calls, in a process that others share."""

    world = SimpleNamespace

    def __init__(self, world, spec, index, environment):
        self._spec, self._index = spec, index
        self._loop = StubLoop(index)
        self._weights_valid = True

    def prepare(self): ...

    def start(self): ...

    def weights_fingerprints(self, part=None):
        """See ``RolloutEngine``."""
        return dict(PRINTS)


class StubLoop:
    """Stands where an engine has its ``StepLoop``. A sample follows from its seed."""

    def __init__(self, index):
        self._index = index
        self._waiting: list[Request] = []
        self._tokens = 0
        self.weights_version = 0

    def submit(self, generation, requests):
        self._waiting += requests

    def progress(self, generation, timeout_s):
        now, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        samples = tuple(self._sample(request) for request in now)
        self._tokens += sum(len(one.token_ids) for one in samples)
        held = sum(len(one.prompt_token_ids) for one in self._waiting)
        return Progress(samples, len(self._waiting), self._tokens, held, 0.0)

    def counts(self):
        return len(self._waiting), self._tokens

    def drain(self): ...

    def rpc(self, method, **arguments):
        # The only function that engines run in a worker asks for constants.
        return [{"norm_eps": [], "ropes": []}] if callable(method) else [None]

    def engine_call(self, function):
        return function(
            SimpleNamespace(reset_prefix_cache=lambda: True, set_weight_version=lambda _: None)
        )

    def renew(self, version):
        self.weights_version = version

    def _sample(self, request):
        draw = np.random.default_rng(request.seed)
        count = int(draw.integers(24, 40))
        tokens = draw.integers(*LETTERS, size=count, dtype=np.int32)
        tokens[-1] = END
        begun, version = request.begun_tokens, self.weights_version
        end = min(count, begun + request.new_tokens)
        spans = () if request.begun is None else request.begun.spans
        if request.begun is not None:
            assert np.array_equal(request.begun.token_ids, tokens[:begun])
        return Sample(
            problem_id=request.problem_id,
            index=request.index,
            token_ids=tokens[:end],
            log_probs=-draw.random(count, dtype=np.float32)[:end],
            text=TOKENIZER.decode(tokens[:end].tolist()),
            finish_reason="cut" if end < count else "stop",
            spans=spans if spans and spans[-1][0] == version else (*spans, (version, begun)),
            seed=request.seed,
            engine=self._index,
        )
