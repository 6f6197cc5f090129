# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Many devices
#
# A federation is two axes, stations and clients, and so is the mesh of devices that it spreads over. Every device trains its
# own clients; only sums travel between devices. Here four CPU devices stand in for four TPU cores: the program is the same.

# %%
# Installs the package where it is missing, as on Colab. SOURCE is the repository: its folder, which you upload there,
# or "git+https://..." with its address.
import importlib.util
import os
import subprocess
import sys

SOURCE = os.environ.get("FEDJAX_DG_SOURCE", "..")
if importlib.util.find_spec("fedjax_dg") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", SOURCE], check=True)

# %% [markdown]
# CPU devices are made before JAX starts. On a TPU or a GPU this line changes nothing that matters: the mesh is made of what
# `jax.devices()` has.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 4)

import numpy as np

import fedjax_dg as fdg

print(jax.devices())

# %% [markdown]
# ## A mesh for a federation
#
# `mesh_for` takes as many devices as stations x clients divide among evenly; stations go first, as a station on one device
# merges its clients without talking. Give the mesh to `federate` and to `make_round`, and nothing else changes.

# %%
domains = fdg.datasets.load("emoji_styles")
sizes = {"stations": 4, "clients_per_station": 2, "station_rounds": 2, "local_steps": 4}
topology = fdg.Topology(**sizes)
mesh = fdg.sharding.mesh_for(topology)
print(fdg.sharding.describe(mesh))

backbone = fdg.backbones.lenet5(num_classes=len(domains.class_names))
algorithm = fdg.algorithms.fedprox()
key = jax.random.key(0)


def train(mesh):
    """Three rounds in one program: the federation, the program, and the state and losses that it returns."""
    federation = fdg.federate(domains, held_out="noto", mesh=mesh, **sizes)
    round_fn = fdg.make_round(backbone, algorithm, federation.topology, mesh=mesh)
    start = round_fn.init(key)
    program = round_fn.block.lower(start, federation.data, key, length=3).compile()
    state, info = program(start, federation.data, key)
    return federation, program, state, info.metrics["loss"].mean((1, 2))


federation, program, state, losses = train(mesh)
print("mean loss of all clients, round by round:", *(f"{loss:.4f}" for loss in losses))

# %% [markdown]
# ## Who holds what
#
# Images stay on the device of their client from the first round to the last. The server's model is on every device.

# %%
images = federation.clients.inputs  # [stations, clients, examples, height, width, channels]
for part in images.addressable_shards:
    stations, clients = (range(*part.index[axis].indices(images.shape[axis])) for axis in (0, 1))
    print(f"{part.device}: stations {list(stations)}, clients {list(clients)}, {part.data.nbytes / 2**20:.1f} MiB")

# %% [markdown]
# ## What travels
#
# Read off the compiled program: all-reduces, which are sums, and nothing else. No image and no client's own model leaves a
# device.

# %%
print(fdg.sharding.collectives(program))
assert set(fdg.sharding.collectives(program)) == {"all-reduce"}

# %% [markdown]
# ## The same numbers as on one device
#
# But for the order in which sums are made, which is rounding.

# %%
_, _, alone, losses = train(None)
print("mean loss of all clients, round by round:", *(f"{loss:.4f}" for loss in losses))
apart = max(
    float(np.abs(np.asarray(a) - np.asarray(b)).max())
    for a, b in zip(jax.tree.leaves(state.variables), jax.tree.leaves(alone.variables))
)
print(f"largest difference between any two parameters after 3 rounds: {apart:.1e}")
assert apart < 1e-3

# %% [markdown]
# ## On a TPU
#
# - **Colab or a single host** (v2-8, v5e-8, ...): run this notebook. All cores are in `jax.devices()`; choose stations and
#   clients so that their product is a multiple of the number of cores.
# - **A pod slice**: the same program runs in every host's process. In Python call `fdg.sharding.start()` first; on the
#   command line it is
#
#   ```
#   fedjax-dg run --distributed --stations 16 --clients-per-station 16
#   ```
#
#   which also works in a Slurm job. The first process writes the run folder. `experiments/launch` has scripts.
# - `fdg.backbones.in_precision(backbone, "bfloat16")` computes layers in half precision; parameters, Grams and solves stay
#   float32.
# - On CPU, `fedjax-dg run --cpu-devices 4` is what this notebook did.
#
# We have run rounds on CPU devices and compiled them for TPU pods; nothing has been timed on a TPU yet.
