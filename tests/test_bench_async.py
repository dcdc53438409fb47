"""The benchmark of rollouts beside training, at its smallest: the real loop on a virtual clock."""

import pytest

from launch.asynchrony import LAWS, SIZES, compare, play


@pytest.mark.parametrize("name", ["math_1_5b", "agent_8b"])
def test_bound_books_and_speed(name: str) -> None:
    result = compare(LAWS[name], SIZES["small"])
    assert result["max_lag_ok"] and result["split"]["1"]["speedup_over_sync"] > 1
    for lag, run in result["split"].items():
        assert run["max_lag"] <= int(lag) and run["given_up"] == 0
        assert all(-1e-9 <= share <= 1 for share in run["idle_share"].values())


def test_the_same_twice_and_each_task_once() -> None:
    (first, world), (second, _) = (play(LAWS["agent_8b"], SIZES["small"], 2, colocated=False) for _ in range(2))
    real = ("wall_s", "host_us_per_group")
    assert {k: v for k, v in first.items() if k not in real} == {k: v for k, v in second.items() if k not in real}
    trained = world.books.trained
    assert len(trained) == len(set(trained)) and set(trained) < set(range(world.buffer.cursor))
