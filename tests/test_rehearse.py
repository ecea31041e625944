"""A rehearsal for GPUs: mistakes that only a GPU would show raise here; right programs pass."""

import os
import pathlib
import subprocess
import sys
import traceback
import weakref

import nbformat
import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_tools import command_line
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ranklab import device, launch
from ranklab.course import rehearse
from ranklab.engine import RankError
from ranklab.meter import SavedActivations, Traffic, memory_of

MIX = "Expected all tensors to be on the same device, but found at least two devices, gpu:0 and cpu"
NO_BACKEND = "No backend type associated with device type cpu"


# --- planted mistakes ---------------------------------------------------------------------------

def here(*shape):
    return torch.ones(shape, device=device())


def a_batch_left_on_the_cpu():
    nn.Linear(3, 3).to(device())(torch.ones(2, 3))


def a_model_left_on_the_cpu():
    nn.Linear(3, 3)(here(2, 3))


def labels_left_on_the_cpu():
    F.cross_entropy(here(2, 3), torch.tensor([0, 1]))


def a_mask_made_on_the_cpu():
    here(3, 3).masked_fill(torch.ones(3, 3).tril() == 0, 0.0)


def a_buffer_that_forward_makes():
    here(3) + torch.zeros(3)


def a_sum_kept_on_the_cpu():
    total = torch.zeros(())
    total += here(3).sum()


def a_list_of_both():
    torch.cat([here(3), torch.ones(3)])


def a_collective_on_the_cpu():
    dist.all_reduce(torch.ones(3))


def a_gather_into_the_cpu():
    dist.all_gather_into_tensor(torch.empty(3), torch.ones(3))


def a_message_from_the_cpu():
    dist.isend(torch.ones(3), 0)


def a_device_by_what_cuda_says():
    chosen = "cuda" if torch.cuda.is_available() else "cpu"
    dist.broadcast(torch.ones(3, device=chosen), 0)


def a_gpu_chosen_by_hand():
    torch.ones(3, device=torch.device(device().type, 3))


def numpy_without_cpu():
    here(3).numpy()


def a_plot_of_it():
    numpy.asarray(here(3))


def a_generator_of_the_cpu():
    torch.randn(3, device=device(), generator=torch.Generator().manual_seed(0))


def pinned_on_the_gpu():
    here(3).pin_memory()


def rows_chosen_on_the_gpu():
    torch.arange(4)[torch.tensor([0, 1], device=device())]


def an_answer_for_the_cpu():
    torch.add(here(3), 1, out=torch.empty(3))


def a_gradient_on_the_cpu():
    here(3).requires_grad_().grad = torch.ones(3)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * torch.ones(gradient.shape)


def a_gradient_that_a_function_makes():
    Doubled.apply(here(3).requires_grad_()).sum().backward()


def a_gradient_from_outside():
    (2 * here(3).requires_grad_()).backward(torch.ones(3))


def gradients_of_outputs():
    x = here(3).requires_grad_()
    torch.autograd.grad(x.view(3), x, grad_outputs=torch.ones(3))


def a_hook_that_mixes():
    x, total = here(3).requires_grad_(), torch.zeros(3)
    x.register_post_accumulate_grad_hook(lambda p: total.add_(p.grad))
    x.sum().backward()


def a_hook_that_leaves_the_gpu():
    x = here(3).requires_grad_()
    x.register_hook(lambda gradient: gradient.cpu())
    x.sum().backward()


def a_parameter_that_stays_behind():
    model = nn.Linear(3, 3)
    model.weight.data = model.weight.data.to(device())
    model(here(2, 3))


