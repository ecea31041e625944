"""The planner: closed formulas, the papers' tables, the loader, and errors on published runs."""

import dataclasses
import json
import math
from random import Random

import pytest

from ranklab.formulas.pipeline_parallel import flush_bubble
from ranklab.hybrid import Job, Layout, layout_memory
from ranklab.models.gpt import GPTConfig
from ranklab.planner import published, rough
from ranklab.planner.compute import waves
from ranklab.planner.constants import CONSTANTS, Constants, bounds
from ranklab.planner.fit import MEMORY, fit_one
from ranklab.planner.jobs import Unused, is_for_fit, job_of
from ranklab.planner.links import bus_bandwidth, bus_of, collective_seconds, link_of, sweep
from ranklab.planner.machine import UNKNOWN_SHARE, machine
from ranklab.planner.memory import fits, in_flight, kept_bytes, memory_per_gpu, states
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan, Span
from ranklab.planner.published import all_runs
from ranklab.planner.score import quantile, score, step_ratio
from ranklab.planner.step import bubble_part, step_time
from ranklab.projects.planner import report, rough_errors
from ranklab.projects.planner.__main__ import project as command

GPT_22B = Model(48, 6144, 64, 24576, 51200, tied=True)
LLAMA_405B = Model(126, 16384, 128, 53248, 128256, 8, gated=True)
GLM_130B = Model(70, 12288, 96, 32768, 150528, gated=True)
BLOOM_176B = Model(70, 14336, 112, 57344, 250880, tied=True)
A100, H100 = machine("A100-SXM-80GB"), machine("H100-SXM-80GB")


# --- the loader -----------------------------------------------------------------------------------

def test_every_published_row_is_read():
    runs = all_runs()
    assert len(runs) == 794 and len({run.row_id for run in runs}) == 794
    run = next(run for run in runs if run.row_id == "korth-530B-dp8")
    assert (run.layers, run.tp, run.pp, run.vpp, run.dp) == (105, 8, 35, 3, 8)
    assert run.iter_time_s == 39.15
    assert run.file == "megatron_recompute" and run.zero_stage == 0 and run.mem_per_gpu is None


def test_missing_columns_and_bad_cells_are_none(tmp_path):
    path = tmp_path / "runs_mine.csv"
    path.write_text("\ufeffrow_id, gpus,layers,iter_time_s,mem_per_gpu,unknown\n"
                    "a,8,1.5,nan,OOM,x\n,\"1,024\",32,2.5\n\nb,-1,,,,\n")
    a, unnamed, b = published.read_runs(path)
    assert (a.gpus, a.layers, a.iter_time_s, a.mem_per_gpu) == (8, None, None, None)
    assert set(a.unreadable) == {"layers", "iter_time_s", "mem_per_gpu"} and a.hidden is None
    assert (unnamed.row_id, unnamed.gpus, unnamed.iter_time_s) == ("mine line 3", 1024, 2.5)
    assert b.gpus is None and b.quality == ""
    for run in (a, unnamed, b):
        with pytest.raises(Unused):
            job_of(run)


def test_a_file_without_rows_of_runs_is_refused(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("offer,price\nx,1\n")
    with pytest.raises(ValueError, match="prices.csv has no column row_id: it is no file of runs"):
        published.read_runs(path)


def test_the_split_is_by_row_id():
    parts = [is_for_fit(run.row_id) for run in all_runs()]
    assert 0.68 < sum(parts) / len(parts) < 0.8
    assert is_for_fit("korth-1T-full") and not is_for_fit("korth-1T-sel_sp")


# --- sizes, and closed formulas -------------------------------------------------------------------

@pytest.mark.parametrize("model, billions", [
    (GPT_22B, 22), (LLAMA_405B, 405.85), (GLM_130B, 130.5), (BLOOM_176B, 176.2),
    (Model(80, 8192, 64, 28672, 128256, 8, gated=True), 70.55)])
def test_parameters(model, billions):
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.02)


def test_active_parameters_of_a_model_with_experts():
    model = Model(48, 2048, 32, 0, 151936, 4, 128, True, experts=128, top_k=8, expert_ffn=768)
    assert model.parameters == pytest.approx(30.5e9, rel=0.01)
    assert model.active == pytest.approx(3.3e9 - model.embedding, rel=0.1)


