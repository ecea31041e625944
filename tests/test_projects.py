"""What projects share: equal however spread, going on elsewhere, running a learner's parts."""

import importlib
import inspect
import types

import pytest

from ranklab.context_parallel import context_attention, zigzag_shard
from ranklab.expert_parallel import dispatch_tokens, expert_gradients
from ranklab.fsdp import (
    FullyShardedBlock, clip_grad_norm_sharded, full_state_dict, masked_loss, wrap_policy,
)
from ranklab.pipeline_parallel import PipelineExecutor, one_f_one_b_schedule, split_stages
from ranklab.projects.hugging_face import is_here
from ranklab.projects.pipeline_parallel.training import schedule_of
from ranklab.tensor_parallel import ColumnParallelLinear

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

FEW = {"steps": 4, "batch": 8, "micro_batch": 4, "eval_batch": 8, "compare": False}
PIECES = {"steps": 4, "batch": 8, "micro_batches": 4, "eval_batch": 8, "compare": False}
SIX = {"steps": 4, "batch": 6, "micro_batch": 3, "eval_batch": 6, "log_every": 1}


def run(stem, **arguments):
    """Return (the project of the lab, its results)."""
    project = importlib.import_module(f"ranklab.projects.{stem[3:]}")
    return project, project.run(timeout=170, **arguments)


def score(results):
    """Return the held-out loss of a training; None where it was stopped."""
    if isinstance(results, dict):
        return (results["rows"][0].held_out if "rows" in results
                else results["ranks"][0]["loss"])
    return [*results.losses.values()][0]


# --- equal ----------------------------------------------------------------------------------------

EQUAL = {  # lab: (what all runs have, what each has)
    "10_context_parallel": (FEW, [{"ranks": 8}, {"ranks": 4, "method": "ulysses"},
                                  {"ranks": 4, "method": "both"}]),
    "11_expert_parallel": (FEW | {"factor": 1.25}, [
        {"ranks": 1, "ep": 1}, {"ranks": 4, "ep": 4}, {"ranks": 4, "ep": 2}]),
}


@pytest.mark.parametrize("stem", EQUAL)
def test_it_learns_the_same_however_it_is_spread_and_sends_what_is_said(stem):
    common, variants = EQUAL[stem]
    results = [run(stem, **common, **variant)[1] for variant in variants]
    assert [*map(score, results)] == pytest.approx([score(results[0])] * len(variants), abs=1e-5)
    for variant, result in zip(variants, results):
        for rank in result.ranks:
            assert rank["sent"] == rank["predicted"], variant
            assert (rank["sent"] > 0) == (variant.get("ep") != 1)
        assert 0 < getattr(result, "dropped", 0.5) < 1


def test_rows_travel_in_the_type_of_matrix_products():
    narrow, wide = (run("11_expert_parallel", **FEW, ranks=2, precision=precision)[1].ranks[0]
                    for precision in ("bf16", "fp32"))
    assert narrow["sent"] == narrow["predicted"] < 0.6 * wide["sent"]


# --- a checkpoint goes on -------------------------------------------------------------------------

GOES_ON = {  # lab: (what all runs have, the whole run, until step 2, from there on)
    "06_zero": (SIX, {"ranks": 2, "numbers": (1,)}, {"ranks": 2, "numbers": (1,)},
                {"ranks": 3, "numbers": (3,)}),
    "08_tensor_parallel": (SIX | {"clip": 0.3}, {"ranks": 1, "method": "one"}, {"ranks": 4},
                           {"ranks": 2}),
    "08_tensor_parallel-one": (SIX | {"clip": 0.3}, {"ranks": 1, "method": "one"}, {"ranks": 4},
                               {"ranks": 1, "method": "one"}),
    "09_pipeline_parallel": (PIECES, {"ranks": 2}, {"ranks": 3},
                             {"ranks": 2, "schedule": schedule_of("interleaved")}),
    "10_context_parallel": (FEW, {"ranks": 2}, {"ranks": 4}, {"ranks": 2, "method": "ulysses"}),
    "11_expert_parallel": (FEW | {"balance": "bias"}, {"ranks": 2}, {"ranks": 4},
                           {"ranks": 2, "ep": 1}),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_a_checkpoint_goes_on_elsewhere(name, tmp_path, text):
    stem, (common, whole, first, rest) = name.partition("-")[0], GOES_ON[name]
    common = common | {"path": text}
    expected = score(run(stem, **common, **whole)[1])
    common["checkpoint"] = str(tmp_path / "saved")
    run(stem, **common, **first, until=2)
    project, results = run(stem, **common, **rest, resume=True)
    assert score(results) == pytest.approx(expected, abs=2e-4)
    project, again = run(stem, **common, **rest, resume=True)  # nothing is left to train
    assert project.report(again)


# --- a learner's parts ----------------------------------------------------------------------------

PARTS = {  # lab: (other arguments, the parts, what the report says)
    "07_fsdp": ({"pretrain": 0, "steps": 1, "save": "tuned", "batch": 8, "eval_batch": 8},
                {"block": FullyShardedBlock, "clip": clip_grad_norm_sharded, "loss": masked_loss,
                 "policy": wrap_policy, "state": full_state_dict},
                ("Yours: FullyShardedBlock, clip_grad_norm_sharded, masked_loss, wrap_policy, "
                 "full_state_dict.", "after step 1 ")),
    "08_tensor_parallel": (SIX, {"column": ColumnParallelLinear},
                           ("Yours: column. The library's: copy, reduce, row, ",)),
    "09_pipeline_parallel": (
        PIECES | {"compare": True, "precision": "bf16", "slow_stage": 1, "ranks": 2},
        {"schedule": one_f_one_b_schedule, "split": split_stages, "executor": PipelineExecutor},
        ("Yours: schedule, split, executor.", "stage 1 is busy")),
    "10_context_parallel": (FEW | {"compare": True, "documents": True},
                            {"attention": context_attention, "shard": zigzag_shard},
                            ("Yours: attention, shard.", "quarter more, the long sequence fits",
                             "trained on long sequences, it is better by ")),
    "11_expert_parallel": (
        FEW | {"compare": True, "steps": 10, "balance": "bias", "shared_width": 16, "ranks": 2},
        {"dispatch": dispatch_tokens, "average": expert_gradients},
        ("Yours: dispatch, average.", "held out, dense", "choices dropped: 0.0%")),
}


def recorded(part, path):
    """Return the part as a learner's own, which makes the file `path` when it is called."""
    def call(*arguments, **named):
        path.touch()
        return part(*arguments, **named)

    def __init__(self, *arguments, **named):
        path.touch()
        part.__init__(self, *arguments, **named)

    return types.new_class(part.__name__, (part,), exec_body=lambda names: names.update(
        __init__=__init__, __module__=__name__)) if inspect.isclass(part) else call


@pytest.mark.parametrize("stem", [pytest.param(stem, marks=pytest.mark.sweep if stem == (
    "10_context_parallel") else ()) for stem in PARTS])
def test_a_learners_parts_run_as_on_gpus_and_are_named(stem, monkeypatch, tmp_path):
    if stem == "07_fsdp" and not is_here():
        pytest.skip("needs transformers")
    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")
    monkeypatch.chdir(tmp_path)
    arguments, parts, expected = PARTS[stem]
    (called := tmp_path / "called").mkdir()
    own = {name: recorded(part, called / name) for name, part in parts.items()}
    project, results = run(stem, **{"ranks": 8 if "context" in stem else 2} | arguments | own)
    assert {path.name for path in called.iterdir()} == own.keys()
    report = project.report(results)
    for words in expected:
        assert words in report
