"""Chips and links: what devices compute, store and send per second.

Open `hardware.py` first: it lists chips and links with their sources, and `layout` gives the links of each mesh axis.
`links.py` routes messages through a torus, `hiding.py` lists which communication overlaps with compute, `constants.py`
reads the constants of your own run, and `units.py` formats numbers.

From outside: the tables and `Topology` of `hardware`.
"""
