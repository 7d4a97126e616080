import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"\d+")


def right_sum(completions, solution, **kwargs):
    """1 for the right number at the end, a little for any number."""
    rewards = []
    for completion, answer in zip(completions, solution, strict=True):
        numbers = NUMBER.findall(completion[0]["content"])
        rewards.append(0.1 * bool(numbers) + 0.9 * (numbers[-1:] == [answer]))
    return rewards


dataset = load_dataset("json", data_files="train.jsonl", split="train")
config = GRPOConfig(
    output_dir="runs/sums",
    per_device_train_batch_size=16,
    num_generations=4,
    max_completion_length=64,
    learning_rate=1e-6,
    max_steps=100,
    loss_type="dr_grpo",
    use_vllm=True,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=[right_sum],
    args=config,
    train_dataset=dataset,
)
trainer.train()
