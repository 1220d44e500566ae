"""Read a program: from its trace, or compiled for devices that are not attached.

Open `program.py` first: `read` traces any JAX program and adds up the costs of its operations. `rows.py` walks the
trace and lists them. `compiled.py` compiles a training step, and counts its memory and collectives. `user_file.py`
imports a user's file.

From outside: `compiled`, and `program.abstract_mesh`.
"""
