"""`ranklab plan`: its numbers are the library's, its refusals name the nearest plan that goes."""

import dataclasses
import json
import os
import re
import sys

import pytest

from ranklab.cli import main
from ranklab.formulas.muon import muon_cost
from ranklab.planner import published
from ranklab.planner.catalog import MODELS, find_node, of_config
from ranklab.planner.cost import bill, price_of
from ranklab.planner.export import megatron_arguments
from ranklab.planner.export.nodes import host_gpus
from ranklab.planner.failures import good_share_of
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.mixed import mixed_plans, mixed_step, search_mixed
from ranklab.planner.muon import matrices, muon_change
from ranklab.planner.offers import affordable, offers
from ranklab.planner.plan import Plan
from ranklab.planner.request import Request, nearest, plain
from ranklab.planner.search import RESERVE, distinct, rank, room, search_layouts
from ranklab.planner.sensitivity import changes
from ranklab.planner.space import ADVISED, layouts, virtuals
from ranklab.planner.step import step_time

A100, H100, RACK = find_node("a100-dgx"), find_node("h100-dgx"), find_node("gb200-nvl72")
SMALL = "--model llama-8b --gpus 16 --on h100-dgx --batch 32".split()
REQUEST = Request(MODELS["llama-8b"], H100, 16, 4096, 32, price=2.0)


def said(capsys, *argv):
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def refused(capsys, *argv):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *argv])
    return capsys.readouterr().err

def test_numbers_are_the_librarys(capsys):
    found = json.loads(said(capsys, *SMALL, "--json", "--tokens", "3e11"))
    every = REQUEST.search()
    expected = distinct(every)
    assert (found["layouts_that_fit"], found["reserve"]) == (len(every), RESERVE)
    assert found["machine"]["memory_bytes"] == H100.memory_bytes == 79.1 * 2**30
    assert found["machine"]["memory_used"] == room(H100) >= max(
        each.memory.total for each in every) > 0.9 * room(H100)
    assert [row["layout"] for row in found["layouts"]] == [each.plan.words() for each in expected]
    for row, (plan, memory, step) in zip(found["layouts"], expected):
        assert Plan(**{**row["plan"], "hides": tuple(row["plan"]["hides"])}) == plan
        assert row["bytes"] == memory.total == memory_per_gpu(REQUEST.model, plan, H100).total
        assert row["seconds"] == step.total == step_time(REQUEST.model, plan, H100).total
        assert row["mfu"] == step.mfu(REQUEST.model, plan, H100) > row["mfu_causal"]
        price = price_of("H100-SXM-80GB")[0]
        assert row["dollars_per_token"] == pytest.approx(
            16 * price / 3600 / step.tokens_per_second(plan))
    plan, _, step = expected[0]
    whole = bill(plan, step, H100, 3e11, price, good_share_of(REQUEST.model, H100, 16))
    assert {**found["bill"], **dataclasses.asdict(whole)} == found["bill"]
    without = {each["what"]: each["seconds_without"] for each in found["assumptions"]}
    flash = dataclasses.replace(plan, attention="flash")
    assert without["attention by cuDNN or FlashAttention 3"] == step_time(
        REQUEST.model, flash, H100).total > step.total
    assert without["all of these"] == max(without.values())
    low, high = (found["range"][end] / step.total for end in ("low", "high"))
    assert low < high < 2 and f"took {low:.2f} to {high:.2f} times" in found["range"]["of"]
    table = said(capsys, *SMALL, "--tokens", "3e11")
    for words in (f"{step.total:.4g} s", f"{row['bytes'] / 1e9:.1f}", "$6.88 (AWS p5.48xlarge",
                  "GB: what the fullest GPU holds", f"{without['all of these']:.4g} s",
                  f"${whole.dollars:,.0f}", f"{whole.days:.3g} days"):
        assert words in table, words
    assert max(map(len, table.splitlines())) <= 100


