"""What the verbs of lab 02 may send: told of a tensor of 100 MB, counted on a small one."""

import torch

from ranklab.checks.beside import expect
from ranklab.checks.trial import rank_name

BACKENDS = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather",
            "scatter", "all_to_all", "barrier"}


def no_backend(seen):
    """Only sends and receives were used, not the collective that is to be built."""
    for _, traffic in seen:
        used = ", ".join(sorted(BACKENDS & set(traffic.calls)))
        expect(not used, f"it calls the backend's own {used}", "Here you build the collective "
               "yourself, from sendrecv, send and recv only.")


def nothing_sent(seen):
    """When x is empty."""
    for of_ranks in seen:
        expect(of_ranks[0][0].numel() or not any(traffic.sent_messages for _, traffic in of_ranks),
               "an empty x is sent", "Nothing at all is sent when x is empty: every rank knows "
               "that there is nothing to come, and a message costs its latency.")


def ranks_agree(seen, hint="Let one rank finish a chunk and send the finished chunk to the others, "
                           "or replicas drift apart."):
    """All ranks hold the same bits, whatever the order of the sum was."""
    for rank, (got, _) in enumerate(seen):
        expect(torch.equal(got, seen[0][0]), f"rank {rank} and rank 0 differ in the last bits of "
               "the sum", f"Each rank adds in a different order. {hint}")


def sends(seen, wanted, hint, nbytes=192):
    """Each rank sends its `wanted` (bytes, messages). x, of `nbytes`, is told to have 100 MB."""
    no_backend(seen)
    for rank, ((_, traffic), (sent, messages)) in enumerate(zip(seen, wanted)):
        where = rank_name(rank, len(seen))
        expect(traffic.sent_bytes == sent, f"{where} sends {100 * traffic.sent_bytes / nbytes:.1f} "
               f"MB of a 100 MB tensor; {100 * sent / nbytes:.1f} MB is enough", hint)
        expect(traffic.sent_messages == messages, f"{where} sends {traffic.sent_messages} "
               f"messages; {messages} are enough", "Send one message in each step, because every "
               "message costs its latency.")
