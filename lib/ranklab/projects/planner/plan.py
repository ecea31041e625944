"""`ranklab plan`: the best layouts for training on your GPUs: their speed, their cost, and why.

    ranklab plan --model llama-70b --gpus 256 --on h100-dgx --seq 8192 --batch 1024
    ranklab plan --params 13e9 --gpus 64 --on a100-dgx --tokens 300e9 --price 2.5 --sensitivity
    ranklab plan --model config.json --on node.json --gpus 1024 --budget 1e6 --deadline 30
    ranklab plan --model llama-8b --on h100-dgx:128,a100-dgx:128
"""

import dataclasses
import functools
import json
import os
import sys
import textwrap
from pathlib import Path

from tqdm import tqdm

from ranklab.basics.options import comma_list, new_file, new_folder, number, picture, positive
from ranklab.planner.catalog import find_model, find_node, model_of_size
from ranklab.planner.cost import price_of
from ranklab.planner.domains import expert_traffic
from ranklab.planner.fp8 import fp8_change, published_pairs
from ranklab.planner.mixed import search_mixed
from ranklab.planner.muon import muon_change
from ranklab.planner.offers import affordable, offers
from ranklab.planner.page import around, plan_page
from ranklab.planner.plan import TOOLS
from ranklab.planner.request import Request, nearest, plain
from ranklab.planner.search import RESERVE, NoLayout, distinct, room
from ranklab.planner.sensitivity import changes
from ranklab.planner.space import ADVISED
from ranklab.projects.command import Command, refusals, save_figure
from ranklab.projects.planner import table
from ranklab.projects.planner.answer import answer, mixed_answer
from ranklab.projects.planner.files import dry_run, refuse_to_replace, write_plans

watch = functools.partial(tqdm, desc="layouts", leave=False, disable=None)  # only on a terminal


@refusals("ranklab plan")
def main(arguments):
    """Run `ranklab plan`: print the answer as text, or as JSON."""
    options = command().parse_args(arguments)
    name, model = find_model(options.model) if options.model else (
        "a model in Llama's shape", model_of_size(options.params))
    parts = kinds(options.on, options.gpus)
    if len(parts) > 1:
        flags = ("budget", "deadline", "sensitivity", "plot", "write", "dry_run", "html", "domains")
        for flag, usual in (("optimizer", "adamw"), ("precision", "bf16")):
            if getattr(options, flag) != usual:
                raise ValueError(f"--{flag} {getattr(options, flag)} is for GPUs of one kind")
        if misfits := [f"--{each.replace('_', '-')}" for each in flags if getattr(options, each)]:
            raise ValueError(f"{misfits[0]} is for GPUs of one kind")
        mixes = search_mixed(model, parts, options.seq, options.batch, options.tool,
                             reserve=options.reserve)
        reply, text = mixed_answer(name, model, parts, mixes, options), table.mixed_text
    else:
        (machine, gpus), = parts
        price, source = (options.price, "given") if options.price else price_of(machine.accelerator)
        wish = Request(model, machine, gpus, options.seq, options.batch, tuple(options.tool),
                       options.tokens, price, options.reserve)
        reply, text = one_kind(name, wish, source, options), table.text
    try:
        print(json.dumps(reply, indent=1) if options.json else text(reply), flush=True)
    except BrokenPipeError:  # `head` has read enough; the rest must go somewhere at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def more(options, name, wish, source, layouts):
    """Write the requested files, and dry-run the course's own trainer.

    Returns: lines about both, and about Muon, FP8 and NVLink domains
    """
    lines = muon_lines(wish, layouts[0]) if options.optimizer == "muon" else []
    lines += fp8_lines(wish, layouts[0]) if options.precision == "fp8" else []
    lines += domain_lines(wish, layouts[0], options.domains)
    if options.write:
        lines += write_plans(options.write, wish.model, layouts, wish.machine, not_written(options))
    if options.html:
        Path(options.html).parent.mkdir(parents=True, exist_ok=True)
        Path(options.html).write_text(plan_page(around(name, wish, source)), encoding="utf-8")
        lines.append(f"{options.html}: half and twice the GPUs, the sequence and the batch, too")
    if options.dry_run:
        plan = next((each.plan for each in layouts if each.plan.tool == "ours"), None)
        if plan is None:
            raise ValueError("--dry-run counts in the course's own trainer: give --tool ours")
        lines += dry_run(wish.model, plan)
    return lines


