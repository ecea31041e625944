"""The checks of mfu_alert_rule and straggler_rule: series go in, alerts come out."""

import re

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Exercise, Mistake
from ranklab.cluster import rules
from ranklab.cluster.alerts import alerts, seconds
from ranklab.cluster.promql import (
    ARITHMETIC, COMPARE, Evaluator, NotCovered, as_vector, missing, parse,
)
from ranklab.cluster.stories import SCRAPE, stepped, trained

KEYS = {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
FOR = ("`for` waits: what is over before then raises no alert. But a long range keeps a long step, "
       "or the start of a run, for as long as the range.")
FAILS = ("If a scrape fails, the newest sample is gone, and `for` begins again. Look at a range, "
         "as avg_over_time(x[1m]) does.")
SUM = ("A rank whose scrape has failed has no sample at that moment. rate() of a sum of counters "
       "takes that for a restart: take the sum of rates. And let the rank be missing above and "
       "below the line, or in neither: sum by (run) (rate(...) * train_flops_per_token).")
BY_RUN = "A server sees many runs, so aggregate by (run), and match on (run)."
GONE = "A rank that is gone has no samples. If the others hang, their counters stand still."
ENDED = "The run has ended by then. It has no samples any more, and needs no alert."
ARGUMENTS = "Both arguments count."

WELL, START = 0.4, (4, 0.0)  # MFU; four minutes of compiling
FALL = (0, [START, (20, WELL), (60, 0.2)])
MFU_CASES = [  # (case, series, [({label: value}, onset, end or None)], hint, arguments if others)
    ("MFU 0.4, 0.2 from minute 20 to 50", lambda: trained(
        (0, [START, (20, WELL), (50, 0.2), (70, WELL)])), [({"run": "a"}, 20, 50)],
     "MFU: tokens/s of all ranks x FLOPs of a token / the peaks of all GPUs."),
    ("MFU 0.4, but for 4 minutes of compiling and a pause of 3", lambda: trained(
        (0, [START, (20, WELL), (23, 0.0), (45, WELL)])), [], FOR),
    ("steps of 50 s, 100 s from minute 20 on", lambda: trained(FALL, step=50.0),
     [({"run": "a"}, 20, None)], "Counters jump, once a step: take the rate over some minutes."),
    ("rank 3 dies in minute 20, the others wait", lambda: trained(
        (0, [START, (20, WELL), (60, 0.0)]), dies=20), [({"run": "a"}, 20, None)], GONE),
    ("a restart in minute 20", lambda: trained(
        (0, [START, (20, WELL)]), (22, [(26, 0.0), (60, WELL)]), moves=False), [],
     "A counter begins again at 0 with its process. rate() knows that, for each series."),
    ("a restart on other nodes in minute 20", lambda: trained(
        (0, [START, (20, WELL)]), (22, [(26, 0.0), (60, WELL)])), [],
     "The series of the old instances end, and others begin. Don't count the GPUs of both."),
    ("two runs, b at 0.2 from minute 20 on", lambda: trained(FALL, run="b", series=trained(
        (0, [START, (60, 0.5)]), ranks=8)), [({"run": "b"}, 20, None)], BY_RUN),
    ("MFU 0.25 from minute 20 on, where scrapes fail", lambda: trained(
        (0, [START, (20, WELL), (60, 0.25)]), fails=True), [({"run": "a"}, 20, None)], SUM),
    ("least=0.5, minutes=20, MFU 0.6, 0.4 from minute 20 on", lambda: trained(
        (0, [START, (20, 0.6), (80, 0.4)])), [({"run": "a"}, 20, None)], ARGUMENTS, 0.5, 20),
    ("minutes=30, a pause of 10 minutes", lambda: trained(
        (0, [START, (20, WELL), (30, 0.0), (60, WELL)])), [], ARGUMENTS, 0.3, 30),
]
SLOW, FIFTH = (5, 10, 99, 1.5), [({"run": "a", "rank": "5"}, 10, None)]
STEP_CASES = [
    ("rank 5 of 8 slow by half from minute 10 to 30", lambda: stepped((5, 10, 30, 1.5)),
     [({"run": "a", "rank": "5"}, 10, 30)], "Divide by the median of the rank's run."),
    ("rank 5 slow by 1.35, rank 2 by 3", lambda: stepped((5, 10, 99, 1.35), (2, 10, 99, 3.0)),
     [*FIFTH, ({"run": "a", "rank": "2"}, 10, None)],
     "A slow rank pulls up the mean and the spread: take the median."),
    ("all ranks slow from minute 10 on", lambda: stepped((None, 10, 99, 2.0)), [],
     "If all are slow, none is a straggler: divide by the median of the same time."),
    ("a slow step now and then, rank 5 slow by half for 100 s", lambda: stepped(
        (None, 0, 0.5, 20.0), (1, 0, 0.5, 3.0), (3, 10, 10.5, 8.0), (1, 15, 15.25, 30.0),
        (5, 20, 21.75, 1.5)), [], FOR),
    ("two runs, and rank 2 of b slow", lambda: stepped(
        (2, 10, 99, 1.5), run="b", ranks=4, series=stepped(step=10.0)),
     [({"run": "b", "rank": "2"}, 10, None)], BY_RUN),
    ("each eighth scrape of rank 5 fails, rank 2 is gone", lambda: stepped(
        SLOW, (2, 8, 99, 0), fails=(5,)), FIFTH, FAILS),
    ("three of eight ranks need half the time", lambda: stepped(
        *((rank, 10, 99, 0.5) for rank in (0, 3, 6))), [],
     "Fast ranks make no stragglers of the others: divide by the median."),
    ("factor=1.7, rank 5 slow by half", lambda: stepped(SLOW), [], ARGUMENTS, 1.7, 5),
    ("minutes=18, rank 5 slow by half", lambda: stepped(SLOW, size=200), FIFTH, ARGUMENTS, 1.2, 18),
]


def judged(rule_of, cases, names, usual, sign):
    """What a rule gets right, sentence by sentence; `names` must be in an annotation.

    sign  "<" or ">": the comparison that a rule for this is made of
    """
    expect(not missing(), missing(), "Without it the check can't judge a rule.")
    for case, series, wanted, hint, *args in cases:
        args = args or usual
        rule = rule_of(*args)
        obeyed(case, rule, series(), wanted, args[1], hint * (not is_turned(rule, sign)))
        yield case + (": it fires" if wanted else ": silent")
    rule = rule_of(*usual)
    texts = [str(text) for text in (rule.get("annotations") or {}).values()]
    expect((rule.get("labels") or {}).get("severity"), f"the labels are {rule.get('labels')}",
           "Alertmanager sends alerts to people by their severity.")
    for name in names:
        pattern = r"\{\{[^}]*" + ("[vV]alue" if name == "value" else rf"abels\W+{name}\b")
        expect(any(re.search(pattern, text) for text in texts), f"no annotation has the {name} in "
               f"it: {texts}", "{{ $labels.run }}, {{ $value }}; in an f-string { is {{.")
    yield f"a severity; {', '.join(names)} in an annotation"


def is_patient(rule, minutes):
    """True where `for` or a range is longer than `minutes`: then the formula may well be right."""
    try:
        times = [rule.get("for", 0), *re.findall(r"\[(\w+)[:\]]", rule["expr"])]
        return any(seconds(each) > 60 * minutes for each in times)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def is_turned(rule, sign):
    """True where the whole expression is a comparison the other way round."""
    try:
        node = parse(rule["expr"])
        while type(node).__name__ == "ParenExpr":
            node = node.expr
        return str(node.op) in COMPARE and not str(node.op).startswith(sign)
    except Exception:
        return False


def obeyed(case, rule, series, wanted, minutes, hint):
    """There is one alert for each that is wanted, in time and until all is well, and no other."""
    expect(isinstance(rule, dict) and {"alert", "expr"} <= rule.keys() <= KEYS, f"{rule!r:.80} is "
           "returned", "A dict with the keys alert, expr, for, labels, annotations.")
    end = max(points[-1][0] for points in series.values() if points)
    times = range(0, end + 1 + (0 if wanted else 120 * minutes), SCRAPE)  # silent afterwards, too
    node, evaluate = None, Evaluator(series, SCRAPE)
    try:
        node = parse(rule["expr"])
        fired = alerts(rule, series, times)
    except NotCovered as error:
        raise Mistake(str(error), "The lab's table has all that you need.") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise Mistake(f"{case}: Prometheus would say: {error}", f"The rule's expr is "
                      f"{rule['expr']!r}, for: {rule.get('for')!r}.") from None
    at = {}
    for t, labels in fired:
        at.setdefault(frozenset(labels.items()), []).append(t / 60)
    first = {key: min(own) for key, own in at.items()}
    for labels, onset, until in wanted:
        mine = [key for key in at if labels.items() <= dict(key).items()]
        said = f"{case}: the alert with {', '.join(map(' '.join, labels.items()))}"
        if mine and first[mine[0]] < onset + minutes / 3:  # a false alarm
            over = onset - 1 > max(t for t in at[mine[0]] if t < onset + minutes / 3)
            is_early = over or seconds(rule.get("for", 0)) < 20 * minutes
            hint = FOR if is_early else hint * (not is_patient(rule, minutes))
            break
        if not mine or first[mine[0]] > onset + 2 * minutes:
            other = [dict(key) for key in at if not labels.keys() <= dict(key).keys()]
            seen, why = (f"it has the labels {other[0]}", "They are those that `expr` leaves: "
                         "by (run), or by (run, rank).") if other else there(
                evaluate, node, 60 * (onset + minutes))
            raise Mistake(f"{said} is not there by minute {onset + 2 * minutes}; {seen}",
                          why or hint * (not is_patient(rule, minutes)))
        expect(len(mine) == 1, f"{said} is there {len(mine)} times: {[dict(key) for key in mine]}",
               "Raise one alert for each run or rank: aggregate the rest away.")
        own, last = at.pop(mine[0]), until or times[-1] / 60 + 1
        expect({t / 60 for t in times if onset + 2 * minutes <= t / 60 < last} <= {*own},
               f"{said} ends while it is still slow", hint)
        expect(own[-1] <= last + minutes, f"{said} is still there in minute {own[-1]:.0f}; all is "
               f"well since minute {last}", "A long range keeps it, or keep_firing_for.")
    for labels in at:
        hint = ENDED if 60 * first[labels] > end else hint
        raise Mistake(f"{case}: a false alarm in minute {first[labels]:.1f}: {dict(labels)}; "
                      f"{there(evaluate, node, 60 * first[labels])[0]}", always(node) or (
                          hint if "run" in dict(labels) else "It has no run: what gives it?"))


def always(node):
    """Why a rule fires wherever its expression has a value, if it does."""
    while type(node).__name__ == "ParenExpr":
        node = node.expr
    is_binary = type(node).__name__ == "BinaryExpr"
    if not is_binary or str(node.op) not in {*COMPARE, "and", "unless", "or"}:
        return "It compares nothing: an alert is active wherever `expr` has a value, even 0."
    return ("`bool` gives 0 or 1: an alert is active wherever `expr` has a value, even 0."
            if node.modifier and node.modifier.return_bool else "")


def there(evaluate, node, t):
    """(what `node` gives, and a hint if that proves a mistake)"""
    if type(node).__name__ == "ParenExpr":
        return there(evaluate, node.expr, t)
    names = {dict(labels)["__name__"] for labels in evaluate.series}
    for name in re.findall(r"\btrain_\w+", str(node)):
        if name not in names:
            return f"no rank exports {name}", f"They export {', '.join(sorted(names))}."
    if type(node).__name__ != "BinaryExpr":
        words = "A range must hold two samples: one comes every 15 s, and some fail."
        return f"`{node}` has no value" * (evaluate(node, t) == {}), words * ("[" in str(node))
    for side in (node.lhs, node.rhs):
        if evaluate(side, t) == {}:
            return there(evaluate, side, t)
    if str(node.op) in ARITHMETIC and not evaluate(node, t):
        return f"`{node}` has no value, and both of its sides have", (
            "Their labels differ: match on (run), with group_left where one side has many.")
    values = sorted(as_vector(evaluate(node.lhs, t)).values())
    asked = f", and the rule asks for {node.op} {node.rhs}" * (str(node.op) in COMPARE)
    return f"`{node.lhs}` is {', '.join(f'{x:.4g}' for x in values[-8:])} then{asked}", ""


def check_mfu_alert_rule(mfu_alert_rule):
    yield from judged(mfu_alert_rule, MFU_CASES, ("run", "value"), (0.3, 10), "<")


def check_straggler_rule(straggler_rule):
    yield from judged(straggler_rule, STEP_CASES, ("run", "rank", "value"), (1.2, 5), ">")


RULES = (
    Exercise(rules.mfu_alert_rule, check_mfu_alert_rule, hints=(
        "From the counters of a run's ranks get tokens a second, times FLOPs, over the peaks.",
        "First rate() of each series, then sum by (run), because a sum of counters hides restarts. "
        "`for` keeps pauses and the start silent.",
        "sum by (run) (rate(train_tokens_total[5m]) * train_flops_per_token) / "
        "sum by (run) (train_peak_flops) < {least}")),
    Exercise(rules.straggler_rule, check_straggler_rule, hints=(
        "What do you compare a rank with? What makes one bad step, or a failed scrape, harmless?",
        "Take each rank's mean over a minute, and divide it by the median of these by (run). The "
        "left side has many ranks, the right side has one value: on (run) group_left.",
        "avg_over_time(train_step_seconds[1m]) / on (run) group_left quantile by (run) (0.5, "
        "avg_over_time(train_step_seconds[1m])) > {factor}")),
)
