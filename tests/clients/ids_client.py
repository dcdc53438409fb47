"""Two turns through the unmodified `renderers.client`, over /inference/v1/generate: URL MODEL. Run by its own environment.

Its tokenizer has the ids of models.tokenizer.ByteTokenizer, and more for what Qwen3 needs. Prints a JSON list of what each turn
was asked and gave.
"""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from renderers import Qwen3RendererConfig, create_renderer
from renderers.client import generate
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""bytes that a byte-level tokenizer writes as themselves; the others stand from 256 on"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    others = [byte for byte in range(256) if byte not in PRINTED]
    vocab = {chr(byte if byte in PRINTED else 256 + others.index(byte)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    assert made.encode("<tool_call>a\n") == [262, 97, 10]
    return made


async def main(url: str, model: str) -> None:
    renderer = create_renderer(make_tokenizer(), Qwen3RendererConfig(thinking_retention="all"))
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    turns: list[dict[str, Any]] = []
    prompt_ids = None
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for seed in (3, 4):
            params = {"max_tokens": 12, "seed": seed, "temperature": 1.0, "top_p": 1.0}
            if turns:
                params["routed_experts_prompt_start"] = len(turns[0]["prompt_ids"])
            done = await generate(
                client=client,
                renderer=renderer,
                messages=messages,
                model=model,
                prompt_ids=prompt_ids,
                sampling_params=params,
                cache_salt="a",
                priority=1,
            )
            routed = done["routed_experts"]
            routed["data"] = bytes(routed["data"]).decode()
            names = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason", "usage", "request_id")
            turns.append({name: done[name] for name in names} | {"routed": routed})
            new = [{"role": "user", "content": "go on"}]
            bridged = renderer.bridge_to_next_turn(done["prompt_ids"], done["completion_ids"], new)
            assert bridged is not None
            prompt_ids = bridged.token_ids
    print(json.dumps(turns))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
