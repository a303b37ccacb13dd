"""`lockstep eval` of adapters, shards, several targets and checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.evaluation.records import read_score, score_path
from lockstep.track.rundir import RunDirectory
from tests.loops.runs import LORA, NO_EVAL, fingerprints, trained, words
from tests.saying import Said
from tests.tiny import write_tiny_model


def peft_folder(run: Path, place: Path) -> Path:
    """The newest checkpoint as PEFT's save_pretrained would leave it: no file of ours."""
    place.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(run / "checkpoints" / "step_000003" / name, place / name)
    return place


def test_an_adapters_folder_gives_the_score_of_its_checkpoint(
    run: Path, model: Path, tmp_path: Path, said: Said
) -> None:
    """With its base beside it, and in the place where trainers put it: global_step_3/actor/lora_adapter."""
    peft_folder(run, tmp_path / "global_step_3" / "actor" / "lora_adapter")
    recipe = words(tmp_path, model)
    out_dir = tmp_path / "out"
    code, out, _ = said(
        "eval", f"mine={tmp_path}/global_step_3", "--recipe", *recipe, "--out", out_dir, "--mode", "greedy"
    )
    assert code == 0, out
    inside, base = (read_score(score_path(run, step, "greedy")) for step in (3, 0))
    adapter, beside = (
        read_score(out_dir / "mine_step_000003_greedy.json"),
        read_score(out_dir / "mine_base_step_000000_greedy.json"),
    )
    assert (adapter.results, adapter.conditions.weights) == (inside.results, inside.conditions.weights)
    assert beside.results == base.results
    assert "verdict" in out
    assert (adapter.source, beside.source) == ("mine", "the base of mine")
    assert f"the adapter is in {tmp_path}/global_step_3/actor/lora_adapter" in out


@pytest.mark.parametrize("first", ["adapters", "all weights"])
def test_the_adapter_of_a_run_with_a_warm_start_is_put_over_what_that_run_had_below_it(
    model: Path, finished: RunDirectory, tmp_path: Path, said: Said, first: str
) -> None:
    """Adapters that another run began are all in the folder; weights that another run trained are the base."""
    parent = finished if first == "adapters" else trained(tmp_path, model, NO_EVAL, "name=full", "steps=1")
    start = f"warm_start={parent.path}"
    heir = trained(tmp_path, model, *LORA, "name=heir", "eval.at_start=false", start)
    folder = peft_folder(heir.path, tmp_path / "peft")
    shutil.copy(heir.checkpoints_path / "step_000003" / "adapter_base.json", folder)
    recipe = words(tmp_path, model, start)
    code, _, err = said("eval", folder, "--recipe", *recipe, "--mode", "greedy", "--no-base", "--out", tmp_path / "out")
    assert code == 0, err
    (written,) = (tmp_path / "out").iterdir()
    inside, outside = read_score(score_path(heir.path, 3, "greedy")), read_score(written)
    assert (outside.results, outside.conditions.weights) == (inside.results, inside.conditions.weights)


def test_two_scores_of_step_0_are_not_taken_for_base_and_trained(
    run: Path, model: Path, tmp_path: Path, said: Said
) -> None:
    """An adapter of whose steps nothing is known has step 0, as its base has."""
    folder = peft_folder(run, tmp_path / "exported")
    assert (
        said("eval", folder, "--recipe", *words(tmp_path, model), "--out", tmp_path / "out", "--mode", "greedy")[0] == 0
    )
    code, _, err = said("compare", tmp_path / "out")
    assert (code, "there are two scores of mode greedy" in err) == (7, True)
    base, trained = sorted((tmp_path / "out").iterdir())
    code, out, _ = said("compare", base, trained)
    assert code == 0
    assert f"A the base of {folder}: " in out
    assert f"B {folder}: " in out


def test_a_model_and_a_fresh_adapter_over_it_are_one_base(run: Path, model: Path, tmp_path: Path, said: Said) -> None:
    both = (f"m={model}", f"r={run}", "--step", "0", "--recipe", *words(tmp_path, model))
    code, out, _ = said("eval", *both, "--mode", "greedy", "--out", tmp_path / "out")
    assert (code, "not loaded" in out) == (0, False)


def test_a_checkpoint_of_all_weights_needs_no_parent_unless_its_base_is_measured(
    model: Path, tmp_path: Path, said: Said
) -> None:
    parent = trained(tmp_path, model, NO_EVAL, "name=parent", "steps=1")
    heir = trained(tmp_path, model, NO_EVAL, "name=heir", "steps=1", f"warm_start={parent.path}")
    parent.path.rename(tmp_path / "away")
    assert said("eval", heir.path, "--mode", "greedy")[0] != 0
    code, out, _ = said("eval", heir.path, "--mode", "greedy", "--no-base")
    assert (code, "as saved" in out) == (0, True)
    assert main(["export", str(heir.path), str(tmp_path / "model")]) == 0


