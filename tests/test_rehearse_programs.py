"""Programs that are right on GPUs pass a rehearsal, nearly all of them in one launch."""

import copy
import io
import pickle
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh, randn
from torch.distributed.tensor.parallel import (ColwiseParallel, loss_parallel,
                                               parallelize_module)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ranklab import device, launch


def here(*shape):
    return torch.ones(*shape, device=device())


def made(where="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(where)


def loss_after(model, x, steps=2):
    """The loss of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach().cpu()


def same(got, wanted):
    torch.testing.assert_close(got, wanted)


# --- parameters that move -----------------------------------------------------------------------

def fully_shard_moves_a_model_of_the_cpu():
    for policy in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = made()
        fully_shard(model[0], **policy)
        fully_shard(model, **policy)
        same(loss_after(model, here(2, 8)), loss_after(made(), torch.ones(2, 8)))


def parameters_move_by_data():
    model, seen = made(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.device))
    model(torch.ones(2, 8)).sum().backward()
    held = list(model.parameters())
    for p in model.parameters():
        p.data = p.data.to(device())
    assert all(one is p and p.is_leaf for one, p in zip(held, model.parameters()))
    model(here(2, 8)).sum().backward()
    assert seen == [torch.device("cpu"), device()]  # a hook moves along
    optimizer.step()
    model.cpu()(torch.ones(2, 8)).sum().backward()
    with torch.inference_mode():
        assert made(device())(here(2, 8)).cpu().numpy().shape == (2, 8)
    with torch.profiler.profile(profile_memory=True, record_shapes=True):
        made().to(device())(here(2, 8))


def lazy_modules_become_what_they_are_on_the_gpu():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()).to(device())
    model(here(4, 3)).sum().backward()
    assert model[0].weight.grad.device == model[1].running_mean.device == device()


# --- as torchtitan begins -----------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.dropout(self.up(self.norm(x)).relu(), 0.1, self.training))

    def init_weights(self):
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        nn.init.xavier_uniform_(self.down.weight)
        for linear in (self.up, self.down):
            nn.init.zeros_(linear.bias)


def a_model_is_made_on_meta_then_sharded_initialised_and_loaded():
    from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                         set_model_state_dict)
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device())
    torch.manual_seed(1)
    for block in model:
        block.init_weights()
    assert 0 < model[0].up.weight.full_tensor().std() < 0.03
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True,
                                                                cpu_offload=True))
    loss_after(model, here(2, 8))
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def dtensors_draw():
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    whole = randn(4, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    assert not torch.equal(whole[:2].cpu(), whole[2:].cpu())  # each rank draws its own part
    x = distribute_tensor(here(4, 4), mesh, [Shard(0)])
    assert 0 <= (F.dropout(x, 0.5) == 0).sum().full_tensor() <= 16


def a_gpu_has_a_generator_of_its_own():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    state = torch.gpu.get_rng_state()
    first = torch.rand(3, device=device())
    assert torch.equal(torch.rand(3), wanted)  # draws on the GPU change nothing on the CPU
    torch.gpu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device()), first)


def loss_parallel_of_torch():
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    torch.manual_seed(0)
    linear = nn.Linear(8, 16)
    wanted = F.cross_entropy(linear(torch.ones(4, 8)), torch.arange(4))
    parallelize_module(linear.to(device()), mesh, ColwiseParallel(use_local_output=False))
    with loss_parallel():
        loss = F.cross_entropy(linear(here(4, 8)), torch.arange(4, device=device()))
        loss.backward()
    same(loss.full_tensor().detach().cpu(), wanted.detach())


# --- tensors on their way -----------------------------------------------------------------------

def what_a_collective_has_filled_is_saved():
    x = here(3)
    dist.all_reduce(x)
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, x)
    for one in (torch.load(file)["x"], pickle.loads(pickle.dumps(x)), copy.deepcopy(x), objects[1]):
        assert one.device == device() and one.tolist() == [2, 2, 2]


def numbers_of_the_gpu_make_a_tensor():
    a, b = here(3).sum(), here(2).mean()
    assert torch.tensor([a, b]).tolist() == torch.tensor([a, b], device=device()).tolist() == [3, 1]


# --- modules and functions whose kernels differ ---------------------------------------------------

def recurrent_modules_have_the_gradients_of_the_cpu():
    x = torch.randn(2, 5, 8)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        plain = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        model = copy.deepcopy(plain).to(device())
        for one in (plain, model):
            rows = pack_padded_sequence(x.to(one.weight_ih_l0.device), torch.tensor([5, 3]), True)
            pad_packed_sequence(one(rows)[0], True)[0].square().sum().backward()
        for p, q in zip(plain.parameters(), model.parameters()):
            same(q.grad.cpu(), p.grad)


def flex_attention_is_attention():
    mine = [torch.randn(1, 2, 16, 8).requires_grad_() for _ in range(3)]
    theirs = [x.detach().to(device()).requires_grad_() for x in mine]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device=device())
    flex_attention(*theirs, block_mask=mask).square().sum().backward()
    F.scaled_dot_product_attention(*mine, is_causal=True).square().sum().backward()
    for x, y in zip(mine, theirs):
        same(y.grad.cpu(), x.grad)


def functions_of_torch():
    def cubes(x):
        return (x**3).sum()

    for hessian in (torch.autograd.functional.hessian(cubes, here(3)),
                    torch.func.hessian(cubes)(here(3))):
        same(hessian.cpu(), 6 * torch.eye(3))
    logits = here(10, 2, 5).log_softmax(-1).requires_grad_()
    labels = torch.ones(2, 4, dtype=torch.long, device=device())
    F.ctc_loss(logits, labels, torch.tensor([10, 10]), torch.tensor([4, 3])).backward()
    i, j = torch.tril_indices(3, 3, device=device())
    assert here(3, 3)[i, j].shape == (6,)
    assert torch.histc(torch.arange(4, device=device()), 4, 0, 3).tolist() == [1, 1, 1, 1]
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(device()).eval()
    mask = torch.arange(5, device=device()) > 2
    with torch.no_grad():
        assert model(here(2, 5, 8), src_key_padding_mask=mask.expand(2, 5)).shape[-1] == 8


def the_machine_is_asked():
    begin, end = (torch.gpu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    kept = here(1000)
    end.record()
    torch.accelerator.synchronize()
    assert begin.elapsed_time(end) >= 0
    before = torch.gpu.memory_allocated()
    del kept
    assert before - torch.accelerator.memory_allocated() == 4000
    assert torch.gpu.max_memory_allocated() >= before


PROGRAMS = [fully_shard_moves_a_model_of_the_cpu, parameters_move_by_data,
            lazy_modules_become_what_they_are_on_the_gpu,
            a_model_is_made_on_meta_then_sharded_initialised_and_loaded, dtensors_draw,
            a_gpu_has_a_generator_of_its_own, loss_parallel_of_torch,
            what_a_collective_has_filled_is_saved, numbers_of_the_gpu_make_a_tensor,
            recurrent_modules_have_the_gradients_of_the_cpu, flex_attention_is_attention,
            functions_of_torch, the_machine_is_asked]


def outcomes(programs):
    """{name: the traceback of what raised}"""
    found = {}
    for program in programs:
        try:
            program()
        except Exception:
            found[program.__name__] = traceback.format_exc()
    return found


def test_right_programs_pass():
    for raised in launch(outcomes, PROGRAMS, ranks=2, rehearse="gpu", timeout=100):
        assert not raised, "\n".join(raised.values())


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=32,
                           num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                           num_local_experts=4, max_position_embeddings=32)
    model, ids = MixtralForCausalLM(config).to(device()), torch.arange(16, device=device())
    model(ids.view(2, 8), labels=ids.view(2, 8)).loss.backward()
    return model.generate(ids.view(2, 8)[:, :4], max_new_tokens=2, do_sample=False).shape


def test_a_mixture_of_experts_of_transformers_passes():
    pytest.importorskip("transformers")
    assert launch(mixtral, ranks=1, rehearse="gpu", timeout=100) == [(2, 6)]
