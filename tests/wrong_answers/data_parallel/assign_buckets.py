"""Wrong answers to assign_buckets."""

from mutants import mutant

from ranklab.data_parallel import assign_buckets

OPEN_ONES = "list(still_open.values())"

WRONG = [
    mutant(assign_buckets, "reversed(list(parameters))", "parameters", f"closed + {OPEN_ONES}",
           f"[bucket[::-1] for bucket in (closed + {OPEN_ONES})[::-1]]",
           says="Begin with the last parameter"),
    mutant(assign_buckets, ">= bucket_cap_bytes:", "> bucket_cap_bytes and bucket[1:]:",
           "closed.append(still_open.pop(kind))",
           "closed.append(still_open[kind][:-1])\n            still_open[kind] = [parameter]",
           says="a bucket may be larger than the cap"),
    mutant(assign_buckets, ">= bucket_cap_bytes", "> bucket_cap_bytes",
           says="compare with >=, not with >"),
    mutant(assign_buckets, "p.nbytes", "p.numel()",
           says="The cap is in bytes, not in elements"),
    mutant(assign_buckets, "p.nbytes", "4 * p.numel()",
           says="A number in bfloat16 has two bytes, not four"),
    mutant(assign_buckets, "parameter.dtype, parameter.device", "None",
           says="holds float32 and bfloat16"),
    mutant(assign_buckets, "parameter.dtype, parameter.device", "parameter.dtype",
           says="a bucket holds what lies on two devices"),
    mutant(assign_buckets, "bucket = still_open.setdefault(kind, [])",
           "if still_open and kind not in still_open:\n            "
           "closed.append(still_open.popitem()[1])\n        "
           "bucket = still_open.setdefault(kind, [])",
           says="another type does not close a bucket"),
    mutant(assign_buckets, f" + {OPEN_ONES}", "", says="is in no bucket"),
    mutant(assign_buckets, OPEN_ONES, f"({OPEN_ONES} or [[]])", says="There is an empty bucket"),
    mutant(assign_buckets, OPEN_ONES, f"{OPEN_ONES}[::-1]",
           says="in the order in which they were opened"),
    mutant(assign_buckets, "reversed(list(parameters))", "parameters[::-1]",
           says="no list but a generator"),
    mutant(assign_buckets, "bucket_cap_bytes < 1", "False",
           says="bucket_cap_bytes=0: no ValueError"),
]