def test_an_adapter_that_does_not_fit_is_refused(run: Path, model: Path, tmp_path: Path, said: Said) -> None:
    recipe = words(tmp_path, model)
    folder = peft_folder(run, tmp_path / "peft")
    assert said("eval", folder)[0] == 2  # which task?
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, code, says in (
        ({"target_modules": ["q_proj"]}, 7, "the adapter does not fit the model: it has"),
        ({"rank_pattern": {"q_proj": 2}}, 4, "it uses rank_pattern"),
        ({"bias": "all"}, 4, "it trains biases"),
        ({"peft_type": "IA3"}, 4, "its method is ia3"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        found, out, err = said("eval", folder, "--recipe", *recipe)
        assert (found, out) == (code, ""), err
        assert says in err


def test_sharded_training_folders_are_refused_and_not_taken_in_part(model: Path, tmp_path: Path, said: Said) -> None:
    actor = tmp_path / "global_step_29" / "actor"
    shutil.copytree(model, actor / "huggingface")
    for rank in range(2):
        (actor / f"model_world_size_2_rank_{rank}.pt").write_bytes(b"")
    code, out, err = said("eval", actor.parent, "--recipe", *words(tmp_path, model))
    assert (code, out) == (6, "")
    assert "the folder holds training shards (FSDP shards of verl: 2 files such as model_world_size_2_rank_0.pt)" in err


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("mp_rank_00_model_states.pt", "convert it with lockstep import"),
        ("__0_0.distcp", "gather it into a Hugging Face folder with the program that wrote it"),
    ],
)
def test_shards_that_import_cannot_read_are_not_sent_there(
    file: str, says: str, model: Path, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / file).write_bytes(b"")
    code, _, err = said("eval", tmp_path / "saved", "--recipe", *words(tmp_path, model))
    assert code == 6
    assert says in err


def test_every_checkpoint_of_a_run_on_one_model(run: Path, finished: RunDirectory, said: Said) -> None:
    code, out, _ = said("eval", run, "--all-checkpoints", "--mode", "sampled")
    assert code == 0
    shown = [line for line in out.splitlines() if ": weights " in line and "as saved" in line]
    weights_of = fingerprints(finished)
    assert shown == [f"{run} at step {step}: weights {weights_of[step]}, as saved, in fp32" for step in (1, 2, 3)]
    assert out.count("verdict") == 3
    for step in (2, 3):  # on the same model, one after the other: the replies are those of training
        assert f"all 8 replies are those of the stored score ({score_path(run, step, 'sampled')})" in out
    assert "all targets" in out
    assert said("eval", run, "--all-checkpoints", "--step", "2")[0] == 2


def test_several_named_targets_stand_side_by_side(run: Path, model: Path, tmp_path: Path, said: Said) -> None:
    recipe = words(tmp_path, model)
    code, out, _ = said(
        "eval", f"base={model}", f"rl={run}", "--no-base", "--mode", "greedy_pass@1", "--out", tmp_path / "out",
        "--recipe", *recipe,
    )  # fmt: skip
    assert code == 0
    table = out[out.index("all targets") :].splitlines()
    assert [line.split()[2] for line in table[3:5]] == ["base", "rl"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "base_step_000000_greedy_pass@1.json", "rl_step_000003_greedy_pass@1.json",
    ]  # fmt: skip
    code, _, err = said("eval", str(model), str(model), "--recipe", *recipe)
    assert (code, "two targets have the same name" in err) == (2, True)


def test_the_same_weights_under_two_names_are_no_alarm_but_other_weights_are(
    model: Path, tmp_path: Path, said: Said
) -> None:
    """A copy of a model with one weight moved by a hair: the weights differ, the greedy replies do not."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, tmp_path / "hair")
    tensors = load_file(tmp_path / "hair" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-6
    save_file(tensors, tmp_path / "hair" / "model.safetensors", metadata={"format": "pt"})
    recipe = words(tmp_path, model)
    named = [f"a={model}", f"b={tmp_path}/hair", "--recipe", *recipe, "--mode", "greedy"]
    code, out, _ = said("eval", *named)
    assert code == 0
    assert "alarm: a and b, greedy: All 8 replies are the same, word for word, although the weights differ" in out
    code, _, err = said("eval", *named, "--fail-on-alarm")
    assert (code, "alarms, the first" in err) == (7, True)
    code, out, _ = said("eval", f"a={model}", f"b={model}", "--recipe", *recipe, "--mode", "greedy")
    assert "weights not loaded?" not in out


def test_numerics_that_change_no_reply_since_the_last_command_are_an_alarm(run: Path, said: Said) -> None:
    """Two commands, as in note 000: the second finds the first one's score. Its record is given the second's own replies."""
    from lockstep.evaluation.records import write_score

    words = (run, "--numerics", "mxfp4-w4a4", "--mode", "greedy", "--no-base")
    code, out, _ = said("eval", *words)
    assert (code, "numerics not applied?" in out) == (0, False)
    (quantised,) = (run / "scores").glob("*/step_000003_greedy.json")
    path = score_path(run, 3, "greedy")
    plain = read_score(path)
    assert plain.results != read_score(quantised).results
    write_score(path, dataclasses.replace(plain, results=read_score(quantised).results))
    code, out, _ = said("eval", *words)
    assert code == 0
    assert f"alarm: {path} and {run} at step 3, now, greedy: numerics not applied? All 8 replies are the same" in out
    path.write_bytes(path.read_bytes()[:-2])
    code, out, _ = said("eval", *words)
    assert (code, f"warning: not compared with {path}" in out) == (0, True)


def test_with_base_a_model_stands_beside_the_recipes_own(model: Path, tmp_path: Path, said: Said) -> None:
    write_tiny_model(tmp_path / "other", seed=3)
    code, out, _ = said(
        "eval", tmp_path / "other", "--with-base", "--mode", "sampled", "--recipe", *words(tmp_path, model)
    )
    assert code == 0
    assert "compared across different model at your request" in out
    assert "conditions differ" not in out
