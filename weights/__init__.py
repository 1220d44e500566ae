"""Weights to and from Hugging Face, bit for bit.

Open `families.py` first: one table for each family of models, read in both directions. `convert.py` follows a table,
one tensor at a time; `gptj.py` is a family whose blocks `model.py` does not have. `python -m weights` is the command.

From outside: `convert.read_config` and `convert.load_weights`; `families.register`, for a table of one's own.
"""
