"""Tokenize text: read documents from a source, and write token shards and a manifest.

Open `prepare.py` first: it is `python -m data.prepare`. `sources.py` lists documents, in files (`files.py`) or in
a data set of the Hugging Face hub (`hub.py`), and splits them into units of work. `tokenizers.py` turns text into ids;
it also reads a tokenizer.json (`hf_json.py`) and a SentencePiece model (`sp_model.py`). `units.py` does the work of one
unit, `engine.py` distributes units over processes, and `shards.py` defines the files.
`check.py`, `train_tokenizer.py` and `tasks.py` are commands too; a task turns a source into training examples.
`dataset.py`, at the root, reads the shards, with the files of `reading/`.

From outside: `tokenizers.load`, `tokenizers.from_manifest`, `prepare.prepare`, `prepare.from_ids` for arrays of ids,
`tasks.add` and `tasks.rows` for examples. `weights/` uses `files`.
"""
