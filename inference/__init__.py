"""The engine: requests and completions, page pool, prefix tree, scheduler, sampler, HTTP API."""
