"""A turn through the unmodified training client of `verifiers`: URL MODEL. Run by its own environment; prints what it gave."""

import asyncio
import json
import sys
import tempfile
from typing import Any

from ids_client import make_tokenizer  # a script's own folder is on its path
from renderers import Qwen3RendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        make_tokenizer().save_pretrained(directory)
        config = TrainClientConfig(
            base_url=f"{url}/v1", api_key_var="KEY", renderer=Qwen3RendererConfig(), renderer_model_name=directory
        )
        client = TrainClient(config)
        sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "seed": 3}
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        answer = await client.get_response(ChatDialect(), body, SamplingConfig(**sampling), session_id="one")
        await client.close()
    assert answer.tokens is not None
    names = ("prompt_ids", "completion_ids", "completion_logprobs")
    print(json.dumps({name: list(getattr(answer.tokens, name)) for name in names} | {"finish_reason": answer.finish_reason}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
