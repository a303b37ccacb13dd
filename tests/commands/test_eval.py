"""`lockstep eval`: what it says, stores and refuses, and that it measures what training measured."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.commands.eval import choose_modes, named, share_range
from lockstep.config.load import load
from lockstep.errors import ConfigError
from lockstep.evaluation.records import read_score, score_path
from lockstep.track.rundir import RunDirectory
from tests.loops.runs import LORA, NO_EVAL, fingerprints, trained, weights, words
from tests.saying import Said, shell
from tests.tiny import write_tiny_model


def test_a_fresh_process_measures_what_training_measured(run: Path, finished: RunDirectory, tmp_path: Path) -> None:
    """X-1: to the item, greedy and sampled, at a checkpoint in the middle and at the last, beside the same base."""
    result = shell("eval", run, run / "checkpoints" / "step_000002", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stdout + result.stderr
    for step in (0, 2, 3):
        for mode in ("greedy", "sampled"):
            inside = read_score(score_path(finished.path, step, mode))
            outside = read_score(tmp_path / "out" / f"mine_step_{step:06d}_{mode}.json")
            assert outside.results == inside.results
            assert outside.conditions == inside.conditions
            assert outside.step == inside.step
            assert outside.version == inside.version
    assert result.stdout.count("all 8 replies are those of the stored score") == 4


def test_base_and_trained_stand_side_by_side(run: Path, finished: RunDirectory, said: Said) -> None:
    before = {path: path.read_bytes() for path in (run / "scores").iterdir()}
    code, out, _ = said("eval", str(run))
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"{run} at step 3: weights {fingerprints(finished)[3]}, as saved, in fp32"
    assert lines[1].startswith("sync v3: 62/62 tensors equal, 28 changed")
    head = next(line for line in lines if line.startswith("task ") and "verdict" in line)
    assert head.split() == ["task", "mode", "items", "base", "trained", "difference", "changed", "p", "verdict"]
    assert sum(" greedy " in line and "[" in line for line in lines[lines.index(head) :]) == 1
    assert sum(" greedy " in line and "12.5 points" in line for line in lines[: lines.index(head)]) == 1  # 1 item of 8
    assert f"greedy at step 0: measured before under the same conditions ({score_path(run, 0, 'greedy')})" in lines
    assert {path: path.read_bytes() for path in (run / "scores").iterdir()} == before


def test_a_run_that_never_evaluated_is_evaluated_with_its_base(
    home: Path, model: Path, tmp_path: Path, said: Said
) -> None:
    never = trained(tmp_path, model, NO_EVAL, "steps=2", "save.every=2")
    files = weights(never, 2)
    code, _, _ = said("eval", str(never.path), "--mode", "greedy")
    assert code == 0
    base, last = (read_score(score_path(never.path, step, "greedy")) for step in (0, 2))
    assert last.conditions.weights == fingerprints(never)[2]
    assert base.proof is not None
    assert base.proof.passed
    assert base.proof.changed == -1
    assert weights(never, 2) == files


def test_scores_under_other_conditions_do_not_mix_with_the_runs_own(run: Path, said: Said) -> None:
    own = sorted(path.name for path in (run / "scores").iterdir())
    assert said("eval", str(run), "--items", "5", "--mode", "greedy")[0] == 0
    (folder,) = [path for path in (run / "scores").iterdir() if path.is_dir()]
    assert sorted(path.name for path in folder.iterdir()) == ["step_000000_greedy.json", "step_000003_greedy.json"]
    assert read_score(folder / "step_000003_greedy.json").items == 5
    assert said("eval", str(run), "eval.items=5", "--mode", "greedy", "--step", "2")[0] == 0  # the same, otherwise put
    assert len(list(folder.iterdir())) == 3
    assert sorted(path.name for path in (run / "scores").iterdir() if path.is_file()) == own


def test_a_stored_score_without_a_requested_number_is_measured_again(run: Path, said: Said) -> None:
    """Which numbers are told of its replies is no condition of a score, but those that are asked for are in its file."""
    for estimates in ("[avg@2, maj@2]", "[avg@2, pass@2]"):
        mode = f"eval.modes=[{{name: two, temperature: 1, samples: 2, estimates: {estimates}}}]"
        assert said("eval", str(run), "--set", mode)[0] == 0
    files = list((run / "scores").glob("*/step_*_two.json"))
    assert [path.name for path in sorted(files)] == ["step_000000_two.json", "step_000003_two.json"]
    assert {tuple(one.name for one in read_score(path).estimates) for path in files} == {("avg@2", "pass@2")}


def test_a_score_outside_of_the_range_ends_with_7(run: Path, said: Said) -> None:
    accuracy = read_score(score_path(run, 3, "sampled")).accuracy
    assert 0 < accuracy < 1
    good = f"{accuracy - 0.01}:{accuracy + 0.01}"
    assert said("eval", str(run), "--mode", "sampled", "--no-base", "--expect", good)[0] == 0
    code, out, err = said("eval", str(run), "--mode", "sampled", "--no-base", "--expect", f"{accuracy + 0.01}:")
    assert code == 7
    assert "accuracy" in out  # the table comes all the same
    assert f"{run} at step 3: sampled(T=1) is {accuracy:.1%}" in err


def test_without_its_base_a_score_stands_alone(run: Path, said: Said) -> None:
    code, out, _ = said("eval", str(run), "--no-base", "--step", "2", "--set", "seed=9")
    assert code == 0
    assert "verdict" not in out
    assert "at step 0" not in out
    (score,) = [line for line in out.splitlines() if " sampled(T=1) " in line]
    assert "%" in score


def test_a_model_is_scored_on_a_recipes_task(home: Path, model: Path, tmp_path: Path, said: Said) -> None:
    recipe = words(tmp_path, model, *LORA, "eval.items=4")
    code, out, _ = said("eval", str(model), "--recipe", *recipe, "--mode", "greedy")
    assert code == 0
    assert "of the model's own files" in out
    assert "verdict" not in out
    (stored,) = (tmp_path / "runs" / "scores").iterdir()
    assert f"stored: {stored}" in out
    assert read_score(stored).conditions.model == str(model)


def test_a_models_score_under_other_conditions_does_not_replace_the_first(
    model: Path, tmp_path: Path, said: Said
) -> None:
    recipe = ["--recipe", *words(tmp_path, model), "--mode", "greedy"]
    for items in ("8", "4", "8", "2"):
        code, _, err = said("eval", model, *recipe, "--items", items)
        assert code == 0, err
    found = {path: read_score(path).items for path in (tmp_path / "runs" / "scores").rglob("*.json")}
    plain = [items for path, items in found.items() if path.parent.name == "scores"]
    assert (sorted(found.values()), plain) == ([2, 4, 8], [8])


def test_two_models_are_compared_only_when_asked(home: Path, model: Path, tmp_path: Path, said: Said) -> None:
    write_tiny_model(tmp_path / "other", seed=3)
    recipe = words(tmp_path, model)
    code, out, _ = said("eval", str(tmp_path / "other"), "--recipe", *recipe, "--mode", "sampled")
    assert (code, "verdict" in out) == (0, False)
    code, out, _ = said("eval", str(tmp_path / "other"), "--recipe", *recipe, "--mode", "sampled", "--allow-mismatch")
    assert (code, "verdict" in out) == (0, True)
    assert "compared across different model at your request" in out


def test_another_base_is_refused_before_anything_is_measured(run: Path, tmp_path: Path, said: Said) -> None:
    write_tiny_model(tmp_path / "other", seed=3)
    before = sorted((run / "scores").rglob("*"))
    code, out, err = said("eval", str(run), "--set", f"model.path={tmp_path}/other")
    assert (code, out) == (7, "")
    assert "when it was saved, but has" in err
    assert "Traceback" not in err
    assert sorted((run / "scores").rglob("*")) == before


def test_the_base_of_full_training_is_what_it_began_from(model: Path, tmp_path: Path, said: Said) -> None:
    """A checkpoint of all weights fits any model of its shape: only what the run recorded tells them apart."""
    full = str(trained(tmp_path, model, NO_EVAL, "name=full", "steps=1").path)
    write_tiny_model(tmp_path / "other", seed=3)
    other = ("--set", f"model.path={tmp_path}/other", "--mode", "greedy")
    for step in ((), ("--step", "0")):
        code, out, err = said("eval", full, *other, *step)
        assert (code, out) == (7, "")
        assert "the run began from" in err
    assert main(["sample", full, *other[:2], "--step", "0", "-n", "4"]) == 7
    code, out, _ = said("eval", full, *other, "--no-base")
    assert (code, "as saved" in out) == (0, True)
    shutil.copytree(model, tmp_path / "moved")
    code, out, _ = said("eval", full, "--set", f"model.path={tmp_path}/moved", "--mode", "greedy")
    assert (code, "verdict" in out) == (0, True)


def test_files_that_changed_since_never_take_a_scores_place(model: Path, tmp_path: Path, said: Said) -> None:
    """Data, template and model are files, whose names are in the recipe: what they hold is in the score's conditions."""
    mine = trained(tmp_path, model, *LORA, "name=mine", "steps=1").path
    before = {path: path.read_bytes() for path in (mine / "scores").iterdir()}
    data = tmp_path / "sums.jsonl"
    data.write_text(data.read_text().replace("State the final answer", "State the final number"))
    code, _, _ = said("eval", mine, "--mode", "greedy")
    assert code == 0
    assert {path: path.read_bytes() for path in before} == before
    assert len(list((mine / "scores").glob("*/step_00000[01]_greedy.json"))) == 2
    out_dir = tmp_path / "out"
    for items in ("8", "5", "8"):
        assert said("eval", mine, "--mode", "greedy", "--no-base", "--items", items, "--out", out_dir)[0] == 0
    assert sorted(read_score(path).items for path in out_dir.rglob("*.json")) == [5, 8]


