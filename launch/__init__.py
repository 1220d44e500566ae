"""Start a command on many hosts over ssh, watch over it there, and ask how it is doing.

Open `launcher.py` first: the commands that people type. `hosts.py` asks hosts, all at once. `agent.py` answers
on a host, and `supervisor.py` watches over a run there; both are sent over ssh each time. `panes.py` shows all hosts in
tmux. They use nothing but the standard library of Python 3.9, because a host has nothing of ours before it is asked.

From outside: nothing. `launcher.sh`, `setup_tpu.sh` and `debug_tpu.sh` start them.
"""
