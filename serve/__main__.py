"""`python -m serve runs/laptop`: answer completions and chat completions, as OpenAI's clients ask for them."""

import asyncio
import contextlib
import dataclasses
import ipaddress
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import generate
from config import Count, MeshConfig, MeshFlag, Positive, Size, check
from devices import use_devices
from errors import UserError, exit_status


@dataclass(frozen=True)
class Arguments:
    """Serve a trained model over HTTP."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]  # directory of a run, e.g. runs/laptop
    step: str = ""  # checkpoint to read: its number, or best, of the lowest validation loss; empty: the newest
    tokenizer: str = ""  # for a run that knows none: a tokenizer.json, a file of ranks, or bytes
    host: str = "127.0.0.1"  # address to listen at; one that others reach needs --api_key_file
    port: Count = 8000  # port to listen at; 0: any that is free
    api_key_file: str = ""  # file of the key that clients send as `Authorization: Bearer KEY`; empty: no key
    slots: Size = 8  # texts that are written at a time
    context: Count = 0  # most tokens of a prompt and its text; 0: data.seq_len of the run, which is the most there is
    piece: Size = 64  # tokens of a prompt that are read at once
    queue: Count = 64  # texts that may wait for a slot; beyond them, clients are told to come again (429)
    timeout_s: Positive = 600.0  # longest that a request may take, its wait included
    # devices along each of data, stage, fsdp, expert, context, tensor
    mesh: MeshFlag = dataclasses.field(default_factory=MeshConfig)
    devices: Count = 0  # simulate this many CPU devices; 0: work on those there are


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that clients may knock at. Raises: UserError if there is no such address, or another has it."""
    if port > 65535:
        raise UserError(f"port={port}: must be at most 65535; 0 takes any that is free")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        why = error.strerror.partition(" (while")[0]
        raise UserError(f"cannot listen at {host}:{port}: {why}; --port 0 takes any port that is free") from error


def read_key(args: Arguments) -> str:
    """Raises: UserError for a file without a key, and for no file where others than this machine could come."""
    if args.api_key_file:
        if not (key := Path(args.api_key_file).read_text().strip()):
            raise UserError(f"{args.api_key_file}: no key in it; write one line, e.g. of `openssl rand -hex 32`")
        return key
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(args.host).is_loopback:
            return ""
    if args.host != "localhost":
        raise UserError(f"--host {args.host}: others may reach it; give --api_key_file FILE, or --host 127.0.0.1")
    return ""


def load(args: Arguments):
    """The model, and an engine that is compiled. Raises: UserError."""
    from serve import worker

    sampler = generate.load(args.run, args.mesh, tokenizer=args.tokenizer, step=args.step)
    seq_len = sampler.cfg.data.seq_len
    if args.context > seq_len:
        raise UserError(f"context={args.context}: the model was trained with data.seq_len={seq_len}; give at most that")
    engine = sampler.engine(args.slots, args.context or seq_len, args.piece)
    begin = time.perf_counter()
    worker.compile(sampler, engine)
    print(f"compiled   in {time.perf_counter() - begin:.1f} s: mesh {args.mesh}, {len(engine.slots)} slots of "
          f"{engine.context} tokens", flush=True)  # fmt: skip
    return sampler, engine


HELP = """\
e.g. python -m serve runs/laptop
     python -m serve runs/laptop --mesh tensor=4 --slots 32

Serve a trained model over HTTP, as OpenAI's clients ask for it: /v1/completions, /v1/chat/completions."""


@exit_status
def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Arguments, args=argv, prog="python -m serve", description=HELP, use_underscores=True)
    check(args)
    api_key = read_key(args)
    try:
        from serve import lifetime, template
    except ModuleNotFoundError as error:
        raise UserError(f"{error}; install it with: make extra-serve") from error
    use_devices(args.devices)
    with open_socket(args.host, args.port) as knock:
        sampler, engine = load(args)
        beside = [str(Path(args.tokenizer).parent)] if Path(args.tokenizer).is_file() else []
        found = (
            template.find_template(args.run, *beside) if hasattr(sampler.encoding, "encode") else None
        )  # not SentencePiece
        served = lifetime.ServedModel(Path(args.run).resolve().name, sampler.encoding, engine.context, found)
        return asyncio.run(lifetime.run(knock, served, engine, args.queue, api_key, args.timeout_s))


if __name__ == "__main__":
    sys.exit(main())
