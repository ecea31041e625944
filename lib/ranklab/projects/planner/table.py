"""The answer of `ranklab plan` as text, at most 100 columns wide."""

import textwrap

from ranklab.planner.cost import DAY
from ranklab.planner.machine import dtype_of
from ranklab.planner.offers import limit
from ranklab.planner.request import plain

COLUMNS = 100
HEADER = f"{'tool':11}{'GB':>6}{'step':>10}{'MFU':>7}{'tokens/day':>12}{'$/M tokens':>12}   "
ASSUMED = ("Assumed: bf16, Adam, FlashAttention, messages beside computing where the tool can, "
           "{:.3g}% of a GPU's memory left free (--reserve).")
OLDER = (" {0} has no bf16: read fp16; and no FlashAttention 2: attention is predicted unfused, "
         "its scores in memory.")
LEGEND = ("GB: what the fullest GPU holds. MFU: the model's FLOPs, of the vendor's peak. $/M "
          "tokens: dollars of a million tokens. dp x tp x pp: data, tensor and pipeline ranks; "
          "cp: context ranks; ep: ranks that share the experts; virtual: stages of a rank; zero: "
          "ZeRO's stage. The line below a layout: where its step goes.")


def text(answer):
    """Return the answer as text.

    Its parts: the model and machine, the table, the best layout's range and bill, and the
    requested extras.
    """
    parts = [top(answer), machine_line(answer["machine"], answer), layouts(answer), best(answer),
             answer["offers"] and offers(answer), answer["sensitivity"] and sensitivity(answer),
             "\n".join(answer["more"])]
    return "\n\n".join(filter(None, parts))


def top(answer):
    model = answer["model"]
    return fill(f"{model['name']}: {short(model['parameters'])} parameters, of which a token uses "
                f"{short(model['active'])} in products. A step: {answer['batch']:,} sequences of "
                f"{answer['sequence']:,} tokens.")


def machine_line(machine, answer):
    islands = (f", {machine['far'] / 1e9:.3g} GB/s between islands of {machine['island']}"
               if machine["island"] else "")
    memory = machine["memory_bytes"]
    return fill(
        f"{answer['gpus']:,} GPUs of {machine['name']}: {machine['peak_flops'] / 1e12:.0f} TFLOP/s "
        f"({dtype_of(machine['accelerator'])}), {memory / 1e9:.1f} GB "
        f"(1e9 bytes; {memory / 2**30:.3g} GiB), "
        f"{machine['node']} in a node at {machine['link'] / 1e9:.0f} GB/s, "
        f"{machine['network'] / 1e9:.3g} GB/s between nodes{islands}. "
        f"{assumed(answer['reserve'], [machine])}")


def assumed(reserve, machines):
    """Return the sentences on what all layouts on these machines assume."""
    older = (machine["accelerator"] for machine in machines
             if dtype_of(machine["accelerator"]) == "fp16")
    families = sorted({accelerator.partition("-")[0] for accelerator in older})
    return ASSUMED.format(100 * reserve) + "".join(map(OLDER.format, families))


def layouts(answer):
    """Return a row for each layout, with its bottleneck below."""
    lines, errors = [HEADER + "dp x tp x pp"], answer["errors"]
    middle, tenth = zip(*errors["left_out"].values())
    for row in answer["layouts"]:
        lines += [fill(row["layout"], numbers(row)), f"{'':11}{row['why']}"]
    return "\n".join([*lines, fill(LEGEND), fill(
        f"Of {answer['layouts_that_fit']:,} that fit, the fastest of each kind are shown. "
        f"Published runs differ from predictions by {errors['time']:.0%} in time and "
        f"{errors['memory']:.0%} in memory (median), but most were used in the fit; with "
        f"each source left out of it by {middle[0]:.0%} and {middle[1]:.0%}, and one run in ten by "
        f"more than {tenth[0]:.0%} and {tenth[1]:.0%}. Layouts nearer to each other are equal.")])


def numbers(row):
    step, speed, dollars = cells(row)
    return f"{row['tool']:11}{row['bytes'] / 1e9:6.1f}{step}{row['mfu']:7.1%}{speed}{dollars}   "


def cells(row):
    """Return [seconds per step, tokens per day, dollars per million tokens], as columns."""
    dollars = "" if row["dollars_per_token"] is None else f"{row['dollars_per_token'] * 1e6:.4f}"
    return [f"{plain(row['seconds'], 4)} s".rjust(10),
            short(row["tokens_per_second"] * DAY).rjust(12), dollars.rjust(12)]


