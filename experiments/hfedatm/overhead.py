"""HFedATM, overhead: seconds of a round, and what the server holds, with averaging and with HFedATM.

command:  python -m experiments.hfedatm.overhead
cost:     about a minute on two cores
data:     emoji styles, embedded, for the time; none for the sizes
paper:    a round takes less than 10 % longer; the server's peak is 2.6 to 2.8 MB with averaging and below 4 MB with HFedATM
          (LeNet-5), and some 27 MB more for RoBERTa-base
ours:     10 x 10 clients, one pass of batches of 32; rounds of both rules in turn, medians. Sizes are read off shapes: 11
          models are those of 10 stations and the global one. "all Grams" are those of 10 stations at once, as our round
          holds them; "streamed" is the largest layer's sum and one more that comes in, which is what 4 MB leave room for
status:   run on emoji styles: results/hfedatm_overhead.md
"""

import statistics
import time

import jax

import fedjax_dg as fdg
from experiments.papers import finish, parser_of, start
from fedjax_dg.estimate import num_bytes
from fedjax_dg.run import message_shapes

RULES = {"Avg": fdg.aggregators.mean(), "HFedATM": fdg.aggregators.hfedatm()}
NETWORKS = {
    "lenet5, 7 classes": (fdg.backbones.lenet5(7), "2.6 to 2.8, below 4 MB with HFedATM"),
    "lenet5, 65 classes": (fdg.backbones.lenet5(65), "the same"),
    "roberta_base, classifier": (fdg.backbones.roberta_base(2), "27 MB more"),
}


def seconds(repeats: int, stations: int) -> dict[str, list[float]]:
    """Of rounds of each rule, in turn."""
    domains = fdg.datasets.load("emoji_styles")
    federation = fdg.federate(domains, "fluent_mono", stations, stations, domain_mix=1.0, batch_size=32)
    key, rounds, states = jax.random.key(0), {}, {}
    for name, rule in RULES.items():
        made = fdg.make_round(fdg.backbones.lenet5(6), fdg.algorithms.fedavg(), federation.topology, rule)
        rounds[name], states[name] = jax.jit(made.step), made.init(key)
    took: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(repeats + 1):  # the first compiles
        for name, step in rounds.items():
            begin = time.perf_counter()
            states[name] = jax.block_until_ready(step(states[name], federation.data, key)[0])
            took[name].append(time.perf_counter() - begin)
    return {name: found[1:] for name, found in took.items()}


def sizes(backbone) -> list[float]:
    """MiB of 11 models, of the Grams of 10 stations, and of twice the largest layer's."""
    model = jax.eval_shape(backbone.init, jax.random.key(0))
    grams = message_shapes(backbone, RULES["HFedATM"])
    largest = max(num_bytes(gram) for gram in grams.values())
    return [number / 2**20 for number in (11 * num_bytes(model), 10 * num_bytes(grams), 2 * largest)]


if __name__ == "__main__":
    parser = parser_of(__doc__)
    arguments = parser.parse_args()
    out = start(parser, arguments)
    took = seconds(*((2, 2) if arguments.smoke else (9, 10)))
    middle = {name: statistics.median(found) for name, found in took.items()}
    more = [100 * (b / a - 1) for a, b in zip(*took.values())]
    finish(
        out,
        "| server rule | seconds of a round (lowest - highest) |\n| --- | --- |\n"
        + "".join(f"| {name} | {middle[name]:.3f} ({min(x):.3f} - {max(x):.3f}) |\n" for name, x in took.items())
        + f"\nHFedATM takes {statistics.median(more):.0f} % longer (paired by turn, {min(more):.0f} to {max(more):.0f}; the "
        "paper: less than 10).\n\n"
        "| network | 11 models, MiB | all Grams, MiB | streamed, MiB | the paper says |\n| --- | --- | --- | --- | --- |\n"
        + "".join(
            f"| {name} | " + " | ".join(f"{x:.2f}" for x in sizes(net)) + f" | {said} |\n"
            for name, (net, said) in NETWORKS.items()
        ),
    )
