"""The checks of mfu_alert_rule and straggler_rule: series go in, alerts come out."""

import re
import statistics

from ranklab.checks.beside import expect
from ranklab.cluster.stories import FLOPS, PEAK, SCRAPE, both, stepped, trained
from ranklab.checks.exercise import Exercise, Mistake, Prediction
from ranklab.cluster import rules
from ranklab.cluster.alerts import alerts
from ranklab.cluster.promql import COMPARE, Evaluator, NotCovered, as_vector, parse

KEYS = {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
FOR = ("`for` of a rule waits: what is over before, is no alert. And a long range keeps what was "
       "in it for as long, a long step or the start of a run.")
FAILS = ("Where a scrape fails the newest sample is gone, and `for` begins again: look at a range, "
         "as avg_over_time(x[1m]) does.")
SUM = ("A rank whose scrape has failed is missing in a sum of counters: rate() takes that for a "
       "restart. Take the sum of rates, and no sample of one moment alone.")
BY_RUN = "A server sees many runs: aggregate by (run), and match on (run)."
GONE = "What is gone has no samples: it says nothing about the others."


def obeyed(case, rule, series, wanted, minutes, hint):
    """The alerts of `rule` are those that are wanted: [(labels, minute of the onset)]."""
    expect(isinstance(rule, dict), f"a {type(rule).__name__} is returned", "Return a dict.")
    unknown = {"alert", "expr"} - rule.keys() | rule.keys() - KEYS
    expect(not unknown, f"the keys are {', '.join(map(str, rule))}", "alert, expr, for, labels, "
           "annotations.")
    times = range(0, max(points[-1][0] for points in series.values() if points) + 1, SCRAPE)
    try:
        fired = alerts(rule, series, times)
    except (ValueError, AttributeError, TypeError) as error:
        raise Mistake(f"{case}: Prometheus would say: {error}", f"The rule's expr is "
                      f"{rule['expr']!r}, for: {rule.get('for')!r}.") from None
    first = {}
    for t, labels in fired:
        first.setdefault(frozenset(labels.items()), t / 60)
    for labels, onset in wanted:
        hint = f"{FOR} (for: {rule.get('for')})" if any(
            labels.items() <= dict(key).items() and minute < onset + minutes / 3
            for key, minute in first.items()) else hint  # too early: a false alarm, see below
        mine = [key for key in first if labels.items() <= dict(key).items()]
        said = ", ".join(f"{name} {value}" for name, value in labels.items())
        if mine and first[mine[0]] < onset + minutes / 3:
            break
        if not mine or first[mine[0]] > onset + 2 * minutes:
            others = [key for key in first if not labels.keys() <= dict(key).keys()]
            seen, why = seen_then(rule, series, times, onset, minutes, others)
            raise Mistake(f"{case}: no alert with {said} by minute {onset + 2 * minutes:.0f}"
                          f"; {seen}", why or hint)
        expect(len(mine) == 1, f"{case}: {len(mine)} alerts, not one: "
               f"{[dict(each) for each in mine[:2]]}", "One alert for each one that it is about: "
               "aggregate the rest away.")
        expect(any(t == times[-1] and labels.items() <= given.items() for t, given in fired),
               f"{case}: the alert with {said} ends while it is still slow", hint)
        del first[mine[0]]
    for labels, minute in first.items():
        raise Mistake(f"{case}: a false alarm in minute {minute:.1f}: {dict(labels)}",
                      always(rule) or hint)


def top(rule):
    """The expression without the brackets around it."""
    node = parse(rule["expr"])
    while type(node).__name__ == "ParenExpr":
        node = node.expr
    return node


def always(rule):
    """Why a rule fires wherever its expression has a value, if it does."""
    node = top(rule)
    if type(node).__name__ != "BinaryExpr" or str(node.op) not in [*COMPARE, "and", "unless", "or"]:
        return "It compares nothing: an alert is active wherever `expr` has a value, even 0."
    if node.modifier and node.modifier.return_bool:
        return "`bool` gives 0 or 1: an alert is active wherever `expr` has a value, even 0."
    return ""


def seen_then(rule, series, times, onset, minutes, others):
    """(what is there when the rule should have fired, a hint where that proves one)"""
    node, evaluate = top(rule), Evaluator(series, SCRAPE)
    if others:
        return f"its alert has the labels {dict(others[0])}", (
            "The labels of an alert are those that `expr` leaves: by (run), or by (run, rank).")
    if type(node).__name__ != "BinaryExpr" or str(node.op) not in COMPARE:
        return f"`{node}` has no value", ""
    for side in (node.lhs, node.rhs):
        value = evaluate(side, min(times[-1], 60 * (onset + minutes)))
        if not value:
            return f"`{side}` has no value", empty(evaluate, side, 60 * onset)
    values = sorted(as_vector(evaluate(node.lhs, min(times[-1], 60 * (onset + minutes)))).values())
    return f"`{node.lhs}` is {', '.join(f'{x:.4g}' for x in values[-8:])} then", ""


def empty(evaluate, node, t):
    """Why `node` has no value."""
    if type(node).__name__ == "ParenExpr":
        return empty(evaluate, node.expr, t)
    if type(node).__name__ == "BinaryExpr":
        if evaluate(node.lhs, t) and evaluate(node.rhs, t):
            return ("Both sides of its last operation have values, with other labels: on (run), "
                    "and group_left where one side has many.")
        return empty(evaluate, node.rhs if evaluate(node.lhs, t) else node.lhs, t)
    return "A range must hold two samples at least: one comes each 15 s, and some fail."


def named(case, rule, names):
    """severity is a label; one annotation names all of this."""
    labels, notes = (rule.get(key) or {} for key in ("labels", "annotations"))
    expect(labels.get("severity"), f"{case}: the labels are {labels}", "Alertmanager sends alerts "
           "to people by their severity.")
    texts = [str(text) for text in notes.values()]
    for name in names:
        pattern = r"\{\{[^}]*" + (r"[vV]alue" if name == "value" else rf"abels\W+{name}\b")
        expect(any(re.search(pattern, text) for text in texts), f"{case}: no annotation has the "
               f"{name} in it: {texts}", "{{ $labels.run }}, {{ $value }}")


def covered(check):
    """The check, that says which part of PromQL it does not know, instead of judging."""
    def judge(rule_of):
        try:
            yield from check(rule_of)
        except NotCovered as error:
            yield f"NOT JUDGED: {error}; `promtool test rules` would"
    return judge


WELL, START = 0.4, (4, 0.0)  # MFU; four minutes of compiling
FALL = (0, [START, (20, WELL), (60, 0.2)])
MFU_CASES = [  # (case, series, [(run, onset)], hint, least, minutes)
    ("MFU 0.4, and 0.2 from minute 20 on", lambda: trained(FALL), [("a", 20)],
     "MFU: tokens/s of all ranks x FLOPs of a token / the peaks of all GPUs.", 0.3, 10),
    ("MFU 0.4 all the time, after 4 minutes of compiling",
     lambda: trained((0, [START, (45, WELL)])), [], FOR, 0.3, 10),
    ("a pause of 3 minutes", lambda: trained((0, [START, (20, WELL), (23, 0.0), (45, WELL)])), [],
     FOR, 0.3, 10),
    ("steps of 50 s, 100 s from minute 20 on", lambda: trained(FALL, step=50.0), [("a", 20)],
     "Counters jump, once a step: take the rate over several minutes.", 0.3, 10),
    ("rank 3 dies in minute 20, the others wait", lambda: trained(
        (0, [START, (20, WELL), (60, 0.0)]), gone=[(3, 20)]), [("a", 20)], GONE, 0.3, 10),
    ("a restart in minute 20", lambda: trained(
        (0, [START, (20, WELL)]), (22, [(26, 0.0), (60, WELL)]), moves=False), [],
     "A counter begins again at 0 when its process does: rate() knows that, of each series alone.",
     0.3, 10),
    ("a restart on other nodes in minute 20", lambda: trained(
        (0, [START, (20, WELL)]), (22, [(26, 0.0), (60, WELL)])), [],
     "The series of the old instances end, others begin: GPUs of both would be too many.", 0.3, 10),
    ("two runs, b at 0.2 from minute 20 on", lambda: both(
        trained, ((FALL,), {"run": "b"}), (((0, [START, (60, 0.5)]),), {"ranks": 8})),
     [("b", 20)], BY_RUN, 0.3, 10),
    ("a run that ends", lambda: trained((0, [START, (20, WELL)]), end=60), [], GONE, 0.3, 10),
    ("MFU 0.2 from minute 20 on, where scrapes fail", lambda: trained(FALL, fails=True),
     [("a", 20)], SUM, 0.3, 10),
    ("MFU 0.4, where scrapes fail", lambda: trained((0, [START, (45, WELL)]), fails=True), [], SUM,
     0.3, 10),
    ("least=0.15, minutes=20, MFU 0.2 from minute 20 on", lambda: trained(FALL), [],
     "`least` is an argument.", 0.15, 20),
    ("least=0.5, minutes=20, MFU 0.6, and 0.4 from minute 20 on", lambda: trained(
        (0, [START, (20, 0.6), (80, 0.4)])), [("a", 20)], "`least` and `minutes` are arguments.",
     0.5, 20),
    ("minutes=30, a pause of 10 minutes", lambda: trained(
        (0, [START, (20, WELL), (30, 0.0), (60, WELL)])), [], "`minutes` is an argument.", 0.3, 30),
]
SLOW = (5, 10, 99, 1.5)
FIRST = (None, 0, 0.5, 20.0), (1, 0, 0.5, 3.0)  # steps that compile
STEP_CASES = [  # (case, series, [(run, rank, onset)], hint, factor, minutes)
    ("noise alone", lambda: stepped(), [], "3% of noise is no straggler.", 1.2, 5),
    ("rank 5 of 8 slow by half from minute 10 on", lambda: stepped(SLOW), [("a", 5, 10)],
     "Divide by the median of the rank's run.", 1.2, 5),
    ("rank 5 slow by 1.35, rank 2 by 3", lambda: stepped((5, 10, 99, 1.35), (2, 10, 99, 3.0)),
     [("a", 5, 10), ("a", 2, 10)], "A slow rank draws the mean up, and the spread: take the "
     "median.", 1.2, 5),
    ("all ranks slow from minute 10 on", lambda: stepped((None, 10, 99, 2.0)), [],
     "All together are no straggler: divide by the median of the same time.", 1.2, 5),
    ("a slow step now and then", lambda: stepped(
        *FIRST, (3, 10, 10.5, 8.0), (1, 15, 15.25, 30.0), (3, 25, 25.5, 8.0)), [], FOR, 1.2, 5),
    ("rank 5 slow by half for 100 s", lambda: stepped((5, 10, 11.75, 1.5)), [], FOR, 1.2, 5),
    ("two runs, of 1 s and of 10 s a step", lambda: both(
        stepped, ((), {"ranks": 4}), ((), {"run": "b", "step": 10.0, "ranks": 6})), [], BY_RUN,
     1.2, 5),
    ("two runs, and rank 2 of b slow", lambda: both(
        stepped, ((), {"step": 10.0}), (((2, 10, 99, 1.5),), {"run": "b", "ranks": 4})),
     [("b", 2, 10)], BY_RUN, 1.2, 5),
    ("a scrape of rank 5 fails each other minute", lambda: stepped(SLOW, fails=(5,)),
     [("a", 5, 10)], FAILS, 1.2, 5),
    ("rank 2 is gone, rank 5 slow", lambda: stepped(SLOW, (2, 8, 99, 0)), [("a", 5, 10)], GONE,
     1.2, 5),
    ("rank 2 is gone", lambda: stepped((2, 8, 99, 0)), [], GONE, 1.2, 5),
    ("one rank needs half the time", lambda: stepped((6, 10, 99, 0.5)), [],
     "A fast rank makes no straggler of the others: divide by the median, not by the fastest.",
     1.2, 5),
    ("factor=1.7, rank 5 slow by half", lambda: stepped(SLOW), [], "`factor` is an argument.",
     1.7, 5),
    ("minutes=18, rank 5 slow by half", lambda: stepped(SLOW, size=200), [("a", 5, 10)],
     "`minutes` is an argument.", 1.2, 18),
    ("minutes=18, rank 5 slow for 6 minutes", lambda: stepped((5, 10, 16, 1.5)), [],
     "`minutes` is an argument.", 1.2, 18),
]


@covered
def check_mfu_alert_rule(mfu_alert_rule):
    for case, series, wanted, hint, least, minutes in MFU_CASES:
        rule, wanted = mfu_alert_rule(least, minutes), [({"run": r}, onset) for r, onset in wanted]
        obeyed(case, rule, series(), wanted, minutes, hint)
    yield "it fires for a run that has slowed, hangs, or has long steps; also where scrapes fail"
    yield "it is silent while a run compiles, pauses, restarts or has ended; two runs are apart"
    named("the rule", mfu_alert_rule(0.3, 10), ("run", "value"))
    yield "a severity; the run and its MFU in an annotation"


@covered
def check_straggler_rule(straggler_rule):
    for case, series, wanted, hint, factor, minutes in STEP_CASES:
        rule = straggler_rule(factor, minutes)
        wanted = [({"run": r, "rank": str(rank)}, onset) for r, rank, onset in wanted]
        obeyed(case, rule, series(), wanted, minutes, hint)
    yield "it fires for each slow rank, also where scrapes fail, or another rank is gone"
    yield "it is silent for noise, slow steps, all slow, one fast, another run's length of steps"
    named("the rule", straggler_rule(1.2, 5), ("run", "rank", "value"))
    yield "a severity; run, rank and value in an annotation"


RULES = (
    Exercise(rules.mfu_alert_rule, check_mfu_alert_rule, hints=(
        "Tokens in a second from a counter, of all ranks of a run, times FLOPs, beside the peaks.",
        "rate() of each series first, then sum by (run): a sum of counters hides restarts. `for` "
        "keeps pauses and the start silent.",
        "sum by (run) (rate(train_tokens_total[5m])) * max by (run) (train_flops_per_token) / "
        "sum by (run) (train_peak_flops) < {least}",
    )),
    Exercise(rules.straggler_rule, check_straggler_rule, hints=(
        "With what is a rank compared? What makes one bad step, or one failed scrape, harmless?",
        "A mean over a minute of each rank, divided by the median of these by (run). The left side "
        "has many ranks, the right one value: on (run) group_left.",
        "avg_over_time(train_step_seconds[1m]) / on (run) group_left quantile by (run) (0.5, "
        "avg_over_time(train_step_seconds[1m])) > {factor}",
    )),
)

PREDICTIONS_OF_RULES = (
    Prediction(
        "cluster_mfu_percent", unit="%", solution="100 * 100_000 * 42e9 / (16 * 989e12)",
        answer=lambda: 100 * 100_000 * FLOPS / (16 * PEAK),
        hint="Which FLOPs are done in a second, and which could be?",
        mistakes={100 * 100_000 * 42e9 / 989e12: "16 GPUs could do 16 times as much",
                  100 * 100_000 * 7e9 / (16 * 989e12): "6 FLOPs of each parameter, not 1",
                  100_000 * 42e9 / (16 * 989e12): "in percent"},
        why="A rule below 0.3 fires.",
    ),
    Prediction(
        "cluster_deviations", unit="deviations", solution="math.sqrt(8 - 1)",
        answer=lambda: (1 - 1 / 8) / statistics.pstdev([0] * 7 + [1]),
        hint="Seven ranks take 0, one takes 1: the mean is 1/8. What is the deviation?",
        mistakes={7 / 8**0.5: "that is with the deviation of a sample; Prometheus' stddev is that "
                  "of a population", 3.0: "it can't be reached: compute it",
                  7.0: "the slow rank is in the mean and in the deviation, too"},
        why="So \"three standard deviations\" never fires, however slow the rank is.",
    ),
)