def test_shown_layouts_differ_and_each_tool_has_one():
    found = REQUEST.search()
    shown = distinct(found, 4)
    kinds = [(each.plan.tool, each.plan.tp, each.plan.pp) for each in shown]
    assert len(set(kinds)) == len(kinds) <= 6 and {tool for tool, *_ in kinds} == set(ADVISED)
    assert found[0].step.total == shown[0].step.total
    for one, kind in zip(shown, kinds):  # none of its kind beats it
        assert rank(one) == min(rank(each) for each in found if kind == (
            each.plan.tool, each.plan.tp, each.plan.pp))


def test_a_price_is_asked_for_and_taken(capsys):
    argv = ["--params", "1e9", "--gpus", "8", "--on", "a100-dgx", "--batch", "64"]
    assert "no price is known (--price)" in said(capsys, *argv)
    assert "at $2.5 (given)" in said(capsys, *argv, "--price", "2.5", "--tool", "torchtitan")
    assert "no price of A100-SXM-80GB is known" in refused(capsys, *argv, "--budget", "1e6")


def test_what_changes_the_plan_has_the_right_sign(capsys):
    found, best = REQUEST.search(), REQUEST.best()
    rows = {(each.quantity, each.factor): each for each in changes(REQUEST, found, best)}
    def speed(what, factor):
        each = rows[what, factor].best
        return each.step.tokens_per_second(each.plan)

    now = best.step.tokens_per_second(best.plan)
    for what in ("GPUs", "batch", "link", "network"):
        assert speed(what, 0.5) <= now <= speed(what, 2), what
    assert speed("sequence", 2) < now < speed("sequence", 0.5)
    for row in rows.values():
        assert row.best.step == step_time(REQUEST.model, row.best.plan, row.request.machine)
    text = said(capsys, *SMALL, "--tool", "torchtitan", "--sensitivity")
    assert "link x 0.5" in text and "  change  " in text and max(map(len, text.splitlines())) <= 100

@pytest.mark.parametrize("argv, words", [
    ("--model llama-1b --gpus 512 --on h100-dgx --batch 3 --tool torchtitan",
     "no layout divides it, or the model; with a batch of 4 there is"),
    ("--model llama-9b --gpus 8 --on h100-dgx", "'llama-9b' is no model: gpt2-xl, gpt3-175b"),
    ("--model llama-8b --gpus 8 --on h1000", "'h1000' is no node: h100-dgx, h200-dgx"),
    ("--model llama-8b --gpus 8 --on b200", "; similar: b200-dgx, B200-SXM-180GB"),
    ("--model llama-8b --gpus 8 --on h100-dxg", "; similar: h100-dgx"),
    ("--model llama-8b --gpus 8 --on a100-40gb", "; similar: a100-40gb-dgx"),
    ("--model llama-8b --on h100-dgx:x", "say how many GPUs with --gpus"),
    ("--model llama-8b --on h100-dgx:8,a100-dgx:8 --gpus 8", "is not the 16 GPUs"),
    ("--model llama-8b --on h100-dgx:8,a100-dgx:8 --budget 9", "--budget is for GPUs of one kind"),
    ("--model llama-8b --on h100-dgx --gpus 8 --tool jax", "'jax' is not one of megatron"),
    ("--model llama-8b --on h100-dgx --gpus 8 --tool ours", "such as gpt3-175b"),
    ("--model llama-8b --on none.json --gpus 8",
     "none.json is not there; on a node this writes it: torchrun "),
    ("--model none.json --on h100-dgx --gpus 8", "none.json can't be read as JSON: No such file"),
    ("--model llama-70b --on h100-dgx --gpus 4 --batch 16", "(--reserve 0.1); on 8 GPUs")])
def test_a_refusal_is_a_sentence(capsys, argv, words):
    err = refused(capsys, *argv.split())
    assert err.startswith("ranklab plan: ") and words in err and err.count("\n") == 1


WHOLE = {name: value for name, value in vars(H100).items() if name != "watts"}


