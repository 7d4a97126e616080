"""GRPO with TRL's GRPOTrainer on ``benchmarks/real_model.py``'s problems; writes a model every few
steps, and after each optimizer step a line of ``TO/history.jsonl`` with its metrics and the seconds
so far, without saves.

The peer of ``real_model.py``, which runs this in a separate process and evaluates the models.
Needs ``pip install --no-deps trl==1.16.0 accelerate==1.15.0``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--to", type=Path, required=True, help="models: TO/checkpoint-STEP")
    parser.add_argument("--settings", type=json.loads, required=True, help="see real_model.py")
    arguments = parser.parse_args()

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlmath.rewards import get_reward

    settings: dict[str, Any] = arguments.settings
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    system = [{"role": "system", "content": settings["system_prompt"]}]
    data = Dataset.from_list(
        [
            {
                "prompt": [*system, {"role": "user", "content": row["prompt"]}],
                "answers": row["solutions"],
            }
            for row in rows
        ]
    )

    rewards = [get_reward(item["name"], **item["params"]) for item in settings["rewards"]]

    arguments.to.mkdir(parents=True, exist_ok=True)
    history = (arguments.to / "history.jsonl").open("w", buffering=1)

    class History(TrainerCallback):
        """Writes each optimizer step's metrics, and the seconds of the steps so far."""

        seconds = last_s = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.last_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds += time.perf_counter() - self.last_s

        def on_log(self, _: Any, state: Any, __: Any, logs: Any = None, **___: Any) -> None:
            row = {"update": state.global_step, "seconds": self.seconds, **logs}
            history.write(json.dumps(row) + "\n")

    # TRL counts optimizer steps.
    updates = settings["minibatches_per_step"]
    batch = settings["prompts_per_step"] * settings["group_size"] // updates
    on_gpu = torch.cuda.is_available()
    # Batch that fits the memory; TRL adds the gradients of the parts before it steps.
    part = math.gcd(batch, 128 if on_gpu else 32)
    config = GRPOConfig(
        output_dir=str(arguments.to),
        per_device_train_batch_size=part,
        gradient_accumulation_steps=batch // part,
        steps_per_generation=updates * batch // part,
        reward_weights=[item["weight"] for item in settings["rewards"]],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_response_tokens"],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        epsilon=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=settings["adam_beta2"],
        adam_epsilon=settings["adam_eps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=settings["steps"] * updates,
        logging_steps=1,
        save_strategy="steps",
        save_steps=settings["eval_every"] * updates,
        save_only_model=True,
        seed=settings["seed"],
        report_to="none",
        use_cpu=not on_gpu,
        bf16=True,
        gradient_checkpointing=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=rewards,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        callbacks=[History()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
