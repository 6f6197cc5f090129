"""LSI, Table VI: parameters that are stored, where and until when; Office-Home, ResNet-50.

command:  python -m experiments.lsi.table6_stored_parameters
cost:     seconds; nothing is trained
data:     none: sizes are read off shapes
paper:    Table VI
ours:     the same parts; places and times are those of our run
status:   run: results/lsi_parameters.md
"""

import fedjax_dg as fdg
from experiments.papers import finish, parser_of, start
from fedjax_dg.traffic import traffic_of

PAPER = {"encoder": "24.6 M", "head": "33.3 K", "translator": "2.1 M", "discriminator": "1.0 M", "latents": "9.8 M"}

if __name__ == "__main__":
    parser = parser_of(__doc__)
    out = start(parser, parser.parse_args())
    algorithm, rule = fdg.algorithms.lsi(num_sources=3), fdg.aggregators.importance()
    parts = traffic_of(fdg.backbones.resnet50(65), algorithm, fdg.Topology(3, 1), 20, rule).parts
    lines = [
        f"| {name} | {part.size.floats:,} | {PAPER.get(name, '-')} | {part.place} | {part.until} |\n"
        for name, part in parts.items()
    ]
    finish(out, "| part | floats | paper | where | kept until |\n| --- | --- | --- | --- | --- |\n" + "".join(lines))