@pytest.mark.parametrize("values, words", [
    ({"network": 0}, "network=0 must be a number of bytes/s, from 1e5 to 1e16: an H100 has 5e10"),
    ({"network": 400}, "network=400 must be a number of bytes/s"),
    ({"network": None}, "network=null must be a number of bytes/s"),
    ({"memory_bytes": "80GB"}, 'memory_bytes="80GB" must be a number of bytes'),
    ({"memory_bytes": -80e9}, "memory_bytes=-80000000000.0 must be a number of bytes"),
    ({"peak_flops": 989, "bf16": 700}, "peak_flops=989 must be a number of FLOP/s, from 1e7 to "
                                       "1e17: an H100 has 9.89e14"),
    ({"bf16": float("nan")}, "bf16=NaN must be a number of FLOP/s"),
    ({"bf16": True}, "bf16=true must be a number of FLOP/s"),
    ({"bf16": 14e14}, "bf16=1.4e15 FLOP/s of measured products is above the peak"),
    ({"node": 0}, "node=0 must be a whole number, from 1 to 1e6: an H100 has 8"),
    ({"node": 7.5}, "node=7.5 must be a whole number"),
    ({"island": 256}, "island=256 needs far"),
    ({"name": 3}, "name=3 must be a text"),
    ({"gpus": 8}, "gpus is unknown; a node has accelerator, bf16, far"),
    ({"accelerator": "K80", "fp4": ...}, "it lacks fp4, and 'K80' is no accelerator of the table"),
    ({"accelerator": ..., "fp4": ..., "fp8": ...}, "it lacks fp8, fp4, and names no accelerator")])
def test_a_node_file_that_is_wrong_is_a_sentence(values, words, capsys, tmp_path):
    path = tmp_path / "node.json"
    path.write_text(json.dumps({name: value for name, value in {**WHOLE, **values}.items()
                                if value is not ...}))
    err = refused(capsys, "--model", "llama-8b", "--on", f"{path}:8")
    assert err.startswith(f"ranklab plan: {path}: {words}") and err.count("\n") == 1


@pytest.mark.parametrize("field", [*WHOLE])
def test_a_known_accelerator_fills_what_a_node_file_leaves_out(field, tmp_path):
    path = tmp_path / "node.json"
    path.write_text(json.dumps({name: WHOLE[name] for name in WHOLE if name != field}))
    watts = 0.0 if field == "accelerator" else H100.watts  # which WHOLE leaves out, too
    expected = {"name": "node"} if field == "name" else {"accelerator": ""} if not watts else {}
    assert find_node(str(path)) == dataclasses.replace(H100, watts=watts, **expected)


def test_the_nearest_is_the_smallest_that_goes():
    request = dataclasses.replace(REQUEST, model=MODELS["llama-70b"], gpus=4, batch=16)
    words = nearest(request)
    count = int(words.split()[1])
    assert words.startswith("on ") and dataclasses.replace(request, gpus=count).best()
    assert not any(dataclasses.replace(request, gpus=each).best() for each in range(4, count, 4))


def test_deepseeks_attention_is_read_from_its_config():
    said = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
            "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
    found, known = of_config(said), MODELS["deepseek-v3"]
    assert found.parameters == pytest.approx(known.parameters, rel=1e-4)
    assert (found.head_size, found.experts, found.dense) == (known.head_size, 256, 3)


def test_a_gpu_without_bf16_is_planned_in_fp16_without_flash_attention(capsys):
    text = " ".join(said(capsys, "--model", "llama-1b", "--gpus", "8", "--on", "v100-dgx", "--seq",
                         "2048", "--batch", "32").split())
    assert "125 TFLOP/s (fp16)" in text and "V100 has no bf16: read fp16" in text
    for node, kind in (("v100-dgx", "unfused"), ("a100-dgx", "flash"), ("h100-dgx", "tuned")):
        plans = layouts(MODELS["llama-1b"], find_node(node), 8, 2048, 32)
        assert {plan.attention for plan in plans} == {kind}
    mixed = said(capsys, "--model", "llama-1b", "--on", "v100-dgx:8,a100-dgx:8", "--batch", "32")
    assert "V100 has no bf16" in " ".join(mixed.split())
    assert "no bf16" not in said(capsys, *SMALL, "--tool", "torchtitan")


