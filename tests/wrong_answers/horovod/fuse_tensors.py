from mutants import mutant

from ranklab.horovod import fuse_tensors as answer

KIND = "tensor.dtype, tensor.device"
FULL, ADD = "last[kind][1] + tensor.nbytes > threshold", "last[kind][1] += tensor.nbytes"


def _counts(size, says):
    return mutant(answer, FULL, FULL.replace("tensor.nbytes", size),
                  ADD, ADD.replace("tensor.nbytes", size), says=says)


WRONG = [
    _counts("tensor.numel()", "The threshold counts bytes"),
    _counts("len(tensor) * tensor.element_size()", "whatever its shape"),
    _counts("tensor.untyped_storage().nbytes()", "not the bytes of the memory"),
    mutant(answer, KIND, "None", says="asks for no dtype"),
    mutant(answer, KIND, "tensor.element_size(), tensor.device",
           says="takes dtypes of one size for one dtype"),
    mutant(answer, KIND, "tensor.dtype", says="puts two devices into one list"),
    mutant(answer, KIND, f"{KIND}\n        last = {{k: held for k, held in last.items() "
           "if k[1] == tensor.device}", says="A tensor of another device between two"),
    mutant(answer, "last[kind] = [[], 0]", "last = {kind: [[], 0]}",
           says="A tensor of another dtype between two"),
    mutant(answer, FULL, "last[kind][1] >= threshold", says="Look before you add"),
    mutant(answer, "> threshold", ">= threshold", says="compare with >, not with >="),
    mutant(answer, "kind not in last", "not last.get(kind, [0, 0])[1]",
           says="Ask whether there is a list"),
    mutant(answer, "return groups", "return groups[:-1]", says="is in no list"),
    mutant(answer, "append(i)", "append(tensor)", says="do not hold positions"),
    mutant(answer, "threshold < 0", "threshold is None", says="-1 byte is accepted"),
    mutant(answer, "in enumerate(tensors)", "in sorted(enumerate(tensors), key=lambda one: "
           "one[1].nbytes)", "return groups", "return [sorted(group) for group in groups]",
           says="without sorting them"),
    mutant(answer, KIND, f"{KIND}\n        if tensor.nbytes > threshold:\n"
           "            groups.append([i])\n            continue",
           says="which is the newest from then on"),
]


def fuse_tensors__first_list_that_fits(tensors, threshold):
    """Nothing goes back into an older list"""
    groups = []  # [kind, bytes, positions]
    for i, t in enumerate(tensors):
        kind = t.dtype, t.device
        fits = [g for g in groups if g[0] == kind and g[1] + t.nbytes <= threshold]
        if not fits:
            fits = [[kind, 0, []]]
            groups += fits
        fits[0][1] += t.nbytes
        fits[0][2].append(i)
    return [positions for *_, positions in groups]
