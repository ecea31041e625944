"""`ranklab layout`: who talks to whom in a layout, what it costs, how others are told of it."""

from ranklab.hybrid import layout_memory, layout_traffic, parse_layout
from ranklab.hybrid.choose import refuse_misfits
from ranklab.meter.text import lined_up
from ranklab.models.gpt import count_parameters
from ranklab.options import positive
from ranklab.projects.command import Command, refusals
from ranklab.projects.hybrid.other_tools import megatron_command, torchtitan_toml
from ranklab.projects.hybrid.sizes import SIZES


def explain(layout, job, per_node=8):
    """The mesh, what crosses nodes, and the costs of the first rank, as text."""
    refuse_misfits(layout, job, per_node)
    inside = layout.mesh.axes_inside(per_node)
    crossing = [axis for axis in layout.mesh.axes if axis not in inside]
    return "\n".join([
        f"{layout}: a GPT of {count_parameters(job.config) / 1e9:.1f} billion parameters",
        f"through each pipeline go {job.micro_batches(layout)} micro-batches of {job.micro_batch}",
        str(layout.mesh),
        f"between nodes of {per_node} go the messages of: {', '.join(crossing) or 'no axis'}", "",
        "predicted for rank 0 of the course's trainer, at its peak",
        str(layout_memory(job, layout)), "",
        lined_up(("sent in a step along", "bytes"), list(layout_traffic(job, layout).items()))])


@refusals("ranklab layout")
def main(arguments):
    """`ranklab layout` has run; returns its exit code."""
    parser = Command("ranklab layout", __doc__)
    parser.add_argument("layout", help="dp x tp x pp, and what else: 2x8x4,zero,sp")
    parser.add_argument("--size", choices=list(SIZES), default="10b", help="which GPT")
    parser.add_argument("--per-node", type=positive, default=8, help="ranks that NVLink joins")
    parser.add_argument("--per-host", type=positive,
                        help="GPUs of a host, for torchrun; as --per-node by default")
    parser.add_argument("--megatron", action="store_true", help="print Megatron-LM's command")
    parser.add_argument("--torchtitan", action="store_true", help="print torchtitan's config")
    options = parser.parse_args(arguments)
    job, _ = SIZES[options.size]
    layout = parse_layout(options.layout)
    texts = [explain(layout, job, options.per_node)]
    texts += [megatron_command(layout, job, options.per_host or options.per_node)
              ] * options.megatron
    texts += [torchtitan_toml(layout, job)] * options.torchtitan
    print("\n\n".join(texts))
