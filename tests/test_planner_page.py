"""The planner's page: its rows are the library's, its controls lead to them, it loads nothing."""

import dataclasses
import itertools
import json
import re

import pytest

from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.live import answer
from ranklab.planner.page import Choices, Node, around, plan_page
from ranklab.planner.request import Request
from ranklab.planner.score import likely_range
from ranklab.planner.search import NoLayout, distinct, quick_search, search_layouts
from ranklab.planner.why import assumptions, why

H100, L40S = find_node("h100-dgx"), find_node("l40s-pcie")
CHOICES = Choices(
    {"<b>": MODELS["llama-8b"], "llama-405b": MODELS["llama-405b"]},
    {"h100-dgx": Node(H100, (8, 64), (2**20,), (2.5, "given")),
     "l40s-pcie": Node(L40S, (16,), (3000,), (None, ""))},
    (2048, 8192), ("<b>", "h100-dgx", 8, 8192, 2**20))


@pytest.fixture(scope="module")
def page():
    return plan_page(CHOICES)


@pytest.fixture(scope="module")
def data(page):
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page)[1])


@pytest.mark.parametrize("choice, search", [
    (CHOICES.first, search_layouts), (("<b>", "h100-dgx", 64, 2048, 2**20), quick_search)])
def test_rows_are_the_librarys(data, choice, search):
    name, node, gpus, sequence, batch = choice
    model, machine = CHOICES.models[name], CHOICES.nodes[node].machine
    found = distinct(search(model, machine, gpus, sequence, batch // sequence))
    plan, memory, step = found[0]
    shown = data["rows"][" ".join(map(str, choice))]
    gb, seconds, said, (low, high, of), (speed, days, dollars, _), plain, layouts = shown
    assert dict(zip(data["memory"], gb)) == pytest.approx(
        {part: nbytes / 1e9 for part, nbytes in dataclasses.asdict(memory).items()}, rel=1e-3)
    assert dict(zip(data["step"], seconds)) == pytest.approx(dataclasses.asdict(step), rel=1e-3)
    assert said == why(plan, step, machine)
    assert (low / step.total, high / step.total, of) == (
        *map(lambda each: pytest.approx(each, rel=1e-3), likely_range(model, plan, machine)[:2]),
        likely_range(model, plan, machine)[2])
    assert [each[0] for each in layouts] == [f"{x.plan.tool} {x.plan.words()}" for x in found]
    assert layouts[-1][1:] == pytest.approx(
        [found[-1].step.total, found[-1].memory.total / 1e9,
         100 * found[-1].step.mfu(model, found[-1].plan, machine)], rel=1e-3)
    assert plain == pytest.approx(assumptions(model, plan, machine)[-1][1], rel=1e-3)
    assert speed == pytest.approx(batch / step.total, rel=1e-3)
    assert 1e12 / speed < days * 86400 < 1.1e12 / speed  # failures take their time
    assert dollars == pytest.approx(days * 24 * gpus * 2.5, rel=1e-2)


def test_every_option_leads_to_a_row_or_a_sentence(data):
    keys = {" ".join(map(str, (name, node, *rest)))
            for name, (node, kind) in itertools.product(data["models"], data["nodes"].items())
            for rest in itertools.product(kind["gpus"], data["sequences"], kind["batches"])}
    assert keys == set(data["rows"])
    for key, row in data["rows"].items():
        node = data["nodes"][key.split()[1]]
        whole = node["room"]
        assert whole == pytest.approx(0.9 * node["GB"])
        assert isinstance(row, str) and len(row) > 30 or (
            sum(row[0]) == pytest.approx(row[-1][0][2], rel=1e-3) and sum(row[0]) <= whole)


@pytest.mark.parametrize("asked, sentence", [
    ({"gpus": 0}, "gpus=0 must be a whole number from 1 to 131,072"),
    ({"batch": 1.5}, "batch=1.5 must be a whole number"),
    ({"sequence": None}, "sequence=None must"), ({"link": 0}, "link=0 must be a number above 0"),
    ({"tokens": -1}, "tokens=-1 must be a number above 0"),
    ({"price": "x"}, "price=x must be a number"), ({"node": "x"}, "'x' is no node: h100-dgx"),
    ({"model": "x"}, "'x' is no model: gpt2-xl"), ({"config": "{"}, "can't be read as JSON: "),
    ({"config": "3"}, "is no JSON object"),
    ({"config": '{"model_type": "rwkv"}'}, "'rwkv' can't be read")])
def test_a_form_with_a_mistake_gets_a_sentence(asked, sentence):
    assert sentence in json.loads(answer(json.dumps(asked)))["refused"]


def test_a_form_is_answered_as_the_search_answers():
    shown = json.loads(answer(json.dumps({"gpus": 64, "network": 5, "link": 100, "price": 3})))
    slow = dataclasses.replace(H100, network=5e9, link=100e9)
    best = search_layouts(MODELS["llama-70b"], slow, 64, 8192, 512)[0]
    assert shown["row"][-1][0][0] == f"{best.plan.tool} {best.plan.words()}"
    assert shown["row"][-1][0][1] == pytest.approx(best.step.total, rel=1e-3)
    assert shown["node"]["price"] == [3, "yours"] and "70.55B" in shown["model"]
    assert shown["node"]["dtype"] == "bf16"


def test_a_gpu_without_bf16_is_planned_in_fp16():
    shown = json.loads(answer(json.dumps({"model": "llama-8b", "node": "v100-dgx", "gpus": 64})))
    assert shown["node"]["dtype"] == "fp16"


def test_what_does_not_fit_is_the_searchs_sentence(data):
    with pytest.raises(NoLayout) as refused:
        search_layouts(MODELS["llama-405b"], H100, 8, 8192, 128)
    assert data["rows"]["llama-405b h100-dgx 8 8192 1048576"] == str(refused.value)
    assert "3000 tokens is no whole" in data["rows"]["llama-405b l40s-pcie 16 2048 3000"]


def test_nothing_is_loaded_and_names_are_escaped(page):
    assert not re.search(r"https?:|//\w|\b(src|href)=|url\(|@import|fetch\(|import\(", page)
    assert "<b>" not in page and "&lt;b&gt; on 8 GPUs" in page and page.count("</script") == 2


def test_around_one_query_are_half_and_twice_of_it():
    found = around("llama-8b", Request(MODELS["llama-8b"], H100, 8, 2048, 33), "")
    assert len(list(found)) == 27 and found.first in list(found)
    assert found.nodes["h100-dgx"].gpus == (4, 8, 16) and found.sequences == (1024, 2048, 4096)
    assert found.request(*found.first).batch == 33


def test_a_range_is_of_similar_runs_and_wider_where_one_source_has_them_all():
    def range_of(name, node):
        model, machine = MODELS[name], find_node(node)
        plan = search_layouts(model, machine, 256, 4096, 1024)[0].plan
        return likely_range(model, plan, machine)

    low, high, said = range_of("llama-8b", "h100-dgx")
    assert "dense, bf16, on H100" in said and 0.8 < low < 1 < high < 1.2
    low, high, said = range_of("mixtral-8x7b", "gb200-nvl72")
    assert "with experts, on GB200" in said and "All are of one source" in said
    assert low < 0.8 and high > 1.35
    low, high, said = range_of("llama-8b", "b200-dgx")
    assert "on any GPU), and of 2" in said and "of other kinds on B200" in said and high > 1.3
