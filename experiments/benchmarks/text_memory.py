"""Memory of a round of RoBERTa-base, by XLA's plan: nothing of that size is allocated, and no round is run.

command:  python experiments/benchmarks/text_memory.py [--rules mean,hfedatm] [--forms plain,remat,frozen] [--chunks 1,2,0]
cost:     about a minute of 2 CPU cores for each line, and 4 GB of memory

Work: --stations x --clients, 16 texts of 128 tokens each in batches of 8, one local pass of FedAvg with momentum, the mean
at stations. Printed are arguments, temporaries and outputs less what is aliased, in MiB and in models (475 MiB of float32),
for clients one after another (``chunk`` 1), two at a time, or those of all stations at once (0).
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp

import fedjax_dg as fdg
from fedjax_dg.estimate import num_bytes
from fedjax_dg.types import Examples, Topology

CLASSES, LENGTH, EXAMPLES, BATCH = 2, 128, 16, 8
FORMS = {"plain": {}, "remat": {"remat": True}, "frozen": {"freeze_encoder": True}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rules", metavar="A,B", default="mean,hfedatm", help="of the server")
    parser.add_argument("--forms", metavar="A,B", default="plain,remat,frozen")
    parser.add_argument("--chunks", metavar="A,B", default="1,2,0", help="clients at once; 0 = those of all stations")
    parser.add_argument("--stations", type=int, default=10)
    parser.add_argument("--clients", type=int, default=10, help="of each station")
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    config = fdg.backbones.ROBERTA_BASE._replace(num_hidden_layers=options.layers)
    topology = Topology(options.stations, options.clients, batch_size=BATCH)
    print(f"{'rule, form, chunk':28s} {'MiB':>8s} {'models':>7s} {'arguments':>10s} {'temporaries':>12s}", flush=True)
    for rule in options.rules.split(","):
        for form in options.forms.split(","):
            for chunk in options.chunks.split(","):
                backbone = fdg.backbones.roberta(config, CLASSES, LENGTH, **FORMS[form])
                model, plan = plan_of(backbone, topology, rule, int(chunk))
                total = plan.argument_size_in_bytes + plan.temp_size_in_bytes
                total += plan.output_size_in_bytes - plan.alias_size_in_bytes
                parts = (plan.argument_size_in_bytes / 2**20, plan.temp_size_in_bytes / 2**20)
                print(f"{f'{rule}, {form}, {chunk}':28s} {total / 2**20:8.0f} {total / model:7.1f}", end="")
                print(f" {parts[0]:10.0f} {parts[1]:12.0f}", flush=True)


def plan_of(backbone, topology: Topology, rule: str, chunk: int):
    """Bytes of a model, and XLA's plan for a round."""
    to_server = fdg.aggregators.AGGREGATORS[rule]()
    round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), topology, to_server, chunk=chunk)
    places = topology.stations, topology.clients_per_station
    each = lambda dtype, *more: jnp.zeros((*places, EXAMPLES, *more), dtype)
    make = lambda: Examples(each(jnp.int32, LENGTH), each(jnp.int32), each(bool), each(jnp.int32))
    state, key = jax.eval_shape(round_fn.init, jax.random.key(0)), jax.random.key(0)
    data = jax.eval_shape(make), jax.ShapeDtypeStruct(places, jnp.int32)
    return num_bytes(state.variables), round_fn.block.lower(state, data, key, length=1).compile().memory_analysis()


if __name__ == "__main__":
    main()