def test_the_base_of_an_adapter_run_is_known_too(model: Path, tmp_path: Path, said: Said) -> None:
    """Whatever its seed: a fresh adapter's own start is no part of the base."""
    shutil.copytree(model, tmp_path / "model")
    mine = trained(tmp_path, tmp_path / "model", *LORA, "name=mine", "steps=1").path
    code, out, _ = said("eval", mine, "seed=6", "--step", "0", "--mode", "greedy")
    assert (code, "not loaded" in out) == (0, False)
    write_tiny_model(tmp_path / "other", seed=3)
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "model")
    code, out, err = said("eval", mine, "--step", "0", "--mode", "greedy")
    assert (code, out, "the run began from" in err) == (7, "", True)


def test_a_model_that_moved_is_named_beside_another_recipe(model: Path, tmp_path: Path, said: Said) -> None:
    """Weights' own settings stay the run's, but for overrides."""
    shutil.copytree(model, tmp_path / "model")
    full = trained(tmp_path, tmp_path / "model", NO_EVAL, "name=full", "steps=1").path
    (tmp_path / "model").rename(tmp_path / "moved")
    recipe = words(tmp_path / "task", tmp_path / "elsewhere")
    assert said("eval", full, "--recipe", *recipe, "--mode", "greedy")[0] == 4
    code, out, _ = said("eval", full, f"model.path={tmp_path}/moved", "--recipe", *recipe, "--mode", "greedy")
    assert (code, "verdict" in out) == (0, True)


