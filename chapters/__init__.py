"""The guide: one program a chapter, read as a page, run as `python -m chapters.03_fsdp`, opened as a notebook.

Open `00_machine.py` first. `lesson.py` is what all chapters share: predictions, checkers, pictures.
`python -m chapters` runs them all.
"""
