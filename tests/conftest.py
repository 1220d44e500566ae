"""What every test stands on: 8 simulated CPU devices, runs on one of them whose programs are kept, no network."""

import os
import socket

import hypothesis

import utils

utils.simulate_devices(8)
# Settings that processes started by a test inherit; what is kept between runs is kept outside the checkout.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(utils.cache_directory(), "hypothesis"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(utils.cache_directory(), "tests"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, so that a commit passes or does not. No deadline: the first example compiles.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None)
hypothesis.settings.load_profile("house")

_connect = socket.socket.connect


def _connect_to_this_machine(self, address):
    if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
        raise OSError(f"tests have no network; something connects to {address[0]}:{address[1]}")
    return _connect(self, address)


socket.socket.connect = _connect_to_this_machine
