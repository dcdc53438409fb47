"""Direct preference optimisation from a file: SmolLM2-135M-Instruct learns which of two names is the answer, from 64 pairs.

    python -m launch.train --config configs/dpo_smollm2.py

The file is made by `python -m configs.data.needle`. There is no engine: nothing is sampled. Hardware: 2 CPU cores. Time: about
3 minutes. Expect: the share of pairs whose chosen name has gained more from 0.46 to 0.85, the loss from 0.693 (ln 2) to 0.65.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "dpo_smollm2"
    config.seed = 0
    config.steps = 0
    config.model = {"source": "runs/models/smollm2-135m-instruct", "dtype": "bfloat16"}
    config.data = {"path": "configs/data/needle_dpo.jsonl", "batch": 16, "epochs": 3}
    config.environment = {"kind": "none", "renderer": "smollm2", "renderer_options": {"default_system": False}}
    config.trainer = {
        "tokens_per_row": 1024,
        "remat": "block",
        "loss": "dpo",
        "loss_options": {"beta": 0.1},
        "learning_rate": 1e-5,
        "mesh": {"data": 1},
    }
    config.checkpoint = {"every": 8, "keep": 1}
    return config
