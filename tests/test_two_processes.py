"""Two processes with two devices each take the steps that one process with four devices takes (jax.distributed, gloo).

The tiny model in float32 on fsdp 2 x data 2: weights and rows cross the processes. Tolerance 1e-6: gloo and the collectives
inside one process may add in another order.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.plain_code

REPO = Path(__file__).parents[1]
STEPS = 2


def steps() -> dict[str, Any]:
    """Metrics of each step, and every weight's sum of squares and of products with fixed noise."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from models.config import ModelConfig
    from models.transformer import Definition
    from rl.batch import Sample
    from rl.forest import Layout
    from rl.objective import Objective
    from rl.optimizer import OptimizerConfig
    from rl.trainer import Trainer
    from sharding.mesh import make_mesh
    from sharding.reshard import init
    from sharding.rules import Rules

    model = ModelConfig(
        family="llama", vocab_size=96, model_dim=32, ffn_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        max_positions=256, tied_head=True,
    )  # fmt: skip
    mesh, rules = make_mesh({"data": 2, "fsdp": 2}), Rules({"embed": "fsdp"})
    definition = Definition(model, jnp.float32, stacked=True)
    masters = init(definition.weights, jax.random.key(0), jnp.float32, rules.shardings(mesh, definition.weights))
    trainer = Trainer(
        model,
        masters,
        layout=Layout(rows=4, tokens=64, context=128, branches=16, length=12),
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3),
        objective=Objective(loss="grpo"),
        dtype=jnp.float32,
        remat="block",
        mesh=mesh,
        rules=rules,
    )
    trainer.warm_up()
    rng = np.random.default_rng(0)
    metrics = []
    for _ in range(STEPS):
        samples = []
        for episode in range(8):
            ids = rng.integers(0, 96, 24).astype(np.int32)
            weights = (np.arange(24) >= 14).astype(np.float32)
            logprobs = (weights * (-np.log(96) + 0.3 * rng.standard_normal(24))).astype(np.float32)
            samples.append(
                Sample(ids=ids, weights=weights, logprobs=logprobs, advantages=weights * (episode - 4), episode=episode)
            )
        line = trainer.train(samples)
        metrics.append({name: value for name, value in line.items() if not name.startswith("time/")})

    def digest(masters: Any) -> Any:
        noise = {name: jnp.sin(jnp.arange(x.size, dtype=jnp.float32) * 1.7).reshape(x.shape) for name, x in masters.items()}
        return {name: jnp.stack([(x**2).sum(), (x * noise[name]).sum()]) for name, x in masters.items()}

    weights = jax.device_get(jax.jit(digest, out_shardings=trainer.programs.replicated)(trainer.state.masters))
    return {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "local": jax.local_device_count(),
        "metrics": metrics,
        "weights": {name: value.tolist() for name, value in weights.items()},
    }


def main(port: str, count: int, number: int) -> None:
    import jax

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    print(json.dumps(steps()), flush=True)


def start(port: int, count: int, number: int) -> subprocess.Popen[str]:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
        "PYTHONPATH": str(REPO),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, __file__, str(port), str(count), str(number)]
    return subprocess.Popen(command, cwd=REPO, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def results(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.slow
def test_two_processes_are_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    [one] = results([start(port, 1, 0)])
    two = results([start(port, 2, number) for number in range(2)])
    assert (one["processes"], one["devices"]) == (1, 4)
    for each in two:
        assert (each["processes"], each["devices"], each["local"]) == (2, 4, 2)
        for ours, theirs in zip(each["metrics"], one["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
        assert each["weights"].keys() == one["weights"].keys()
        for name, value in one["weights"].items():
            assert each["weights"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    assert two[0] == two[1]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
