# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A sweep
#
# Hyper-parameters are numbers inside the compiled round, so a sweep is one program, compiled once, that trains many
# settings. Here nine settings of FedProx, each over two seeds, and then the question that decides a table: by which rule was
# the setting chosen?

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
import matplotlib.pyplot as plt
import numpy as np

import fedjax_dg as fdg

# %% [markdown]
# ## What is the same for all settings
#
# A `RunConfig` is what `fedjax-dg run` takes, in snake case. Seeds draw the partition, the start and the batches; every
# setting meets the same ones, so settings are compared on equal terms.

# %%
config = fdg.RunConfig(
    dataset="emoji_styles",
    examples_per_domain=300,
    held_out="fluent_mono",
    algorithm="fedprox",
    aggregator="mean",
    stations=3,
    clients_per_station=2,
    rounds=5,
    station_rounds=2,
    local_steps=8,
    batch_size=16,
    seeds=2,
)

# %% [markdown]
# ## What is swept
#
# The names are those of `--set` and of the options. Traced numbers (`client_lr`, `mu`) share one compiled program; an option
# that changes shapes or code (`backbone`, `algorithm`) would get a program of its own.

# %%
found = fdg.sweep(config, grid={"client_lr": [0.01, 0.03, 0.1], "mu": [0.0, 0.1, 1.0]})
print(f"{len(found.settings)} settings, {len(found.cells)} runs, of programs compiled in", end=" ")
print(*sorted({cell["compile_seconds"] for cell in found.cells}), "s")
print("the run folder:", *sorted(path.name for path in found.folder.iterdir()))

# %% [markdown]
# ## The table
#
# One line: for every seed the setting that the *source* domains' validation examples prefer, as nobody may look at the
# held-out domain. With `selection="oracle"` one does look: the number that nobody has in practice.

# %%
print(found.table())
print(found.table(selection="oracle"))

# %% [markdown]
# All settings, for an appendix, in any of the formats `text`, `md`, `latex`, `csv`:

# %%
print(found.table(settings="all", format="md"))

# %% [markdown]
# ## The numbers as an array
#
# `scores` is [server rule, setting, held-out domain, seed], and `axes` says what the places stand for.

# %%
scores = {name: found.scores(name)[0, :, 0].mean(-1) for name in ("source_accuracy", "accuracy")}
rates = sorted({setting["client_lr"] for setting in found.settings})
weights = sorted({setting["mu"] for setting in found.settings})
figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
titles = "validation examples of the sources", "held-out style"
for axes, title, values in zip(panels, titles, scores.values()):
    grid = np.full((len(rates), len(weights)), np.nan)
    for setting, value in zip(found.settings, values):
        grid[rates.index(setting["client_lr"]), weights.index(setting["mu"])] = 100 * value
    axes.imshow(grid, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        light = value < (np.nanmin(grid) + np.nanmax(grid)) / 2
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", color="white" if light else "black")
    axes.set_xticks(range(len(weights)), weights)
    axes.set_yticks(range(len(rates)), rates)
    axes.set(title=f"accuracy on the {title}, %", xlabel="mu", ylabel="client_lr")
plt.show()

# %% [markdown]
# ## On the command line
#
# The same sweep is a file; `[sweep.list]` pairs values instead of crossing them, `[sweep.random]` draws them.
#
# ```toml
# [run]
# algorithm = "fedprox"
# aggregator = "mean"
#
# [sweep.grid]
# client_lr = [0.01, 0.03, 0.1]
# mu = [0.0, 0.1, 1.0]
# ```
#
# ```
# fedjax-dg sweep --config S.toml --out runs/sweep
# fedjax-dg table runs/sweep --selection oracle --format latex
# ```
