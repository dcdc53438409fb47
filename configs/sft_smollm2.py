"""Supervised fine-tuning from a file: SmolLM2-135M-Instruct learns to answer with the name alone, from 64 lines.

    python -m launch.train --config configs/sft_smollm2.py

The file is made by `python -m configs.data.needle`. Hardware: 2 CPU cores. Time: about 3 minutes. Expect: held-out reward
without worked examples at temperature 1 from 0.00 to 0.47, greedy from 0.00 to 0.55.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.name = "sft_smollm2"
    config.steps = 0
    config.data = {"path": "configs/data/needle_sft.jsonl", "batch": 16, "epochs": 6}
    config.checkpoint = {"every": 8, "keep": 1}
    config.update(
        {
            "environment": {"options": {"num_examples": 0}},  # the file's prompts have no worked examples
            "trainer": {"loss": "sft", "learning_rate": 5e-5},
        }
    )
    return config
