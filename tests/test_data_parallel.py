"""Lab 03 beside torch: DDP, Join, batch norm, DTensors; failures, refusals and edges."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ranklab import device, launch
from ranklab.checks.data_parallel.overlapped_data_parallel import ALL, Layers
from ranklab.checks.data_parallel.toys import gradients, loss_of, rows, toy
from ranklab.data_parallel import (
    OverlappedDataParallel, SyncBatchNorm, average_gradients,
    convert_sync_batch_norm, join_uneven, plan, replicas_agree,
)
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


def difference(model, other):
    """The largest difference of any gradient, weight or buffer; None must meet None."""
    largest, others = 0.0, gradients(other) | other.state_dict()
    for name, mine in (gradients(model) | model.state_dict()).items():
        theirs = others[name]
        assert (mine is None) == (theirs is None), name
        if mine is not None and mine.numel():
            largest = max(largest, (mine - theirs).abs().max().item())
    return largest


def gradient_messages(traffic):
    """(how many, how many bytes) all-reduces there were."""
    sent = [op.payload_bytes for op in traffic.ops if op.name == "all_reduce"]
    return len(sent), sum(sent)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)


def said_by(call):
    """What call() returns, or the sentence of its ValueError."""
    try:
        return call()
    except ValueError as error:
        return str(error)


# --- beside torch ---------------------------------------------------------------------------------

def gpt(seed):
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=61, n_ctx=8, n_layer=2, n_head=2, n_embd=16)).to(device())


def layers(_=0):
    return Layers().to(device())


def my_rows(step=0):
    return rows(10 * step + dist.get_rank())


USED = ((0, 1), (1,), (0,)), ((2,), (2,), (2,)), ((0,), (1,), (2,)), ((1,), (1, 0), (1,))


def _inputs(model, step):
    """This rank's; of Layers each rank uses some, and in the second step nobody the first two."""
    if isinstance(model, GPT):
        random = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return [torch.randint(61, (4, 8), generator=random).to(device())]
    return [my_rows(step), USED[step][dist.get_rank()]]  # toys take no heed of the second


def _train(wrapped, model):
    """The messages and bytes of each step; gradients and weights of the last one are left."""
    optimizer, seen = sgd(model), []
    for step in range(4):
        with Traffic() as traffic:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(wrapped, *_inputs(model, step)).backward()
        seen.append((gradient_messages(traffic), traffic.sent_bytes))
        if step < 3:
            optimizer.step()
    return seen


def _beside_torch():
    wrong = []
    for new_model, cap in ((gpt, 1), (gpt, 3072), (gpt, 25 * 2**20), (toy, 1), (layers, 1)):
        finds = {"find_unused_parameters": new_model is layers}
        mine, theirs = new_model(dist.get_rank()), new_model(dist.get_rank())
        wrapped = OverlappedDataParallel(mine, cap, **finds)
        torch_ddp = TorchDDP(theirs, bucket_cap_mb=cap / 2**20, **finds,
                             gradient_as_bucket_view=True)
        ours, torchs = _train(wrapped, mine), _train(torch_ddp, theirs)
        flats = {bucket.flat.untyped_storage().data_ptr() for bucket in wrapped.buckets}
        views = {p.grad.untyped_storage().data_ptr() for p in mine.parameters()
                 if p.grad is not None}
        if difference(mine, theirs) > 5e-6 or ours[2:] != torchs[2:] or not views <= flats:
            wrong.append((new_model.__name__, cap, difference(mine, theirs), ours, torchs))
    return wrong


def test_equal_to_torch_in_values_bytes_and_messages_and_gradients_are_views_of_buckets():
    assert launch(_beside_torch, ranks=3) == [[]] * 3


def _joined(find_unused_parameters):
    differences = []
    for counts in (0, 3, 3, 1), (2, 1, 0, 0):
        mine, theirs = toy(1), toy(1)
        ours = OverlappedDataParallel(mine, 32, find_unused_parameters=find_unused_parameters)
        torch_ddp = TorchDDP(theirs, find_unused_parameters=find_unused_parameters)
        batches = [my_rows(step) for step in range(counts[dist.get_rank()])]

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for x in batches:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

        train(ours, join_uneven(batches, ours))
        with Join([torch_ddp]):
            train(torch_ddp, batches)
        differences.append(max((a - b).abs().max().item() for a, b in zip(
            mine.state_dict().values(), theirs.state_dict().values())))
        assert replicas_agree(mine)
    return max(differences)


def test_uneven_batches_end_as_with_torchs_join():
    assert max(launch(lambda: max(_joined(False), _joined(True)), ranks=4)) < 1e-6


