# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Start here
#
# Three art styles of the same icons are spread over clients that never show their images to anyone. Can the model that they
# train together read a fourth style, which nobody trained on? We train twice, with plain averaging and with HFedATM at the
# server, and compare. It takes less than a minute on one core; on a GPU or a TPU nothing changes but the time.

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
import jax
import matplotlib.pyplot as plt
import numpy as np

import fedjax_dg as fdg

print(f"fedjax_dg {fdg.__version__} on {jax.devices()[0].device_kind}")

# %% [markdown]
# ## The data
#
# `emoji_styles` comes with the package: 1,021 icons in four styles, 32 x 32 pixels, six classes. Each style is a *domain*.

# %%
domains = fdg.datasets.load("emoji_styles")
print(f"{len(domains.labels):,} images, classes: {', '.join(domains.class_names)}")

figure, panels = plt.subplots(4, 8, figsize=(6.4, 3.6), dpi=72)
for row, (style, axes) in enumerate(zip(domains.domain_names, panels)):
    here = np.flatnonzero(domains.domain == row)
    for panel, example in zip(axes, here[:: len(here) // 8]):
        panel.imshow(domains.inputs[example])
        panel.set_axis_off()
    axes[0].set_title(style, fontsize=9, loc="left")
plt.show()

# %% [markdown]
# ## The federation
#
# Three *stations* with two *clients* each. The line-art style `fluent_mono` is *held out*: no client has any of it. With
# `domain_mix=0` a client has one style only; with 1 every client has the same mixture of all.

# %%
federation = fdg.federate(
    domains,
    held_out="fluent_mono",
    stations=3,
    clients_per_station=2,
    domain_mix=0.0,
    station_rounds=2,  # how often clients and their station agree before the stations meet at the server
    local_steps=12,  # gradient steps of a client in between
    seed=0,
)
print("examples by station, client and domain", federation.domain_names)
print(federation.counts())

# %% [markdown]
# ## Training
#
# A round goes clients -> stations -> server and back. What clients do (an *algorithm*) and how models become one (an
# *aggregator*) are chosen apart. The round is one compiled program; `run` calls it round after round and evaluates.

# %%
key = jax.random.key(0)
backbone = fdg.backbones.lenet5(num_classes=len(domains.class_names))
algorithm = fdg.algorithms.fedavg(fdg.algorithms.FedAvgHparams(client_lr=0.05))
rules = {"averaging": fdg.aggregators.mean(), "HFedATM": fdg.aggregators.hfedatm(alpha=0.75)}
histories = {}
for name, rule in rules.items():
    round_fn = fdg.make_round(backbone, algorithm, federation.topology, to_server=rule)
    _, histories[name] = fdg.run(round_fn, round_fn.init(key), federation, rounds=8, key=key, progress=True)

# %% [markdown]
# ## Which model would you have chosen?
#
# Nobody may look at the held-out style to choose a round. So the round is chosen by validation examples of the *source*
# styles (`source_accuracy`), and the accuracy on the held-out style is read off there.

# %%
labels = domains.labels[domains.domain == domains.domain_names.index("fluent_mono")]
print(f"{'server rule':<12} {'round':>5} {'sources, %':>11} {'held out, %':>12}")
for name, history in histories.items():
    best = max(history, key=lambda record: record["source_accuracy"])
    print(f"{name:<12} {best['round']:>5} {100 * best['source_accuracy']:>11.1f} {100 * best['accuracy']:>12.1f}")
print(f"always answering the commonest class: {100 * np.bincount(labels).max() / len(labels):.1f} %")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for number, (name, history) in enumerate(histories.items()):
    rounds = [record["round"] for record in history]
    for axes, score in ((left, "source_accuracy"), (right, "accuracy")):
        values = [100 * record[score] for record in history]
        axes.plot(rounds, values, marker="os"[number], color=("#0072B2", "#D55E00")[number], label=name)
for axes, title in ((left, "source styles, validation examples"), (right, "fluent_mono, held out")):
    axes.set(title=title, xlabel="server round")
    axes.grid(alpha=0.3)
left.set_ylabel("accuracy, %")
left.legend()
plt.show()

# %% [markdown]
# One seed and eight rounds decide nothing: seeds differ by more than the two rules do. The whole comparison, with
# three seeds, intervals and a folder that can be resumed, is one command:
#
# ```
# fedjax-dg run --held-out all
# ```
#
# Next: `your_own_algorithm`, `sweep`, `many_devices`.
