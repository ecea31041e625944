"""Wrong answers to no_sync."""

from mutants import mutant

from ranklab.data_parallel import no_sync

AVERAGES = """model.sync = old_sync
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad.div_(dist.get_world_size(model.group)), group=model.group)"""

WRONG = [
    mutant(no_sync, "@contextlib.contextmanager\n", "",
           says="put @contextlib.contextmanager above"),
    mutant(no_sync, "model.sync, False", "model.sync, True",
           says="must be False while the block runs"),
    mutant(no_sync, "model.sync = old_sync", AVERAGES, says="no_sync itself sends nothing"),
    mutant(no_sync, "model.sync, False", "model.sync, model.zero_grad() is not None",
           says="also over several blocks"),
    mutant(no_sync, "model.sync = old_sync", "pass", says="Switch `sync` back on"),
    mutant(no_sync, "model.sync = old_sync", "model.sync = True",
           says="Put back what `sync` was before"),
    mutant(no_sync, "model.sync, False", "model.sync, not model.sync", "model.sync = old_sync",
           "model.sync = not model.sync", says="inside an inner no_sync `sync` is on again"),
    mutant(no_sync, "old_sync, model.sync =", "model.old_sync, model.sync =",
           "model.sync = old_sync",
           "model.sync = model.old_sync", says="in a variable of its own"),
    mutant(no_sync, "(model)", "(model, depth=[0])", "old_sync, model.sync = model.sync, False",
           "model.sync, depth[0] = False, depth[0] + 1", "model.sync = old_sync",
           "depth[0] -= 1\n        model.sync = depth[0] == 0", says="Each model has its own"),
    mutant(no_sync, "finally:", "except Exception:\n        pass\n    if True:",
           says="Leave errors alone"),
    mutant(no_sync, "finally:", "except Exception:\n        model.sync = old_sync\n        raise\n"
           "    else:", says="into a `finally`. .*An interrupt is no Exception"),
]