def an_optimizers_state_that_stays_behind():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    for where in ("cpu", device()):
        model.to(where)(torch.ones(2, 3, device=where)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def a_position_left_on_the_cpu():
    nn.Embedding(4, 2).to(device())(torch.arange(3))


def a_list_gathered_on_the_cpu():
    dist.all_gather([torch.ones(3)], here(3))


def an_order_drawn_on_the_cpu():
    torch.randperm(4, device=device(), generator=torch.Generator())


def made_and_pinned_on_the_gpu():
    torch.empty(3, device=device(), pin_memory=True)


def lengths_on_the_gpu():
    lengths = torch.tensor([5, 3], device=device())
    nn.utils.rnn.pack_padded_sequence(here(2, 5, 3), lengths, batch_first=True)


GRADIENT = "invalid gradient at index 0 - expected device gpu:0 but got cpu"
MISTAKES = {
    a_batch_left_on_the_cpu: MIX, a_model_left_on_the_cpu: MIX, labels_left_on_the_cpu: MIX,
    a_mask_made_on_the_cpu: MIX, a_buffer_that_forward_makes: MIX, a_sum_kept_on_the_cpu: MIX,
    a_list_of_both: MIX, an_answer_for_the_cpu: MIX,
    a_collective_on_the_cpu: NO_BACKEND, a_gather_into_the_cpu: NO_BACKEND,
    a_message_from_the_cpu: NO_BACKEND, a_device_by_what_cuda_says: NO_BACKEND,
    a_gpu_chosen_by_hand: "invalid device ordinal: there is no gpu:3",
    numpy_without_cpu: "can't convert gpu:0 device type tensor to numpy. Use Tensor.cpu()",
    a_plot_of_it: "can't convert gpu:0 device type tensor to numpy. Use Tensor.cpu()",
    a_generator_of_the_cpu: "Expected a 'gpu' device type for generator but found 'cpu'",
    pinned_on_the_gpu: "only dense CPU tensors can be pinned",
    rows_chosen_on_the_gpu: "indices should be either on cpu or on the same device",
    a_gradient_from_outside: GRADIENT, gradients_of_outputs: GRADIENT,
    a_gradient_that_a_function_makes: f"Function DoubledBackward returned an {GRADIENT}",
    a_hook_that_mixes: MIX,
    a_gradient_on_the_cpu: "attempting to assign a gradient with device type 'cpu'",
    a_hook_that_leaves_the_gpu: "has changed the type of value (was gpuFloatType got torch.Float",
    a_parameter_that_stays_behind: MIX, an_optimizers_state_that_stays_behind: MIX,
    a_position_left_on_the_cpu: MIX, a_list_gathered_on_the_cpu: MIX,
    an_order_drawn_on_the_cpu: "Expected a 'gpu' device type for generator but found 'cpu'",
    made_and_pinned_on_the_gpu: "Only dense CPU tensors can be pinned",
    lengths_on_the_gpu: "'lengths' argument should be a 1D CPU int64 tensor",
}


def said_by(mistakes):
    """{name: the traceback of each, or "nothing"}"""
    said = dict.fromkeys((mistake.__name__ for mistake in mistakes), "nothing")
    for mistake in mistakes:
        try:
            mistake()
        except Exception:
            said[mistake.__name__] = traceback.format_exc()
    return said


def test_a_mistake_raises_on_its_line_with_the_sentence_of_a_gpu():
    (said,) = launch(said_by, list(MISTAKES), ranks=1, rehearse="gpu")
    for mistake, sentence in MISTAKES.items():
        assert sentence in said[mistake.__name__], mistake
        assert f"in {mistake.__name__}\n" in said[mistake.__name__]


def test_a_mistake_ends_the_launch():
    with pytest.raises(RankError) as caught:
        launch(a_batch_left_on_the_cpu, ranks=1, rehearse="gpu")
    assert MIX in str(caught.value) and "in a_batch_left_on_the_cpu" in str(caught.value)


def beyond_it():
    nn.SyncBatchNorm(3).to(device())(here(2, 3))


def test_what_cant_be_rehearsed_is_a_sentence():
    with pytest.raises(RankError) as caught:
        launch(beyond_it, ranks=2, rehearse="gpu")
    assert "batch_norm_stats can't be rehearsed (Could not run" in str(caught.value)
    assert "this is a limit of the rehearsal, not of a GPU\n" in str(caught.value)
    assert "registered at" not in str(caught.value)


def test_a_file_of_gpu_tensors_needs_a_map_location_where_no_gpu_is(tmp_path):
    def save():
        torch.save({"x": here(3), "y": torch.ones(2)}, tmp_path / "file")

    launch(save, ranks=1, rehearse="gpu")
    with pytest.raises(RuntimeError, match="don't know how to restore data location.*gpu:0"):
        torch.load(tmp_path / "file")
    assert torch.load(tmp_path / "file", map_location="cpu")["x"].tolist() == [1, 1, 1]


# --- right programs -----------------------------------------------------------------------------

class HasUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def wrapped(kind, model):
    """`model` as a kind of data parallelism, or of DTensors, has it."""
    if kind == "unused":
        return DistributedDataParallel(HasUnused().to(device()), find_unused_parameters=True)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        return fully_shard(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                   parallelize_module)

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def trained(kind):
    """Weights, traffic and memory after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device())
    x = torch.ones(2, 4, device=device())
    with Traffic() as traffic:
        model = wrapped(kind, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            with SavedActivations(model) as saved:
                loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return ([w.detach() for w in weights], traffic.sent_bytes, traffic.calls,
            memory_of(model, optimizer), saved.bytes)


@pytest.mark.parametrize("kind", [
    "fsdp2", pytest.param("unused", marks=pytest.mark.sweep),
    pytest.param("tensor parallel", marks=pytest.mark.sweep)])
def test_training_has_the_same_values_traffic_and_memory(kind):
    for plain, rehearsed in zip(launch(trained, kind, ranks=2),
                                launch(trained, kind, ranks=2, rehearse="gpu")):
        torch.testing.assert_close(rehearsed[0], plain[0])
        assert rehearsed[1:] == plain[1:]
        assert all(type(w) is torch.Tensor and w.device.type == "cpu" for w in rehearsed[0])


def one_gpus_program(path):
    d = device()
    assert str(here(1)) == "tensor([1.], device='gpu:0')" and f"{here(1).sum():.1f}" == "1.0"
    model = nn.Linear(4, 4)
    optimizers = [torch.optim.AdamW(model.parameters(), **how) for how in
                  ({"fused": True}, {"foreach": True}, {"foreach": False})]
    somebody = weakref.ref(model.weight), WeakTensorKeyDictionary({model.weight: 1})
    model.to(d)  # its parameters are those that the optimizers hold
    assert somebody[0]() is model.weight and model.weight in somebody[1]
    with torch.autocast(d.type, dtype=torch.bfloat16):
        y = checkpoint(model, here(2, 4), use_reentrant=False)
        assert y.dtype == torch.bfloat16 and y.softmax(-1).dtype == torch.float32
    before = model.weight.detach().cpu()
    y.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not torch.equal(before, model.weight.detach().cpu())
    x = torch.arange(12.0, device=d).view(3, 4)
    for rows in (torch.tensor([0, 2], device=d), torch.tensor([0, 2])):  # a CPU index may choose
        assert x[rows].shape == (2, 4)
    x[x > 3] = torch.tensor(0.0)  # a CPU number may mix
    assert (x * torch.tensor(2.0)).sum().item() == 12
    assert torch.equal(torch.eye(3, device=d).cpu(), torch.eye(3))
    assert x.t_().shape == (4, 3)
    a, b = (torch.randn(3, device=d, generator=torch.Generator(d).manual_seed(1)) for _ in "ab")
    assert torch.equal(a, b)
    assert torch.ones(3).pin_memory()[:2].is_pinned() and not torch.ones(3).is_pinned()
    torch.save({"weight": model.weight, "on the cpu": before}, path)
    loaded = torch.load(path, weights_only=True)
    assert loaded["weight"].device == d and loaded["on the cpu"].device.type == "cpu"
    assert torch.load(path, map_location="cpu")["on the cpu"].numpy().shape == (4, 4)
    assert torch.load(path, map_location=d)["on the cpu"].device == d
    return model, x


def test_what_a_gpu_can_passes(tmp_path):
    (model, x), = launch(one_gpus_program, tmp_path / "file", ranks=1, rehearse="gpu")
    assert type(model.weight) is nn.Parameter and model(torch.ones(1, 4)).shape == (1, 4)
    assert x.shape == (4, 3) and x.device.type == "cpu"


def talk():
    rank, x = dist.get_rank(), here(2) * (dist.get_rank() + 1)
    dist.barrier()
    group = dist.new_group([0, 1])
    dist.all_reduce(x, group=group, async_op=True).wait()
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y := here(2), 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    return y.tolist(), objects


def test_messages_and_objects_travel():
    assert launch(talk, ranks=2, rehearse="gpu") == [([3, 3], [0, 1])] * 2


# --- the ways in --------------------------------------------------------------------------------

def test_the_keyword_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match='rehearse must be None or "gpu", got \'tpu\''):
        launch(here, rehearse="tpu")


def test_without_it_the_device_is_what_it_was(monkeypatch):
    def kind():
        return device().type

    if not torch.cuda.is_available():
        assert launch(kind, ranks=1) == ["cpu"]
    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")
    assert launch(kind, ranks=1) == ["gpu"]


def notebook(path, *cells):
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(made, path)
    return str(path)


def test_the_command_says_which_cell_of_a_notebook_raised(tmp_path, capsys):
    imports = "import torch\nfrom ranklab import launch, device"
    wrong = "def wrong():\n    return torch.ones(2, device=device()) + torch.ones(2)\nlaunch(wrong)"
    path = notebook(tmp_path / "made.ipynb", imports, wrong, "launch(lambda: 1, ranks=1)")
    before = (tmp_path / "made.ipynb").read_bytes()
    assert rehearse.rehearse(path) == 1
    said = capsys.readouterr().out
    assert "made.ipynb, cell 2, which begins with: def wrong():" in said and MIX in said
    assert "1 of 3 cells with code raised" in said
    assert (tmp_path / "made.ipynb").read_bytes() == before
    with pytest.raises(ValueError, match="there is no file"):
        rehearse.rehearse(str(tmp_path / "none.ipynb"))


def test_a_run_can_do_less(tmp_path):
    path = pathlib.Path(notebook(tmp_path / "made.ipynb", "steps=40\nassert steps == 2"))
    assert rehearse.run(path, {"steps=40": "steps=2"}) == (1, [])
    with pytest.raises(ValueError, match="made.ipynb: no cell has 'steps=41'"):
        rehearse.run(path, {"steps=41": ""})


def test_the_command_runs_a_module_also_under_torchrun(tmp_path):
    (tmp_path / "made.py").write_text(
        "import sys\nimport torch\nfrom ranklab import device, launch\n\n"
        "def work(mix):\n    x = torch.ones(2, device=device())\n"
        "    return (x + torch.ones(2) if mix else x).sum().item()\n\n"
        "if __name__ == '__main__':\n    print(launch(work, 'mix' in sys.argv, ranks=1))\n")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}

    def run(*arguments, **more):
        return subprocess.run([sys.executable, "-m", "ranklab.cli", "rehearse", "made",
                               *arguments], env=environ | more, capture_output=True, text=True,
                              timeout=100)

    assert run().stdout == "[2.0]\n"
    wrong = run("mix", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
                MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert wrong.returncode == 1 and MIX in wrong.stderr


@pytest.mark.sweep
def test_the_command_runs_a_script_and_says_when_nothing_was_rehearsed(tmp_path):
    (tmp_path / "made.py").write_text(
        "import sys\nfrom ranklab import device, launch\n\n"
        "if __name__ == '__main__' and 'no' not in sys.argv:\n"
        "    print(launch(lambda: device().type, ranks=1))\n")

    def run(*words):  # as the console script does: this folder is in no list
        code = "import sys; sys.path.remove(''); from ranklab.cli import main; sys.exit(main())"
        done = subprocess.run([sys.executable, "-c", code, "rehearse", *words], cwd=tmp_path,
                              capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout

    assert run("made.py") == run("made") == (0, "['gpu']\n")
    assert run("made.py", "no") == (
        1, "made.py ended, but it launched no ranks: nothing was held to a GPU's rules.\n"
           "A rehearsal is for ranks of ranklab's launch; a script that calls init_process_group "
           "has none.\n")


def kernels():
    """The kernels of notebooks below this process."""
    return {child.pid for child in psutil.Process().children(recursive=True)
            if "ipykernel" in command_line(child)}


def test_no_kernel_is_left_behind(tmp_path):
    """Neither after a run, nor after a cell that raised: each would keep a gigabyte."""
    before = kernels()
    for source in ("1", "1 / 0"):
        cells = [nbformat.v4.new_code_cell(source)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "lab.ipynb")
        rehearse.run(tmp_path / "lab.ipynb")
        assert kernels() == before
