from mutants import mutant

from ranklab.horovod import Sum, size
from ranklab.horovod import distributed_optimizer as answer

HOOKED = "register_post_accumulate_grad_hook(ask)"
ASKED = "handles[p] = allreduce_async_(small, name=names[p], op=Average), ctx"
AVERAGE = "compression.decompress(synchronize(handle), ctx)"
FILLED = "torch.zeros_like(p) if p.grad is None else p.grad"
IN_TURN = "for p, (handle, ctx) in handles.items()"
REFUSES = "if p in handles:"
WRONG = [
    mutant(answer, "op=Average", "op=Sum", Sum=Sum,
           says="3 times what is right.+sum instead of the mean"),
    mutant(answer, AVERAGE, f"{AVERAGE} / size()", size=size,
           says="1/3 of what is right.+divided twice"),
    mutant(answer, f"p.{HOOKED}", "p",
           says="asks for no average in backward.+nothing travels while it computes"),
    mutant(answer, ASKED, f"{ASKED}\n        synchronize(handles[p][0])",
           says="In the hook only ask"),
    mutant(answer, HOOKED, HOOKED.replace("ask", "lambda _: ask(p)"), REFUSES, "if False:",
           says="a lambda in a loop sees the last"),
    mutant(answer, "if p not in handles", "if False",
           says=r"does not ask for \['seldom', 'unused'\].*zeros where this rank has no"),
    *(mutant(answer, "if p not in handles",
             f'if p not in handles and p in {{*optimizer.param_groups[{group}]["params"]}}',
             says=rf"does not ask for \['{lacks}'\]") for group, lacks in enumerate(
                 ("seldom", "unused"))),
    mutant(answer, REFUSES, "if False:", "handles.clear()", "pass",
           says="handles of the last step still there"),
    mutant(answer, REFUSES, "if False:", "handles.clear()", "pass", ASKED,
           "handles.setdefault(p, (allreduce_async_(small, name=names[p]), ctx))",
           says=r"that of the first call.+handles.clear\(\)"),
    mutant(answer, f"p.grad = {AVERAGE}", AVERAGE,
           says="the average is in the small copy, not in p.grad"),
    mutant(answer, "name=names[p], ", "", says="ranks are ready in different orders: pass name"),
    mutant(answer, "compression.compress(p.grad)", "p.grad, None", AVERAGE, "synchronize(handle)",
           says="with Compression.fp16 for averages of .*float32.*of `small`"),
    mutant(answer, IN_TURN, f"*_, (_, ctx) = handles.values()\n        "
           f"{IN_TURN.replace('ctx', '_')}", says="its own ctx"),
    mutant(answer, FILLED, FILLED.replace("zeros_like(p)", "zeros(p.shape, device=p.device)"),
           says=r"zeros_like\(p\) where there is no gradient"),
    mutant(answer, FILLED, "torch.zeros_like(p)", says="zeros only where p.grad is None"),
    mutant(answer, "wait(*_):", "wait(*_):\n        had = {p for p in names if p.grad is not None}",
           AVERAGE, f"[None, {AVERAGE}][p in had]", says="also where that was None"),
    mutant(answer, "register_step_pre_hook", "register_step_post_hook",
           says="before the optimizer's own step begins"),
    mutant(answer, " if p.requires_grad", "", says="A frozen parameter takes no hook"),
    mutant(answer, "if p.requires_grad",
           'if p.requires_grad and p in {*optimizer.param_groups[0]["params"]}',
           says="Each parameter with requires_grad once"),
    mutant(answer, "raise ValueError", "str", says=r"a second backward before step\(\) raises no"),
    mutant(answer, "return optimizer", "return names", says="another object than the optimizer"),
]
