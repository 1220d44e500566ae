"""Start a command on many hosts over ssh, supervise it on each host, and report its state.

Open `launcher.py` first: it implements the commands that users type. `hosts.py` sends requests to all hosts in
parallel. On a host, `agent.py` answers them, `supervisor.py` watches a run, and `machine.py` describes the machine; all
three are sent over ssh with every request. `panes.py` shows all hosts in tmux. The package uses only the standard
library of Python 3.9, because a new host has none of the project's packages.

From outside: nothing; no other package imports this one. `launcher.sh`, `setup_tpu.sh` and `debug_tpu.sh` start it.
"""
