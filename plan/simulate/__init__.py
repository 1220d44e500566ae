"""Simulate how long a compiled TPU program takes, from its text.

Open `simulator.py` first: `replay` runs the instructions of a program in the compiler's order. `replayed.py` gives it a
chip, the places of the devices and the pipeline schedule. `moved.py` counts memory traffic; `live.py` estimates peak
memory.

From outside: `replayed`, and `simulator.replay`.
"""
