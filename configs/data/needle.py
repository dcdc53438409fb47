"""Writes needle_sft.jsonl and needle_dpo.jsonl beside this file: 64 lines each of reasoning_gym's needle_haystack.

    python -m configs.data.needle

The tasks are those of train keys that no reinforcement step of configs/quickstart.py comes to. The answer that is rejected is
another name of the same text.
"""

import json
from pathlib import Path

from rl.environments import TRAIN_KEYS, ReasoningGym

LINES = 64


def examples() -> dict[str, list[dict[str, str]]]:
    """File -> its lines."""
    environment = ReasoningGym(dataset="needle_haystack", min_num_statements=3, max_num_statements=4)
    first = len(TRAIN_KEYS) // 2
    tasks = [environment.task(key) for key in TRAIN_KEYS[first : first + 2 * LINES]]
    sft, dpo = [], []
    for number, task in enumerate(tasks):
        prompt, answer = task.messages[-1]["content"], task.answer
        assert answer is not None
        names = [sentence.split()[0] for sentence in prompt.splitlines()[0].split(". ") if sentence.strip()]
        names.remove(answer)
        other = names[number % len(names)]  # not always the first, which would be learned instead
        if number < LINES:
            sft.append({"prompt": prompt, "completion": answer})
        else:
            dpo.append({"prompt": prompt, "chosen": answer, "rejected": other})
    return {"needle_sft.jsonl": sft, "needle_dpo.jsonl": dpo}


if __name__ == "__main__":
    for name, lines in examples().items():
        Path(__file__).with_name(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
