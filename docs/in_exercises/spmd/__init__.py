"""JAX for the exercises of the site: programs on emulated devices, in plain Python. Open `arrays.py` first."""