@pytest.mark.parametrize("name, same", [
    ("h100", "H100"), ("H100-DGX", "h100-dgx"), ("a100-sxm-40gb", "A100-SXM-40GB"),
    ("gb200-nvl72", "GB200-NVL72"), ("gb300-NVL72", "gb300-nvl72")])
def test_a_node_is_found_in_any_case(name, same):
    assert dataclasses.replace(find_node(name), name="") == dataclasses.replace(
        find_node(same), name="")


def test_a_budget_and_a_deadline(capsys):
    request = dataclasses.replace(REQUEST, gpus=64, tokens=1e11, batch=256, tools=("torchtitan",))
    every = offers(request)
    days = {each.layout.plan.gpus: each.bill.days for each in every}
    assert [*days] == [8, 16, 24, 32, 48, 64]
    good = affordable(every, deadline=days[16])
    assert good.bill.dollars == min(
        each.bill.dollars for each in every if each.bill.days <= days[16])
    spent = sorted(every, key=lambda each: each.bill.dollars)[3].bill.dollars
    assert affordable(every, budget=spent).bill.days == min(
        each.bill.days for each in every if each.bill.dollars <= spent)
    with pytest.raises(ValueError, match=rf"is 64 .*\$.* and {days[64]:.3g} days"):
        affordable(every, 1000, days[64])  # it keeps one of both
    argv = "--gpus 64 --batch 256 --tokens 1e11 --price 2 --tool torchtitan --reserve 0".split()
    found = json.loads(said(capsys, *SMALL, *argv, "--deadline", f"{days[16]}", "--json"))
    assert found["gpus"] == good.layout.plan.gpus == found["offers"][0]["gpus"]
    assert "the nearest is 64" in refused(capsys, *SMALL, *argv, "--deadline", "0.1")


def test_what_is_printed_is_plain(monkeypatch):
    assert [plain(each) for each in (5230.4, 0.08816, 1e6)] == ["5,230", "0.0882", "1,000,000"]
    reads, writes = os.pipe()
    os.close(reads)  # as `head` does
    monkeypatch.setattr(sys, "stdout", open(writes, "w"))
    assert main(["plan", *SMALL, "--tool", "torchtitan"]) == 0

def test_one_gpu_may_keep_its_optimizer_on_the_host(capsys):
    argv = "--model llama-1b --gpus 1 --on rtx4090-pcie --batch 8 --seq 2048".split()
    assert "zero 2, offload" in said(capsys, *argv, "--tool", "deepspeed")
    assert "no layout fits" in refused(capsys, *argv, "--tool", "megatron")


def test_a_rack_of_72_is_one_node():
    model = MODELS["gpt3-175b"]
    one, more = ({plan.tp for plan in layouts(model, RACK, gpus, 2048, gpus)} for gpus in (72, 288))
    assert one == more == {1, 2, 3, 4, 6, 8, 12, 24}  # 16, 32, 48 are not in whole racks
    plan = Plan(dp=9, tp=8, zero=1)
    assert plan.span("weights", RACK).node == 9 and plan.span("weights", H100).node == 1
    far = dataclasses.replace(RACK, node=8)
    assert step_time(model, plan, RACK).data < step_time(model, plan, far).data


def test_stages_need_not_be_even():
    model = MODELS["deepseek-v3"]
    assert virtuals(model, 16, "megatron") == [1, 2]  # 4 layers on most: 3 stages would have 2 each
    assert virtuals(MODELS["llama-70b"], 4, "megatron") == [1, 2, 4, 5, 10]
    assert virtuals(MODELS["llama-405b"], 16, "megatron") == [1, 2, 4]
    hybrid = {plan.shard for plan in layouts(MODELS["llama-1b"], A100, 64, 2048, 64, "torchtitan")}
    assert hybrid == {0, 2, 4, 8}


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "llama-70b"])
def test_the_space_is_small_enough(name):
    plans = [plan for tool in ADVISED
             for plan in layouts(MODELS[name], H100, 1024, 4096, 4096, tool)]
    assert len(set(plans)) == len(plans) < 20_000  # of 0.15 ms each
    assert {plan.gpus for plan in plans} == {1024} and {plan.batch for plan in plans} == {4096}


