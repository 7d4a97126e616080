"""A CPU engine with vLLM's asynchronous scheduling, in a separate process.

What is real: vLLM's engine core with its queue of two batches, the scheduler of GPU engines, the
executor, the model, and rlmath's step loop. What stands in: vLLM turns asynchronous scheduling off
on CPU, so its platform is told not to; and a CPU worker computes a batch at once, where a GPU would
compute it while the next one is scheduled, so that its copies of tokens need no second stream.

Prints what an engine without and then one with it gave, as JSON. Arguments: the model folder, a
folder for logs.
"""

import json
import os
import sys

from rlmath.engines.requests import EngineSpec
from rlmath.engines.step_loop import StepLoop
from rlmath.rollout.seeds import requests_for
from rlmath.types import Problem

MODEL, LOGS = sys.argv[1:3]
SPEC = EngineSpec(
    model_path=MODEL,
    dtype="float32",
    device="cpu",
    tensor_parallel=1,
    max_sequence_tokens=128,
    max_running_sequences=8,
    transport="shared_memory",
    log_dir=LOGS,
    cpu_kv_cache_gib=0.0625,
)


def let_vllm_schedule_ahead():
    """See the module."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from rlmath.engines import engine_arguments

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_schedule_ahead(cls, config):
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_schedule_ahead)
    CPUModelRunner.use_async_scheduling = property(lambda runner: False, lambda runner, value: None)
    engine_arguments.CPU_SCHEDULER = engine_arguments.ASYNC_SCHEDULER


def requests(step, *, max_tokens):
    problems = [Problem(f"p{i}", "", (5 + i, 9, 17 + i), ("1",)) for i in range(6)]
    return requests_for(
        problems, samples=3, max_tokens=max_tokens, temperature=1.0, run_seed=7, step=step
    )


def finish(loop, generation):
    """Take all samples of a generation."""
    samples = {}
    while True:
        progress = loop.progress(generation, 60.0)
        for sample in progress.samples:
            samples[f"{sample.problem_id}.{sample.index}"] = [
                sample.token_ids.tolist(),
                sample.log_probs.tolist(),
                sample.finish_reason,
                sample.weights_version,
            ]
        if not progress.unfinished and not progress.samples:
            return samples


def run():
    """Samples of a started engine, and how many batches were in flight when."""
    loop = StepLoop(SPEC, 0)
    loop.start()
    client = loop.engine_call(lambda engine: engine.engine_core)
    core = client.engine_core
    step, in_flight, at_once = client.get_output, [], [0]

    def get_output():
        output = step()
        in_flight.append(len(core.batch_queue or ()))
        at_once.extend(len(one.new_token_ids) for one in output.outputs)
        decoded = getattr(output, "decoded", None)
        at_once.append(0 if decoded is None else decoded.tokens.shape[1])
        return output

    client.get_output = get_output
    found = {"scheduler": type(core.scheduler).__name__}
    loop.submit(2, requests(1, max_tokens=100))
    found["samples"] = finish(loop, 2)
    found["most_in_flight"], found["most_at_once"] = max(in_flight), max(at_once)
    found["in_flight_after_generation"] = len(core.batch_queue or ())
    # Aborted in the middle: the next generation begins with an empty engine.
    loop.submit(4, requests(2, max_tokens=100))
    generated = loop.counts()[1]
    while loop.counts()[1] == generated:
        pass
    loop.submit(5, [])
    found["in_flight_after_abort"] = len(core.batch_queue or ())
    found["unfinished_after_abort"] = core.scheduler.get_num_unfinished_requests()
    found["prefix_cache_reset"] = loop.engine_call(lambda engine: engine.reset_prefix_cache())
    loop.submit(6, requests(1, max_tokens=100))
    found["samples_again"] = finish(loop, 6)
    loop.stop()
    return found


def main():
    os.environ.update(SPEC.environment())
    found = {"sync": run()}
    let_vllm_schedule_ahead()
    found["async"] = run()
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
