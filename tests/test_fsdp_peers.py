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


def _wrapped(way):
    """A model of sizes that nothing divides, as each `way` leaves it; what is said of it."""
    model = nn.Sequential(*(nn.Linear(23, 23) for _ in range(4)), nn.Linear(23, 5)).to(device())
    if way == "ours":
        FullyShardedBlock(model[0])
        FullyShardedBlock(model)
    elif way == "FSDP2":
        fully_shard(model[0])
        fully_shard(model)
    elif way == "ZeRO":
        model = deepspeed_engine(model, functools.partial(torch.optim.AdamW, lr=0.01), 3)
    elif way == "ZeRO-2":
        model = deepspeed_engine(model, functools.partial(torch.optim.AdamW, lr=0.01), 2)
    elif way == "DDP":
        model = DistributedDataParallel(model)
    return said_of(model, dist.get_world_size())


def said_of(model, ranks):
    try:
        peers.assert_sharded(model, ranks)
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize("way", ["ours", "FSDP2", "ZeRO"])
def test_what_is_sharded_is_seen(way):
    assert launch(_wrapped, way, ranks=3) == [None] * 3


@pytest.mark.parametrize("way, kind", [("DDP", "DistributedDataParallel"), ("none", "Sequential"),
                                       ("ZeRO-2", "DeepSpeedEngine")])
def test_what_is_not_sharded_is_refused_on_every_rank(way, kind):
    for sentence in launch(_wrapped, way, ranks=3):
        assert re.fullmatch(
            r"not sharded: this rank keeps (2,3\d\d) of the model's \1 numbers, not 1/3 of them; "
            f"the model is a {kind}, the ranks of its job: 3", sentence)


def _for_more_ranks():
    model = nn.Linear(16, 16, bias=False).to(device())
    FullyShardedBlock(model)
    return said_of(model, 4)


def test_shards_of_fewer_ranks_are_refused():
    assert "keeps 128 of the model's 256 numbers, not 1/4" in launch(_for_more_ranks, ranks=2)[0]


def test_a_process_without_a_group_is_refused():
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
