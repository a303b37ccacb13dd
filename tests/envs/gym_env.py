"""A gymnasium environment of text in, text out."""

from __future__ import annotations

import gymnasium
from gymnasium.spaces import Text


class Echo(gymnasium.Env):
    observation_space = Text(200)
    action_space = Text(20, charset="abcdefghijklmnopqrstuvwxyz")

    def __init__(self, words: int = 3) -> None:
        self.words = words

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), self.words))
        return f"Say {self.word}", {}

    def step(self, action):
        return "again", float(action == self.word), action == self.word, False, {}


class Picture(Echo):
    observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3))


class Motor(Echo):
    action_space = gymnasium.spaces.Box(-1, 1, (2,))


class Compass(Echo):
    """Ends with the action that was taken as its reward."""

    action_space = gymnasium.spaces.Discrete(4)

    def step(self, action):
        return "again", float(action), True, False, {}
