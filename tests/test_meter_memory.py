"""memory_of and SavedActivations count exactly, each storage once."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from ranklab import device, launch
from ranklab.meter import Memory, SavedActivations, memory_of


def tied_model():
    """Two layers of 8 x 8 that share their weight, a frozen scale, a buffer of 8."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model.scale = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    model.register_buffer("mask", torch.ones(8))
    model.register_buffer("same_mask", model.mask[:4])
    return model


TRAINED = 8 * 8 + 8 + 8  # elements: one weight, two biases


def trained(model, optimizer):
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    return memory_of(model, optimizer)


# --- memory_of ------------------------------------------------------------------------------------


def test_categories_and_tied_weights():
    model = tied_model()
    assert memory_of(model) == Memory((TRAINED + 8) * 4, 0, 0, 8 * 4)
    adam = trained(model, torch.optim.AdamW(model.parameters()))
    steps = 3 * 4  # Adam keeps the number of its steps as a float beside each trained tensor
    assert adam == Memory((TRAINED + 8) * 4, TRAINED * 4, 2 * TRAINED * 4 + steps, 8 * 4)
    assert adam.total == 4 * (TRAINED + 8) + 3 * 4 * TRAINED + steps + 8 * 4


@pytest.mark.parametrize("momentum, copies", [(0.0, 0), (0.9, 1)])
def test_sgd_keeps_one_copy_with_momentum_and_none_without(momentum, copies):
    model = tied_model()
    memory = trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
    assert memory.optimizer_state == copies * TRAINED * 4


def test_views_of_a_flat_buffer_count_once():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    flat, gradients = torch.zeros(144), torch.zeros(144)
    start = 0
    for p in model.parameters():
        p.data = flat[start:start + p.numel()].view_as(p)
        p.grad = gradients[start:start + p.numel()].view_as(p)
        start += p.numel()
    assert memory_of(model) == Memory(144 * 4, 144 * 4, 0, 0)


@pytest.mark.filterwarnings("error")
def test_what_was_computed_in_a_parameters_place_has_no_gradient():
    model, seen = torch.nn.Linear(8, 8), []
    model.register_forward_hook(lambda *_: seen.append(memory_of(model)))
    torch.func.functional_call(model, {"weight": model.weight * 2}, torch.ones(3, 8))
    assert seen == [Memory(72 * 4, 0, 0, 0)]


def test_mixed_precision_adam_needs_16_bytes_a_parameter():
    """bf16 weights and gradients (2 + 2); fp32 master weights and two moments (12)."""
    model = torch.nn.Linear(100, 50, bias=False).to(torch.bfloat16)
    master = torch.nn.Parameter(model.weight.detach().float())
    optimizer = torch.optim.AdamW([master])
    model(torch.ones(3, 100, dtype=torch.bfloat16)).sum().backward()
    master.grad = model.weight.grad.float()
    optimizer.step()
    master.grad = None
    assert memory_of(model, optimizer).total == 16 * 5000 + 4


def test_the_meta_device_and_sparse_gradients_are_counted():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(10**5, 10**5, bias=False))
    assert memory_of(model).parameters == 4 * 10**10
    table = torch.nn.Embedding(1000, 4, sparse=True)
    table(torch.tensor([1, 2, 3])).sum().backward()
    assert memory_of(table).gradients == 3 * 8 + 3 * 4 * 4  # an index and a row each


def sharded_memory():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(device())
    fully_shard(model, mesh=dist.init_device_mesh(device().type, (4,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 8, device=device())).sum().backward()
    optimizer.step()
    return memory_of(model, optimizer)


def test_of_a_sharded_model_each_rank_holds_its_shard():
    shard = (8 * 8 + 8) // 4 * 4  # bytes
    for memory in launch(sharded_memory, ranks=4):
        assert memory.parameters == memory.gradients == shard
        assert memory.optimizer_state == 2 * shard + 2 * 4


def test_the_table_reads_like_the_categories():
    assert str(Memory(4000, 4000, 8000, 12)).splitlines() == [
        "memory            bytes",
        "parameters        4,000",
        "gradients         4,000",
        "optimizer state   8,000",
        "buffers              12",
        "total            16,012",
    ]


# --- SavedActivations -----------------------------------------------------------------------------


def test_a_layer_saves_its_input_and_a_relu_its_output():
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    with SavedActivations() as saved:
        model(torch.ones(5, 8))
    # The second layer's input is the ReLU's output: one storage, saved twice, counted once.
    assert saved.bytes == 5 * 8 * 4 + 5 * 32 * 4
    assert [s.shape for s in saved.tensors] == [(5, 8), (5, 32)]


def test_parameters_and_their_views_are_left_out_and_with_model_buffers_too():
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(4, 6))
    model.register_buffer("mask", torch.ones(4, 4))
    x = torch.ones(3, 6, requires_grad=True)
    for known, extra in ((None, 4 * 4 * 4), (model, 0)):
        with SavedActivations(known) as saved:
            y = x @ model.weight.t()  # saves x and a view of the weight
            y @ model.mask  # saves the buffer
        assert saved.bytes == 3 * 6 * 4 + extra


