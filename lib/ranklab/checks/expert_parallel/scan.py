"""chunked_scan: compared with a scan of all tokens in one place; operations after the receive."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ranklab.checks.expert_parallel.inputs import COST, costs, of_all
from ranklab.checks.handles import Waits
from ranklab.checks.prover import ALL, GROUPS, AtMost, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.expert_parallel import chunked_scan, scan
from ranklab.meter import Traffic

B, T, C = 2, 96, 3
AFTER = 20  # operations that may follow when the state has come: a scan of 24 tokens takes more
LATE = "operations after the state has come"
PRODUCTS = "products of a after the state has come"


class Over(Waits):
    """A context that counts the handles that were waited for."""

    @property
    def count(self):
        return len(self._over)


class AfterReceive(TorchDispatchMode):
    """A context that counts the operations since the last receive ended; `over` is an Over."""

    def __init__(self, over):
        super().__init__()
        self.over, self.before, self.count, self.products = over, None, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "recv" in str(func):
            self.before, self.count, self.products = self.over.count, 0, 0
        elif self.before is not None and self.over.count > self.before:
            self.count += 1
            self.products += "prod" in str(func)
        return func(*args, **(kwargs or {}))


def inputs(dtype):
    """Return a and b of all tokens; some a are negative, and one is 0."""
    random = torch.Generator().manual_seed(0)
    a, b = (2 * torch.rand(B, T, C, generator=random) - 1 for _ in range(2))
    a = a.sign() * (1 - 0.2 * a.abs())  # so that the state counts at the end of a part, too
    a[0, 3] = 0  # nothing is left of what was before
    return a.to(device(), dtype), b.to(device(), dtype)


def _see(fn, dtype, ranks):
    a, b = (x[:, ranks.at(T)] for x in inputs(getattr(torch, dtype)))
    with Traffic() as traffic, Over() as over, AfterReceive(over) as after:
        h = fn(a, b, **ranks.keywords)
    late = after.count if ranks.index else 0
    messages = (ranks.index > 0) + (ranks.index < ranks.size - 1)  # a recv and a send
    yield {"h": h, "a afterwards": a, "b afterwards": b, LATE: AtMost(
        min(late, AFTER + 1), AFTER, f"runs {late} operations after the state has come; "
        "{1} are enough"),  # how many a scan takes is torch's choice
        PRODUCTS: AtMost(after.products, 0),
        **costs(traffic, over, messages, a.element_size() * B * C * messages)}


def in_one_place(a, b, group=None):
    """Scan all tokens in one place, in float64; return this rank's part."""
    (a, lengths), (b, _) = of_all(a, group), of_all(b, group)
    whole = scan(*(torch.cat(x.split(lengths), dim=1).double() for x in (a, b)))
    return whole.tensor_split(len(lengths), dim=1)[dist.get_rank(group)].to(a.dtype)


