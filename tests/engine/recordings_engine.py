"""A CPU engine that records its decode passes, in a separate process.

Each case is an engine's samples with recordings beside those without any; prints them as JSON.
Arguments: the model folder, a folder for logs, and ``short`` for the first two cases alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from async_engine import SPEC, finish, requests

from rlmath.rollout.step_loop import StepLoop


class Engine:
    """A started engine; ``of_runner`` runs a function on its model runner."""

    def __init__(self) -> None:
        self.loop = StepLoop(SPEC, 0)
        self.loop.start()
        self.generation = 0

    def of_runner(self, function: Callable[[Any], Any]) -> Any:
        def call(engine: Any) -> Any:
            return function(
                engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            )

        return self.loop.engine_call(call)

    def samples(self, step: int = 1) -> dict[str, Any]:
        self.generation += 1
        self.loop.submit(self.generation, requests(step, max_tokens=100))
        return finish(self.loop, self.generation)

    def stand(self) -> dict[str, Any]:
        """What the recordings are."""

        def found(runner: Any) -> dict[str, Any]:
            from rlmath.vllm_plugin.cpu_recordings import recordings_of

            of = recordings_of(runner)
            return {
                "sizes": sorted(of.made),
                "made": of.num_made,
                "replays": of.num_replays,
                "reason": of.reason,
                "too_large": of.too_large,
                "is_proven": of.is_proven,
                "bytes": sum(one.num_bytes for one in of.made.values()),
            }

        found_there: dict[str, Any] = self.of_runner(found)
        return found_there

    def record(self, on: bool) -> None:
        """Begin without recordings; ``on``: more may be made."""

        def begin(runner: Any) -> None:
            from rlmath.vllm_plugin.cpu_recordings import recordings_of

            if hasattr(runner, "rlmath_recordings"):
                del runner.rlmath_recordings
            recordings_of(runner).reason = "" if on else "off"

        self.of_runner(begin)

    def both(self, step: int = 1) -> dict[str, Any]:
        """Samples with and without recordings, and what was recorded."""
        self.record(True)
        recorded = self.samples(step)
        stand = self.stand()
        self.record(False)
        return {"recorded": recorded, "plain": self.samples(step), **stand}


def load(runner: Any, factor: float) -> None:
    """New weights the way a weight sync brings them."""
    import torch
    from safetensors.torch import load_file

    from rlmath.weights.transports.cpu_load import CpuLoader

    loader = CpuLoader(runner.model)
    weights = load_file(os.path.join(sys.argv[1], "model.safetensors"))
    generator = torch.Generator().manual_seed(int(1000 * factor))
    loader.begin()
    loader.load(
        (name, w + factor * w.std() * torch.randn(w.shape, generator=generator))
        for name, w in weights.items()
    )
    assert not loader.missing


def of_weights(engine: Engine) -> dict[str, Any]:
    """Two updates, with the recordings of before."""
    engine.record(True)
    before = engine.samples()
    first = engine.stand()
    found: dict[str, Any] = {"before": before, "made_before": first["made"]}
    for factor in (0.3, 0.6):
        engine.of_runner(lambda runner, factor=factor: load(runner, factor))
        recorded = engine.samples()
        stand = engine.stand()
        kept = engine.of_runner(lambda runner: runner.rlmath_recordings)
        engine.record(False)
        found[str(factor)] = {"recorded": recorded, "plain": engine.samples(), **stand}

        def give_back(runner: Any, kept: Any = kept) -> None:
            runner.rlmath_recordings = kept

        engine.of_runner(give_back)
    return found


def of_moved_matrices(engine: Engine) -> dict[str, Any]:
    """vLLM packs a matrix into other memory, and a norm's weight moves, as in vLLM's reload."""
    engine.record(True)
    before = engine.samples()

    def move(runner: Any) -> None:
        import torch
        from safetensors.torch import load_file

        weights = load_file(os.path.join(sys.argv[1], "model.safetensors"))
        layer = runner.model.model.layers[1]
        module = layer.mlp.down_proj
        module.weight = torch.nn.Parameter(
            -2 * weights["model.layers.1.mlp.down_proj.weight"], requires_grad=False
        )
        module.quant_method.process_weights_after_loading(module)
        norm = layer.input_layernorm
        norm.weight.data = norm.weight.data * 2

    engine.of_runner(move)
    recorded = engine.samples()
    stand = engine.stand()
    engine.record(False)
    return {"before": before, "recorded": recorded, "plain": engine.samples(), **stand}


def of_hooks(engine: Engine) -> dict[str, Any]:
    """Passes that a hook on a layer sees, and those that it changes."""
    engine.record(True)
    engine.samples()
    seen = []

    def hook(runner: Any) -> Any:
        layer = runner.model.model.layers[0].mlp
        return layer.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))

    handle = engine.of_runner(hook)
    engine.samples()
    engine.of_runner(lambda runner: handle.remove())
    return {"passes": len(seen), **engine.stand()}


def of_broken_recording(engine: Engine, name: str) -> dict[str, Any]:
    """An operator is missing in the recording."""
    from rlmath.vllm_plugin import cpu_recordings

    record = cpu_recordings._record

    def without(runner: Any, of: Any) -> Any:
        recording = record(runner, of)
        left = [call for call in recording.calls if name not in call[0].name()]
        assert len(left) < len(recording.calls)
        recording.calls[:] = left
        return recording

    cpu_recordings._record = without
    try:
        return engine.both()
    finally:
        cpu_recordings._record = record


def of_other_model(engine: Engine, forward: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """The model's code has something between its first layer's parts."""

    def change(runner: Any) -> Callable[[], None]:
        mlp = runner.model.model.layers[0].mlp
        before = type(mlp).forward
        mlp.forward = lambda x: forward(x, before(mlp, x))
        return lambda: delattr(mlp, "forward")

    undo = engine.of_runner(change)
    found = engine.both()
    engine.of_runner(lambda runner: undo())
    return found


def of_changes(engine: Engine) -> dict[str, Any]:
    """Cases that change the engine."""
    found: dict[str, Any] = {}
    engine.of_runner(lambda runner: load(runner, 0.0))
    found["moved"] = of_moved_matrices(engine)
    engine.of_runner(lambda runner: load(runner, 0.0))
    found["hooks"] = of_hooks(engine)
    for name in ("reshape_and_cache", "cpu_attention", "silu", "copy_"):
        found[f"without {name}"] = of_broken_recording(engine, name)
    found["asks for a value"] = of_other_model(engine, lambda x, y: y * (1 + float(x.sum() > 9e9)))
    total: list[Any] = []

    def adds_up(x: Any, y: Any) -> Any:
        if not total:
            total.append(y.new_zeros(1))
        return y + total[0].add_(0.01).to(y.dtype)

    found["keeps a sum"] = of_other_model(engine, adds_up)

    def with_buffer(runner: Any) -> Any:
        mlp = runner.model.model.layers[0].mlp
        mlp.register_buffer("total", mlp.down_proj.weight.new_zeros(1))
        return mlp.total

    buffer = engine.of_runner(with_buffer)
    found["keeps a sum in a buffer"] = of_other_model(engine, lambda x, y: y + buffer.add_(0.01))
    from rlmath.vllm_plugin import cpu_recordings

    constants, cpu_recordings._constants = cpu_recordings._constants, lambda model: 1 // 0
    found["fails"] = engine.both()
    cpu_recordings._constants = constants
    cpu_recordings.MAX_PASS_BYTES, before = 2**17, cpu_recordings.MAX_PASS_BYTES
    found["small passes"] = engine.both()
    cpu_recordings.MAX_PASS_BYTES = before
    cpu_recordings.MAX_BYTES = 2**18
    found["few"] = engine.both()
    return found


def main() -> None:
    os.environ.update(SPEC.environment())
    engine = Engine()
    found: dict[str, Any] = {"plain": engine.both(), "weights": of_weights(engine)}
    if "short" not in sys.argv:
        found |= of_changes(engine)
    engine.loop.stop()
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
