"""Lab 12's 3D parallelism: every layout gives the losses of one process, and so do torch's own
parts and DeepSpeed.
"""

import itertools
import subprocess
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.data import python_text
from ranklab.engine import RankError
from ranklab.hybrid import PARTS, Hybrid, Job, Layout, parse_layout
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.peers.deepspeed_pipeline import train_with_deepspeed
from ranklab.peers.megatron import megatron_command
from ranklab.peers.torch_hybrid import TorchHybrid
from ranklab.tensor_parallel.split import ShardSpec
from ranklab.trainer.text import TextTrainer, TrainConfig

pytestmark = pytest.mark.timeout(180)

MODEL = {"n_ctx": 16, "n_embd": 32, "n_head": 8, "n_layer": 6}
LAYOUTS = """
    1x2x2,gpipe 1x2x2,sp,recompute,zb-v 2x1x2,zero,zb-h1 2x2x1,sp,full,recompute
    2x1x2,full,virtual=2,outermost=data 2x2x2,sp,zero,recompute,virtual=2
    1x2x2,sp,recompute,cp=2""".split()
SWEEP = """
    1x8x1 1x1x8 8x1x1,zero 8x1x1,full 1x4x2,sp,virtual=2 2x4x1,sp,zero,recompute 2x4x1,full
    4x1x2,zero,virtual=2 4x1x2,gpipe,outermost=data 4x1x2,full,recompute 2x2x2,sp,zero
    2x2x2,recompute,virtual=2 2x2x2,zero,recompute,zb-h1 2x2x2,sp,recompute,zb-v
    2x2x2,sp,full,virtual=2,outermost=data 1x1x1,cp=4 2x1x1,zero,cp=2 2x1x2,full,cp=2
    2x2x1,sp,cp=2,outermost=data""".split()  # each two options meet somewhere


@pytest.fixture(scope="module")
def text():
    whole = python_text()
    return replace(whole, train=whole.train[:200_000], held_out=whole.held_out[:20_000])


def settings(**changes):
    return TrainConfig(**{"steps": 2, "batch": 16, "micro_batch": 4, "log_every": 1, "clip": 0.3,
                          "warmup": 1, "eval_batch": 16, **changes})


def new_model(text):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=text.vocab_size, **MODEL))


