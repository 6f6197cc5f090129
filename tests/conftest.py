"""Every test runs with the jaxtyping annotations of the library turned into checks."""

import os

# several devices for what spreads over a mesh, also in processes that tests start: how many there are decides how XLA
# divides a product among threads, and so its rounding; everything else uses the first
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_enable_compilation_cache", False)  # the command line turns it on

# no module of the package is imported above: the hook sees them all
install_import_hook("fedjax_dg", "beartype.beartype")


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(scope="module")
def quick_compilation():
    """Most of XLA's optimizations left out: half the time to compile, the same programs."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="module")
def free_programs():
    """Let go of a module's compiled programs when it ends: with many hundreds in a process, XLA's compiler crashes."""
    yield
    jax.clear_caches()
