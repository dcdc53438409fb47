"""The benchmark of rollouts beside training, at its smallest: the real loop, buffer and schedulers on a virtual clock."""

import pytest

from launch.asynchrony import LAWS, SIZES, compare, play
from launch.costs import Chip, Model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math", "agent"])
def test_bound_and_speed(name: str) -> None:
    result = compare(LAWS[name], SIZES["small"])
    assert result["max_lag_ok"] and result["speedup_over_sync"] > 1 and result["colocated"]["max_lag"] == 0
    for lag, run in result["split"].items():
        assert run["max_lag"] <= int(lag) and run["given_up"] == 0 and sum(run["lags"].values()) == pytest.approx(1)
        assert all(-1e-9 <= share <= 1 for share in run["idle_share"].values())
        assert lag == "0" or run["speedup_over_split"] > 1
    assert result["split"]["0"]["speedup_over_sync"] < 1


def test_the_same_twice_and_each_task_once() -> None:
    (first, world), (second, _) = (play(LAWS["agent"], SIZES["small"], 2, colocated=False) for _ in range(2))
    real = ("wall_s", "host_us_per_group")
    assert {k: v for k, v in first.items() if k not in real} == {k: v for k, v in second.items() if k not in real}
    trained = world.books.trained
    assert len(trained) == len(set(trained)) and set(trained) < set(range(world.buffer.cursor))


@pytest.mark.parametrize("colocated", [True, False])
def test_an_engine_is_busy_or_idle(colocated: bool) -> None:
    """To the end of the run, and the schedulers' books of pages and slots reconcile."""
    _, world = play(LAWS["agent"], SIZES["small"], 0 if colocated else 1, colocated)
    for engine in world.engines:
        assert sum(engine.times()) == pytest.approx(world.clock.now)
        engine.scheduler.check()
    assert 0 < world.trainer.time() < world.clock.now


def test_costs_by_hand() -> None:
    """1e9 parameters: 2 GB are read in a millisecond at 2 TB/s; 100 tokens of context of 1 MB take 50 us, the host 0.5 ms."""
    chip, model = Chip(peak=1e15, bandwidth=2e12, read_share=1, prefill_share=1, step_s=5e-4), Model(1e9, 10**6, 0)
    assert chip.engine_step(model, 1, 100, 0) == pytest.approx(1e-3 + 5e-5 + 5e-4)
    assert chip.engine_step(model, 10_000, 0, 0) == pytest.approx(2e-2 + 5e-4)  # 2e13 FLOPs take longer than reading
    assert chip.train_step(model, [1000, 3000], 2) == pytest.approx(2.4e13 / (2 * 1e15 * 0.4) + 2)
