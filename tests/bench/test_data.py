"""`python -m bench.data` compares like with like."""

import json

from bench import data


def test_both_make_the_same_tokens(tmp_path, capsys):
    """Catches a comparison of two texts, or of a command that failed at once."""
    found = data.tokenizing(str(tmp_path), 3)
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    splits = manifest["splits"].values()
    assert found["made"] == sum(split["tokens"] - split["documents"] for split in splits)
    assert sum(split["text_bytes"] for split in splits) >= 3 * 2**20 - 12 and len(manifest["units"]) == 2
    assert found["alone_s"] > 0 and found["prepare_s"] > 0
    assert data.made(found).startswith(f"{found['made']:,} tokens made of text\ntiktoken alone ")
