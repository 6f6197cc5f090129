"""LSI, Fig. 3: latents made from heads alone beside the features they stand for, with each loss left out in turn.

command:  python -m experiments.lsi.fig3_latents --out latents
cost:     about a minute on 2 CPU cores
data:     emoji styles, embedded; needs pip install 'fedjax-dg[plots]'
paper:    Fig. 3 is a picture; its authors chose lambda_bn = 0.001 and lambda_norm = 0.0001 by looking at it
ours:     LeNet-5 on emoji styles instead of ResNet-50 on PACS
status:   run on emoji styles: results/lsi_latents.png

One client for each of three styles trains LeNet-5 with LSI's bottleneck for --epochs passes at rate 0.01; latents are made
from its head as in the method's second stage, from N(m, v). Printed: for every way of making them, over the clients, the
share that the head gives its label, and how far mean and variance of the latents are from those of the features, relative
to the latter's size. Drawn: the first client's, by t-SNE.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_dg as fdg
from experiments.papers import finish, parser_of, start
from fedjax_dg import inversion, local, tree
from fedjax_dg.algorithms.common import classification_loss, gradient_method, momentum
from fedjax_dg.algorithms.lsi import LATENT_BATCH, with_bottleneck
from fedjax_dg.inversion import InversionWeights
from fedjax_dg.plots import plot_latents
from fedjax_dg.types import Received

WAYS = {
    "all losses": InversionWeights(),
    "without L_clsz": InversionWeights(clsz=0.0),
    "without L_bn": InversionWeights(bn=0.0),
    "without L_norm": InversionWeights(norm=0.0),
}


def train_clients(backbone, federation, key):
    """Every client's own model [J, ...], from one start."""
    algorithm, rules = (
        gradient_method(classification_loss, momentum(0.01)),
        (fdg.aggregators.mean(), fdg.aggregators.mean()),
    )
    variables = backbone.init(key)

    @jax.jit
    def one(examples, i):
        received = Received(variables, (), (), ())
        mine = jax.random.fold_in(key, i)
        return local.train(
            backbone, algorithm, federation.topology, rules, received, (), examples, mine
        ).local.variables

    models = [one(tree.take(federation.clients, (s, 0)), s) for s in range(federation.topology.stations)]
    return jax.tree.map(lambda *x: jnp.stack(x), *models)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=8, help="batches of 32 latents for each client")
    options = parser.parse_args()
    out = start(parser, options)
    small = (1, 20, 1, 60)
    epochs, steps, batches, shown = small if options.smoke else (options.epochs, options.steps, options.batches, None)
    key = jax.random.key(0)
    domains = fdg.datasets.load("emoji_styles")
    federation = fdg.federate(
        domains, held_out="noto", stations=3, clients_per_station=1, domain_mix=0.0, local_epochs=epochs, seed=0
    )
    backbone = with_bottleneck(fdg.backbones.lenet5(num_classes=6))
    models = train_clients(backbone, federation, key)
    norm, head = models.batch_stats["head_norm"], models.params["head"]
    heads = inversion.Head(head["kernel"], head["bias"], norm["mean"], norm["var"])
    first = jax.tree.map(lambda x: x[0, 0], federation.clients)
    features = backbone.features(jax.tree.map(lambda x: x[0], models), first.inputs)[first.mask][:shown]
    choice = jnp.broadcast_to(jnp.arange(3)[:, None], (3, batches))
    begin = inversion.start_bank(heads, choice, LATENT_BATCH, True, key)
    panels, text = {}, "| losses | class accuracy | mean is off by | variance is off by |\n| --- | --- | --- | --- |\n"
    for name, weights in WAYS.items():
        make = jax.jit(functools.partial(inversion.invert, squared=True))
        bank = make(begin, heads, weights, 1e-4, steps)
        off = lambda found, wanted: float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
        means, variances = bank.z.mean(2), bank.z.var(2)  # of every batch
        text += (
            f"| {name} | {100 * float(inversion.accuracy(bank, heads)):.1f} % "
            f"| {100 * off(means, heads.mean[bank.head]):.1f} % | {100 * off(variances, heads.var[bank.head]):.1f} % |\n"
        )
        made = np.asarray(bank.z[0].reshape(-1, bank.z.shape[-1]))
        panels[name] = np.asarray(features), made
    finish(out, text)
    labels = np.asarray(first.labels[first.mask])[:shown], np.asarray(begin.labels[0]).ravel()
    for path in plot_latents(panels, labels, out):
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