@pytest.mark.parametrize("mode", ["avg@1", "maj@1", "nondet_proxy@0", "pass@999999999"])
def test_modes_that_mean_nothing_are_refused(run: Path, said: Said, mode: str) -> None:
    code, _, err = said("eval", run, "--mode", mode)
    assert (code, f"--mode {mode}: " in err) == (2, True)


def test_a_changed_reply_is_reported(run: Path, said: Said) -> None:
    """A stored score of the same weights that does not say the same is a warning, and stays as it was."""
    from lockstep.evaluation.records import write_score

    path = score_path(run, 3, "greedy")
    score = read_score(path)
    first = dataclasses.replace(score.results[0], text="something else")
    write_score(path, dataclasses.replace(score, results=(first, *score.results[1:])))
    stored = path.read_bytes()
    code, out, _ = said("eval", str(run), "--mode", "greedy")
    assert code == 0
    assert f"warning: greedy: 1 of 8 replies differ from those of the stored score ({path}), first {first.id}" in out
    assert path.read_bytes() == stored


def test_a_damaged_newest_checkpoint_is_named(run: Path, said: Said) -> None:
    file = run / "checkpoints" / "step_000003" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, out, _ = said("eval", str(run), "--no-base", "--mode", "greedy")
    assert code == 0
    assert out.startswith(f"{run} at step 2: ")
    assert "warning: step 3 is damaged: optimizer.safetensors" in out
    code, _, err = said("eval", str(run), "--step", "3")
    assert (code, "optimizer.safetensors" in err) == (6, True)


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ([], 2, "required"),
        (["RUN", "--expect", "0.7:0.5"], 2, "is not a range of accuracies"),
        (["RUN", "--expect", "fifty"], 2, "is not a range of accuracies"),
        (["RUN", "--items", "0"], 2, "at least 1"),
        (["RUN", "--mode", "gready"], 2, "there are greedy, sampled, all"),
        (["RUN", "eval.itemz=3"], 2, "did you mean eval.items?"),
        (["eval.items=3"], 2, "no target was given"),
        (["RUN", "--step", "9"], 6, "no checkpoint of step 9; the saved steps are 1, 2, 3"),
        (["RUN", "--items", "400"], 4, "400 held-out questions were requested, but id_probe has only 8"),
        (["MODEL"], 2, "needs --recipe"),
        (["MODELS"], 2, "there is no such file or folder; did you mean MODEL?\n  to fix: correct the path\n"),
        (
            ["org/model"],
            2,
            "there is no such file or folder\n  to fix: correct the path, or for a model of the hub add --recipe",
        ),
        (["smollm2-135m-instruct"], 2, "needs --recipe"),
    ],
)
def test_mistakes_end_with_their_code(
    args: list[str], code: int, text: str, run: Path, model: Path, said: Said
) -> None:
    named = [arg.replace("RUN", str(run)).replace("MODEL", str(model)) for arg in args]
    found, out, err = said("eval", *named)
    assert (found, out) == (code, "")
    assert text.replace("MODEL", str(model)) in err


