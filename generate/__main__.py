"""`python -m generate runs/laptop --prompt "def "`: continue texts with a trained model."""

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

import generate
from config import Count, Size, check
from devices import use_devices
from generate.request import Request, RunArguments, Settings
from utils import UserError, exit_status, parse_early, suggest


@dataclass(frozen=True)
class Arguments(Settings, RunArguments):
    """Continue texts with a trained model."""

    prompt: tuple[str, ...] = ()  # one or more prompts to continue
    prompts: str = ""  # file (-: standard input) with a prompt per line, as text or JSON {"prompt": "...", "top_k": 5}
    beams: Count = 0  # beam search with this many beams instead of sampling; --json prints all beams; 0: sample
    length_penalty: float = 1.0  # beam score: log-probability / length**length_penalty; above 0 favors long outputs
    draft: str = ""  # run directory of a small draft model with the same tokenizer, for speculative decoding
    draft_tokens: Size = 4  # draft tokens per forward pass of the main model
    weights: Literal["compute", "int8"] = "compute"  # weight dtype; compute: training compute dtype; int8: with scales
    cache: Literal["compute", "bfloat16", "int8"] = "compute"  # dtype of the KV cache; compute: training compute dtype
    samples: Size = 1  # samples per prompt; sample n, counting from 0 across prompts, uses seed + n
    json: bool = False  # print one JSON object per text


def parse_requests(args: Arguments) -> list[Request]:
    """Return a request per sample. JSON settings override the flags. Without prompts: one empty prompt."""
    prompts = [{"prompt": text} for text in args.prompt] + (read_prompts(args.prompts) if args.prompts else [])
    shared = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
    samples = [own for own in prompts or [{}] for _ in range(args.samples)]
    return [Request(**shared | {"seed": args.seed + n} | own) for n, own in enumerate(samples)]


def read_prompts(name: str) -> list[dict]:
    """Read the settings of one request from each nonempty line. Raises: UserError that names the line."""
    place = "standard input" if name == "-" else name
    lines = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).replace(b"\r\n", b"\n").split(b"\n")
    prompts = [_settings(line, f"{place}:{number}") for number, line in enumerate(lines, 1) if line]
    if not prompts:
        raise UserError(f'{place}: no prompts; each line should be a prompt, or JSON {{"prompt": "...", "top_k": 5}}')
    return prompts


def _settings(line: bytes, place: str) -> dict:
    try:
        values = json.loads(line) if line.startswith(b"{") else {"prompt": line.decode()}
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error.reason} at byte {error.start}): {line[:60]!r}") from error
    except ValueError as error:
        raise UserError(
            f"{place}: invalid JSON ({error}): {line.decode()[:60]!r}; "
            'if the prompt itself starts with {, write it as JSON: {"prompt": "..."}'
        ) from error
    fields = [field.name for field in dataclasses.fields(Request)]
    for setting in values:
        if setting not in fields:
            raise UserError(f"{place}: unknown setting {setting!r}; {suggest(setting, fields)}")
    if isinstance(values.get("stop"), list):
        values["stop"] = tuple(values["stop"])
    try:
        Request(**values)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return values


def check_beam_settings(args: Arguments, requests: list[Request]) -> None:
    """Raises: UserError for flags that do not work with beam search."""
    if args.beams and args.draft:
        raise UserError(f"--beams {args.beams} and --draft {args.draft} are mutually exclusive; leave one of them out")
    if args.beams and args.samples > 1:
        raise UserError(f"--samples {args.samples}: beam search does not sample, so all samples would be equal; "
                        f"--json prints the texts of all {args.beams} beams")  # fmt: skip
    for name in ("repetition_penalty", "logprobs") if args.beams else ():
        if other := [request for request in requests if getattr(request, name) != getattr(Settings, name)]:
            raise UserError(f"{name}={getattr(other[0], name)} does not work with --beams {args.beams}; leave it out")


HELP = """\
e.g. python -m generate runs/laptop --prompt 'def '
     python -m generate runs/laptop --prompts FILE --json
     python -m generate runs/laptop --prompt 'def ' --beams 4
     python -m generate runs/laptop --prompt 'def ' --draft runs/tiny --draft_tokens 4

Continue texts with a trained model."""


def parse(argv: list[str] | None) -> tuple[Arguments, list[Request]]:
    """Parse the flags, and read the prompts. Raises: UserError for settings that do not work together."""
    args = tyro.cli(Arguments, args=argv, prog="python -m generate", description=HELP, use_underscores=True)
    check(args)
    requests = parse_requests(args)
    if not args.json and any(request.logprobs for request in requests):
        raise UserError("--logprobs needs --json, because log-probabilities are only printed as JSON")
    check_beam_settings(args, requests)
    return args, requests


EARLY = parse_early(parse) if __name__ == "__main__" else None

