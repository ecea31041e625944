"""Lab 07's peers: who shards and who only seems to; the same losses by Trainer with ZeRO-3."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranklab import device, launch
from ranklab.fsdp import FullyShardedBlock
from ranklab.projects.fsdp import peers
from ranklab.zero.deepspeed_engine import deepspeed_engine

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
needs_trainer = pytest.mark.skipif(not peers.has_trainer(),
                                   reason="needs transformers and accelerate")
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


def _said(tools, more=0):
    """{tool: what is said of a model of sizes that nothing divides, as it leaves that}"""
    return {tool: said_of(wrapped(tool), dist.get_world_size() + more) for tool in tools}


def wrapped(tool):
    model = nn.Sequential(*(nn.Linear(23, 23) for _ in range(4)), nn.Linear(23, 5)).to(device())
    if tool in ("ours", "FSDP2"):
        for module in (model[0], model):
            (FullyShardedBlock if tool == "ours" else fully_shard)(module)
    if tool.startswith("ZeRO"):
        return deepspeed_engine(model, ADAMW, int(tool[-1]))
    return DistributedDataParallel(model) if tool == "DDP" else model


def said_of(model, ranks):
    try:
        peers.assert_sharded(model, ranks)
    except AssertionError as error:
        return str(error)


def test_what_is_sharded_is_seen_and_what_is_not_is_refused_on_every_rank():
    kinds = {"DDP": "DistributedDataParallel", "none": "Sequential", "ZeRO-2": "DeepSpeedEngine"}
    for said in launch(_said, ["ours", "FSDP2", "ZeRO-3", *kinds], ranks=3):
        assert [said.pop(tool) for tool in ("ours", "FSDP2", "ZeRO-3")] == [None] * 3
        for tool, sentence in said.items():
            assert re.fullmatch(
                r"not sharded: this rank keeps (2,3\d\d) of the model's \1 numbers, not 1/3 of "
                f"them; the model is a {kinds[tool]}, the ranks of its job: 3", sentence)


def test_shards_of_fewer_ranks_are_refused_and_a_process_without_a_group():
    [said, _] = launch(_said, ["ours"], 2, ranks=2)
    assert re.search("keeps 1,2.. of the model's 2,328 numbers, not 1/4 of them", said["ours"])
    assert "the ranks of its job: 1" in said_of(nn.Linear(4, 4), 2)


@needs_trainer
def test_accelerate_shards_on_gpus_and_is_caught_on_a_cpu():
    sentence = peers.fallback_caught()
    if torch.cuda.device_count() >= peers.RANKS:
        assert sentence.startswith("Accelerate has sharded")
    else:
        assert sentence.startswith("not sharded") and "DistributedDataParallel" in sentence


@needs_trainer
def test_trainer_with_zero_3_has_our_losses():
    theirs, ours = peers.trainer_losses(4), peers.our_losses(4)
    print(theirs, ours)
    assert len(ours) == 4 and ours[-1] < ours[0] - 1
    assert theirs == pytest.approx(ours, rel=1e-4)


def test_without_transformers_it_is_a_sentence(monkeypatch):
    monkeypatch.setattr(peers, "has_trainer", lambda: False)
    assert peers.fallback_caught() == peers.NOT_HERE
    assert peers.trainer_losses(2) == peers.our_losses(2) == []