def test_a_saved_slice_keeps_its_whole_storage():
    qkv = torch.ones(2, 30, requires_grad=True) * 1
    q, k, v = qkv.split(10, dim=1)
    with SavedActivations() as saved:
        (q * k).sum()
    assert saved.bytes == 2 * 30 * 4 and len(saved.tensors) == 1


def test_backward_frees_and_the_peak_stays():
    x = torch.ones(10, requires_grad=True)
    with SavedActivations() as saved:
        for _ in range(3):  # three micro-batches, one after the other
            x.exp().sum().backward()
    assert (saved.bytes, saved.live_bytes, saved.peak_bytes) == (3 * 40, 0, 40)
    with SavedActivations() as saved:
        y = x.exp()
        assert saved.live_bytes == 40
        del y  # exp saves its own output; nobody may keep that alive in a ring
    assert saved.live_bytes == 0 and torch.equal(x.grad, 3 * x.exp())


class Recomputed(torch.autograd.Function):
    """The simplest activation checkpoint: save the input, compute again in backward."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(gradient)
        return None, x.grad


def blocks():
    torch.manual_seed(0)
    make = torch.nn.Sequential
    return [make(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
            for _ in range(4)]


def step(apply):
    layers, x = blocks(), torch.ones(32, 16, requires_grad=True)
    with SavedActivations() as saved:
        h = x
        for layer in layers:
            h = apply(layer, h)
        forward = saved.bytes
        h.sum().backward()
    return forward, saved, [p.grad for layer in layers for p in layer.parameters()]


def test_a_checkpoint_saves_only_inputs_and_peaks_with_one_block():
    hidden, width = 32 * 64 * 4, 32 * 16 * 4  # bytes of a tensor
    block = width + 2 * hidden  # input of each layer, and of the GELU
    full, all_saved, gradients = step(lambda layer, h: layer(h))
    kept, few_saved, same_gradients = step(Recomputed.apply)
    assert full == all_saved.peak_bytes == 4 * block
    assert kept == 4 * width
    assert few_saved.peak_bytes == 4 * width + 2 * hidden
    assert few_saved.live_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(gradients, same_gradients))


def test_torch_checkpoint_saves_what_ours_saves():
    from torch.utils.checkpoint import checkpoint

    kept, _, _ = step(Recomputed.apply)
    for reentrant in (False, True):
        forward, _, _ = step(lambda layer, h: checkpoint(layer, h, use_reentrant=reentrant))
        assert forward == kept


def test_attention_saves_no_square_of_the_sequence():
    q, k, v = torch.ones(3, 1, 2, 128, 16, requires_grad=True).unbind()
    with SavedActivations() as flash:
        F.scaled_dot_product_attention(q, k, v)
    with SavedActivations() as plain:
        ((q @ k.transpose(-1, -2)).softmax(-1) @ v).sum()
    qkv, square, logsumexp = 3 * 2 * 128 * 16 * 4, 2 * 128 * 128 * 4, 2 * 128 * 4
    assert plain.bytes == qkv + square
    assert flash.bytes == qkv + qkv // 3 + logsumexp + 0


def test_the_saved_table_groups_equal_tensors():
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    with SavedActivations() as saved:
        model(torch.ones(5, 8))
    assert saved.table().splitlines() == [
        "saved for backward  tensors  bytes",
        "float32 (5, 8)            3    480",
        "sum                       3    480",
    ]
