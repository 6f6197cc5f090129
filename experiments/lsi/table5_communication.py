"""LSI, Table V: parameters that travel between the server and one client, Office-Home, ResNet-50.

command:  python -m experiments.lsi.table5_communication
cost:     seconds; nothing is trained
data:     none: sizes are read off the shapes of what is sent
paper:    Table V. A round takes a model up and down; LSI's importances, which are as large as the model, are not counted
ours:     all that travels is counted, with batch statistics. FedDG-GA sends two accuracies, and its clients get
          the new model at a round's end, to judge it, and again at the next one's start
status:   run: results/lsi_parameters.md
"""

import fedjax_dg as fdg
from experiments.papers import finish, parser_of, start
from fedjax_dg.traffic import traffic_of

CLASSES, SOURCES = 65, 3
METHODS = {
    "FedDG-GA": (fdg.algorithms.fedavg(), fdg.aggregators.feddg_ga(), 40, ("23.6", "945", "945")),
    "gPerXAN": (fdg.algorithms.gperxan(), fdg.aggregators.mean(), 100, ("23.7", "2370", "2370")),
    "LSI, averaged": (fdg.algorithms.lsi(num_sources=SOURCES), fdg.aggregators.mean(), 20, ("24.6", "492", "494")),
    "LSI": (fdg.algorithms.lsi(num_sources=SOURCES), fdg.aggregators.importance(), 20, ("24.6", "492", "494")),
}


def line(name: str) -> str:
    """Millions of floats of one method: ours, and the paper's in brackets."""
    algorithm, rule, rounds, said = METHODS[name]
    found = traffic_of(fdg.backbones.resnet50(CLASSES), algorithm, fdg.Topology(SOURCES, 1), rounds, rule)
    floats = (found.before.up, found.before.down, found.per_round.up, found.per_run.up, found.per_run.down)
    once_up, once_down, *rest = (size.floats / 1e6 for size in floats)
    return f"| {name} | {rounds} | {once_up:.4f} | {once_down:.2f} | " + " | ".join(
        f"{x:.1f} ({y})" for x, y in zip(rest, said)
    )


if __name__ == "__main__":
    parser = parser_of(__doc__)
    out = start(parser, parser.parse_args())
    head = (
        "| method | rounds | once up | once down | up in a round | up in all | down in all |\n" + "| --- " * 7 + "|\n"
    )
    text = "Millions of floats between the server and one client; in brackets the paper's.\n\n"
    finish(out, text + head + "".join(f"{line(name)} |\n" for name in METHODS))