def _agree_as_dtensors():
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh, rank, seen = init_device_mesh(device().type, (2,)), dist.get_rank(), []
    local = torch.arange(6.0, device=device()).view(3, 2)
    for placement, change in ((Replicate(), 0), (Replicate(), rank), (Shard(0), 0)):
        model = nn.Linear(1, 1)
        model.weight = nn.Parameter(DTensor.from_local(local + change, mesh, [placement],
                                                       run_check=False))
        seen.append(said_by(lambda: replicas_agree(model)))
    return seen


def test_replicas_agree_on_copies_of_a_dtensor_and_refuses_its_shards():
    for seen in launch(_agree_as_dtensors, ranks=2):
        assert seen == [True, False, "replicas_agree: weight is (Shard(dim=0),), so no rank holds "
                        "a copy of it; compare its full_tensor()"]


# --- beside gradients averaged one by one ---------------------------------------------------------

def _checkpointed_as_a_whole(reentrant):
    model, plain = layers(), layers()
    wrapped, x = OverlappedDataParallel(model, 1), my_rows().requires_grad_()
    with Traffic() as traffic:
        checkpoint(wrapped, x, ALL, use_reentrant=reentrant).sum().backward()
    checkpoint(plain, x, ALL, use_reentrant=reentrant).sum().backward()
    average_gradients(plain)
    return difference(model, plain), gradient_messages(traffic)[0]


def test_a_checkpoint_around_the_whole_model_changes_nothing():
    def both():
        return [_checkpointed_as_a_whole(reentrant) for reentrant in (True, False)]

    for largest, messages in sum(launch(both, ranks=2), []):
        assert largest < 1e-6 and messages == 6


def _runs_out_of_memory(*_):
    raise MemoryError("none left")


def _after_a_failure(fails_at, set_to_none, find_unused_parameters):
    """Of each backward: "failed", "whole", or its difference to gradients averaged one by one."""
    model, plain, seen = layers(), layers(), []
    wrapped = OverlappedDataParallel(model, 1, find_unused_parameters=find_unused_parameters)
    at = fails_at[dist.get_rank()]
    for step in range(4):
        loss_of(plain, my_rows(step), ALL).backward()
        loss = loss_of(wrapped, my_rows(step), ALL)
        if step % 2 == 0 and at is not None:
            hook = model.layers[at].weight.register_hook(_runs_out_of_memory)
            with pytest.raises(MemoryError):
                loss.backward()
            hook.remove()
        else:
            loss.backward()
        if step % 2:  # in these steps no rank fails
            average_gradients(plain)
            seen.append(difference(model, plain))
        plain.zero_grad(set_to_none=set_to_none)
        if step % 2 or at is None or not set_to_none:  # after a failure all is gone anyway
            model.zero_grad(set_to_none=set_to_none)
    return max(seen)


def test_after_a_backward_that_failed_the_next_is_right():
    """All ranks alike, one of them, and each at another layer: with other buckets on their way."""
    def all_cases():
        return [_after_a_failure(fails_at, *how)
                for fails_at in ((2, 2, 2), (None, 1, None), (0, 2, 1))
                for how in ((True, False), (False, True))]

    assert max(map(max, launch(all_cases, ranks=3, timeout=30))) < 1e-6


# --- buffers and checkpoints ----------------------------------------------------------------------

def _buffers():
    model = toy(0)
    wrapped, rank = OverlappedDataParallel(model), dist.get_rank()
    loss_of(wrapped, my_rows()).backward()
    start = model.steps.item()
    model.steps += 10 * rank  # what a rank has counted by itself
    with torch.no_grad():
        wrapped(my_rows())  # the first one after training has rank 0's buffers
        with Traffic() as traffic:
            for _ in range(rank):
                wrapped(my_rows())
    return traffic.sent_messages, model.steps.item() - start, [*wrapped.state_dict()]


def test_buffers_are_rank_0s_evaluation_may_be_uneven_and_a_checkpoint_knows_no_ranks():
    names = [*toy(0).state_dict()]
    assert launch(_buffers, ranks=3) == [(0, 1 + rank, names) for rank in range(3)]


# --- batch norm -----------------------------------------------------------------------------------

def _converted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(),
                          nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Flatten()),
                          nn.BatchNorm1d(64, track_running_stats=False)).double().to(device())
    alone, names = copy.deepcopy(model), list(model.state_dict())
    assert convert_sync_batch_norm(model, dist.new_group()) is model
    assert list(model.state_dict()) == names
    wrapped, R = OverlappedDataParallel(model, find_unused_parameters=True), dist.get_world_size()
    for step in range(3):
        x = torch.randn(12, 1, 6, 6, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(step)).to(device())
        for net, part in ((alone, x), (wrapped, x.chunk(R)[dist.get_rank()])):
            net.zero_grad()
            net(part).square().mean().backward()
    trained = max((a.grad - b.grad).abs().max().item()
                  for a, b in zip(model.parameters(), alone.parameters()))
    return trained, (model.eval()(x) - alone.eval()(x)).abs().max().item()


