"""Lab 06: what goes wrong when the optimizer's state leaves the GPU."""

from mutants import mutant

from ranklab.zero import offload_optimizer

SET = "bucket.set_master(place.copy(bucket.shard))"
MAKE = "optimizer = model.make_optimizer(new_optimizer, groups)"
HOOK = "optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer))"
PLACE = "place = place or CpuMemory()"

WRONG = [
    mutant(offload_optimizer, SET, "pass", says="Each bucket gets a master elsewhere"),
    mutant(offload_optimizer, PLACE, f"{PLACE}\n    {MAKE}", f"    {MAKE}\n    {HOOK}",
           f"    {HOOK}", says="before the optimizer is made|Masters are set first"),
    mutant(offload_optimizer, PLACE, "place = CpuMemory()", says="not what `place` has copied"),
    mutant(offload_optimizer, PLACE, "if place is None:\n        return model.make_optimizer("
           "new_optimizer, groups)", says="the model's own memory"),
    mutant(offload_optimizer, PLACE, "place = place if isinstance(place, CpuMemory) else "
           "CpuMemory()", says="not what `place` has copied", called="never_a_file"),
    mutant(offload_optimizer, SET, f"{SET}\n        bucket.kept = place.copy(bucket.shard)",
           says="A second copy"),
    mutant(offload_optimizer, "    return optimizer", "", says="Return the optimizer"),
    mutant(offload_optimizer, "place.copy(bucket.shard)",
           "place.copy(bucket.shard).to(bucket.shard.dtype)", says="have 16 bits"),
    mutant(offload_optimizer, "(new_optimizer, groups)", "(new_optimizer)",
           says="the groups go with it"),
    mutant(offload_optimizer, HOOK, "place.take_state(optimizer)",
           says="The first step makes the state"),
    mutant(offload_optimizer, HOOK, f"{HOOK}\n    optimizer.register_step_post_hook(lambda *_: "
           "model.step_ends())", says="has registered step_ends"),
]