def test_flops_follow_both_conventions():
    sequence, h, layers = 2048, 6144, 48
    by_paper = 72 * layers * h * h * (1 + sequence / (6 * h) + 51200 / (12 * layers * h))
    assert GPT_22B.flops_per_token(sequence) == pytest.approx(by_paper, rel=1e-3)
    halved = GPT_22B.flops_per_token(sequence) - GPT_22B.flops_per_token(sequence, causal=True)
    assert halved == 6 * layers * sequence * h
    twice = GPT_22B.flops_per_token(sequence, forwards=2)
    assert twice == pytest.approx(4 / 3 * GPT_22B.flops_per_token(sequence))


def test_zero_memory_is_the_papers():
    rows = [row for row in published.table("zero_memory")
            if row["quantity"] == "model_state_gb_per_gpu"]
    assert len(rows) > 40
    for row in rows:
        numbers = float(row["model"].removesuffix("B").removesuffix("T")) * (
            1e12 if row["model"].endswith("T") else 1e9)
        plan = Plan(dp=int(row["dp"]), zero=int(row["zero_stage"]), gradient_bytes=2)
        found = sum(states(plan, "deepspeed", numbers, plan.copies)) / 1e9
        assert found == pytest.approx(float(row["formula_value"]), rel=1e-2, abs=0.01), row


def test_bubbles_are_the_papers():
    rows = [row for row in published.table("pipeline_bubbles") if row["schedule"] == "1F1B"]
    assert len(rows) == 12
    for row in rows:
        P, M = int(row["stages_p"]), int(row["microbatches_m"])
        ideal = float(row["ideal_1f1b_(p-1)/(m+p-1)"])
        assert flush_bubble(P, M) == pytest.approx(ideal, abs=1e-4)
        part = bubble_part(GPT_22B, Plan(pp=P, micro_batches=M), A100)
        assert part == pytest.approx(ideal, abs=1e-4)
    wide = Model(8, 16384, 128, 65536, 1000)  # whose head is small: all stages are alike
    step = step_time(wide, Plan(pp=8, micro_batches=24), A100)
    assert step.bubble / (step.total - step.data - step.optimizer - step.rest) == pytest.approx(
        flush_bubble(8, 24), rel=0.02)


def test_layer_times_are_near_the_papers():
    """One layer of the 22B model, micro-batch 4, on 8 A100: forward and backward, in ms."""
    rows = {row["experiment"]: float(row["combined_ms"]) for row in published.table("layer_times")}
    plan = Plan(tp=8, micro_batch=4, attention="unfused", hides=())
    plans = {"baseline no recompute": plan,
             "sequence parallelism": dataclasses.replace(plan, sequence_parallel=True),
             "baseline with recompute": dataclasses.replace(plan, recompute="full")}
    for name, each in plans.items():
        two, one = (step_time(dataclasses.replace(GPT_22B, layers=n), each, A100) for n in (2, 1))
        seconds = two.total - two.optimizer - (one.total - one.optimizer)
        assert seconds * 1e3 == pytest.approx(rows[name], rel=0.3), name


# --- links ----------------------------------------------------------------------------------------

def test_a_group_of_whole_nodes_uses_all_their_cards():
    one = bus_bandwidth("all_reduce", 2**33, Span(4, 1, 4), H100)[1]
    eight = bus_bandwidth("all_reduce", 2**33, Span(32, 8, 32), H100)[1]
    assert eight == pytest.approx(8 * one) and 330e9 < eight < 400e9  # 365 are measured (p5en)


def test_bandwidth_in_a_node_is_the_measured_sweep():
    sizes, speeds = sweep("A100-SXM (one", 8)
    for size, speed in zip(sizes, speeds):
        fast, *slow = bus_bandwidth("all_reduce", math.exp(size), Span(8, 8, 8), A100)
        assert fast == pytest.approx(math.exp(speed), rel=0.05) and slow == [math.inf] * 2


@pytest.mark.parametrize("ranks, gb_s", [(4, 363.3), (8, 473.1)])
def test_the_switch_adds_up_for_more_than_four(ranks, gb_s):
    """The published rows of H200s, 4 by a ring and 8 by NVLS (nccl_busbw.csv)."""
    h200 = machine("H200-SXM-141GB")
    fast, *_ = bus_bandwidth("all_reduce", 2**34, Span(ranks, ranks, ranks), h200)
    assert fast / 1e9 == pytest.approx(gb_s, rel=0.02)
    assert link_of(bus_of(450e9, ranks), ranks) == pytest.approx(450e9)