def not_written(options):
    """Return a sentence on the options that are not in the files, if there are any."""
    flags = [f"--{flag} {value}" for flag, value, usual in (
        ("precision", options.precision, "bf16"), ("optimizer", options.optimizer, "adamw"))
        if value != usual]
    return [f"Not in the files: {' and '.join(flags)}. They are of the layout that is best in bf16 "
            "with AdamW."] * bool(flags)


def muon_lines(wish, best):
    """Return lines about the effect of Muon on the best layout."""
    change = muon_change(wish.model, best.plan, wish.machine)
    memory, seconds = best.memory, best.step.total + change.computing + change.sending
    return textwrap.wrap(
        f"Muon for the matrices of the blocks, in the best layout: "
        f"{(memory.total - change.saved_bytes) / 1e9:.1f} GB instead of {memory.total / 1e9:.1f}, "
        f"{plain(seconds, 4)} s a step instead of {plain(best.step.total, 4)}. Newton-Schulz takes "
        f"{plain(change.computing)} s on the busiest owner, and rows there and back "
        f"{plain(change.sending)} s; nothing hides them. Layouts were searched with AdamW.", 100)


def fp8_lines(wish, best):
    """Return lines about the effect of FP8 on the best layout."""
    change, pairs = fp8_change(wish.model, best.plan, wish.machine), published_pairs()
    memory, seconds = change.memory, change.seconds
    gathers = (f" With weights gathered in FP8 it is {plain(change.gathers, 4)} s, and a GPU "
               f"gathers {plain(change.gathered[1] / 1e9)} GB of weights in a step instead of "
               f"{plain(change.gathered[0] / 1e9)}." if change.gathered[0] else "")
    gains = [pair.speedup for pair in pairs]
    return textwrap.wrap(
        f"FP8 for the products of the blocks, {change.share:.0%} of a step of the best layout: "
        f"{plain(seconds[1], 4)} s a step instead of {plain(seconds[0], 4)} "
        f"({seconds[0] / seconds[1]:.2f} times as fast), and "
        f"{memory[1] / 1e9:.1f} GB instead of {memory[0] / 1e9:.1f}.{gathers} Attention, head, "
        "embeddings, master weights and the optimizer stay as they are. In published pairs of runs "
        f"({len(pairs)}, each of one layout) a step became {min(gains):.2f} to {max(gains):.2f} "
        "times as fast. Layouts were searched in bf16.", 100)


def domain_lines(wish, best, domains):
    """Return a table of the experts' all-to-alls in the best layout, in NVLink domains of these
    numbers of GPUs.
    """
    if not domains:
        return []
    rows = [expert_traffic(wish.model, best.plan, wish.machine, domain) for domain in domains]
    lines = ["", f"Experts on {best.plan.ep} ranks in the best layout, if NVLink joins as many "
             "GPUs as the first column says:", "",
             "NVLink joins   rows that leave   GB by network   all-to-alls      step",
             *(f"{row.domain:>12}{row.crossing:>18.0%}{plain(row.nbytes / 1e9):>16}"
               f"{plain(row.seconds):>12} s{plain(row.step, 4):>8} s" for row in rows)]
    lines += ["", *textwrap.wrap(
        "Rows: of a plain all-to-all with even loads. GB: of a GPU in a step; a token goes only "
        "once to each domain with some of its experts. All-to-alls: before anything hides them.",
        100)]
    if wish.machine.node > best.plan.ep and wish.machine.node % best.plan.ep:
        lines += textwrap.wrap(
            f"Use a multiple of {best.plan.ep} of a domain's {wish.machine.node} GPUs, or some "
            "groups of experts lie in two domains.", 100)
    return lines


