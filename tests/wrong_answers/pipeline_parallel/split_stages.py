"""Lab 09: what goes wrong when layers are shared out."""

from mutants import mutant

from ranklab.pipeline_parallel import split_stages

CHECK = "if not 1 <= stages <= len(costs):"
RETURN = "return [range(a, b) for a, b in zip(begins, begins[1:] + [len(costs)])]"

WRONG = [
    mutant(split_stages, CHECK, "if False:", says="is no error|raises"),
    mutant(split_stages, "begins[1:] + [len(costs)]", "begins[1:]", says="as many stages as"),
    mutant(split_stages, "best = {n: (sum(costs[:n])", "costs.sort()\n    best = {n: (sum("
           "costs[:n])", says="Work on a copy"),
    mutant(split_stages, "max(best[k][0], sum(costs[k:n]))", "best[k][0] + sum(costs[k:n])",
           says="best place for the last cut depends on", called="the_sum_of_all"),
    mutant(split_stages, "range(a, b) for", "range(a, b + 1) for", says="Each begins where the "
                                                                        "one"),
]


def split_stages__equally_many(costs, stages):
    """Equally many layers are not equally much work"""
    if not 1 <= stages <= len(costs):
        raise ValueError("stages")
    each, more = divmod(len(costs), stages)
    begins = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(a, b) for a, b in zip(begins, begins[1:])]


def split_stages__up_to_the_mean(costs, stages):
    """a stage filled up to the mean leaves too much"""
    if not 1 <= stages <= len(costs):
        raise ValueError("stages")
    parts, first = [], 0
    for left in range(stages, 0, -1):
        mean, stop = sum(costs) / stages, first + 1
        while stop < len(costs) - left + 1 and (left == 1 or sum(costs[first:stop + 1]) <= mean):
            stop += 1
        parts.append(range(first, stop))
        first = stop
    return parts


def split_stages__a_stage_without_layers(costs, stages):
    """each with one layer or more"""
    total, done, parts = sum(costs), 0, [[] for _ in range(stages)]
    for layer, cost in enumerate(costs):
        parts[min(stages - 1, int(done * stages / total))].append(layer)
        done += cost
    return parts
