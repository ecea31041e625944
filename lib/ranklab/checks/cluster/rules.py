"""mfu_alert_rule and straggler_rule: series go in, alerts come out."""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from ranklab.checks.cluster.findings import finding
from ranklab.checks.looks import expect
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.cluster.alerts import alerts
from ranklab.cluster.promql import (
    ARITHMETIC, COMPARE, STALE, Evaluator, NotCovered, as_vector, missing, parse,
)
from ranklab.cluster.rules import mfu_alert_rule, straggler_rule
from ranklab.cluster.stories import SCRAPE, stepped, trained

KEYS = {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
TRUTH = "story_alert"  # a series that is there while there should be an alert


class Story(NamedTuple):
    """Series, and the alerts that should come out.

    wanted  ({label: value}, minute of the onset, minute of the end or None) of each
    args    of the learner's function: a limit, and minutes
    """

    name: str
    series: Callable
    wanted: tuple
    args: tuple

    def __str__(self):
        return self.name


def mfu_story(name, *lives, wanted=(), least=0.3, minutes=10, **options):
    return Story(name, lambda: trained(*lives, **options), wanted, (least, minutes))


def step_story(name, *changes, wanted=(), factor=1.2, minutes=5, **options):
    return Story(name, lambda: stepped(*changes, **options), wanted, (factor, minutes))


WELL, START = 0.4, (4, 0.0)  # MFU; four minutes of compiling
FALL, FROM_20 = (0, [START, (20, WELL), (60, 0.2)]), (({"run": "a"}, 20, None),)
MFU_STORIES = (
    mfu_story("MFU 0.4, 0.2 from minute 20 to 50", (
        0, [START, (20, WELL), (50, 0.2), (70, WELL)]), wanted=(({"run": "a"}, 20, 50),)),
    mfu_story("MFU 0.4, but for 4 minutes of compiling and a pause of 3", (
        0, [START, (20, WELL), (23, 0.0), (45, WELL)])),
    mfu_story("steps of 50 s, 100 s from minute 20 on", FALL, step=50.0, wanted=FROM_20),
    mfu_story("rank 3 dies in minute 20, the others wait", (
        0, [START, (20, WELL), (60, 0.0)]), dies=20, wanted=FROM_20),
    mfu_story("a restart in minute 20", (0, [START, (20, WELL)]), (22, [(26, 0.0), (60, WELL)]),
              moves=False),
    mfu_story("a restart on other nodes in minute 20", (0, [START, (20, WELL)]),
              (22, [(26, 0.0), (60, WELL)])),
    Story("two runs, b at 0.2 from minute 20 on", lambda: trained(
        FALL, run="b", series=trained((0, [START, (60, 0.5)]), ranks=8)),
        (({"run": "b"}, 20, None),), (0.3, 10)),
    mfu_story("MFU 0.25 from minute 20 on, with failed scrapes", (
        0, [START, (20, WELL), (60, 0.25)]), fails=True, wanted=FROM_20),
    mfu_story("least=0.5, minutes=20, MFU 0.6, 0.4 from minute 20 on", (
        0, [START, (20, 0.6), (80, 0.4)]), wanted=FROM_20, least=0.5, minutes=20),
    mfu_story("minutes=30, a pause of 10 minutes", (
        0, [START, (20, WELL), (30, 0.0), (60, WELL)]), minutes=30),
)
SLOW, FIFTH = (5, 10, 99, 1.5), ({"run": "a", "rank": "5"}, 10, None)
STEP_STORIES = (
    step_story("rank 5 of 8 slow by half from minute 10 to 30", (5, 10, 30, 1.5),
               wanted=(({"run": "a", "rank": "5"}, 10, 30),)),
    step_story("rank 5 slow by 1.35, rank 2 by 3", (5, 10, 99, 1.35), (2, 10, 99, 3.0),
               wanted=(FIFTH, ({"run": "a", "rank": "2"}, 10, None))),
    step_story("all ranks slow from minute 10 on", (None, 10, 99, 2.0)),
    step_story("a slow step now and then, rank 5 slow by half for 100 s", (None, 0, 0.5, 20.0),
               (1, 0, 0.5, 3.0), (3, 10, 10.5, 8.0), (1, 15, 15.25, 30.0), (5, 20, 21.75, 1.5)),
    Story("two runs, and rank 2 of b slow", lambda: stepped(
        (2, 10, 99, 1.5), run="b", ranks=4, series=stepped(step=10.0)),
        (({"run": "b", "rank": "2"}, 10, None),), (1.2, 5)),
    step_story("every eighth scrape of rank 5 fails, rank 2 is gone", SLOW, (2, 8, 99, 0),
               fails=(5,), wanted=(FIFTH,)),
    step_story("three of eight ranks need half the time",
               *((rank, 10, 99, 0.5) for rank in (0, 3, 6))),
    step_story("factor=1.7, rank 5 slow by half", SLOW, factor=1.7),
    step_story("minutes=18, rank 5 slow by half", SLOW, size=200, minutes=18, wanted=(FIFTH,)),
)


# --- what a rule does -----------------------------------------------------------------------------

def _see(fn, story):
    rule, series = fn(*story.args), story.series()
    is_rule = isinstance(rule, dict) and {"alert", "expr"} <= rule.keys() <= KEYS
    yield {"what is returned": finding(is_rule, f"{rule!r:.80}, not a dict with the keys alert, "
                                       "expr, for, labels, annotations")}
    end = max(points[-1][0] for points in series.values() if points)
    minutes = story.args[1]
    times = range(0, end + 1 + (0 if story.wanted else 120 * minutes), SCRAPE)
    try:
        node = parse(rule["expr"])
        fired = alerts(rule, series | _truth(story, end), times)
    except (NotCovered, ValueError, AttributeError, TypeError) as error:
        source = "Prometheus" if type(error) is ValueError else "this check"
        yield {"what is wrong with the rule": finding(
            str(error)[:40], f"this, {source} says: {error}. The rule's expr is {rule['expr']!r}, "
            f"for: {rule.get('for')!r}")}
        yield {}
        return
    yield {"what is wrong with the rule": finding("", "")}
    at = {}
    for t, labels in fired:
        at.setdefault(frozenset(labels.items()), []).append(t / 60)
    yield _findings(story, at, times, end / 60, _Reader(node, series))


def _truth(story, end):
    """Return the series TRUTH of the wanted alerts."""
    series = {}
    for labels, onset, until in story.wanted:
        start, stop = 60 * onset + 30 * story.args[1], 60 * until if until else end + SCRAPE
        series[frozenset({"__name__": TRUTH, **labels}.items())] = [
            *((t, 1.0) for t in range(start, stop, SCRAPE)), (stop, STALE)]
    return series


def by_truth(limit, minutes):
    """Return a rule on the series TRUTH, whose name a learner's rule can't know."""
    return {"alert": "Wanted", "expr": TRUTH, "labels": {"severity": "page"},
            "annotations": {"all": "{{ $labels.run }} {{ $labels.rank }} {{ $value }}"}}


def _findings(story, at, times, end, reader):
    """Return {alert: when it fires, and when it should}; the remaining alerts are false alarms.

    at  {labels: minutes at which the alert fires}
    """
    minutes, findings = story.args[1], {}
    for labels, onset, until in story.wanted:
        name = f"the alert with {', '.join(map(' '.join, labels.items()))}"
        own = [key for key in at if labels.items() <= dict(key).items()]
        rest = [dict(sorted(key)) for key in at if not labels.keys() <= dict(key).keys()]
        due, last = onset + 2 * minutes, until or times[-1] / 60 + 1
        first = min((at[key][0] for key in own), default=None)
        if first is None and rest:
            findings[name] = finding(f"labels {sorted(rest[0])}",
                                     f"not there: there is one with the labels {rest[0]}, the ones "
                                     "that `expr` keeps")
        elif first is None or first > due:
            findings[name] = reader.finding("late", f"not there by minute {due}", onset + minutes)
        elif first < onset + minutes / 3:
            findings[name] = reader.finding("early" if first < onset else "at once", "a false "
                                            f"alarm from minute {first:.1f} on", first)
        elif len(own) > 1:
            findings[name] = finding(f"{len(own)} times", f"there {len(own)} times: "
                                     f"{[dict(sorted(key)) for key in own]}")
        elif not {t / 60 for t in times if due <= t / 60 < last} <= {*at[own[0]]}:
            findings[name] = finding("a gap", "not there all the time while it is slow")
        elif at[own[0]][-1] > last + minutes:
            findings[name] = finding("too long", f"still there in minute {at[own[0]][-1]:.0f}; all "
                                              f"has been well since minute {last}")
        else:
            findings[name] = finding("right", "")
        at = {key: own_times for key, own_times in at.items() if key not in own}
    return findings | {"a false alarm": _false_alarm(at, end, reader)}


def _false_alarm(at, end, reader):
    if not at:
        return finding("", "")
    key = min(at, key=lambda key: (at[key][0], sorted(key)))
    first, names = at[key][0], {name for each in at for name in dict(each)}
    ended = ", when the run has ended" * (first > end)
    return reader.finding(f"with {', '.join(sorted(names))}{ended}",
                          f"there in minute {first:.1f}{ended}: {dict(sorted(key))}", first)


class _Reader:
    """Reads the values of an expression's parts at a given time."""

    def __init__(self, node, series):
        self.node, self.series = node, series

    @functools.cached_property
    def evaluate(self):
        return Evaluator(self.series, SCRAPE)

    def finding(self, value, details, minute):
        word, text = self.read(self.node, 60 * minute)
        return finding(f"{value}: {word}", f"{details}; {text}")

    def read(self, node, t):
        """Return (a word for the observation, a sentence)."""
        if type(node).__name__ == "ParenExpr":
            return self.read(node.expr, t)
        names = {dict(labels)["__name__"] for labels in self.series}
        for name in re.findall(r"\btrain_\w+", str(node)):
            if name not in names:
                return "no such name", (f"no rank exports {name}: they export "
                                        f"{', '.join(sorted(names))}")
        if type(node).__name__ != "BinaryExpr":
            is_empty = self.evaluate(node, t) == {}
            return "empty" if is_empty else "a value", f"`{node}` has " + (
                "no value" if is_empty else "a value, and is compared with nothing")
        for side in (node.lhs, node.rhs):
            if self.evaluate(side, t) == {}:
                return self.read(side, t)
        if str(node.op) in ARITHMETIC and not self.evaluate(node, t):
            return "no match", (f"`{node}` has no value, but both of its sides have one: their "
                                "labels differ")
        values = sorted(as_vector(self.evaluate(node.lhs, t)).values())
        limit = f", and the rule asks for {node.op} {node.rhs}" * (str(node.op) in COMPARE)
        is_number = isinstance(self.evaluate(node.rhs, t), float)
        return f"{_about(values[-1])} {node.op} {'a number' if is_number else 'others'}", (
            f"`{node.lhs}` is {', '.join(f'{x:.4g}' for x in values[-8:])} then{limit}")


def _about(x):
    """Return the nearest power of 2: a different range or window does not change it."""
    return f"2^{round(math.log2(x))}" if 0 < x < math.inf else f"{x:g}"


# --- what people read -----------------------------------------------------------------------------

class Texts(NamedTuple):
    """names  of what must be in an annotation"""

    args: tuple
    names: tuple

    def __str__(self):
        return "the rule"


def _see_texts(fn, case):
    rule = fn(*case.args)
    texts = [str(text) for text in (rule.get("annotations") or {}).values()]
    yield {"that its labels have a severity": bool((rule.get("labels") or {}).get("severity")),
           **{f"the {name} in an annotation": _placed(name, texts) for name in case.names}}


def _placed(name, texts):
    is_value = name == "value"
    pattern = r"\{\{[^}]*" + ("[vV]alue" if is_value else rf"abels\W+{name}\b")
    place = "{{ $value }}" if is_value else f"{{{{ $labels.{name} }}}}"
    return finding(any(re.search(pattern, text) for text in texts),
                   f"missing: {place} is not in {texts}")


class RuleProof(Proof):
    """A Proof that needs the PromQL parser."""

    def prove(self, fn):
        expect(not missing(), missing(), "Without it, the check can't judge a rule.")
        yield from super().prove(fn)


def _stages(stories, args, names):
    return (Stage(f"{len(stories)} stories: it fires in time, and it is silent when all is well",
                  _see, stories, oracle=by_truth),
            Stage(f"a severity; {', '.join(names)} in an annotation", _see_texts,
                  (Texts(args, names),), oracle=by_truth))


SEVERITY, FOR = '"severity"', 'f"{minutes}m"'
NO_SEVERITY = "Alertmanager routes alerts by severity: give it as a label."
FLOPS = "sum by (run) (rate(train_tokens_total[5m]) * train_flops_per_token)"
PEAK = "sum by (run) (train_peak_flops)"
MFU_EXPR = 'f"{flops} / sum by (run) (train_peak_flops) < {least}"'
MFU = RuleProof(
    mfu_alert_rule, *_stages(MFU_STORIES, (0.3, 10), ("run", "value")),
    mistakes=(
        Slip('In Prometheus, a duration needs a unit: "10m".', (FOR, "minutes"),
             (FOR, 'f"{minutes}"')),
        Slip("`for` makes the alert wait: what is over by then raises no alert.", (FOR, '"0s"'),
             (FOR, 'f"{minutes}s"'), ('        "for": f"{minutes}m",\n', "")),
        Slip("`for` waits too long: it must be `minutes` minutes.", (FOR, 'f"{3 * minutes}m"'),
             (FOR, 'f"{minutes}h"')),
        Slip("`minutes` is an argument: it is not always 10.", (FOR, '"10m"')),
        Slip("`least` is an argument: it is not always 0.3.", ("< {least}", "< 0.3")),
        Slip("An alert is active wherever `expr` has a value, even 0: use a comparison, without "
             "`bool`.",
             ("< {least}", "< bool {least}"), (" < {least}", "")),
        Slip("A low MFU is below `least`: use <.", ("< {least}", "> {least}")),
        Slip("Ranks that hang have an MFU of 0, which is below `least`: don't exclude it.",
             ("< {least}", "> 0 < {least}")),
        Slip("The fraction is upside down: divide FLOPs by peaks.",
             (MFU_EXPR, 'f"sum by (run) (train_peak_flops) / {flops} < {least}"')),
        Slip("`least` is a share, such as 0.3, not a percentage.",
             ("{flops} / sum", "100 * {flops} / sum")),
        Slip("A counter that falls has restarted. rate() handles that for each series, so take the "
             "sum of rates, not the rate of a sum.",
             (FLOPS, "rate(sum by (run) (train_tokens_total)[5m:15s]) * max by (run) "
              "(train_flops_per_token)")),
        Slip("A rank whose scrape failed must be missing from both numerator and denominator, or "
             "from neither: sum by (run) (rate(...) * train_flops_per_token).",
             (FLOPS, "sum by (run) (rate(train_tokens_total[5m])) * max by (run) "
              "(train_flops_per_token)")),
        Slip("Counters jump once per step: take the rate over several minutes.",
             ("rate(train_tokens_total[5m]", "irate(train_tokens_total[5m]"),
             ("rate(train_tokens_total[5m]", "rate(train_tokens_total[30s]"),
             ("rate(train_tokens_total[5m]", "rate(train_tokens_total[1m]")),
        Slip("A counter is a total since the start: rate() turns it into tokens/s.",
             ("rate(train_tokens_total[5m])", "train_tokens_total")),
        Slip("With a long range, the start of a run or a pause affects the rate for as long as the "
             "range.",
             ("[5m]", "[20m]"), ("[5m]", "[30m]")),
        Slip("Tokens are not FLOPs: multiply by train_flops_per_token.",
             (" * train_flops_per_token", "")),
        Slip("The MFU is too high by a factor of the rank count: add up all GPUs' peaks, but not "
             "train_flops_per_token, which is the same on all ranks.",
             (PEAK, "max by (run) (train_peak_flops)"), (PEAK, "avg by (run) (train_peak_flops)"),
             (FLOPS, "sum by (run) (rate(train_tokens_total[5m])) * sum by (run) "
              "(train_flops_per_token)")),
        Slip("After a restart, the old instances' series end and new ones begin: a range over "
             "peaks counts the GPUs of both.",
             (PEAK, "sum by (run) (max_over_time(train_peak_flops[30m]))")),
        Slip("The alert has no `run` label: aggregate by (run).",
             (MFU_EXPR, 'f"sum(rate(train_tokens_total[5m]) * train_flops_per_token) / '
              'sum(train_peak_flops) < {least}"')),
        Slip("Raise one alert for each run, not for each rank: aggregate by (run).",
             (MFU_EXPR, 'f"rate(train_tokens_total[5m]) * train_flops_per_token / train_peak_flops '
              '< {least}"'), (MFU_EXPR, 'f"sum by (run, rank) (rate(train_tokens_total[5m]) * '
              'train_flops_per_token) / sum by (run, rank) (train_peak_flops) < {least}"')),
        Slip("Both sides of / or * must have the same labels: here they differ. Multiply each "
             "rank's rate() by its train_flops_per_token first; then sum both sides of / by "
             "(run).", (PEAK, "sum(train_peak_flops)"), (PEAK, "train_peak_flops"),
             (FLOPS, "sum(rate(train_tokens_total[5m]) * train_flops_per_token)"),
             (FLOPS, "sum by (run) (rate(train_tokens_total[5m])) * train_flops_per_token")),
        Slip("The alert stays active when all is well again: leave out keep_firing_for.",
             (f'        "for": {FOR},\n', f'        "for": {FOR},\n        "keep_firing_for": '
              '"1h",\n')),
        Slip(NO_SEVERITY, ('"labels": {"severity": "warning"}', '"labels": {}')),
        Slip("In an f-string {{ becomes {, but Prometheus needs two braces.",
             ('"summary": "', '"summary": f"')),
        Slip("Say which run it is: {{ $labels.run }}.", ("run {{ $labels.run }}: ", "")),
        Slip("Say how low the MFU is: {{ $value }}.",
             ("{{ $value | humanizePercentage }}", "is low")),
    ), hints=(
        "From the counters of a run's ranks, get tokens per second, multiply by FLOPs per token, "
        "and divide by the peaks.",
        "First take rate() of each series, then sum by (run), because a sum of counters hides "
        "restarts. `for` keeps the alert silent at the start and in pauses.",
        "sum by (run) (rate(train_tokens_total[5m]) * train_flops_per_token) / "
        "sum by (run) (train_peak_flops) < {least}"))

MEAN = "avg_over_time(train_step_seconds[1m])"
MEDIAN = "on (run) group_left quantile by (run) (0.5, {mean})"
STEP_EXPR = f'f"{{mean}} / {MEDIAN} > {{factor}}"'
STRAGGLER = RuleProof(
    straggler_rule, *_stages(STEP_STORIES, (1.2, 5), ("run", "rank", "value")),
    mistakes=(
        Slip('In Prometheus, a duration needs a unit: "5m".', (FOR, "minutes"),
             (FOR, 'f"{minutes}"')),
        Slip("`for` makes the alert wait: what is over by then raises no alert.", (FOR, '"0s"'),
             (FOR, 'f"{minutes}s"'), ('        "for": f"{minutes}m",\n', "")),
        Slip("`for` waits too long: it must be `minutes` minutes.", (FOR, 'f"{3 * minutes}m"'),
             (FOR, 'f"{minutes}h"')),
        Slip("`minutes` is an argument: it is not always 5.", (FOR, '"5m"')),
        Slip("`factor` is an argument: it is not always 1.2.", ("> {factor}", "> 1.2")),
        Slip("An alert is active wherever `expr` has a value, even 0: use a comparison, without "
             "`bool`.",
             ("> {factor}", "> bool {factor}"), (" > {factor}", "")),
        Slip("A slow rank is above the median: use >.", ("> {factor}", "< {factor}")),
        Slip("The fraction is upside down: divide a rank's time by the median.",
             (STEP_EXPR, 'f"quantile by (run) (0.5, {mean}) / on (run) group_right {mean} > '
              '{factor}"')),
        Slip("A slow rank pulls up the mean: divide by the median.",
             ("quantile by (run) (0.5, ", "avg by (run) (")),
        Slip("A slow rank also pulls up the spread: among eight ranks, none can be three standard "
             "deviations above the mean.",
             (STEP_EXPR, 'f"{mean} > on (run) group_left avg by (run) ({mean}) + 3 * stddev by '
              '(run) ({mean})"')),
        Slip("A few fast ranks don't make the others stragglers: divide by the median.",
             ("quantile by (run) (0.5, ", "min by (run) (")),
        Slip("Compared with the slowest rank, no rank is slow: divide by the median.",
             ("quantile by (run) (0.5, ", "max by (run) (")),
        Slip("If a scrape fails, the newest sample is missing, and `for` starts over. Use a range, "
             "as avg_over_time(x[1m]) does.", (MEAN, "train_step_seconds")),
        Slip("With a long range, old steps count for as long as the range, and the alert ends too "
             "late.", (MEAN,
             "avg_over_time(train_step_seconds[10m])"), (MEAN,
             "max_over_time(train_step_seconds[10m])")),
        Slip("One long step doesn't make a straggler: take a mean or a median, not the maximum.",
             (MEAN, "max_over_time(train_step_seconds[5m])")),
        Slip("After some minutes the rank's own past is slow, and the alert ends: divide by the "
             "median rank at the same time.",
             (STEP_EXPR, 'f"{mean} / avg_over_time(train_step_seconds[20m] offset 2m) > {factor}"'),
             (STEP_EXPR, 'f"{mean} / (train_step_seconds offset 10m) > {factor}"')),
        Slip("`factor` is a ratio to the median, not a number of seconds.",
             (STEP_EXPR, 'f"{mean} > {factor}"')),
        Slip("A server sees many runs: take the median by (run), and match on (run).",
             (MEDIAN, "scalar(quantile(0.5, {mean}))")),
        Slip("The labels of the two sides differ: match on (run), with group_left, because one "
             "side has many ranks.",
             (MEDIAN, "quantile by (run) (0.5, {mean})"),
             (MEDIAN, "on (rank) group_left quantile by (run) (0.5, {mean})")),
        Slip("One side has many ranks, the other has one value: use group_left.",
             (MEDIAN, "on (run) quantile by (run) (0.5, {mean})")),
        Slip("The alert has no `rank` label: aggregate only the right side.",
             (STEP_EXPR, 'f"max by (run) ({mean}) / quantile by (run) (0.5, {mean}) > {factor}"')),
        Slip("The alert stays active when all is well again: leave out keep_firing_for.",
             (f'        "for": {FOR},\n', f'        "for": {FOR},\n        "keep_firing_for": '
              '"1h",\n')),
        Slip(NO_SEVERITY, ('"labels": {"severity": "warning"}', '"labels": {}')),
        Slip("In an f-string {{ becomes {, but Prometheus needs two braces.",
             ('"summary": "', '"summary": f"', '"{{ $value', 'f"{{ $value')),
        Slip("Say which run it is: {{ $labels.run }}.", ("run {{ $labels.run }}: ", "")),
        Slip("Say which rank it is: {{ $labels.rank }}.",
             ("rank {{ $labels.rank }} takes", "a rank takes")),
        Slip("Say how slow the rank is: {{ $value }}.",
             ("{{ $value | humanize }}", "several")),
    ), hints=(
        "What do you compare a rank with? What makes one bad step, or a failed scrape, harmless?",
        "Take each rank's mean over a minute, and divide it by the median of these means by (run). "
        "The left side has many ranks, the right side has one value: on (run) group_left.",
        "avg_over_time(train_step_seconds[1m]) / on (run) group_left quantile by (run) (0.5, "
        "avg_over_time(train_step_seconds[1m])) > {factor}"))
