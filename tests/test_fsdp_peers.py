"""Lab 07's peers: who shards and who only seems to; the same losses by Trainer with ZeRO-3."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranklab import device, launch
from ranklab.fsdp import FullyShardedBlock, hugging_face
from ranklab.peers.deepspeed_zero import deepspeed_engine

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
needs_trainer = pytest.mark.skipif(not hugging_face.are_here(),
                                   reason="needs transformers and accelerate")
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
WRAPPED = {
    "ours": lambda model: FullyShardedBlock(model) and model, "FSDP2": fully_shard,
    "ZeRO-3": lambda model: deepspeed_engine(model, ADAMW, 3), "DDP": DistributedDataParallel,
    "none": nn.Identity(), "ZeRO-2": lambda model: deepspeed_engine(model, ADAMW, 2)}


def _said():
    """{tool: what is said of a model of sizes that nothing divides}; of ours also for 6 ranks."""
    models = {}
    for tool, wrap in WRAPPED.items():
        model = nn.Sequential(*(nn.Linear(23, 23) for _ in range(4)), nn.Linear(23, 5))
        models[tool] = wrap(model.to(device()))
    return {tool: said_of(model, 3) for tool, model in models.items()} | {
        "too few": said_of(models["ours"], 6)}


def said_of(model, ranks):
    try:
        hugging_face.assert_sharded(model, ranks)
    except AssertionError as error:
        return str(error)


def test_what_is_sharded_is_seen_and_what_is_not_is_refused_on_every_rank():
    kinds = {"DDP": "DistributedDataParallel", "none": "Sequential", "ZeRO-2": "DeepSpeedEngine"}
    for said in launch(_said, ranks=3):
        assert [said.pop(tool) for tool in ("ours", "FSDP2", "ZeRO-3")] == [None] * 3
        assert "not 1/6 of them" in said.pop("too few")
        for tool, sentence in said.items():
            assert re.fullmatch(
                r"not sharded: this rank keeps (2,3\d\d) of the model's \1 numbers, not 1/3 of "
                f"them; the model is a {kinds[tool]}, the ranks of its job: 3", sentence)
    assert "the ranks of its job: 1" in said_of(nn.Linear(4, 4), 2)


@needs_trainer
def test_trainer_with_zero_3_has_our_losses_and_accelerate_is_caught_on_a_cpu():
    theirs, ours, said = (hugging_face.losses_on_ranks(train, 4) for train in (
        hugging_face.train_with_trainer, hugging_face.train_with_ours,
        hugging_face.train_with_accelerate))
    assert len(ours) == 4 and ours[-1] < ours[0] - 1
    assert theirs == pytest.approx(ours, rel=1e-4)
    if torch.cuda.device_count() >= hugging_face.RANKS:
        assert said == pytest.approx(ours, rel=1e-4)
    else:
        assert said.startswith("not sharded") and "DistributedDataParallel" in said


def test_without_transformers_there_are_no_losses(monkeypatch):
    monkeypatch.setattr(hugging_face, "are_here", lambda: False)
    assert hugging_face.losses_on_ranks(hugging_face.train_with_ours, 2) == []
