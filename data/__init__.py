"""Tokenize text: read documents from a source, and write token shards and a manifest.

Open `prepare.py` first: it is `python -m data.prepare`. `sources.py` lists documents, in files (`files.py`) or in
a data set of the Hugging Face hub (`hub.py`), and splits them into units of work. `tokenizers.py` turns text into ids;
it also reads a tokenizer.json (`hf_json.py`) and a SentencePiece model (`sp_model.py`). `units.py` does the work of one
unit, `engine.py` distributes units over processes, and `shards.py` defines the files.
`check.py`, `train_tokenizer.py` and `tasks.py` are commands too; a task turns a source into training examples.
`dataset.py`, at the root, reads the shards. It uses `order.py` for the order of rows, `packing.py` to pack whole
documents into rows, and `bucket.py` to download the parts of remote shards that a host needs. `objectives.py` divides
a text into inputs and targets, `examples.py` makes the examples of a row, and `features.py` makes batches of them.

From outside: `tokenizers.load`, `tokenizers.from_manifest`, `prepare.prepare`, `prepare.from_ids` for arrays of ids,
`tasks.add`, `tasks.rows` for examples, and `features.encoder_ids` for what an encoder reads. `weights/` uses `files`;
`dataset.py` and `train/` use `order`, `packing`, `bucket`, `objectives`, `features` and `examples`.
"""
