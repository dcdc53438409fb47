"""Direct preference optimisation from a file: SmolLM2-135M-Instruct learns which of two names is the answer, from 64 pairs.

    python -m launch.train --config configs/dpo_smollm2.py

The file is made by `python -m configs.data.needle`. Hardware: 2 CPU cores. Time: ?
"""

from ml_collections import ConfigDict

from configs import sft_smollm2


def get_config() -> ConfigDict:
    config = sft_smollm2.get_config()
    config.name = "dpo_smollm2"
    config.data = {"path": "configs/data/needle_dpo.jsonl", "batch": 16, "epochs": 3}
    config.update({"trainer": {"loss": "dpo", "loss_options": {"beta": 0.1}, "learning_rate": 1e-5}})
    return config
