@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_library_is_a_source(tmp_path, streaming):
    """Catches a data set that is taken for a list of texts, one that only the first split reads, and lost fields."""
    import datasets

    rows = [{"question": f"{n}?", "reply": f"{n}!", "n": n} for n in range(60)]
    source = datasets.Dataset.from_list(rows)
    source = source.to_iterable_dataset() if streaming else source
    task = tasks.Task("own", "", source, (tasks.rekey(prompt="question", answer="reply"),), val_share=0.3)
    found = {split: [*tasks.documents(task, split)] for split in tasks.SPLITS}
    assert all(found.values())
    assert sorted(one["answer"] for both in found.values() for one in both) == sorted(row["reply"] for row in rows)
    manifest = prepare.from_texts(source, str(tmp_path / "out"), text_field="reply", val_share=0.3)
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(rows)
