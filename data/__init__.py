"""Text to token shards: documents from a source, tokens from a tokenizer, shards and a manifest on disk.

Open `prepare.py` first: it is the command, `python -m data.prepare`. `sources.py` finds documents, in files wherever
they lie (`files.py`) or in a data set of the Hugging Face hub (`hub.py`), and cuts them into units of work;
`tokenizers.py` turns text into ids, also by a tokenizer.json (`hf_json.py`) or a SentencePiece model (`sp_model.py`).
`units.py` is the work, `engine.py` who does it, `progress.py` how far it has come, `shards.py` what is then on disk.
`check.py` and `train_tokenizer.py` are commands too. `tasks.py` keeps, by name, ways from a source to examples. What
reads the shards is `dataset.py`, at the root. For it, `order.py` says which row comes when, `packing.py` puts whole
documents into rows, and `bucket.py` fetches what a host needs of shards that are not on its disk.

From outside: `tokenizers.load`, `tokenizers.from_manifest`, `prepare.prepare`, and `prepare.from_ids` for arrays
of ids; `tasks.add`, and `tasks.rows` for examples; `files`, for `weights/`;
`order`, `packing` and `bucket`, for `dataset.py` and `train/`.
"""
