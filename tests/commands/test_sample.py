"""`lockstep sample`: questions, replies and grades, and nothing that could act on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.commands.sample import Sample, show
from lockstep.evaluation.records import read_score, score_path
from lockstep.track.rundir import RunDirectory
from lockstep.track.text import visible
from lockstep.types import ItemResult, Message, Prompt
from tests.gallery import Gallery
from tests.loops.runs import LORA, words
from tests.saying import Printed
from tests.track.runs import HOSTILE


@pytest.fixture
def run(gallery: Gallery) -> RunDirectory:
    return gallery.run("lora")


def test_greedy_samples_are_the_replies_of_the_score(run: RunDirectory, printed: Printed) -> None:
    score = read_score(score_path(run.path, 3, "greedy"))
    out = printed("sample", run.path, "-n", "3", "--greedy")
    assert out.startswith(f"{run.path} at step 3: weights {score.conditions.weights} in fp32, greedy, id_probe\n")
    for result in score.results[:3]:
        reward, word = f"{result.reward:g}", "right" if result.correct else "wrong"
        assert f"── {result.id} · {word} · reward {reward}\n   graded as a whole, answer '{result.answer}'" in out
        assert all(f"     │ {line}" in out for line in visible(result.text).split("\n"))
    assert out.count("── ") == 3
    assert out.count("     │ State the final answer: ") == 3
    assert out.splitlines()[-1].startswith("3 replies: ")


def test_temperature_and_target_change_the_replies(run: RunDirectory, printed: Printed) -> None:
    shown = {}
    for name, extra in {"base": ["--step", "0"], "warm": [], "again": [], "hot": ["--temperature", "2"]}.items():
        shown[name] = printed("sample", run.path, "-n", "8", *extra).split("\n", 1)
    assert shown["warm"] == shown["again"]
    assert len({body for _, body in shown.values()}) == 3
    assert ", T=1, " in shown["warm"][0]
    assert ", T=2, " in shown["hot"][0]


def test_a_model_with_a_recipe(home: Path, model: Path, printed: Printed) -> None:
    args = [str(model), "--recipe", *words(home, model, *LORA), "rollout.max_tokens=2"]
    assert "2 tokens, cut off" in printed("sample", *args, "-n", "1")


def test_an_adapters_folder_is_sampled_and_not_its_base(
    run: RunDirectory, home: Path, model: Path, printed: Printed
) -> None:
    adapter = run.checkpoints_path / "step_000003"
    shown = {}
    for name, target in {
        "run": str(run.path),
        "adapter": str(copied(adapter, home / "alone")),
        "base": str(run.path),
    }.items():
        extra = ["--recipe", *words(home, model, *LORA)] if name == "adapter" else []
        extra += ["--step", "0"] if name == "base" else []
        out = printed("sample", target, "-n", "8", "--greedy", *extra)
        shown[name] = out[out.index(": weights ") :]
    assert shown["adapter"] == shown["run"] != shown["base"]


def copied(checkpoint: Path, folder: Path) -> Path:
    """What another program has of an adapter."""
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


def test_the_numerics_are_those_of_an_evaluation(run: RunDirectory, printed: Printed) -> None:
    plain = printed("sample", run.path, "-n", "8", "--greedy")
    quantised = printed("sample", run.path, "-n", "8", "--greedy", "--set", "numerics.eval=mxfp4-w4a4")
    assert " in mxfp4-w4a4(floor, fp32), greedy" in quantised.splitlines()[0]
    assert quantised.split("\n", 1)[1] != plain.split("\n", 1)[1]


def test_a_task_of_turns_is_played(model: Path, printed: Printed) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "envs" / "guess_number.yaml"
    few = ["rollout.max_tokens=24", "rollout.slots=4", "device=cpu", "model.dtype=fp32"]
    out = printed("sample", model, "--recipe", recipe, *few, "-n", "2", "--greedy")
    assert "2 replies: 0 right, 2 wrong, 0 unscored" in out


def test_nothing_in_a_reply_acts_on_the_terminal() -> None:
    prompt = Prompt("sums/\x1b[1m", (Message(role="user", content="4 + 3 =\x07"),), "7\x00", "sums")
    reply = ItemResult(
        id=prompt.id, sample=0, correct=None, reward=None, extracted="\x1b]0;owned\x07", answer=prompt.answer, text=HOSTILE,
        truncated=True, tokens=12, method="boxed", boxed=None, error="killed\nafter 2 s",
    )  # fmt: skip
    text = show(Sample(prompt, reply))
    assert "── sums/\\x1b[1m · unscored · reward none" in text
    assert "12 tokens, cut off" in text
    assert "   not scored: killed⏎after 2 s" in text
    assert "\\x1b[2J" in text
    assert not any(c in text for c in "\x1b\x07\x00\u202e\ud800")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["RUN", "-n", "0"], 2, "at least 1"),
        (["RUN", "--greedy", "--temperature", "1"], 2, "not allowed with"),
        (["RUN", "--temperature", "-1"], 2, "must be 0 or above"),
        (["RUN", "RUN"], 2, "only one target can be sampled"),
        (["RUN", "-n", "9"], 4, "id_probe has only 8\n  to fix: set -n 8"),
        (["RUN/nothing"], 2, "neither a run nor a checkpoint"),
    ],
)
def test_mistakes_end_with_their_code(
    args: list[str], code: int, text: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", *(arg.replace("RUN", str(run.path)) for arg in args)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err