def test_collectives_take_longer_with_more_bytes_and_more_nodes():
    times = [collective_seconds("all_gather", n, Span(64, 8, 64), A100, CONSTANTS)
             for n in (1e6, 1e7, 1e9)]
    assert times == sorted(times)
    assert collective_seconds("all_gather", 1e9, Span(8, 8, 8), A100, CONSTANTS) < times[-1]
    assert collective_seconds("all_gather", 1e9, Span(1, 1, 1), A100, CONSTANTS) == 0


# --- the size of a GPU ---

def test_a_gpu_has_what_cuda_offers():
    """As torch prints it; where no log is known, less than any GPU has whose log is."""
    known = [row for row in published.table("hardware_accelerators") if row["cuda_gib"]]
    assert len(known) > 15 and all(row["cuda_gib_source"] for row in known)
    parts = {row["name"]: float(row["cuda_gib"]) / float(row["mem_gb"]) for row in known}
    assert UNKNOWN_SHARE <= min(parts.values()) and max(parts.values()) < 1
    assert {name: round(machine(name).memory_bytes / 2**30, 1) for name in (
        "H100-SXM-80GB", "A100-SXM-80GB", "A100-SXM-40GB", "H200-SXM-141GB", "B200-SXM-180GB")
            } == {"H100-SXM-80GB": 79.1, "A100-SXM-80GB": 79.1, "A100-SXM-40GB": 39.4,
                  "H200-SXM-141GB": 139.8, "B200-SXM-180GB": 178.3}
    assert machine("T4").memory_bytes == 16 * UNKNOWN_SHARE * 2**30


# --- memory ---------------------------------------------------------------------------------------

LLAMA_PLAN = Plan(dp=64, tp=8, pp=16, sequence=8192, micro_batches=32, virtual=8, zero=2,
                  schedule="interleaved", sequence_parallel=True, tool="torchtitan")


@pytest.mark.parametrize("model, plan, on", [
    (LLAMA_405B, LLAMA_PLAN, H100),
    (GLM_130B, Plan(dp=24, tp=4, pp=8, micro_batches=176, zero=1, recompute="full", hides=(),
                    attention="unfused", gradient_bytes=2, tool="deepspeed"),
     machine("A100-SXM-40GB")),
    (BLOOM_176B, Plan(dp=8, tp=4, pp=12, micro_batch=2, micro_batches=128, zero=1, hides=(),
                      recompute="full", attention="unfused", tool="deepspeed"), A100),
    (LLAMA_405B, Plan(dp=8, tp=8, pp=8, cp=2, sequence=8192, micro_batches=192, virtual=8, zero=1,
                      schedule="interleaved", sequence_parallel=True, precision="fp8",
                      gradient_bytes=2), H100),  # Megatron-Bridge 26.06 on 1,024 H100
], ids=["Llama 3 405B", "GLM-130B", "BLOOM-176B", "Megatron-Bridge's 405B"])
def test_what_was_trained_fits(model, plan, on):
    memory = memory_per_gpu(model, plan, on)
    assert fits(model, plan, on) and memory.total > 0.3 * on.memory_bytes, memory


def test_megatron_has_18_bytes_a_parameter_or_6_and_12_parts():
    assert sum(states(Plan(), "megatron", 1000, 1)) == 18_000
    assert sum(states(Plan(dp=4, zero=1), "megatron", 1000, 4)) == 6_000 + 12_000 / 4
    assert sum(states(Plan(gradient_bytes=2), "megatron", 1000, 1)) == 16_000
    assert sum(states(Plan(dp=8, zero=3), "torchtitan", 1000, 8)) == 16_000 / 8


def test_fp8_keeps_inputs_of_products_in_one_byte():
    """A Llama layer's bytes for a token: two norms' results, the MLP's input and output in one byte
    fewer; attention's output also as FP8.
    """
    plan = Plan(sequence=8192)
    small = dataclasses.replace(plan, precision="fp8")
    fewer = (kept_bytes(LLAMA_405B, plan, "megatron") - kept_bytes(LLAMA_405B, small, "megatron"))
    assert fewer / 8192 == 2 * 16384 + 53248 - 16384
    assert kept_bytes(LLAMA_405B, small, "torchtitan") == kept_bytes(LLAMA_405B, plan, "torchtitan")