def test_unlike_gpus_share_by_speed(capsys, tmp_path):
    argv = "--model llama-8b --on h100-dgx:16,a100-dgx:8 --batch 96 --json".split()
    found = json.loads(said(capsys, *argv))
    fast, slow = found["kinds"]
    assert slow["alone"] > fast["alone"] > found["seconds"] and 0.3 < found["mfu"] < 0.7
    assert fast["share"] + slow["share"] == pytest.approx(1)
    assert fast["micro_batches"] > 1.5 * slow["micro_batches"]
    node = tmp_path / "mine.json"
    node.write_text('{"accelerator": "A100-SXM-80GB", "node": 4, "network": 1e9}')
    text = said(capsys, *argv[:3], f"a100-dgx:8,{node}:8", "--batch", "96")
    assert "8 mine: " in text and max(map(len, text.splitlines())) <= 100


def test_alike_gpus_are_one_machine():
    parts = [(H100, 16), (H100, 16)]
    plan = Plan(tp=2, pp=2, sequence=4096, virtual=2, schedule="interleaved", zero=1,
                sequence_parallel=True, attention="tuned")
    plans = mixed_plans(REQUEST.model, plan, parts, 128)
    assert [each.micro_batches for each in plans] == [16, 16]  # rounds of pp
    whole = dataclasses.replace(plan, dp=8, micro_batches=16)
    assert mixed_step(REQUEST.model, plans, [H100, H100]) == pytest.approx(
        step_time(REQUEST.model, whole, H100).total, rel=0.02)
    best = search_mixed(REQUEST.model, parts, 4096, 128, ("torchtitan",))[0]
    alone = search_layouts(REQUEST.model, H100, 32, 4096, 128, ("torchtitan",))[0]
    assert best.seconds == pytest.approx(alone.step.total, rel=0.05)


def test_llama_3_worked_most_of_the_time():
    more = {row["component"]: row["count"] for row in published.table("failures")}
    good = good_share_of(MODELS["llama-405b"], H100, 16384)
    assert float(more["effective training time above"]) / 100 < good < 0.97


def test_pictures(capsys, tmp_path):
    for name, more in (("a.svg", []), ("b.png", ["--deadline", "1000"])):
        said(capsys, *SMALL, "--tool", "torchtitan", "--plot", str(tmp_path / name), *more)
        assert (tmp_path / name).stat().st_size > 5000
    assert "the best of each tool" in (tmp_path / "a.svg").read_text()


def test_files_are_written_and_a_dry_run_counts(tmp_path, capsys):
    folder = tmp_path / "plans"
    argv = ["plan", "--model", "llama-8b", "--gpus", "16", "--on", "h100-dgx", "--batch", "64"]
    assert not main([*argv, "--write", str(folder), "--html", str(tmp_path / "plan.html")])
    assert "16 GPUs of h100-dgx" in (tmp_path / "plan.html").read_text()
    assert {"megatron.sh", "torchtitan.toml", "deepspeed.json"} <= {
        path.name for path in folder.iterdir()}
    assert str(folder / "megatron.sh") in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*argv, "--dry-run"])
    assert "give --tool ours" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_embd": 256, "n_head": 8, "n_layer": 4, "vocab_size": 512,
        "tie_word_embeddings": True}))
    small = ["plan", "--model", str(tmp_path), "--gpus", "4", "--on", "a100-dgx", "--seq", "512",
             "--batch", "8", "--tool", "ours", "--dry-run", "--write", str(folder)]
    assert not main(small)
    said = capsys.readouterr().out
    held = re.search(r"^held +([\d,]+) +([\d,]+)$", said, re.M).groups()
    formula, counted = (float(each.replace(",", "")) for each in held)
    assert counted == pytest.approx(formula, rel=0.15) and "ranklab.sh" in said