def waits_at_once(a, b, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    before = torch.zeros_like(b[:, 0])
    if rank:
        dist.recv(before, group=group, group_src=rank - 1)
    h = scan(a, b) + a.cumprod(1) * before[:, None]
    if rank < R - 1:
        dist.send(h[:, -1].contiguous(), group=group, group_dst=rank + 1)
    return h


DECAY, SHARE = "a.cumprod(dim=1)", "h = h + decay * state[:, None]"
STATE, RECV = "torch.empty_like(h[:, -1])", "dist.recv(state, group=group, group_src=rank - 1)"
SEND = "dist.send(h[:, -1].contiguous(), group=group, group_dst=rank + 1)"
SCAN = Proof(
    chunked_scan,
    Stage({"the states of one process, on 1, 2, 3 and 4 ranks, in the type of b": (),
           "one message of a state from each rank but the last; each rank scans its own part "
           "before that": (LATE, PRODUCTS, *COST)},
          _see, ("float32", "float64"), (4,), (ALL, *GROUPS), oracle=in_one_place),
    mistakes=(
        Slip("This scans only this rank's part. What came before also counts: add the share of the "
             "previous rank's state.", (SHARE, "pass"),
             ("if rank > 0:", "if False:", "if rank < R - 1:", "if False:")),
        Slip("The state is sent but never received: every rank except the first needs a recv.",
             ("if rank > 0:", "if False:")),
        Slip("The state is added without its decay: h[t] includes it multiplied by a[0] ... a[t].",
             (SHARE, "h = h + state[:, None]")),
        Slip("The state decays as if for one step only. At token t it is multiplied by the product "
             "of all a up to t: cumprod.", (DECAY, "a")),
        Slip("The first token of a part also multiplies the state by its a.",
             (DECAY, f"{DECAY} / a"),
             (DECAY, "torch.cat([torch.ones_like(a[:, :1]), a[:, :-1]], 1).cumprod(dim=1)")),
        Slip("Decays multiply: use cumprod, not cumsum.", (DECAY, "a.cumsum(dim=1)")),
        Slip("Tokens are dimension 1: cumprod(dim=1).", (DECAY, "a.cumprod(dim=0)"),
             (DECAY, "a.cumprod(dim=-1)")),
        Slip("The product of all a applies only to the last token: token t needs a[0] ... a[t].",
             (DECAY, "a.prod(dim=1, keepdim=True)")),
        Slip("The state is added only at the first token. It also counts in all later ones.",
             (SHARE, "h[:, 0] += decay[:, 0] * state")),
        Slip("a may be zero or negative, where it has no logarithm.",
             (DECAY, "a.log().cumsum(1).exp()")),
        Slip("The state that is sent lacks what came before this part. Send the last h after "
             "adding that share.",
             ("    if rank > 0:", f"    if rank < R - 1:\n        {SEND}\n    if rank > 0:",
                     f"    if rank < R - 1:\n        {SEND}\n    return", "    return")),
        Slip("The state is the last h of a part, h[:, -1].", (SEND, SEND.replace("-1]", "0]"))),
        Slip("The message has the dtype of h, so the receive buffer must have it as well: "
             "empty_like.",
             (STATE, "torch.empty(h[:, -1].shape, device=h.device)")),
        Slip("The result must have the dtype of b.", ("return h", "return h.float()")),
        Slip("send and recv need a contiguous tensor, which this slice is not: send "
             ".contiguous(), and receive into a new tensor.",
             (SEND, SEND.replace(".contiguous()", ""))),
        Slip("`a` is an argument: work on a copy.", (f"{DECAY}\n", "a.cumprod_(dim=1)\n")),
        Slip("Scan your own part before you wait; the state only adds its share: h + decay * "
             "state.",
             waits_at_once, ("h, decay = scan(a, b), a.cumprod(dim=1)", "b = b.clone()",
                             SHARE, "b[:, 0] += a[:, 0] * state",
                             STATE, "torch.empty_like(b[:, 0])",
                             "    if rank < R - 1:", "    h = scan(a, b)\n    if rank < R - 1:")),
        Slip("Also compute the products of your own a before you wait: they do not need the state.",
             (SHARE, f"h = h + {DECAY} * state[:, None]")),
        Slip("All states are sent. The last one is enough.",
             (STATE, "torch.empty_like(h)", SHARE, "h = h + decay * state[:, -1:]",
              SEND, SEND.replace("h[:, -1].contiguous()", "h.contiguous()"))),
        Slip("All tokens go to all ranks here. One state, sent to the next rank, is enough.",
             in_one_place),
        Slip("These are ranks within the group, but src and dst are global ranks: use group_src "
             "and group_dst.", ("group_src", "src", "group_dst", "dst"), ("group_src", "src"),
             ("group_dst", "dst")),
    ), hints=(
        "How much of the state before this part is left at the part's first, second and t-th "
        "token?",
        "A factor of a[0] a[1] ... a[t]. So a rank can scan its own part right away, and add that "
        "share when the state arrives.",
        "h, decay = scan(a, b), a.cumprod(1); recv from rank - 1; h + decay * before[:, None]; "
        "send h[:, -1] to rank + 1",
    ))