@pytest.mark.parametrize("plan, waiting", [
    (Plan(), 1), (Plan(pp=8, micro_batches=32), 8), (Plan(pp=8, micro_batches=4), 4),
    (Plan(pp=8, micro_batches=32, schedule="gpipe"), 32),
    (Plan(pp=8, micro_batches=32, schedule="zb-h2"), 15),
    (Plan(pp=8, micro_batches=32, virtual=2, schedule="interleaved"), (14 + 8 + 1) / 2)])
def test_micro_batches_that_wait(plan, waiting):
    assert in_flight(plan, 0) == waiting


def test_no_stage_holds_more_than_the_one_that_is_found():
    # recomputed, so that weights count most
    plan = Plan(dp=2, tp=8, pp=10, micro_batches=4, zero=1, recompute="full")
    found = memory_per_gpu(Model(96, 12288, 96, 49152, 51200), plan, A100)
    assert plan.stages(96) == (9, 9, 10, 10, 10, 10, 10, 10, 9, 9)
    assert found.weights == 2 * 10 * 12 * 12288**2 / 8  # no embedding: a stage between


def test_ours_is_lab_12s():
    model = Model(8, 256, 8, 1024, 512, tied=True)
    plan = Plan(dp=2, tp=2, pp=2, sequence=128, micro_batches=4, tool="ours")
    config = GPTConfig(vocab_size=512, n_ctx=128, n_embd=256, n_head=8, n_layer=8)
    expected = layout_memory(Job(config, 8, 1), Layout(2, 2, 2)).total
    assert memory_per_gpu(model, plan, A100).reading("allocated") == expected
    with pytest.raises(ValueError, match="the course's trainer has GPTs"):
        memory_per_gpu(LLAMA_405B, plan, H100)


# --- time -----------------------------------------------------------------------------------------

def test_parts_add_up_and_mfu_is_below_one():
    step = step_time(LLAMA_405B, LLAMA_PLAN, H100)
    assert step.total == pytest.approx(sum(dataclasses.astuple(step)))
    assert all(part >= 0 for part in dataclasses.astuple(step))
    assert 0.3 < step.mfu(LLAMA_405B, LLAMA_PLAN, H100) < 0.5  # 43% is published
    again = dataclasses.replace(LLAMA_PLAN, recompute="full")
    slower = step_time(LLAMA_405B, again, H100)
    assert slower.recompute > 0 and slower.hfu(LLAMA_405B, again, H100) > slower.mfu(
        LLAMA_405B, again, H100)


def test_products_go_in_waves_of_tiles():
    assert waves(128 * 108, 128, A100) == 1  # one tile for each processor
    assert waves(128 * 109, 128, A100) == pytest.approx(2 * 108 / 109)
    assert waves(1, 128 * 108, A100) == 128 and waves(128 * 54, 128, A100, count=2) == 1


def test_a_layer_with_experts_waits_for_its_host_unless_graphs_launch_it():
    model = Model(48, 2048, 32, 0, 151936, 4, 128, True, experts=128, top_k=8, expert_ffn=768)
    found = []
    for size in (1, 64):
        plan = Plan(dp=8, ep=8, sequence=4096, micro_batch=size)
        late, soon = (step_time(model, dataclasses.replace(plan, graphs=graphs), H100).total
                      for graphs in (False, True))
        found.append(late / soon)
    assert found[0] > 1.15 and 1 <= found[1] < 1.02


def test_messages_of_backward_alone_may_be_hidden():
    plan = Plan(tp=8, sequence=2048, micro_batch=4)
    none, back, both = (step_time(GPT_22B, dataclasses.replace(plan, hides=hides), A100).tensor
                        for hides in ((), ("tensor backward",), ("tensor",)))
    assert 0 < both < none / 2 < back < 0.8 * none


@pytest.mark.parametrize("change, longer", [
    ({"hides": ()}, "data"), ({"micro_batches": 16, "dp": 128}, "bubble"),
    ({"sequence_parallel": False}, "other"), ({"virtual": 1, "schedule": "1f1b"}, "bubble")])
def test_a_worse_plan_takes_longer(change, longer):
    plan = dataclasses.replace(LLAMA_PLAN, **change)
    per_token = [getattr(step_time(LLAMA_405B, each, H100), longer) / each.micro_batches
                 for each in (LLAMA_PLAN, plan)]
    assert per_token[1] > per_token[0]


def test_whole_copies_are_summed_too():
    plan = Plan(dp=16, zero=3, shard=1, micro_batches=2, tool="torchtitan")
    assert step_time(LLAMA_405B, plan, H100).weights > 0