def test_scores_that_cannot_be_written_say_where_else(run: Path, said: Said) -> None:
    shutil.rmtree(run / "scores")
    (run / "scores").write_text("a file")
    code, _, err = said("eval", str(run), "--no-base", "--mode", "greedy")
    assert (code, "--out" in err) == (7, True)


def test_two_targets_never_share_a_file(run: Path, tmp_path: Path, said: Said) -> None:
    """Two runs of one name, in folders of their own, and scores of both in one: the second would take the first's place."""
    shutil.copytree(run, tmp_path / "elsewhere" / "mine")
    args = ("--no-base", "--mode", "greedy", "--out", str(tmp_path / "out"))
    code, out, err = said("eval", str(run), str(tmp_path / "elsewhere" / "mine"), *args)
    assert (code, out) == (2, "")
    assert "one would be lost" in err
    assert "a=PATH b=PATH" in err
    assert said("eval", f"a={run}", f"b={tmp_path}/elsewhere/mine", *args)[0] == 0
    assert len(list((tmp_path / "out").iterdir())) == 2
    assert said("eval", str(run), str(run / "checkpoints" / "step_000002"), *args)[0] == 0  # one run: other steps


def test_a_damaged_score_says_how_to_get_another(run: Path, said: Said) -> None:
    """Evaluating again alone would meet the same file."""
    path = score_path(run, 3, "greedy")
    path.write_text(path.read_text().replace('"text": "', '"text": "x', 1))
    code, _, err = said("eval", str(run), "--mode", "greedy", "--no-base")
    assert (code, "delete the file and evaluate again" in err) == (7, True)
    path.unlink()
    assert said("eval", str(run), "--mode", "greedy", "--no-base")[0] == 0