def best(answer):
    """Describe the first layout: likely range, MFU by all conventions, failures and cost."""
    row, near, bill = answer["layouts"][0], answer["range"], answer["bill"]
    cost = f"{dollars(bill)} at ${bill['price']:g} ({bill['source']})" if bill[
        "dollars"] else "no price is known (--price)"
    watts = answer["machine"]["watts"]  # 0 for a measured node
    energy = (f"{plain(bill['energy'] / 3.6e9, 4)} MWh of GPUs alone ({watts:.0f} W, the vendor's)"
              if watts else "no power of a GPU is known")
    lines = {
        "step": f"{plain(near['low'])} to {plain(near['high'])} s: {near['of']}",
        "assumed": "; ".join(
            f"{each['what']}, else {plain(each['seconds_without'], 4)} s"
            for each in answer["assumptions"]) or "nothing that hides messages",
        "MFU": f"{row['mfu']:.1%} with attention in full (PaLM, 2022), {row['mfu_causal']:.1%} "
               f"with the half that is needed; HFU {row['hfu']:.1%}",
        "failures": f"{bill['good_share']:.1%} of the time is work: one each "
                    f"{plain(bill['hours_between_failures'])} h at Llama 3's rate (arXiv "
                    f"2407.21783, 3.3.4), {bill['good_share_often']:.1%} at {bill['often']:.1f} "
                    "times that, as on Meta's research clusters (arXiv 2410.21680, 1,024 GPUs); "
                    f"{bill['restart_seconds'] / 60:.0f} min to restart "
                    f"(MegaScale), {plain(bill['checkpoint_seconds'])} s for a checkpoint "
                    "(2 GB/s a node, assumed)",
        "bill": f"{short(bill['tokens'])} tokens: {plain(bill['days'])} days, "
                f"{short(bill['gpu_hours'])} GPU hours, {cost}, {energy}"}
    return f"The best, {row['layout']} ({row['tool']}):\n" + listed(lines)


def offers(answer):
    """List numbers of GPUs, those within the limits first; the first of them has the bill."""
    return "\n".join([f"Within {limit(answer['budget'], answer['deadline'])}:",
                      f"{'':5}{'GPUs':>9}{'days':>10}{'dollars':>15}"] + [
        fill(f"{row['layout']} ({row['tool']})", f"{'yes' if row['meets'] else 'no':5}"
             f"{row['gpus']:9,}{row['days']:10,.1f}{dollars(row):>15}   ")
        for row in answer["offers"]])


def sensitivity(answer):
    """List the effect of halving and of doubling each quantity."""
    base = answer["layouts"][0]
    lines = [f"{'What if':16}{'step':>10}{'tokens/day':>12}  change  $/M tokens   layout"]
    for row in answer["sensitivity"]:
        label = f"{row['what']} x {row['factor']:g}"
        if not row["layout"]:
            lines.append(f"{label:16}nothing fits")
            continue
        speed = row["tokens_per_second"] / base["tokens_per_second"] - 1
        step, tokens, dollars = cells(row)
        tool = "" if row["tool"] == base["tool"] else f" ({row['tool']})"
        lines.append(fill("the same" if row["same"] else row["layout"] + tool,
                          f"{label:16}{step}{tokens}{speed:+8.1%}{dollars}   "))
    return "\n".join([*lines, "A step keeps its tokens when the sequence changes."])


def mixed_text(answer):
    """Return the answer for several kinds of GPUs: the share of the micro-batches of each kind."""
    layout, bill, tokens = answer["layout"], answer["bill"], answer["batch"] * answer["sequence"]
    lines = [fill(f"In each kind tp {layout['tp']}, pp {layout['pp']}, {layout['words']} "
                  f"({layout['tool']}): {answer['bytes'] / 1e9:.1f} GB, "
                  f"{plain(answer['seconds'], 4)} s a step, "
                  f"{short(tokens / answer['seconds'] * DAY)} tokens a day, "
                  f"MFU {answer['mfu']:.1%} of all peaks together")]
    for kind in answer["kinds"]:
        speed = f"{plain(kind['alone'], 4)} s a step" if kind["alone"] else "no layout"
        lines.append(f"  {kind['gpus']:,} {kind['machine']['name']}: data ranks "
                     f"{kind['data_ranks']:,}, micro-batches {kind['micro_batches']:,} each, "
                     f"{kind['share']:.1%} of the batch; alone {speed}")
    unknown = " and ".join(kind["machine"]["accelerator"] for kind in answer["kinds"]
                           if kind["price"] is None)
    return "\n".join([top(answer), "", *lines, "", fill(
        f"{short(bill['tokens'])} tokens: {plain(bill['days'])} days, {short(bill['gpu_hours'])} "
        f"GPU hours, {dollars(bill) or f'no price of {unknown} is known (--price)'}; "
        f"{bill['good_share']:.1%} of the time is work. "
        f"{assumed(answer['reserve'], [kind['machine'] for kind in answer['kinds']])} "
        "Ranks with unequal numbers of micro-batches need a data loader and a weighted mean of "
        "gradients of your own.")])


def listed(lines):
    """Return "name  text" for each line, wrapped."""
    return "\n".join(fill(words, f"  {name:10}") for name, words in lines.items())


def fill(words, before=""):
    """Wrap the words after `before`; indent further lines to where the words begin."""
    return textwrap.fill(words, COLUMNS, initial_indent=before, break_on_hyphens=False,
                         subsequent_indent=" " * len(before))


def dollars(row):
    return f"${row['dollars']:,.0f}" if row["dollars"] else ""


def short(number):
    """Format a number with three digits and a letter: "70.6B", "15T"."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{plain(number / size)}{letter}"
    return plain(number)