def written(folder, capsys, *words):
    """Run `ranklab plan ... --write folder`; return ({name of a file: its text}, the output as one
    line).
    """
    assert not main(["plan", *words, "--write", str(folder)])
    said = " ".join(capsys.readouterr().out.split())
    return {path.name: path.read_text() for path in folder.iterdir()}, said


def test_torchrun_is_called_on_each_tray_of_a_rack(tmp_path, capsys):
    files, _ = written(tmp_path, capsys, "--model", "llama-8b", "--gpus", "72", "--batch", "144",
                       "--on", "gb300-nvl72", "--tool", "megatron")
    assert "--nnodes 18 --nproc-per-node 4 " in files["megatron.sh"]
    assert [host_gpus(find_node(name)) for name in ("gb200-nvl72", "h100-dgx", "l4-pcie")] == [
        4, 8, 4]


def test_only_files_of_an_earlier_plan_are_replaced(tmp_path, capsys):
    files, _ = written(tmp_path, capsys, *SMALL)
    assert set(files) == {"megatron.sh", "torchtitan.toml", "torchtitan_planned.py",
                          "deepspeed.json"}
    assert written(tmp_path, capsys, *SMALL)[0] == files
    (tmp_path / "deepspeed.json").write_text("{}")
    (tmp_path / "megatron.sh").unlink()
    with pytest.raises(SystemExit):
        main(["plan", *SMALL, "--write", str(tmp_path)])
    assert f"{tmp_path}/deepspeed.json is there and was not written" in capsys.readouterr().err
    assert not (tmp_path / "megatron.sh").exists()


def test_what_files_lack_is_said_in_them_and_on_the_terminal(tmp_path, capsys):
    files, said = written(tmp_path, capsys, *SMALL, "--precision", "fp8", "--optimizer", "muon")
    words = "Not in the files: --precision fp8 and --optimizer muon."
    assert words in said and all(words in text for text in files.values())
    assert "debugmodel takes its place" not in said
    _, said = written(tmp_path, capsys, "--params", "13e9", *SMALL[2:])
    assert "debugmodel takes its place" in said and "Not in the files" not in said
    assert "--add-qkv-bias (Qwen2.5)" in said and "--squared-relu" not in said
    files, said = written(tmp_path, capsys, "--model", "gpt2-xl", *SMALL[2:], "--tool", "megatron")
    assert "--squared-relu (Nemotron-4)" in said and "--squared-relu" in files["megatron.sh"]
    assert "add --multi-latent-attention" in megatron_arguments(MODELS["deepseek-v3"], Plan(dp=8))


def test_muon_saves_a_moment_and_adds_two_parts(capsys):
    model, plan = MODELS["llama-8b"], Plan(dp=16, zero=1)
    shapes = matrices(model)
    assert sum(m * n for m, n in shapes) == model.block
    change = muon_change(model, plan, H100)
    assert change.saved_bytes == 4 * model.layers * model.block / 16
    flops = muon_cost(shapes * model.layers, 16).flops
    assert 0.5 * H100.bf16 < flops / change.computing < H100.bf16
    assert change.sending > 0
    whole = muon_change(model, dataclasses.replace(plan, zero=0), H100)  # each copy does all of it
    assert whole.saved_bytes == 16 * change.saved_bytes and whole.sending == 0
    assert whole.computing > 10 * change.computing
    table = said(capsys, *SMALL, "--optimizer", "muon")
    assert "Muon for the matrices of the blocks" in table
    assert max(map(len, table.splitlines())) <= 100
    assert "experts" in refused(capsys, "--model", "mixtral-8x7b", "--gpus", "64", "--on",
                                "h100-dgx", "--optimizer", "muon")
