"""An environment of OpenEnv: name the letters of a word that is shown. Run by the recipe: python letters_server.py PORT SESSIONS

pip install openenv
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Named(Action):
    letter: str


class Said(Observation):
    text: str


class Letters(Environment):
    """Three turns; each letter that the word has, and that was not named before, earns a third."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.word, self.named, self.now = "", set(), State()

    def reset(self, seed=None, episode_id=None, **_) -> Said:
        self.word, self.named = "".join(random.Random(seed).sample("abcdefghijklmnop", 3)), set()
        self.now = State(episode_id=episode_id, step_count=0)
        return Said(text=f"Name one letter of {self.word}.")

    def step(self, action: Named, timeout_s=None, **_) -> Said:
        letter = action.letter[:1].lower()
        earned = letter in self.word and letter not in self.named
        self.named.add(letter)
        self.now.step_count += 1
        said = f"{'Yes' if earned else 'No'}. Name another letter of {self.word}."
        return Said(text=said, reward=float(earned) / 3, done=self.now.step_count == 3)

    @property
    def state(self) -> State:
        return self.now


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:])
    app = create_fastapi_app(Letters, Named, Said, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
