"""`python -m bench.data` tokenizes the same text with both programs."""

import json

from bench import data


def test_both_programs_produce_the_same_tokens(tmp_path, capsys):
    """Catches a comparison on two different texts, or with a command that failed immediately."""
    found = data.time_tokenizing(str(tmp_path), 3)
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    splits = manifest["splits"].values()
    assert found["made"] == sum(split["tokens"] - split["documents"] for split in splits)
    assert sum(split["text_bytes"] for split in splits) >= 3 * 2**20 - 12 and len(manifest["units"]) == 2
    assert found["alone_s"] > 0 and found["prepare_s"] > 0
    assert data.tokenizing_table(found).startswith(
        f"{found['made']:,} tokens from text, in CPU seconds\ntiktoken alone "
    )