def test_all_checkpoints_names_those_that_it_leaves_out(run: Path, said: Said) -> None:
    file = run / "checkpoints" / "step_000002" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, out, _ = said("eval", str(run), "--all-checkpoints", "--mode", "greedy", "--no-base")
    assert code == 0
    assert out.startswith("warning: step 2 is left out: optimizer.safetensors")
    assert f"{run} at step 2" not in out
    for step in (1, 3):  # of the right length, so only reading it tells
        file = run / "checkpoints" / f"step_{step:06d}" / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
        code, out, err = said("eval", str(run), "--all-checkpoints", "--mode", "greedy", "--no-base")
        assert (code, "SHA-256" in out + err) == (0 if step == 1 else 6, True)
        assert ("warning: step 1 is left out: adapter_model.safetensors" in out, "at step 3:" in out) == (
            True, step == 1
        )  # fmt: skip


def test_another_start_never_takes_the_place_of_the_runs_own_base(
    run: Path, model: Path, tmp_path: Path, said: Said
) -> None:
    start = trained(tmp_path, model, NO_EVAL, "name=start", "steps=1").path
    before = score_path(run, 0, "greedy").read_bytes()
    code, out, err = said("eval", str(run), f"warm_start={start}", "--step", "0", "--mode", "greedy")
    assert (code, out, "the run began from" in err) == (7, "", True)
    assert "--no-base" not in err  # it would not help at step 0
    assert score_path(run, 0, "greedy").read_bytes() == before


def test_the_base_of_a_warm_start_is_not_called_the_models_own(
    run: Path, model: Path, finished: RunDirectory, tmp_path: Path, said: Said
) -> None:
    child = trained(tmp_path, model, *LORA, NO_EVAL, "name=child", "steps=1", f"warm_start={finished.path}")
    code, out, _ = said("eval", str(child.path), "--step", "0", "--mode", "greedy")
    assert code == 0
    assert out.startswith(
        f"{child.path} at step 0, its base: weights {fingerprints(finished)[3]}, of its warm start, in "
    )


def test_modes_by_name_and_by_kind(home: Path, model: Path) -> None:
    recipe = load(words(home, model, "eval.modes=[{name: avg@4, temperature: 0.6, samples: 4}]"))
    assert [mode.name for mode in choose_modes(recipe, "all")] == ["avg@4"]
    assert [mode.name for mode in choose_modes(recipe, "sampled")] == ["avg@4"]
    assert [(mode.name, mode.temperature) for mode in choose_modes(recipe, "greedy")] == [("greedy", 0.0)]
    assert choose_modes(recipe, "avg@4") == recipe.eval.modes
    with pytest.raises(ConfigError, match="avg@4"):
        choose_modes(recipe, "avg8")
    # Fixed modes need no recipe, and several can be named.
    fixed = choose_modes(recipe, "greedy_pass@1,pass@8,nondet_proxy@4")
    assert [(mode.name, mode.temperature, mode.samples) for mode in fixed] == [
        ("greedy_pass@1", 0.0, 1), ("pass@8", 0.6, 8), ("nondet_proxy@4", 0.0, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [("0.5:0.7", (0.5, 0.7)), ("0.5:", (0.5, 1.0)), (":0.7", (0.0, 0.7))])
def test_ranges(text: str, expected: tuple[float, float]) -> None:
    assert share_range(text) == expected


# --- adapters, several targets, every checkpoint ---------------------------------------------------------------------


def test_other_sets_are_evaluated_by_role(run: Path, said: Said) -> None:
    code, out, _ = said("eval", run, "--role", "train", "--items", "6", "--mode", "greedy", "--no-base")
    assert code == 0
    assert "sums/train/" in out
    code, _, err = said("eval", run, "--role", "ood_probe", "--items", "6", "--mode", "greedy")
    assert (code, "no held-out questions for ood_probe" in err) == (4, True)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("mine=runs/mine", ("mine", "runs/mine")),
        ("eval.items=3", ("", "eval.items=3")),
        ("seed=3", ("", "seed=3")),
        ("eval.itemz=3", ("", "eval.itemz=3")),
        ("runs/mine", ("", "runs/mine")),
    ],
)
def test_names_are_told_from_overrides(word: str, expected: tuple[str, str]) -> None:
    assert named(word) == expected
