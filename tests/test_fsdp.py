"""Lab 07's FSDP beside torch's FSDP2: numbers, rows, bytes and messages; and what is refused.

That it is equal to one process, its check proves.
"""

import re
from collections import UserDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ranklab import device, launch
from ranklab.checks.fsdp.hybrid_shard_groups import HYBRID, MAKE_REPLICAS, MAKE_SHARDS
from ranklab.checks.fsdp.wrap_policy import OURS, limits, models
from ranklab.checks.prover.slips import edited
from ranklab.checks.zero.toys import SGD, Toy, loss_of, seeded
from ranklab.course.check import judge
from ranklab.fsdp import (
    FullyShardedBlock, Precision, clip_grad_norm_sharded, hybrid_shard_groups, whole_bytes,
    wrap_policy,
)
from ranklab.fsdp.training import FullyShard
from ranklab.meter import MemoryCurve, Traffic
from ranklab.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.timeout(120)
SHAPE = GPTConfig(vocab_size=50, n_ctx=16, n_embd=20, n_head=2, n_layer=3)


def new_gpt():
    torch.manual_seed(0)
    return GPT(SHAPE).to(device())


# --- as torch's FSDP2 -----------------------------------------------------------------------------

def _each(call, values, *args):
    """call(value, *args) of each of the values, on this rank."""
    return [call(value, *args) for value in values]


