"""Every test runs with the jaxtyping annotations of the library turned into checks."""

import jax
import pytest
from jaxtyping import install_import_hook

# no module of the package is imported above: the hook sees them all
install_import_hook("fedjax_dg", "beartype.beartype")


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Hundreds of compiled programs in one process end in a crash of XLA's own compiler: let go of a module's when it ends."""
    yield
    jax.clear_caches()