def test_bad_plans_are_refused():
    for bad, words in (({"tp": 0}, "tp=0 must be at least 1"), ({"zero": 4}, "0, 1, 2 or 3"),
                       ({"tool": "jax"}, "tool='jax' is not one of megatron")):
        with pytest.raises(ValueError, match=words):
            Plan(**bad)
    with pytest.raises(ValueError, match="hidden=8 is less than the 16 heads"):
        Model(1, 8, 16, 32, 100)
    with pytest.raises(ValueError, match="is no accelerator of the table"):
        machine("A1000")


# --- constants, scores ----------------------------------------------------------------------------

def test_constants_lie_within_their_bounds():
    for name, (low, high, meaning) in bounds().items():
        assert low <= getattr(CONSTANTS, name) <= high and meaning, name
    assert len(bounds()) <= 24
    assert set(MEMORY) < {field.name for field in dataclasses.fields(Constants)}


def test_the_fit_finds_a_constant_again():
    true = dataclasses.replace(CONSTANTS, product=0.75)
    jobs = [job_of(run) for run in all_runs() if run.file == "zero_bubble"][:8]
    made = [dataclasses.replace(job, seconds=job.seconds * step_ratio(job, true)) for job in jobs]
    found = fit_one(made, step_ratio, ("product",), CONSTANTS, steps=8)
    assert found.product == pytest.approx(0.75, abs=0.01)


def test_errors_on_rows_that_the_fit_has_not_seen():
    runs = [run for run in all_runs() if not is_for_fit(run.row_id)]
    found = score(runs)["all"].as_dict()
    assert found["step_time"]["median"] < 0.08 and found["step_time"]["p90"] < 0.20
    assert found["memory"]["median"] < 0.05 and found["used"] > 0.8 * found["usable"]
    assert found["pairs"]["right"] > 0.85 and found["fits"] > 0.8


def test_no_row_is_dropped_for_its_error():
    runs = [run for run in all_runs() if run.file == "megatron_sc21"]
    worse = [dataclasses.replace(run, iter_time_s=100 * run.iter_time_s) for run in runs]
    assert score(worse)["all"].used == score(runs)["all"].used == len(runs)
    contradicts = dataclasses.replace(runs[0], quality="inconsistent")
    assert score([contradicts])["all"].unused == {"the source contradicts itself": 1}


def test_rows_with_random_cells_are_scored_or_refused():
    random = Random(0)
    names = [name for name in published.KINDS if name not in ("row_id", "file", "unreadable")]
    for run in random.sample(all_runs(), 200):
        cells = {name: random.choice(("", "x")) if published.KINDS[name] is str else
                 random.choice((None, 0, 1, 3, 10**6)) for name in random.sample(names, 2)}
        found = score([dataclasses.replace(run, **cells)])["all"]
        assert found.used + sum(found.unused.values()) == 1


def test_quantiles():
    assert quantile([3, 1, 2], 0.5) == 2 and quantile([0, 10], 0.9) == 9
    assert quantile([], 0.5) is None


def test_the_command_scores_files(capsys):
    path = next(path for path in published.run_files() if "zero_bubble" in path.name)
    assert not command.main(["score", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["all"]["rows"] == 37 == found["zero_bubble"]["used"]
    assert found["all"]["step_time"]["number"] == 37 and found["all"]["pairs"]["number"] == 105
    assert not command.main(["score", "--part", "validation"])
    out = capsys.readouterr().out
    assert "tpu_maxtext: " in out and "the usual is assumed: recompute in 63 rows" in out


def test_the_command_refuses_what_is_no_file(capsys):
    for argv, words in ((["score", "nowhere.csv"], "there is no file 'nowhere.csv'"),
                        (["draw"], "invalid choice: 'draw'")):
        with pytest.raises(SystemExit):
            command.main(argv)
        assert words in capsys.readouterr().err
    assert report.Options().runs()


def test_a_rule_of_five_lines_is_off_by_twice_as_much():
    jobs = rough.rough_jobs()
    rule = rough.median_error(rough.rough_ratios(rough.rough_step_seconds))
    library = rough.median_error([step_ratio(job) for job in jobs])
    assert {job.plan.precision for job in jobs} == {"bf16"} and 2 * library < rule < 0.15
    assert rough_errors(rough.rough_step_seconds).splitlines()[-1].split()[1:3] == [
        str(len(jobs)), f"{rule:.0%}"]
