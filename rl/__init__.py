"""Reinforcement learning of agents: environments, rollouts, message graph, losses, forest, trainer, publishing."""
