"""Text to token shards: documents from a source, tokens from a tokenizer, shards and a manifest on disk."""