def test_a_converted_model_trains_as_one_process_does_in_a_group_of_its_own():
    for trained, evaluated in launch(_converted, ranks=3):
        assert trained < 1e-12 and evaluated < 1e-12
    made = convert_sync_batch_norm(nn.BatchNorm1d(3).eval())  # a model that is a batch norm
    assert isinstance(made, SyncBatchNorm) and not made.training
    assert convert_sync_batch_norm(made) is made


def _too_few(of_ranks):
    norm = SyncBatchNorm(2).to(device())
    said = [said_by(lambda: str(len(norm(torch.ones(each[dist.get_rank()], 2, device=device())))))
            for each in of_ranks]
    return said, torch.stack([norm.running_mean, norm.running_var]).isfinite().all().item()


def test_one_value_has_no_variance_and_every_rank_says_so():
    few = "values in a channel of all ranks must be at least 2"
    for rank, seen in enumerate(launch(_too_few, [(1, 0, 0), (0, 0, 0), (1, 1, 0)], ranks=3)):
        assert seen == ([f"n=1 {few}", f"n=0 {few}", str((1, 1, 0)[rank])], True)


# --- refusals, on every rank ----------------------------------------------------------------------

def _mixed_messages(norm, **group):
    OverlappedDataParallel(convert_sync_batch_norm(nn.Sequential(nn.Linear(2, 2), norm(2))),
                           find_unused_parameters=True, **group)


def _joins(norm=nn.Identity, accumulates=False):
    model = OverlappedDataParallel(nn.Sequential(nn.Linear(6, 6), norm(6)))
    for x in join_uneven([my_rows() for _ in range(dist.get_rank() + accumulates)], model):
        model.sync = not accumulates
        model(x).sum().backward()


MIXED = "find_unused_parameters=True with a SyncBatchNorm in the same group"
JOINS = "a SyncBatchNorm inside join_uneven: it would"
REFUSED = [
    (lambda: OverlappedDataParallel(nn.Linear(2, 2).requires_grad_(False)),
     "no parameter requires a gradient"),
    (lambda: OverlappedDataParallel(nn.Linear(2, 2 + dist.get_rank())),
     r"the 2 parameters of rank \d differ from those of another rank"),
    (lambda: OverlappedDataParallel(nn.Linear(2, 2), bucket_cap_bytes=0),
     "bucket_cap_bytes=0 must be at least 1"),
    (lambda: _mixed_messages(nn.BatchNorm1d, group=dist.group.WORLD), MIXED),
    (lambda: _mixed_messages(nn.SyncBatchNorm), MIXED),
    (lambda: _joins(SyncBatchNorm), JOINS), (lambda: _joins(nn.SyncBatchNorm), JOINS),
    (lambda: _joins(accumulates=True), "no_sync inside join_uneven"),
]


def test_bad_input_is_a_sentence_on_every_rank():
    for of_rank in launch(lambda: [said_by(broken) for broken, _ in REFUSED], ranks=2):
        for said, (_, sentence) in zip(of_rank, REFUSED):
            assert re.match(sentence, said)


def test_times_of_buckets_are_those_of_one_link():
    case = [1.0, 2.0, 3.0], [5, 5, 5], 0.5, 0.1
    assert plan.bucket_times([[0], [1, 2]], *case) == [(1.0, 2.0), (3.0, 4.5)]
    assert plan.exposed_seconds([[0], [1], [2]], *case) == 1.0
    assert plan.capped_buckets([5, 5, 5, 1], 10) == [[0, 1], [2, 3]]


# --- parameters that not all ranks share ----------------------------------------------------------

class Experts(OverlappedDataParallel):
    """The second layer is shared with every second rank only, all else with all ranks."""

    def group_of(self, tensor):
        is_expert = any(tensor is p for p in self.module[1].parameters())
        return self.pair if is_expert else self.group


def _expert_gradients():
    pair = [dist.new_group([r, r + 2]) for r in range(2)][dist.get_rank() % 2]
    Experts.pair = pair
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 2)).to(device())
    wrapped = Experts(model, bucket_cap_bytes=30)
    plain = copy.deepcopy(model)  # the same on the ranks that share it, from here on
    loss_of(wrapped, my_rows()).backward()
    loss_of(plain, my_rows()).backward()
    average_gradients(plain[1], pair)
    average_gradients(plain[::2])
    return difference(model, plain), [bucket.group is pair for bucket in wrapped.buckets]


def test_parameters_are_averaged_over_the_ranks_that_share_them():
    for largest, is_of_pair in launch(_expert_gradients, ranks=4):
        assert is_of_pair == [False, True, False], "in the order of backward, whatever the group"
        assert largest < 1e-6
