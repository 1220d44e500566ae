"""Text to token shards: documents from a source, tokens from a tokenizer, shards and a manifest on disk.

Open `prepare.py` first: it is the command, `python -m data.prepare`. `sources.py` finds documents, `tokenizers.py`
turns them into ids. What reads the shards is `dataset.py`, at the root.

From outside: `tokenizers.load`, `tokenizers.of`, `prepare.prepare`, and `prepare.from_ids` for arrays of ids.
"""