def _trained(ours, shard_ranks, precision, options):
    """(losses, the shapes of the rows, bytes sent in the last step, messages of each kind)"""
    model = new_gpt()
    if ours:
        group, replicas = hybrid_shard_groups(shard_ranks) if shard_ranks else (None, None)
        for module in (*model.blocks.values(), model):
            FullyShardedBlock(module, group, replicas, precision, **options)
    else:
        mesh = shard_ranks and torch.distributed.init_device_mesh(
            device().type, (dist.get_world_size() // shard_ranks, shard_ranks),
            mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(precision.compute, precision.reduce)
        for module in (*model.blocks.values(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(4):
        x = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(
            10 * step + dist.get_rank())).to(device())
        optimizer.zero_grad()
        with Traffic() as traffic:
            loss = model(x, x)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    shapes = [tuple((p if ours else p.to_local()).shape) for p in model.parameters()]
    return losses, shapes, traffic.sent_bytes, sorted(traffic.calls.values())


@pytest.mark.parametrize("ranks, shard_ranks, precision, options", [
    (3, None, Precision(), {}), (4, 2, Precision(), {}),
    (2, None, Precision(), {"reshard_after_forward": False}),
    (2, None, Precision(torch.bfloat16, torch.float32), {}),
], ids=["3 ranks", "hybrid", "whole until backward", "bf16"])
def test_same_losses_rows_bytes_and_messages_as_fsdp2(ranks, shard_ranks, precision, options):
    for ours, right in launch(_each, _trained, (True, False), shard_ranks, precision, options,
                              ranks=ranks):
        assert ours[0] == pytest.approx(right[0], rel=1e-5)
        assert ours[1:] == right[1:]


class Spare(nn.Module):
    """Of its layers the spare one is used by some ranks."""

    def __init__(self, inside=None):
        super().__init__()
        self.inside, self.layer, self.spare = inside, nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x, uses):
        x = torch.tanh(self.inside(x, uses)) if self.inside else x
        return self.layer(x) + self.spare(x) if uses else self.layer(x)


def _spare(shard, users):
    """For each parameter after two steps: (its name, whether it has a gradient, its rows here)."""
    torch.manual_seed(0)
    model = Spare(Spare()).to(device())
    model.layer.requires_grad_(False)  # now the root may have nothing to send
    for module in (model.inside, model) if shard else ():
        shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    ranks = [dist.get_rank()] if shard else range(2)
    for step in range(2):
        optimizer.zero_grad()
        for rank in ranks:
            x = torch.full((1, 5), 1.0 + rank + step, device=device())
            (model(x, rank in users).sum() / len(ranks)).backward()
        optimizer.step()
    return [(name, p.grad is not None, p.to_local() if shard is fully_shard else p)
            for name, p in model.named_parameters()]


@pytest.mark.parametrize("users, like", [((), fully_shard), ((0, 1), fully_shard), ((0,), None)])
def test_what_no_rank_has_used_is_left_alone_as_by_fsdp2(users, like):
    """Where one rank alone has used it, it is stepped as in one process. (For that FSDP2 has
    set_reduce_scatter_unused_params.)
    """
    for rank, (ours, right) in enumerate(launch(_each, _spare, (FullyShardedBlock, like), users,
                                                ranks=2)):
        for (name, has_gradient, rows), (_, *its) in zip(ours, right, strict=True):
            used = name.startswith("inside.layer") or "spare" in name and bool(users)
            assert has_gradient == its[0] == used
            torch.testing.assert_close(rows, its[1] if like else its[1].chunk(2)[rank])


# --- forwards without backward --------------------------------------------------------------------

def new_toy():
    return seeded(lambda: Toy().float(), 0)


def _odd_forwards():
    """The losses after forwards without backward, in any mode, and a backward that raised."""
    one, model = new_toy(), new_toy()
    # torch does not look into it, so nothing tells when the block's backward begins
    model.blocks[1].register_forward_hook(lambda module, inputs, outputs: UserDict(outputs))
    for module in (*model.blocks, model):
        root = FullyShardedBlock(module, reshard_after_forward=False)
    ours, ones = SGD(model.parameters()), SGD(one.parameters())
    for step in range(3):
        loss_of(model, 1)  # with autograd, but without a backward
        with torch.no_grad():
            loss_of(model, 2)
        if step == 1:
            hook = model.blocks[1].register_forward_hook(
                lambda module, inputs, outputs: outputs["on"].register_hook(_raise) and None)
            with pytest.raises(RuntimeError, match="on purpose"):
                loss_of(model, 3).backward()
            hook.remove()
        for each, optimizer in ((model, ours), (one, ones)):
            first, second = loss_of(each, 4), loss_of(each, 5)  # two forwards, one backward
            (first + second).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any(block.is_whole for block in root.unit.hooks.buckets)
    return [(loss_of(m, 6)).item() for m in (model, one)]


def _raise(gradient):
    raise RuntimeError("on purpose")


def test_forwards_without_backward_leave_nothing_stale():
    for ours, one in launch(_odd_forwards, ranks=2):
        assert ours == pytest.approx(one, abs=1e-5)


# --- what is whole, the norm ----------------------------------------------------------------------

def _peak(most_bytes):
    """(bytes of parameters that were whole at the same time, bytes promised)."""
    model = new_gpt()
    blocks = wrap_policy(model, most_bytes)
    promised = whole_bytes(model, blocks)
    roots = [FullyShardedBlock(module) for module in (*blocks, model)]
    parameters = [p for block in roots for p in block.parameters]
    x = torch.zeros(2, 16, dtype=torch.long, device=device())
    model(x, x).backward()  # shows the order of the blocks
    with MemoryCurve(model, gathered=lambda: [
            *(block.gathered for block in roots), *(p.whole for p in parameters)]) as curve:
        model(x, x).backward()
    return max(point.gathered_parameters for point in curve.points), promised


def test_as_much_is_whole_as_the_policy_promises():
    limits = 70_000, 50_000, 30_000
    for found in launch(_each, _peak, limits, ranks=2):
        assert all(peak == promised <= most for (peak, promised), most in zip(found, limits))


def test_the_check_knows_how_many_blocks_the_policy_takes():
    assert OURS == sum(len(wrap_policy(model, most)) for model in models().values()
                       for most in limits(model))


def _norm_without_the_first_gradient(clip):
    model = nn.ModuleDict({"unused": nn.Linear(2, 2), "used": nn.Linear(2, 2)})
    parallel = FullyShard(blocks=lambda model: model.values(), clip=clip)
    parallel.apply(model.to(device()))
    model["used"](torch.ones(1, 2, device=device())).sum().backward()
    return parallel.grad_norm(list(model.parameters())).item()


def test_the_first_parameter_may_have_no_gradient():
    for clip in (clip_grad_norm_sharded, lambda *of: float(clip_grad_norm_sharded(*of))):
        norms = launch(_norm_without_the_first_gradient, clip, ranks=2)
        assert norms == [pytest.approx(6**0.5)] * 2


# --- bad input ------------------------------------------------------------------------------------

def _bad(what):
    model = new_toy()
    if what == "scalar":
        model.scale = nn.Parameter(torch.ones((), device=device()))
    if what == "types":
        model.norm.double()
    if what == "layer":  # one and the same in two blocks
        model.blocks[0].up = model.blocks[2].up
    before = {"tied": [model.head], "layer": [model.blocks[0], model.blocks[2]]}
    with pytest.raises(ValueError) as error:
        for module in (*before.get(what, ()), model):
            FullyShardedBlock(module)
    return str(error.value)


@pytest.mark.parametrize("what, sentence", [
    ("layer", "up.weight is a parameter of a block that was sharded before, too"),
    ("scalar", r"scale has the shape \(\), so it has no rows to share out"),
    ("types", "travel in one message, but these are torch.float32 and torch.float64"),
    ("tied", "embedding.weight is a parameter of a block that was sharded before, too"),
])
def test_bad_input_is_a_sentence_on_every_rank(what, sentence):
    said = launch(_bad, what, ranks=3)
    assert all(re.search(sentence, each) for each in said)


def test_groups_that_only_their_own_ranks_make_hang_and_no_mistake_is_named():
    """Which rank waits where is chance, so no table can hold it."""
    own = edited(hybrid_shard_groups, (
        MAKE_SHARDS, "shards = dist.new_group(copies[dist.get_rank() // shard_ranks].tolist())",
        MAKE_REPLICAS, "replicas = dist.new_group("
        "copies[:, dist.get_rank() % shard_ranks].tolist())"))
    mistake = judge(HYBRID, own).mistake
    assert "does not end" in mistake.what
    assert not any(slip.says in mistake.hint for slip in HYBRID.mistakes)
