"""What `main.py` does before the first step.

Open `preflight.py` first: it checks a run before it starts. `start.py` builds or restores its state.

From outside: only `main.py`.
"""
