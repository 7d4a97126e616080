import pandas

rows = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": 10 * a + b},
    }
    for a in range(10)
    for b in range(10)
]
pandas.DataFrame(rows).to_parquet("train.parquet")
