"""Steps of TRL's GRPOTrainer on a model folder and prompts; prints seconds of each as JSON.

The peer of ``benchmarks/step_time.py``, which runs this in its own process. Needs
``pip install --no-deps trl==1.16.0 accelerate``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="jsonl with a field prompt")
    parser.add_argument("--num-prompts", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--fixed-length", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()

    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]

    batch = arguments.num_prompts * arguments.group_size
    fixed = {"min_new_tokens": arguments.max_tokens} if arguments.fixed_length else None
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        num_generations=arguments.group_size,
        max_completion_length=arguments.max_tokens,
        generation_kwargs=fixed,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=arguments.steps,
        logging_steps=arguments.steps,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=arguments.prompts, split="train"),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        callbacks=[Clock()],
    )
    started = time.perf_counter()
    trainer.train()
    seconds = [end - start for start, end in zip([started, *ends], ends, strict=False)]
    print("seconds", json.dumps(seconds))


if __name__ == "__main__":
    main()
