"""The answer of `ranklab plan` as text, of at most 100 columns."""

import textwrap

from ranklab.planner.cost import DAY
from ranklab.planner.wish import limit

COLUMNS = 100
HEADER = f"{'tool':11}{'GB':>6}{'step':>9}{'MFU':>7}{'tokens/day':>12}{'$/M tokens':>12}   "


def text(said):
    """The model and machine, the table, the best layout's range and bill, and what was asked."""
    parts = [top(said), machine_line(said["machine"], said["gpus"]), layouts(said), best(said),
             said["offers"] and offers(said), said["sensitivity"] and sensitivity(said),
             "\n".join(said["more"])]
    return "\n\n".join(filter(None, parts))


def top(said):
    model = said["model"]
    return fill(f"{model['name']}: {short(model['parameters'])} parameters, of which a token meets "
                f"{short(model['active'])} in products. A step: {said['batch']:,} sequences of "
                f"{said['sequence']:,} tokens.")


def machine_line(machine, gpus):
    islands = (f", {machine['far'] / 1e9:.3g} GB/s between islands of {machine['island']}"
               if machine["island"] else "")
    return fill(
        f"{gpus:,} GPUs of {machine['name']}: {machine['peak_flops'] / 1e12:.0f} TFLOP/s (bf16), "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, {machine['node']} in a node at "
        f"{machine['link'] / 1e9:.0f} GB/s, {machine['network'] / 1e9:.3g} GB/s between nodes"
        f"{islands}. Assumed: bf16, Adam, FlashAttention, messages beside computing where the tool "
        "has it.")


def layouts(said):
    """A row for each layout, and under it what bounds it."""
    lines = [HEADER + "dp x tp x pp"]
    for row in said["layouts"]:
        lines += [fill(row["layout"], numbers(row)), f"{'':11}{row['why']}"]
    return "\n".join([*lines, fill(
        f"{said['layouts_that_fit']:,} layouts fit; of those that are alike one is shown. "
        f"Published runs differ from predictions by {said['errors']['time']:.0%} in time and "
        f"{said['errors']['memory']:.0%} in memory (median): layouts nearer to each other are "
        "equal.")])


def numbers(row):
    dollars = "" if row["dollars_per_token"] is None else f"{row['dollars_per_token'] * 1e6:.4f}"
    return (f"{row['tool']:11}{row['bytes'] / 1e9:6.1f}{row['seconds']:7.4g} s"
            f"{row['mfu']:7.1%}{short(row['tokens_per_second'] * DAY):>12}{dollars:>12}   ")


def best(said):
    """The first layout: its likely range, MFU by all conventions, failures and the bill."""
    row, near, bill = said["layouts"][0], said["range"], said["bill"]
    cost = f"{dollars(bill)} at ${bill['price']:g} ({bill['source']})" if bill[
        "dollars"] else "no price is known (--price)"
    lines = {
        "step": f"{near['low']:.3g} to {near['high']:.3g} s: as near to its prediction are 80% of "
                f"{near['of']}; three quarters of all rows were for the fit",
        "MFU": f"{row['mfu']:.1%} with attention in full (PaLM, 2022), {row['mfu_causal']:.1%} "
               f"with the half that is needed; HFU {row['hfu']:.1%}",
        "failures": f"{bill['good_share']:.1%} of the time is work: one each "
                    f"{bill['hours_between_failures']:,.3g} h at Llama 3's rate (arXiv 2407.21783, "
                    f"3.3.4), {bill['restart_seconds'] / 60:.0f} min to restart (MegaScale), "
                    f"{bill['checkpoint_seconds']:.3g} s for a checkpoint (2 GB/s a node, assumed)",
        "bill": f"{short(bill['tokens'])} tokens: {bill['days']:,.3g} days, "
                f"{short(bill['gpu_hours'])} GPU hours, {cost}, {bill['energy'] / 3.6e9:,.4g} "
                f"MWh of GPUs alone ({said['machine']['watts']:.0f} W, the vendor's)"}
    return f"The best, {row['layout']} ({row['tool']}):\n" + listed(lines)


def offers(said):
    """Numbers of GPUs, the cheapest that meets the limits first."""
    rows = sorted(said["offers"], key=lambda row: (not row["meets"], row["dollars"] or 0,
                                                   row["days"]))
    return "\n".join([f"Within {limit(said['budget'], said['deadline'])}:",
                      f"{'':5}{'GPUs':>9}{'days':>10}{'dollars':>15}"] + [
        fill(f"{row['layout']} ({row['tool']})", f"{'yes' if row['meets'] else 'no':5}"
             f"{row['gpus']:9,}{row['days']:10.1f}{dollars(row):>15}   ") for row in rows])


def sensitivity(said):
    """What half and twice of each thing changes."""
    now = said["layouts"][0]
    lines = [f"{'What if':16}{'step':>9}{'tokens/day':>12}{'':8}{'$/M tokens':>12}   layout"]
    for row in said["sensitivity"]:
        what = f"{row['what']} x {row['factor']:g}"
        if not row["layout"]:
            lines.append(f"{what:16}nothing fits")
            continue
        speed = row["tokens_per_second"] / now["tokens_per_second"] - 1
        cells = numbers(row)[17:]
        tool = "" if row["tool"] == now["tool"] else f" ({row['tool']})"
        lines.append(fill("the same" if row["same"] else row["layout"] + tool,
                          f"{what:16}{cells[:9]}{cells[16:28]}{speed:+8.1%}{cells[28:]}"))
    return "\n".join(lines)


def mixed_text(said):
    """The same of unlike GPUs: each kind's share of the micro-batches."""
    layout, bill, tokens = said["layout"], said["bill"], said["batch"] * said["sequence"]
    lines = [fill(f"tp {layout['tp']}, pp {layout['pp']}, {layout['words']} ({layout['tool']}): "
                  f"{said['bytes'] / 1e9:.1f} GB, {said['seconds']:.4g} s a step, "
                  f"{short(tokens / said['seconds'] * DAY)} tokens a day")]
    lines += [f"  {kind['gpus']:,} {kind['machine']['name']}: {kind['data_ranks']} data ranks, "
              f"{kind['micro_batches']} micro-batches each, {kind['share']:.1%} of the batch"
              for kind in said["kinds"]]
    return "\n".join([top(said), "", *lines, "", fill(
        f"{short(bill['tokens'])} tokens: {bill['days']:,.3g} days, {short(bill['gpu_hours'])} GPU "
        f"hours, {dollars(bill) or 'no price is known (--price)'}; {bill['good_share']:.1%} of the "
        "time is work. Ranks with unequal numbers of micro-batches need a data loader and a "
        "weighted mean of gradients of your own.")])


def listed(lines):
    """"name  text" for each, wrapped."""
    return "\n".join(fill(words, f"  {name:10}") for name, words in lines.items())


def fill(words, before=""):
    """The words after others, on lines that begin where they do."""
    return textwrap.fill(words, COLUMNS, initial_indent=before, break_on_hyphens=False,
                         subsequent_indent=" " * len(before))


def dollars(row):
    return f"${row['dollars']:,.0f}" if row["dollars"] else ""


def short(number):
    """"70.6B", "15T": three digits and a letter."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
