"""Weights to and from Hugging Face, bit for bit, and those of a run alone.

Open `families.py` first: one table for each family of models, read in both directions. `convert.py` follows a table,
one tensor at a time, and opens the parameters of a run; `folders.py` is what lies on disk or in a bucket. `slim.py`
writes a run's parameters alone, `card.py` the README.md beside them. `python -m weights` is the command. `init_from.py`
starts a run from another's parameters.

From outside: `init_from`; `convert.load_params` and `convert.load_weights`; `folders.Folder`; `families.register`, for
a table of one's own.
"""