def new_trainer(text, layout, parts=None, **changes):
    rows = max(1, 16 // layout.dp // max(2, layout.pp)) if layout else 4  # as few pieces as will do
    config = settings(**{"micro_batch": rows, **changes})
    with torch.device("meta" if layout else "cpu"):  # a rank never has the whole model
        model = new_model(text)
    return TextTrainer(model, text, config, device(), progress=False,
                       parallel=layout and Hybrid(layout.new_mesh(), layout, parts=parts))


def trained(text, layout, changes=None):
    """All losses, and the held-out one."""
    history = new_trainer(text, layout, **(changes or {})).fit()
    return history.loss + list(history.held_out.values())


@pytest.fixture(scope="module")
def alone(text):
    """The losses of one process."""
    return launch(trained, text, None, ranks=1)[0]


@pytest.mark.parametrize("words", [
    *LAYOUTS, *(pytest.param(words, marks=pytest.mark.sweep) for words in SWEEP)])
def test_equal_to_one_process(words, text, alone):
    layout = parse_layout(words)
    for losses in launch(trained, text, layout, ranks=layout.ranks, timeout=120):
        assert losses == pytest.approx(alone, abs=2e-5)


def noting(parts, used):
    """`parts`, each of which adds its name to `used` when it is called."""
    def note(name, part):
        def noted(*args, **kwargs):
            used.add(name)
            return part(*args, **kwargs)

        def __init__(self, *args, **kwargs):
            used.add(name)
            part.__init__(self, *args, **kwargs)

        return type(name, (part,), {"__init__": __init__}) if isinstance(part, type) else noted

    return {name: note(name, part) for name, part in parts.items()}


def trained_by_parts(text, layout):
    """As trained, and the names of the parts that were used."""
    used = set()
    return trained(text, layout, {"parts": noting(PARTS, used)}), used


def test_every_part_may_be_a_learners(text, alone):
    used = {"build_mesh"}                            # which new_mesh takes
    for words in ("2x2x2", "2x1x2,zero,gpipe"):
        layout = parse_layout(words)
        for losses, used_there in launch(trained_by_parts, text, layout, ranks=layout.ranks):
            assert losses == pytest.approx(alone, abs=2e-5)
            used |= used_there
    assert used == PARTS.keys()


@pytest.mark.parametrize("layout, batch", [(Layout(2, 1, 1, zero=3), 3),
                                           (Layout(2, 1, 2, virtual=2), 7)], ids=str)
def test_data_ranks_may_have_unequal_numbers_of_rows(layout, batch, text):
    """With zero=3 all must gather as often; interleaved, 3 micro-batches are no whole rounds."""
    changes = {"batch": batch, "micro_batch": 1, "eval_batch": batch, "steps": 1}
    right = launch(trained, text, None, changes, ranks=1)[0]
    for losses in launch(trained, text, layout, changes, ranks=layout.ranks, timeout=60):
        assert losses == pytest.approx(right, abs=2e-5)


# --- dropout --------------------------------------------------------------------------------------

def _masks(layout):
    """What dropout lets through on this rank: sums of attention, and a mask; its coordinates."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(n_ctx=8, n_embd=32, n_head=4, n_layer=1, dropout=0.5, flash=False))
    hybrid, seen = Hybrid(layout.new_mesh(), layout), []
    hybrid.apply(model)
    block = model.blocks["0"]
    inside = block.attention.attend
    block.attention.attend = lambda *q_k_v: inside(*map(torch.ones_like, q_k_v))
    block.attention.out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    block.drop.register_forward_hook(lambda _, args, y: seen.append(y == 0))
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device())
    model(tokens, tokens)
    return tuple(hybrid.mesh.coordinates().values()), [x.cpu() for x in seen[:2]]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_differ_over_data_ranks_and_where_tensor_ranks_hold_other_numbers(sequence_parallel):
    layout = Layout(2, 2, 1, sequence_parallel=sequence_parallel)
    found = dict(launch(_masks, layout, ranks=4))
    for (one, of_one), (other, of_other) in itertools.combinations(found.items(), 2):
        is_alike = one[:2] == other[:2] and not sequence_parallel  # after attention, as it was
        assert [torch.equal(*pair) for pair in zip(of_one, of_other)] == [False, is_alike]


# --- peers ----------------------------------------------------------------------------------------

def _by_torch(text, *layouts):
    """For each layout the losses of two steps."""
    trainers = [TextTrainer(new_model(text), text, settings(), device(), progress=False,
                            parallel=TorchHybrid(layout)) for layout in layouts]
    return [[trainer.parallel.total(trainer.step()).item() for _ in range(2)]
            for trainer in trainers]


@pytest.mark.sweep
def test_torch_has_the_losses_of_one_process(text, alone):
    layouts = map(parse_layout, ("1x2x2,sp", "2x2x1,full", "2x1x2,virtual=2,recompute"))
    for of_rank in launch(_by_torch, text, *layouts, ranks=4, timeout=120):
        for losses in of_rank:
            assert losses == pytest.approx(alone[:2], abs=2e-5)


def _by_deepspeed(text, layout):
    return train_with_deepspeed(new_model(text), text, settings(), layout, 2)


@pytest.mark.sweep
def test_deepspeed_has_the_losses_of_one_process(text, alone):
    for losses in launch(_by_deepspeed, text, Layout(2, 1, 2, zero=1), ranks=4, timeout=120):
        assert losses == pytest.approx(alone[:2], abs=2e-5)


@pytest.mark.parametrize("peer, said", [
    (lambda: TorchHybrid(Layout(1, 1, 2, schedule="zb-v")), "zero-bubble schedules do not go with"),
    (lambda: TorchHybrid(Layout(2, virtual=2)), "a tied matrix that two stages of one rank share"),
    (lambda: train_with_deepspeed(None, None, None, Layout(2, 1, 2), 1), "compared with zero=1"),
    (lambda: train_with_deepspeed(None, None, None, Layout(2, 2, 2, zero=1), 1), "over data and"),
])
def test_what_they_do_not_do_is_a_sentence(peer, said):
    with pytest.raises(ValueError, match=said):
        peer()


def test_megatron_is_told_of_all_that_the_layout_has():
    job = Job(GPTConfig(50304, 2048, 80, 80, 10240), batch=1024, micro_batch=2)
    said = megatron_command(parse_layout("2x8x4,zero,sp,virtual=5,recompute"), job)
    assert subprocess.run(["bash", "-n"], input=said, text=True).returncode == 0
    for words in ("--tensor-model-parallel-size 8 ", "--pipeline-model-parallel-size 4 ",
                  "--sequence-parallel ", "--num-virtual-stages-per-pipeline-rank 5 ",
                  "--use-distributed-optimizer ", "--recompute-granularity full ", "--nnodes 8 "):
        assert words in said, words
    plain = megatron_command(Layout(pp=3, schedule="gpipe", zero=3, outermost="data"), job)
    for words in ("not gpipe", "--pipeline-model-parallel-layout", "no pipeline",
                  "--use-tp-pp-dp-mapping", "--use-megatron-fsdp", "torchrun --nproc-per-node 3"):
        assert words in plain, words
    assert max(map(len, (said + "\n" + plain).splitlines())) <= 100


# --- edges ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, sentence", [
    ({"dp": 0}, "dp=0 must be at least 1"),
    ({"schedule": "1b1f"}, "schedule='1b1f' is not one of gpipe, 1f1b, zb-h1, zb-v"),
    ({"zero": 2}, "zero=2 must be 0, 1 or 3"),
    ({"zero": 3, "schedule": "zb-h1"}, "when with zero=3 the weights are gone"),
    ({"cp": 0}, "cp=0 must be at least 1"),
    ({"outermost": "tensor"}, "outermost='tensor' must be pipeline or data"),
    ({"virtual": 2, "schedule": "gpipe"}, "virtual=2 stages need schedule='1f1b'"),
])
def test_a_bad_layout_is_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Layout(**options)


def test_tensor_ranks_stay_where_nvlink_joins_them():
    layout = Layout(1, 4, 1)
    with pytest.raises(RankError, match="tp=4 tensor ranks would be on several nodes of 2"):
        launch(layout.new_mesh, ranks=4, nodes=2)
    assert launch(lambda: layout.new_mesh(per_node=4).axes["tensor"], ranks=4, nodes=2) == [4] * 4


def test_key_heads_that_unequal_numbers_of_ranks_hold_count_once():
    def norms():
        layout = Layout(1, 2, 1)
        hybrid, mine = Hybrid(layout.new_mesh(), layout), torch.nn.Parameter(torch.zeros(4))
        mine.grad = torch.tensor([[3.0, 3.0, 4.0, 4.0], [4.0, 4.0, 5.0, 5.0]][dist.get_rank()])
        # six numbers: this rank's own two, and two that both have
        mine.shard_spec = ShardSpec(0, 6, *[(((0, 2), (2, 4)), (1, 2)), (((2, 4), (4, 6)), (2, 1))][
            dist.get_rank()])
        hybrid.pipeline.model, hybrid.pipeline.tied = torch.nn.Module(), {}
        hybrid.data.gradients = lambda model: [(mine, mine.grad, 1)]
        whole = hybrid.grad_norm(None).item()
        hybrid.data.gradients = lambda model: [(mine, mine.grad[:3], 1)]
        with pytest.raises(ValueError, match="take tp that divides the key heads"):
            hybrid.grad_norm(None)
        return whole

    assert launch(norms, ranks=2) == pytest.approx([10.0] * 2)
