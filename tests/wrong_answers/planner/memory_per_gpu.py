"""Lab 13: what a GPU holds, with something forgotten, counted twice, or of the wrong rank."""

from mutants import mutant

from ranklab.planner.memory import GpuMemory, memory_per_gpu

RANKS = "{0, min(1, plan.pp - 1), stages.index(max(stages)), plan.pp - 1}"
AGAIN = '2 * kept_bytes(model, plan, tool, "none") if plan.recompute != "none" else 0'
HELD = "in_flight(plan, rank) * stages[rank] * layer_bytes + rerun_bytes"
LOGITS = "        logits *= rank == plan.pp - 1\n"
SPARSE = "states(plan, tool, experts, max(1, plan.copies * plan.tp // plan.ep))"
MOST = "max(memories, key=lambda memory: memory.total)"

WRONG = [mutant(memory_per_gpu, *edits, says=says, called=called) for *edits, says, called in (
    (RANKS, "{0}", "the first stage", "rank_0"),
    (RANKS, "{plan.pp - 1}", "the last stage", "last_rank"),
    (RANKS, "{0, min(1, plan.pp - 1), plan.pp - 1}", "first, second and last stage", "three"),
    (RANKS, "{0, plan.pp - 1}", "any of them may be the fullest", "both_ends"),
    ("in_flight(plan, rank)", "plan.micro_batches", "all micro-batches", "all_micro_batches"),
    ("in_flight(plan, rank)", "1", "one micro-batch", "one_micro_batch"),
    ("in_flight(plan, rank)", "in_flight(plan, 0)", "as many in flight", "as_the_first"),
    ("* stages[rank]", "* model.layers", "all layers", "all_layers"),
    ("* stages[rank]", "* (model.layers / plan.pp)", "as many layers on each", "even_stages"),
    ("* stages[rank]", "* (model.layers // plan.pp)", "activations, in GB: yours", "rounded_down"),
    (HELD, HELD.removesuffix(" + rerun_bytes"), "without what is computed again", "no_again"),
    (AGAIN, '2 * kept_bytes(model, plan, tool, "none")', "without recompute", "always_again"),
    (AGAIN, AGAIN.replace('!= "none"', '== "full"'), "with full recompute only", "full_alone"),
    (AGAIN, AGAIN.replace("!= \"none\" else", "not in (\"none\", \"selective\") else"),
     "attention's core again.*activations, in GB: yours", "selective_is_none"),
    (AGAIN, AGAIN.replace("plan.recompute != \"none\"", "plan.recompute != \"none\" and tool != "
                          "\"deepspeed\""), "ZeRO-2, recompute.*activations, in GB: yours",
     "nothing_again_in_deepspeed"),
    (AGAIN, AGAIN.replace("plan, tool, \"none\"", "plan, plan.tool, \"none\""),
     "tool='torchtitan' for a plan of megatron.*activations, in GB", "again_by_the_plans_tool"),
    (SPARSE, SPARSE.replace("max(1, plan.copies * plan.tp // plan.ep)", "min(plan.sharders, plan."
                            "copies * plan.tp // plan.ep)"), "32 ranks.*optimizer, in GB: yours",
     "experts_over_sharders_at_most"),
    (RANKS, "{0, min(1, plan.pp - 1), min(2, plan.pp - 1), plan.pp - 1}", "20 layers on 9 stages.*"
     "GB: yours", "four_stages"),
    (AGAIN, AGAIN.replace("(model, plan, tool, \"none\")", "(model, plan, tool)"), "activations, in"
     " GB: yours", "again_as_it_is_kept"),
    (HELD, "in_flight(plan, rank) * (stages[rank] * layer_bytes + rerun_bytes)",
     "again for each micro-batch", "again_for_each"),
    (LOGITS, "", "logits on all stages", "logits_everywhere"),
    (LOGITS, "        logits = 0\n", "no logits", "no_logits"),
    (LOGITS, LOGITS.replace("*= rank", "*= in_flight(plan, rank) * (rank").replace("- 1", "- 1)"),
     "logits of all micro-batches", "logits_in_flight"),
    (" * model.vocab / plan.tp", " * model.vocab", "whole logits", "whole_logits"),
    ("(12 if tool == \"torchtitan\" else 8)", "8", "8 bytes a logit", "always_8"),
    ("(12 if tool == \"torchtitan\" else 8)", "4", "logits, in GB: yours", "float32_alone"),
    (AGAIN, AGAIN.removeprefix("2 * "), "activations without their gradients", "once"),
    ("plan.tokens * model.vocab", "plan.sequence * plan.micro_batch * model.vocab",
     "context ranks.*logits, in GB: yours", "logits_of_whole_sequences"),
    ("numbers, plan.sharders)", "numbers, plan.dp)", "sharded over dp", "over_dp"),
    ("numbers, plan.sharders)", "numbers, plan.copies)", "sharded over all copies", "no_shard"),
    ("numbers, plan.sharders)", "numbers, plan.gpus)", "optimizer, in GB: yours", "over_all_gpus"),
    (SPARSE, "states(plan, tool, experts, plan.sharders)", "An expert is on copies", "as_all"),
    (SPARSE, "(0, 0, 0)", "experts forgotten", "no_experts"),
    (SPARSE, "states(plan, tool, experts, plan.ep)", "weights|gradients|optimizer", "over_ep"),
    (" * (not plan.offload)", "", "the optimizer on the GPU", "no_offload"),
    ("constants.gaps * (activations + logits)", "0.0", "no gaps", "no_gaps"),
    ("constants.gaps * (activations + logits)", "constants.gaps * activations",
     "gaps of activations alone", "gaps_of_some"),
    ("constants.gaps * (activations + logits)", "CONSTANTS.gaps * (activations + logits)",
     "allowance, in GB: yours", "gaps_of_the_library"),
    ("    layer_bytes = ", "    constants = CONSTANTS\n    layer_bytes = ",
     "the constants of the library", "constants_ignored"),
    ("tool, numbers), const", "tool, numbers + experts), const", "buffers, in GB: yours",
     "buffers_of_experts"),
    ("tool, memories = tool or plan.tool, []", "tool, memories = plan.tool, []",
     "the tool of the plan|course's trainer", "tool_ignored"),
    ("kept_bytes(model, plan, tool)\n", "kept_bytes(model, plan, plan.tool)\n", "tool='torchtitan'",
     "kept_by_the_plans_tool"),
    (MOST, "max(memories, key=lambda memory: memory.activations)", "not |stage",
     "most_activations"),
    (MOST, "min(memories, key=lambda memory: memory.total)", "stage", "the_emptiest"),
    (MOST, "GpuMemory(*(max(part) for part in zip(*(vars(each).values() for each in memories))))",
     "the largest of each part", "largest_parts"),
    (MOST, f"{MOST}.total", "a float is returned.*Return the GpuMemory", "the_total"),
    (MOST, "memories", "a list is returned", "all_ranks"),
    ("return ours(model, plan, constants)", "pass", "Keep the line that is given", "no_ours"),
)]  # fmt: skip


def memory_per_gpu__eighteen_bytes(model, plan, machine, tool=None, constants=None):
    """4 stages.*(weights|gradients|optimizer), in GB: yours|one GPU.*, in GB: yours"""
    share = model.parameters / plan.tp / plan.pp
    return GpuMemory(2 * share, 4 * share, 12 * share / plan.dp, 0, 0, 0, 0, 0)
