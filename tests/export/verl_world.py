"""Writes an actor's checkpoint as verl does: a gloo world of two processes, FSDP2, sharded state dicts, torch.save by rank.

    python tests/export/verl_world.py MODEL_FOLDER ACTOR_FOLDER PORT

The layout is that of verl/utils/checkpoint/fsdp_checkpoint_manager.py: model_world_size_2_rank_R.pt, fsdp_config.json,
huggingface/ with config and tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

WORLD = 2


def rank_main(rank: int, model_folder: str, actor: str, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), Path(actor) / f"model_world_size_{WORLD}_rank_{rank}.pt")
    torch.save({"lr_scheduler": {}, "rng": {}}, Path(actor) / f"extra_state_world_size_{WORLD}_rank_{rank}.pt")
    if rank == 0:
        AutoConfig.from_pretrained(model_folder).save_pretrained(Path(actor) / "huggingface")
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(Path(actor) / "huggingface")
        (Path(actor) / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True)
    mp.spawn(rank_main, args=tuple(sys.argv[1:]), nprocs=WORLD)
