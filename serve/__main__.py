"""`python -m serve runs/laptop`: serve a trained model over HTTP with OpenAI's protocol."""

import asyncio
import contextlib
import ipaddress
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

import generate
from config import Count, Positive, Size, check
from devices import use_devices
from generate.request import RunArguments
from utils import UserError, exit_status


@dataclass(frozen=True)
class Arguments(RunArguments):
    """Serve a trained model over HTTP."""

    host: str = "127.0.0.1"  # address to listen on; addresses other than loopback need --api_key_file
    port: Count = 8000  # port to listen on; 0: any free port
    api_key_file: str = ""  # file with the key that clients send as `Authorization: Bearer KEY`; empty: no key
    cors: str = ""  # origin of a web page that may use the server, e.g. http://localhost:5173; empty: only its own page
    slots: Size = 8  # number of texts generated at the same time
    context: Count = 0  # maximum tokens of a prompt and its text; 0: data.seq_len of the run, which is the limit
    piece: Size = 64  # prompt tokens per prefill chunk
    queue: Count = 64  # texts that may wait for a slot; when it is full, clients get 429 and retry
    timeout_s: Positive = 600.0  # maximum duration of a request in seconds, including its wait


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises: UserError if the address does not exist or is in use."""
    if port > 65535:
        raise UserError(f"port={port}: must be at most 65535; 0 uses any free port")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        why = error.strerror.partition(" (while")[0]
        raise UserError(f"cannot listen on {host}:{port}: {why}; --port 0 uses any free port") from error


def read_key(args: Arguments) -> str:
    """Return the API key, or "". Raises: UserError if the file is empty, or if a public host has no key."""
    if args.api_key_file:
        if not (key := Path(args.api_key_file).read_bytes().strip()):
            raise UserError(f"{args.api_key_file}: empty; write a key to it, e.g. with `openssl rand -hex 32`")
        if not re.fullmatch(rb"[!-~]+", key):
            raise UserError(f"{args.api_key_file}: a key is one line of ASCII characters without spaces; write one to "
                            "it, e.g. with `openssl rand -hex 32`")  # fmt: skip
        return key.decode()
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(args.host).is_loopback:
            return ""
    if args.host != "localhost":
        raise UserError(f"--host {args.host}: other machines can connect, so a key is required; add --api_key_file "
                        "FILE, or use --host 127.0.0.1")  # fmt: skip
    return ""


def check_origin(text: str) -> None:
    """Raises: UserError if --cors is not an origin in the form that browsers send."""
    if text and not re.fullmatch(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d+)?", text):
        raise UserError(f"--cors {text}: should be an origin: http:// or https://, a host in lower case, and the port "
                        "unless it is the default, without a path, e.g. https://example.com")  # fmt: skip


def load(args: Arguments):
    """Load the model and compile its engine. Raises: UserError as `generate.load`, or if --context is too long."""
    from generate.texts import positions
    from serve import worker

    sampler = generate.load(args.run, args.mesh, tokenizer=args.tokenizer, step=args.step)
    d = sampler.cfg.data
    most = positions(d)
    if args.context > most or (args.context and d.input_len):
        raise UserError(f"context={args.context}: the encoder and the decoder have their positions of training; leave "
                        "it out" if d.input_len else
                        f"context={args.context}: must be at most data.seq_len={most}, as in training")  # fmt: skip
    engine = sampler.engine(args.slots, args.context or most, args.piece)
    begin = time.perf_counter()
    worker.compile(sampler, engine)
    print(f"compiled   in {time.perf_counter() - begin:.1f} s: mesh {args.mesh}, {len(engine.slots)} slots of "
          f"{engine.context} tokens", flush=True)  # fmt: skip
    return sampler, engine


HELP = """\
e.g. python -m serve runs/laptop
     python -m serve runs/laptop --mesh tensor=4 --slots 32

Serve a trained model over HTTP with OpenAI's protocol: /v1/completions, /v1/chat/completions."""


@exit_status
def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Arguments, args=argv, prog="python -m serve", description=HELP, use_underscores=True)
    check(args)
    check_origin(args.cors)
    api_key = read_key(args)
    try:
        from serve import lifetime, template
    except ModuleNotFoundError as error:
        raise UserError(f"{error}; install it with: make extra-serve") from error
    use_devices(args.devices)
    with open_socket(args.host, args.port) as listener:
        sampler, engine = load(args)
        folders = [str(Path(args.tokenizer).parent)] if Path(args.tokenizer).is_file() else []
        is_sentencepiece = not hasattr(sampler.encoding, "encode")  # templates need special tokens in texts
        chat_template = None if is_sentencepiece else template.find_template(args.run, *folders)
        served = lifetime.ServedModel(Path(args.run).resolve().name, sampler.encoding, engine.context, chat_template,
                                      sampler.cfg.data.input_len, sampler.start)  # fmt: skip
        access = lifetime.Access(api_key, args.host, args.cors)
        return asyncio.run(lifetime.run(listener, served, engine, args.queue, access, args.timeout_s))


if __name__ == "__main__":
    sys.exit(main())
