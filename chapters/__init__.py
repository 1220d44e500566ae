"""The guide. Each chapter is a page, a notebook, and a program: `python -m chapters.03_fsdp`.

Open `00_machine.py` first. `lesson.py` has the code that all chapters share: predictions, checkers and pictures.
`python -m chapters` runs them all.
"""