def command():
    """Return the parser of the command line."""
    parser = Command("ranklab plan", __doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--model", help="a name such as llama-70b, or a Hugging Face config.json")
    group.add_argument("--params", type=number(float, above=0), metavar="13e9",
                       help="of a model in Llama's shape")
    for flag, kind, default, help in (
            ("gpus", positive, None, "how many; with --budget or --deadline: at most"),
            ("seq", positive, 4096, "tokens of a sequence"),
            ("batch", positive, 1024, "sequences of a step, on all GPUs"),
            ("tokens", number(float, above=0), 1e12, "of the whole training"),
            ("price", number(float, above=0), None, "dollars of a GPU for an hour"),
            ("budget", number(float, above=0), None, "dollars at most"),
            ("deadline", number(float, above=0), None, "days at most"),
            ("reserve", number(float, least=0, most=0.9), RESERVE, "of a GPU's memory, left free"),
            ("top", positive, 5, "layouts in the table")):
        parser.add_argument(f"--{flag}", type=kind, default=default, help=help,
                            metavar=flag.upper())
    parser.add_argument("--on", required=True, metavar="NODE",
                        help="h100-dgx, an accelerator, node.json; h100-dgx:128,a100-dgx:128")
    parser.add_argument("--tool", type=comma_list(str, TOOLS), default=ADVISED,
                        metavar="TOOL,TOOL", help="of " + ", ".join(TOOLS))
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw",
                        help="muon: what it changes in the best layout")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16",
                        help="fp8: what it changes in the best layout")
    parser.add_argument("--domains", type=comma_list(positive), default=(), metavar="GPUS,GPUS",
                        help="the experts' all-to-alls if NVLink joins so many GPUs: 8,64")
    parser.add_argument("--sensitivity", action="store_true",
                        help="half and twice the GPUs, batch, sequence, links")
    parser.add_argument("--write", type=new_folder, metavar="FOLDER",
                        help="the best of each tool as Megatron's, torchtitan's, DeepSpeed's files")
    parser.add_argument("--html", type=new_file, metavar="FILE",
                        help="a page on which you can change GPUs, sequence and batch")
    parser.add_argument("--dry-run", action="store_true", help="with --tool ours: one process "
                        "plays the first rank, and counts memory and messages")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw it: x.svg or x.png")
    return parser


def kinds(text, gpus):
    """Parse "h100-dgx" or "h100-dgx:128,a100-dgx:128" into [(Machine, GPUs)].

    Raises: ValueError if the number of GPUs is missing, or differs from --gpus
    """
    pairs, parts = [], [each.rpartition(":") for each in text.split(",")]
    for before, colon, last in parts:
        count = int(last) if colon and last.isdecimal() else 0
        if not count and (len(parts) > 1 or not gpus or colon):
            raise ValueError(f"--on {text}: say how many GPUs with --gpus, or as "
                             "h100-dgx:128,a100-dgx:128")
        pairs.append((find_node(before if count else last), count or gpus))
    total = sum(count for _, count in pairs)
    if gpus and gpus != total:
        raise ValueError(f"--gpus {gpus} is not the {total} GPUs of --on {text}")
    return pairs


def one_kind(name, wish, source, options):
    """Return the answer for one kind of GPU, as a dict; draw its picture if --plot is given."""
    limits = options.budget, options.deadline
    if options.write:
        refuse_to_replace(options.write, options.tool)
    if options.budget and not wish.price:
        raise ValueError(f"no price of {wish.machine.accelerator} is known: give --price")
    try:
        choices = offers(wish, watch) if any(limits) else None
        if choices:
            wish = dataclasses.replace(wish, gpus=affordable(choices, *limits).layout.plan.gpus)
        layouts = wish.search(watch)
    except NoLayout as error:
        reserve = f" (--reserve {options.reserve:g})" * ("GB" in str(error))
        raise NoLayout(f"{error}{reserve}; {nearest(wish)}") from None
    best = distinct(layouts, options.top)
    rows = changes(wish, layouts, best[0], watch) if options.sensitivity else []
    if options.plot:
        from ranklab.plots import planner  # here: matplotlib takes half a second

        save_figure(options.plot, lambda: planner.offered(choices, *limits) if choices
                    else planner.frontier(layouts, room(wish.machine, wish.reserve)))
    return {**answer(name, wish, source, best, len(layouts), choices, limits, rows),
            "more": more(options, name, wish, source, best)}
