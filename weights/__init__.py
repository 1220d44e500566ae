"""Convert weights to and from Hugging Face, bit for bit, and export a run's parameters without optimizer state.

Open `families.py` first: it has one table per family of models, which maps tensor names and layouts in both directions.
`layouts.py` applies a table to a tensor. `hf_config.py` converts a config.json, and `published.py` reads one for the
planner. `convert.py` converts a folder, one tensor at a time, and opens or exports a run's parameters. `folders.py`
reads and writes folders, and `card.py` their README.md. `python -m weights` is the command. `init_from.py` starts a run
from the parameters of another run.

From outside: `init_from`; `convert.load_params` and `convert.load_weights`; `folders.Folder`; `families.register`,
which adds your own table; `published.read`.
"""
