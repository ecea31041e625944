"""Lab 14: hashes that see nothing, and ranks that are blamed wrongly."""

from collections import Counter

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.resilience import silent_corruption

KNOWN = "deviants if 2 * times > len(column) else []"
CONTENT = "tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()"
MARK = 'marks.append(int.from_bytes(digest, "big", signed=True))'

WRONG = [mutant(silent_corruption, *edits, says=says, called=called)
         for *edits, says, called in (
    ("usual, times = Counter(column).most_common(1)[0]", "usual, times = column[0], "
     "column.count(column[0])", "the group's first", "the_first_is_right"),
    (KNOWN, "deviants", "nobody knows", "a_minority_rules"),
    (KNOWN, "deviants if 2 * times >= len(column) else []", "nobody knows", "half_rules"),
    (KNOWN, "deviants if len(column) > 2 else []", "nobody knows", "two_ranks_only"),
    (CONTENT, "tensor.detach().float().contiguous().view(-1).view(torch.uint8).cpu().numpy()",
     "the last bit of a float64", "as_float32"),
    (CONTENT, "(tensor.detach() + 0).nan_to_num().contiguous().view(-1).view(torch.uint8).cpu()"
     ".numpy()", "is not named", "zeros_alike"),
    (CONTENT, "tensor.detach().contiguous().view(-1).cpu().numpy()", "bfloat16", "numpy_types"),
    (CONTENT, "tensor.detach().view(-1).view(torch.uint8).cpu().numpy()", "strided|contiguous",
     "not_contiguous"),
    (CONTENT, "tensor.detach().contiguous().view(torch.uint8).cpu().numpy()", "no dimension",
     "no_dimension"),
    (CONTENT, f"{CONTENT}[:1024]", "its very last number", "the_first_kilobyte"),
    (CONTENT, "tensor.detach().double().contiguous().view(-1).view(torch.uint8).cpu().numpy()",
     "a whole number", "as_float64"),
    (CONTENT, "tensor.detach().contiguous().view(-1).view(torch.int16).cpu().numpy()",
     "divisible by 2", "as_int16"),
    (CONTENT, "torch.empty(0, dtype=torch.uint8).set_(tensor.detach().cpu().untyped_storage())"
     ".numpy()", "is named, and does not differ", "the_whole_storage"),
    (MARK, 'marks.append(int.from_bytes(digest, "big"))', "a sign", "no_sign"),
    (MARK, "marks.append(hash(content.tobytes()))", "PYTHONHASHSEED", "pythons_hash"),
    ("dist.get_world_size(group))]", "dist.get_world_size())]", "group", "all_ranks_of_a_group"),
    ("if mark != usual", "if mark == usual", "not \\[", "the_majority_is_wrong"),
)]


def silent_corruption__sums(parameters, group=None):
    """is named, and does not differ|is not named"""
    mine = torch.stack([p.detach().double().sum() for p in parameters.values()])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    found = {}
    for name, column in zip(parameters, torch.stack(rows, 1).tolist()):
        usual, times = Counter(column).most_common(1)[0]
        if times < len(column):
            others = [i for i, x in enumerate(column) if x != usual]
            found[name] = others if 2 * times > len(column) else []
    return found


def silent_corruption__sends_all(parameters, group=None):
    """bytes to collectives"""
    rows = [None] * dist.get_world_size(group)
    mine = {name: bytes(p.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())
            for name, p in parameters.items()}
    dist.all_gather_object(rows, mine, group=group)
    found = {}
    for name in parameters:
        column = [row[name] for row in rows]
        usual, times = Counter(column).most_common(1)[0]
        if times < len(column):
            others = [i for i, x in enumerate(column) if x != usual]
            found[name] = others if 2 * times > len(column) else []
    return found


def silent_corruption__one_by_one(parameters, group=None):
    """collectives; one is enough"""
    import hashlib

    from ranklab.engine import device

    found, R = {}, dist.get_world_size(group)
    for name, p in parameters.items():
        content = p.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        mark = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
        mine = torch.tensor([mark], device=device())
        rows = [torch.empty_like(mine) for _ in range(R)]
        dist.all_gather(rows, mine, group=group)
        column = [int(row) for row in rows]
        usual, times = Counter(column).most_common(1)[0]
        if times < R:
            found[name] = [i for i, x in enumerate(column) if x != usual] if 2 * times > R else []
    return found
