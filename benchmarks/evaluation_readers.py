"""What one program makes of an exported folder: greedy replies and log-probabilities, as JSON. For gpu_evaluation.py.

    python benchmarks/evaluation_readers.py lockstep FOLDER --recipe RECIPE --questions 50 --out lockstep.json
    python benchmarks/evaluation_readers.py transformers FOLDER --asked lockstep.json --out transformers.json
    python benchmarks/evaluation_readers.py vllm FOLDER --asked lockstep.json --out vllm.json

transformers and vllm are read as anybody reads a folder, with nothing of Lockstep.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def read_lockstep(folder: str, recipe_file: str, count: int) -> dict[str, Any]:
    """By Lockstep's engine, which also chooses what is asked: the first held-out questions as ids, and random ids."""
    from lockstep.config.schema import EvalMode
    from lockstep.evaluate.plan import eval_plan
    from lockstep.evaluate.runner import eval_requests, heldout_items
    from lockstep.export.measure import probe_sequences
    from lockstep.scoring.targets import build_rig, find_target

    recipe = find_target(folder, [recipe_file]).recipe
    rig = build_rig(recipe)
    proof = rig.prove()
    chat, plan = rig.policy.chat, eval_plan(recipe, rig.policy.numerics, rig.policy.context)
    prompts = heldout_items(rig.task, plan)[:count]
    requests = eval_requests(prompts, chat, EvalMode(), plan, proof.version)
    rig.engine.submit(requests)
    found = {one.request.id: one.ids for one in rig.engine.completed()}
    stop = sorted(chat.stop_ids)
    replies = [without(found[request.id], stop) for request in requests]
    asked = [list(request.prompt_ids) for request in requests]
    probe = [list(ids) for ids in probe_sequences(rig.policy.model, rig.policy.tokenizer.all_special_ids)]
    sequences = [ids + reply for ids, reply in zip(asked, replies, strict=True)] + probe
    return {
        "asked": asked, "stop": stop, "max_tokens": plan.max_tokens, "sequences": sequences, "replies": replies,
        "texts": [chat.decode(reply) for reply in replies], "logprobs": rig.engine.score([tuple(s) for s in sequences]),
    }  # fmt: skip


def read_transformers(folder: str, given: dict[str, Any], cpu: bool) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = model.to(device).eval()
    stop = given["stop"]
    how = GenerationConfig(
        do_sample=False, max_new_tokens=given["max_tokens"], eos_token_id=stop, pad_token_id=stop[0], repetition_penalty=1.0
    )  # fmt: skip
    replies, logprobs = [], []
    with torch.no_grad():
        for ids in given["asked"]:
            ids_1T = torch.tensor([ids], device=device)
            out_1T = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=how)
            replies.append(without(out_1T[0, len(ids) :].tolist(), stop))
        for ids in given["sequences"]:
            ids_1T = torch.tensor([ids], device=device)
            logprobs_TV = model(input_ids=ids_1T).logits[0, :-1].float().log_softmax(-1)
            logprobs.append(logprobs_TV.gather(-1, ids_1T[0, 1:, None]).squeeze(-1).tolist())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return {"replies": replies, "texts": [tokenizer.decode(ids) for ids in replies], "logprobs": logprobs}


def read_vllm(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    longest = max(map(len, given["asked"] + given["sequences"])) + given["max_tokens"] + 8
    llm: Any = LLM(
        folder, enforce_eager=True, gpu_memory_utilization=0.3, max_model_len=longest, seed=0,
        enable_prefix_caching=False, generation_config="vllm",
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=given["max_tokens"], stop_token_ids=given["stop"])
    forced = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([{"prompt_token_ids": ids} for ids in given["asked"]], greedy)
    scored = llm.generate([{"prompt_token_ids": ids} for ids in given["sequences"]], forced)
    replies = [without(one.outputs[0].token_ids, given["stop"]) for one in found]
    logprobs = [
        [place[token].logprob for place, token in zip(one.prompt_logprobs[1:], ids[1:], strict=True)]
        for one, ids in zip(scored, given["sequences"], strict=True)
    ]
    tokenizer = llm.get_tokenizer()
    texts = [tokenizer.decode(ids) for ids in replies]
    llm.llm_engine.engine_core.shutdown()  # its process, which the end of this one would leave (see main)
    return {"replies": replies, "texts": texts, "logprobs": logprobs}


def without(ids: Iterable[int], stop: Sequence[int]) -> list[int]:
    """A reply without the token that ended it, which some engines return and some do not."""
    kept = list(ids)
    return kept[:-1] if kept and kept[-1] in stop else kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=("lockstep", "transformers", "vllm"))
    parser.add_argument("folder")
    parser.add_argument("--recipe", help="whose questions are asked")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--asked", type=Path, help="what lockstep wrote")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    given: dict[str, Any] = json.loads(args.asked.read_text()) if args.asked else {}
    match args.reader:
        case "lockstep":
            found = read_lockstep(args.folder, args.recipe, args.questions)
        case "transformers":
            found = read_transformers(args.folder, given, args.cpu)
        case _:
            found = read_vllm(args.folder, given)
    args.out.write_text(json.dumps(found))
    if args.reader == "vllm":
        os._exit(0)  # in the ordinary way vLLM 0.24 ends with an abort: threads of its outlive what they use


if __name__ == "__main__":
    main()
