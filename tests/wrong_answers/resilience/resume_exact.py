"""Lab 14: runs that go on otherwise."""

from mutants import mutant

from ranklab.resilience import resume_exact

BACK = "        part.load_state_dict(state)\n"

WRONG = [mutant(resume_exact, *edits, says=says, called=called) for *edits, says, called in (
    ("parts, loader = (run.model, run.optimizer, run.scheduler)", "parts, loader = (run.model, "
     "run.optimizer)", "scheduler's step: another value", "no_scheduler"),
    ("parts, loader = (run.model, run.optimizer, run.scheduler)", "parts, loader = (run.model, "
     "run.scheduler)", "what AdamW remembers", "no_optimizer"),
    ("parts, loader = (run.model, run.optimizer, run.scheduler)", "parts, loader = (run.optimizer, "
     "run.scheduler)", "the weights: another value", "no_model"),
    ("    run.steps_done = saved[\"steps_done\"]\n", "", "steps_done: another value", "no_steps"),
    ("    loader.generator.set_state(rng)\n", "", "the loader's generator", "no_generator"),
    ("    loader.generator.set_state(rng)\n", "    loader.generator.manual_seed(0)\n    for _ in "
     "range(-(-run.steps_done * loader.batch // loader.samples)):\n        "
     "torch.randperm(loader.samples, generator=loader.generator)\n", "seed 3.*the loader's "
     "generator", "wound_forward_from_seed_0"),
    ("loader.order, loader.position, rng = saved", "loader.order, _, rng = saved",
     "the loader's position", "no_position"),
    ("loader.order, loader.position, rng = saved", "_, loader.position, rng = saved",
     "the loader's order", "no_order"),
    ("    random.setstate(pythons)\n", "", "python's random numbers", "no_python"),
    ("    np.random.set_state(numpys)\n", "", "numpy's random numbers", "no_numpy"),
    ("    set_random_state(torchs)\n", "    torch.manual_seed(0)\n", "torch's random numbers",
     "seed_again"),
    ("np.random.get_state()", "np.random.get_state()[:3]", "after 5 steps, put back: numpy's",
     "without_the_number_in_hand"),
    ("        return copy.deepcopy({", "        return dict({", "the run went on", "no_copy"),
    ("    saved = copy.deepcopy(saved)", "    saved = saved", "put back twice", "not_copied_again"),
    ("[part.state_dict() for part in parts]", "[*parts]", "part.load_state_dict(state)",
     "part.load_state_dict(state.state_dict())", "can't be pickled", "the_objects"),
    ("    if saved is None:\n", "    if saved is None:\n        "
     "torch.manual_seed(run.steps_done)\n",
     "while it saves: torch's random numbers", "draws_while_it_saves"),
)]


def resume_exact__a_fresh_optimizer(run, saved=None):
    """the weights|AdamW|loss of step"""
    import copy

    if saved is None:
        return copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(saved)