from architectures import architecture
from generate.texts import Sampler, TextJob, token_text
from progress import print_to_stderr, show_busy


def token_fields(sampler: Sampler, one: TextJob) -> list[dict]:
    """Return each token of a text with its log-probability and the most likely alternatives."""
    text = functools.partial(token_text, sampler.encoding)
    likeliest = lambda token: [(text(id), logprob) for id, logprob in token.alternatives]
    drawn = lambda token: {"token": text(token.id), "logprob": token.logprob, "likeliest": likeliest(token)}
    return [drawn(token) for token in one.tokens]


def result_fields(sampler: Sampler, request: Request, one: TextJob) -> dict:
    """Return the settings and the result of a text, for JSON."""
    more = {"drawn": token_fields(sampler, one)} if request.logprobs else {}
    return (
        dataclasses.asdict(request) | {"text": sampler.whole_text(request.prompt, one.text), "ended": one.ended} | more
    )


def show_compiling():
    return show_busy("compiling  for inference (seconds to minutes)", print_to_stderr)


@contextlib.contextmanager
def print_stream(prompt: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints the next piece of a text. It prints the prompt first, once the model is compiled."""
    begin = [prompt]
    with contextlib.ExitStack() as until_first:
        until_first.enter_context(show_compiling())

        def stream(text: str) -> None:
            until_first.close()
            print(*begin, text, sep="", end="", flush=True)
            begin.clear()

        yield stream
        stream("\n")


def print_texts(sampler: Sampler, requests: list[Request], as_json: bool) -> None:
    """Print every text. A single text is printed while it is generated."""
    for n, request in enumerate(requests):
        if (room := sampler.make_job(request).max_new_tokens) < request.tokens:
            d = sampler.cfg.data
            why = f"its prompt leaves no room for {request.tokens} in data.seq_len={d.seq_len}"
            why = f"the decoder has data.seq_len={d.seq_len} positions" if d.input_len else why
            print(f"note: text {n} gets at most {room} new tokens: {why}", file=sys.stderr)
    if not as_json and len(requests) == 1 and architecture(sampler.cfg.model).continues_prompt:
        with print_stream(requests[0].prompt) as stream:
            sampler.generate_texts(requests, stream=lambda _, text: stream(text))
        return
    with show_compiling():
        written = sampler.run_requests(requests)
    for n, (request, one) in enumerate(zip(requests, written, strict=True)):
        text = sampler.whole_text(request.prompt, one.text)
        shown = f"--- {n}\n{text}" if len(requests) > 1 else text
        print(json.dumps(result_fields(sampler, request, one)) if as_json else shown)


def print_beams(sampler: Sampler, request: Request, args: Arguments) -> None:
    """Print the best text that beam search finds; with --json, print the texts of all beams."""
    with show_compiling():
        results = sampler.search(request, args.beams, args.length_penalty)
    if not args.json:
        print(sampler.whole_text(request.prompt, results[0][0].text))
        return
    beams = [{"text": sampler.whole_text(request.prompt, one.text), "ended": one.ended, "logprob": beam.logprob,
              "score": beam.score(args.length_penalty)} for one, beam in results]  # fmt: skip
    settings = {"prompt": request.prompt, "tokens": request.tokens, "length_penalty": args.length_penalty}
    print(json.dumps(settings | {"beams": beams}))


def print_speculative(sampler: Sampler, request: Request, args: Arguments, draft: Sampler) -> None:
    """Print a text while it is generated, or as JSON, and the number of tokens per step of the model."""
    with show_compiling() if args.json else print_stream(request.prompt) as stream:
        one, rounds = sampler.speculate(request, draft, args.draft_tokens, stream)
    if args.json:
        print(json.dumps(result_fields(sampler, request, one) | {"tokens_per_step": rounds.tokens_per_step}))
    proposed = f"{args.draft_tokens} proposed per step"
    print(f"note: {rounds.tokens_per_step:.2f} tokens per step in {rounds.steps} steps, {proposed}", file=sys.stderr)


@exit_status
def main(argv: list[str] | None = None) -> None:
    args, requests = EARLY or parse(argv)
    use_devices(args.devices)
    load = functools.partial(generate.load, mesh=args.mesh, form=args.weights, cache=args.cache,
                             tokenizer=args.tokenizer)  # fmt: skip
    sampler = load(args.run, step=args.step)
    one_by_one = functools.partial(print_beams, sampler)
    if args.draft:
        one_by_one = functools.partial(print_speculative, sampler, draft=load(args.draft))
    elif not args.beams:
        return print_texts(sampler, requests, args.json)
    for n, request in enumerate(requests):
        if len(requests) > 1 and not args.json:
            print(f"--- {n}")
        one_by_one(request=request, args=args)


if __name__ == "__main__":
    sys.exit(main())
