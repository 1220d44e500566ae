"""The message board of a run's processes: the key-value store of `jax.distributed`, which process 0 hosts.

    axis/message/3      what process 3 reports about itself: a `Message`, sent again with every heartbeat
    axis/value/NAME/3   a value that process 3 sends once, under the name NAME

Both are stored as JSON. A process that trains alone has its own local store.
"""

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable


@dataclasses.dataclass
class Message:
    """What a process reports about itself."""

    host: str
    heartbeat: int = 0  # increases with every message, which shows that the process is alive
    step: int = 0  # the latest step that it has started
    ready: bool = False  # whether it is ready to start the training loop
    stop: bool = False  # whether it was asked to stop, or has read that another process was
    by: str = ""  # who asked it to stop: the "user", or the "system" if its host is preempted; "": nobody
    stopped: bool = False  # whether it exits before the run is complete, because a process was asked to stop
    last_step: int = -1  # the last step that it may start; fixed once `stop` is true
    saved: int | None = None  # only from process 0: the step of the latest checkpoint, or 0 without one; None: unknown
    matmuls_ms: list[float] = dataclasses.field(default_factory=list)  # the last two times of `pace.Pace.measure`
    stuck: bool = False  # whether it has finished no step for hang_timeout_s
    where: str = ""  # what its main thread is doing, if a process is stuck
    ended: bool = False
    status: int = 0  # its exit status
    why: str = ""  # the reason for a nonzero status


class LocalStore(dict):
    """The store of a process that trains alone, with the two methods of a jax.distributed client that `Board` uses."""

    def key_value_set(self, key: str, text: str, allow_overwrite: bool) -> None:
        self[key] = text

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, text) for key, text in [*self.items()] if key.rpartition("/")[0] == folder]


class Board:
    """The message board, as used by process `rank` of `count`: it sends its own message and values, and reads all."""

    POLL_S = 0.5

    def __init__(self, rank: int, count: int, store):
        self.rank, self.count, self.store, self.lock = rank, count, store, threading.RLock()
        self.message = Message(os.environ.get("AXIS_HOST") or socket.gethostname())
        self.messages: dict[int, Message] = {}  # {rank: message}, as last read

    def process_name(self, rank: int) -> str:
        host = self.messages[rank].host if rank in self.messages else "an unknown host"
        return f"process {rank} on {host}"

    def write(self, folder: str, value) -> None:
        self.store.key_value_set(f"axis/{folder}/{self.rank}", json.dumps(value), allow_overwrite=True)

    def values(self, folder: str) -> dict[int, object]:
        """Return {rank: value} for the processes that have written to a folder."""
        entries = self.store.key_value_dir_get(f"axis/{folder}")
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}

    def send(self) -> None:
        """Send this process's message, which also counts as a heartbeat."""
        with self.lock:
            self.message.heartbeat += 1
            self.write("message", dataclasses.asdict(self.message))

    def read(self) -> dict[int, Message]:
        return {rank: Message(**fields) for rank, fields in self.values("message").items()}

    def wait(self, condition: Callable[[list[Message]], bool]) -> list[Message]:
        """Wait until all processes have sent messages that together satisfy a condition; return the messages."""
        while len(messages := self.read()) < self.count or not condition([*messages.values()]):
            time.sleep(self.POLL_S / 10)
        return [*messages.values()]

    def gather(self, name: str, value) -> list:
        """Send a value under a name, wait until all processes have done so, and return their values in rank order."""
        self.write(f"value/{name}", value)
        while len(values := self.values(f"value/{name}")) < self.count:
            time.sleep(self.POLL_S / 5)
        return [values[rank] for rank in range(self.count)]

    def call_on_first(self, name: str, function: Callable):
        """Call function() only on process 0, and return the result, which must be valid JSON, on every process."""
        if self.rank == 0:
            self.write(f"value/{name}", value := function())
            return value
        while not (values := self.values(f"value/{name}")):
            time.sleep(self.POLL_S / 5)
        return values[0]
