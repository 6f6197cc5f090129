# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Your own algorithm
#
# A client method is mostly a loss. We write one that is not in the library, a *confidence penalty*: clients are rewarded for
# predictions that stay unsure (Pereyra et al. 2017, https://arxiv.org/abs/1701.06548). Then HFedATM merges what they train,
# without knowing of it, and a check says that with strength 0 the method is FedAvg.

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

# %%
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import ArrayLike

import fedjax_dg as fdg
from fedjax_dg.algorithms.common import classify, gradient_method, masked_mean, momentum

# %% [markdown]
# ## The method, whole
#
# - Hyper-parameters are a `NamedTuple` of numbers, so that they can be swept by `vmap`; one of them is `client_lr`.
# - The loss gets the network, the parameters that it is differentiated by, what the client received, its own state, a batch
#   and a key. A batch has padding, which `batch.mask` marks: losses are *masked* means.
# - It returns its value, the forward pass and whatever should be logged.
# - `gradient_method` makes an algorithm of it: local steps, an optimizer, nothing more to upload than the model.


# %%
class ConfidencePenaltyHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    strength: ArrayLike = 0.5  # of the reward for unsure predictions


def confidence_penalty(hparams=ConfidencePenaltyHparams(), optimizer=momentum):
    """FedAvg with the loss: cross-entropy - strength * mean entropy of the predictions. Upload: the model."""

    def loss(backbone, params, received, local, batch, key):
        value, forward = classify(backbone, params, local, batch, key)
        logs = jax.nn.log_softmax(forward.logits)
        entropy = masked_mean(-(jnp.exp(logs) * logs).sum(-1), batch.mask)
        return value - hparams.strength * entropy, (forward, {"entropy": entropy})

    return gradient_method(loss, optimizer(hparams.client_lr))


# %% [markdown]
# ## A check before any table: strength 0 is FedAvg
#
# A method that can be switched off must then be the method that it extends. One round of each, from the same start:

# %%
domains = fdg.datasets.load("emoji_styles")
sizes = {"stations": 3, "clients_per_station": 2, "station_rounds": 2, "local_steps": 12}
federation = fdg.federate(domains, held_out="fluent_mono", **sizes)
backbone = fdg.backbones.lenet5(num_classes=len(domains.class_names))
key = jax.random.key(0)


def one_round(algorithm):
    round_fn = fdg.make_round(backbone, algorithm, federation.topology)
    state, _ = jax.jit(round_fn.step)(round_fn.init(key), federation.data, key)
    return state.variables


switched_off = one_round(confidence_penalty(ConfidencePenaltyHparams(client_lr=0.05, strength=0.0)))
fedavg = one_round(fdg.algorithms.fedavg(fdg.algorithms.FedAvgHparams(client_lr=0.05)))
apart = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(switched_off), jax.tree.leaves(fedavg)))
print(f"largest difference between any two parameters: {apart:.1e}")
assert apart < 1e-5

# %% [markdown]
# ## With HFedATM at the server
#
# Any algorithm goes with any aggregator. A round is a pure function and the strength is a number in it, so the whole
# training is a function of the strength: it is compiled once and run for both settings. (`fdg.run` does one setting, with a
# progress bar; `fdg.sweep` does many.)

# %%
strengths = (0.0, 0.5)


def train(strength):
    algorithm = confidence_penalty(ConfidencePenaltyHparams(client_lr=0.05, strength=strength))
    round_fn = fdg.make_round(backbone, algorithm, federation.topology, to_server=fdg.aggregators.hfedatm())

    def one_round(state, _):
        state, info = round_fn.step(state, federation.data, key)
        return state, info.metrics["entropy"].mean()  # what the loss returned, a number for every client

    state, entropies = jax.lax.scan(one_round, round_fn.init(key), length=6)
    return state.variables, entropies


models, entropies = jax.jit(lambda values: jax.lax.map(train, values))(jnp.array(strengths))
for strength, by_round in zip(strengths, entropies):
    print(f"strength {strength}: entropy of clients' predictions by round", *(f"{x:.2f}" for x in by_round))

# %%
held_out = domains.domain == domains.domain_names.index("fluent_mono")
logits = jax.jit(jax.vmap(backbone.apply, (0, None)))(models, jnp.asarray(domains.inputs[held_out]))
predictions = dict(zip(strengths, np.asarray(jax.nn.softmax(logits))))
labels = domains.labels[held_out]

# %%
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for number, (strength, probabilities) in enumerate(predictions.items()):
    right = (probabilities.argmax(-1) == labels).mean()
    sure = probabilities.max(-1)
    title = f"strength {strength}: {100 * right:.1f} % right, {100 * sure.mean():.1f} % sure"
    axes.hist(sure, np.linspace(0, 1, 31), alpha=0.6, color=("#0072B2", "#D55E00")[number], label=title)
axes.set(xlabel="how sure the model is of its answer on the held-out style", ylabel="icons")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# The penalty makes the model less sure of itself on a style that it has never seen; whether it is also right more often
# takes more seeds and rounds than these to say.
#
# To keep it: put the method into `fedjax_dg/algorithms/confidence_penalty.py` and its name into `ALGORITHMS`. Then it is on
# the command line (`--algorithm confidence_penalty --set strength=0.2`), and `tests/contract` runs over it: padding is never
# read, a run goes on from a checkpoint to the same bits, devices do not matter. The page "How to add an algorithm" of the
# documentation goes on from here.
