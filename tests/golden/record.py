"""Records the golden arrays beside this file with torch and transformers (float32, CPU). See README.md for the formats.

python tests/golden/record.py        needs torch, transformers and runs/models/smollm2-135m-instruct
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

# Only the oracles' environment has these two, so a type checker need not find them.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

HERE = Path(__file__).parent
SMOLLM2 = HERE.parents[1] / "runs/models/smollm2-135m-instruct"
TEXT = (
    "The lighthouse keeper counted the ships every evening, and wrote their names into a small green book. In 1931 "
    "there were 46 of them; by the end of the war, only three still passed the cape. He never asked where the others "
    "had gone, but he kept a line open for each, as if they might return."
)
POSITIONS = (0, 1, 7, 15, 31, 47, -2, -1)
VOCAB_STRIDE = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "To bake bread you need flour, water,",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Water boils at a temperature of",
    "In the year 1969, the first",
    "Dear Professor Miller,\n\nI am writing to",
    "The quick brown fox",
    "1, 2, 3, 5, 8, 13,",
    "Photosynthesis is the process by which",
    "She opened the door and saw",
    "The main difference between a list and a tuple in Python is",
    "My favourite season is autumn because",
    "Question: What is the largest planet?\nAnswer:",
    "The history of the bicycle begins",
    "SELECT name FROM users WHERE",
    "A good night's sleep",
    "Albert Einstein was born in",
    "If it rains tomorrow, we will",
)
NEW_TOKENS = 64
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_LENGTHS = (64, 17)
TINY_MOE = TINY | {"num_hidden_layers": 3, "num_experts": 8, "moe_intermediate_size": 24}


@torch.no_grad()
def record_smollm2() -> None:
    """Logits of one text, and greedy continuations of plain prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32, attn_implementation="eager")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    logits = model(ids).logits[0]
    positions = np.arange(ids.shape[1], dtype=np.int32)[list(POSITIONS)]
    np.savez(
        HERE / "smollm2_logits.npz",
        ids=ids[0].numpy().astype(np.int32),
        positions=positions,
        vocab_ids=np.arange(0, logits.shape[1], VOCAB_STRIDE, dtype=np.int32),
        logits=logits[positions, ::VOCAB_STRIDE].numpy(),
        logsumexp=logits.logsumexp(-1).numpy(),
    )
    rows = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            **prompt_ids, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        start = prompt_ids["input_ids"].shape[1]
        best = torch.cat(out.logits).topk(2).values
        rows.append(
            {
                "prompt": prompt,
                "prompt_ids": prompt_ids["input_ids"][0].tolist(),
                "ids": out.sequences[0, start:].tolist(),
                "gaps": [round(gap, 4) for gap in (best[:, 0] - best[:, 1]).tolist()],
            }
        )
    lines = ",\n".join(json.dumps(row) for row in rows)
    (HERE / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")


@torch.no_grad()
def record_tiny(name: str, model: Any, seed: int) -> None:
    """A tiny random model, saved in bfloat16, and its float32 logits on random ids; and each layer's experts."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        value = 1 + 0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5
        parameter.copy_(value.to(torch.bfloat16))
    ids = [torch.randint(0, TINY["vocab_size"], (length,), generator=generator) for length in TINY_LENGTHS]
    arrays = {}
    for i, row in enumerate(ids):
        arrays[f"ids_{i}"] = row.numpy().astype(np.int32)
        experts = getattr(model.config, "num_experts_per_tok", None)
        out = model.eval()(row[None], **({"output_router_logits": True} if experts else {}))
        arrays[f"logits_{i}"] = out.logits[0].numpy()
        if experts:
            arrays[f"experts_{i}"] = torch.stack(out.router_logits).topk(experts).indices.numpy().astype(np.uint8)
    np.savez(HERE / f"{name}.npz", **arrays)
    model.to(torch.bfloat16).save_pretrained(HERE / name)


if __name__ == "__main__":
    torch.set_num_threads(2)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama = transformers.LlamaConfig(
        **TINY, rope_parameters={**scaling, "rope_theta": 10000.0, "original_max_position_embeddings": 256}
    )
    qwen3 = transformers.Qwen3Config(
        **TINY, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    qwen3_moe = transformers.Qwen3MoeConfig(
        **TINY_MOE, num_experts_per_tok=3, norm_topk_prob=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    qwen2_moe = transformers.Qwen2MoeConfig(
        **{name: value for name, value in TINY_MOE.items() if name != "head_dim"},
        num_experts_per_tok=2,
        shared_expert_intermediate_size=40,
        tie_word_embeddings=True,
    )
    record_tiny("tiny_llama3", transformers.LlamaForCausalLM(llama), seed=1)
    record_tiny("tiny_qwen3", transformers.Qwen3ForCausalLM(qwen3), seed=2)
    record_tiny("tiny_qwen3_moe", transformers.Qwen3MoeForCausalLM(qwen3_moe), seed=3)
    record_tiny("tiny_qwen2_moe", transformers.Qwen2MoeForCausalLM(qwen2_moe), seed=4)
    record_smollm2()
    print(f"recorded with torch {torch.__version__}, transformers {transformers.__version__}")
