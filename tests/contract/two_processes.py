"""One of two processes that share a mesh of 4 x 2 devices: three rounds of the tiny federation with every method given.

``python two_processes.py ADDRESS PROCESS FOLDER ALGORITHM-AGGREGATOR ...``; process 0 writes the last states.
"""

import os
import sys
from pathlib import Path

import jax

if __name__ == "__main__":
    address, process, folder, *pairs = sys.argv[1:]
    os.environ |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": process}
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    sys.path.insert(0, str(Path(__file__).parents[1]))

    import numpy as np
    from tiny import backbone_for, contract_federation, tiny_method

    from fedjax_dg import make_round, sharding
    from fedjax_dg.aggregators import AGGREGATORS

    # as if the data were loaded twice: every process places what its own devices hold
    sharding.start()
    federation = contract_federation()
    mesh = sharding.mesh_for(federation.topology)
    assert mesh.size == 8 and jax.process_count() == 2

    def own(x):
        return sharding.build(x.shape, x.dtype, lambda index: np.asarray(x)[index], mesh)

    data = jax.tree.map(own, federation.data)
    for pair in pairs:
        algorithm, aggregator = pair.split("-")
        backbone, algorithm, rule = backbone_for(algorithm), tiny_method(algorithm), AGGREGATORS[aggregator]()
        topology = federation.topology._replace(local_epochs=algorithm.least_epochs)
        round_fn = make_round(backbone, algorithm, topology, rule, chunk=1, mesh=mesh)
        key = jax.random.key(0)
        state, _ = round_fn.block(round_fn.init(key), data, key, length=3)
        leaves = jax.tree.leaves(sharding.fetch(state))
        if sharding.is_first():
            np.savez(Path(folder) / f"{pair}.npz", *leaves)
        jax.clear_caches()
