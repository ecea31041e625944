"""Mends of clinic/sharding.py that treat a symptom, or one place of two, or fit one size only."""

from mutants import mutant, slips_of

from ranklab.checks.clinic.sharding import (LENGTHENED, SLIP_OF_END, SLIP_OF_HELD_OUT,
                                            SLIPS_OF_NORM, TIED)
from ranklab.clinic.sharding import (
    BLOCKS, CLIP, GATHER, KEEP, LOAD, OPTIMIZER, OWN, ROOT, SEEDS, SEND, STEP, SUM_ENDS,
    flat_model, gathered_model, moved_gpt, staged_gpt, wide_layer,
)

AVERAGED = """            dist.all_reduce(end.weight.data, group=ends)
            end.weight.data /= 2
"""
COPIED = "            dist.broadcast(end.weight.data, group=ends, group_src=0)\n"
HEAD_OF_SUM_ENDS = "".join(SUM_ENDS.splitlines(keepends=True)[:2])
ALL_RANKS = "ranks, rank = list(range(dist.get_world_size())), dist.get_rank()"
SOME_RANKS = "ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)"
LOSS = "        loss = F.cross_entropy(model(inputs), targets[:, -1]) / R\n"
BY_HAND = """        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= R
"""
ALL_REDUCE, SCALE = "dist.all_reduce(square, group=group)", "shard.grad *= (max_norm"

WRONG = [
    *slips_of(staged_gpt, TIED), *slips_of(gathered_model, SLIP_OF_HELD_OUT + SLIP_OF_END),
    *slips_of(flat_model, SLIPS_OF_NORM + LENGTHENED),
    mutant(wide_layer, SEEDS, "    torch.manual_seed(seed)\n", *OWN,
           says="ranks 0 and 1 drop the same places of the wide layer", called="one_seed_for_all"),
    mutant(wide_layer, SEEDS, "    torch.manual_seed(seed + rank)\n", *OWN,
           "losses.append(loss.item())", "loss = loss.detach()\n        dist.all_reduce(loss, "
           "group=inside)\n        losses.append(loss.item() / tensor)",
           says="share a wide layer, and drop different places in the second dropout",
           called="the_printed_loss_is_averaged"),
    mutant(wide_layer, "tensor=2, seed=0, group=None):", "tensor=2, seed=0, group=None, p_=0.0):",
           "(model[\"up\"](x)), p)", "(model[\"up\"](x)), p_)", "inside), p)", "inside), p_)",
           says="0% of the numbers are dropped, not 25%"),
    mutant(wide_layer, "dropout_seeds(seed, row, column", "dropout_seeds(seed, 0, column",
           says="have different rows, and drop the same places of them"),
    mutant(wide_layer, "        with own_random(own):", "        torch.manual_seed(shared)\n"
           "        with own_random(own):", says="rank 0 drops the same in steps 0 and 1"),
    mutant(wide_layer, SOME_RANKS, ALL_RANKS, says="in groups of 1 and 3"),

    mutant(staged_gpt, SUM_ENDS + STEP, STEP + HEAD_OF_SUM_ENDS + COPIED,
           says="trained by the embedding's gradient alone"),
    mutant(staged_gpt, SUM_ENDS + STEP, STEP + HEAD_OF_SUM_ENDS + AVERAGED,
           says="alike, and not what one process has"),
    mutant(staged_gpt, SUM_ENDS + STEP, STEP + SUM_ENDS,
           says="are up to .* apart", called="the_sum_comes_after_the_step"),
    mutant(staged_gpt, "[ranks[0], ranks[-1]]", "[0, 3]", says="in groups of 1 and 3"),

    mutant(gathered_model, STEP + GATHER, GATHER + "        coming.wait()\n" + STEP,
           says="the loss of step 1 .* that of the first weights", called="waited_for_too_early"),
    mutant(gathered_model, STEP + GATHER, KEEP + SEND + STEP, "SGD([shard], lr,",
           "SGD([shard], lr / 4,", says="the loss of step 1 is .* that of the first weights",
           called="a_smaller_rate"),
    mutant(gathered_model, STEP + GATHER, STEP, LOAD, "", LOSS, GATHER + LOAD + LOSS,
           says="held_out .* is that of the weights before the step", called="before_the_forward"),
    mutant(gathered_model, "        coming.wait()\n", "", says="wait"),
    mutant(gathered_model, "[shard], lr,", "[shard], lr / 2,", says="With which weights does each"),

    mutant(moved_gpt, ROOT + OPTIMIZER, OPTIMIZER + ROOT, says="2 of 18 weights are what they"),
    mutant(moved_gpt, BLOCKS + ROOT + OPTIMIZER,
           OPTIMIZER.replace("lr,", "100 * lr,") + BLOCKS + ROOT,
           says="18 of 18 weights are what they were"),
    mutant(moved_gpt, BLOCKS + ROOT, "", "        loss.backward()\n", BY_HAND,
           "weight.full_tensor()", "weight", says="0 reduce-scatters in 3 steps"),
    mutant(moved_gpt, BLOCKS + ROOT + OPTIMIZER, OPTIMIZER + BLOCKS + ROOT
           + "    optimizer.add_param_group({\"params\": list(model.parameters())})\n",
           says="the optimizer has 36 parameters, and the model 18", called="old_and_new"),
    mutant(moved_gpt, BLOCKS, "", says="3 reduce-scatters in 3 steps, not 3 a step"),
    mutant(moved_gpt, "DeviceMesh.from_group(group, device().type) if group else None", "None",
           says="rank 0 with .*without `group`"),

    mutant(flat_model, CLIP, CLIP.replace(SCALE, "nn.utils.clip_grad_norm_([shard], max_norm)\n"
                                          "        shard.grad *= 1 + 0 * (max_norm"),
           says="That of step 0 is right", called="the_log_is_mended"),
    mutant(flat_model, ALL_REDUCE, "dist.all_reduce(square)", says="rank 0 with .*without `group`"),
]
