"""The guide. Each chapter is a page, a notebook, and a program: `python -m chapters.03_fsdp`.

Open `00_machine.py` first. `lesson.py` has the code that all chapters share: predictions, checkers and pictures;
`opening.py` draws the figure at the top of each. `four_hosts.py` simulates the hosts of chapter 13, and `tpu_step.py` has
the step of chapter 16 for a TPU. With `folded.py`, a notebook loads the checkers of its exercises.
`python -m chapters` runs them all.
"""
