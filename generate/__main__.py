"""`python -m generate runs/laptop --prompt "def "`: continue texts with a trained model."""

import dataclasses
import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

import generate
from config import Count, MeshConfig, MeshFlag, Size, check
from devices import use_devices
from errors import UserError, exit_status, nearest
from generate.sampling import Request, Settings
from generate.texts import Sampler, TextJob, token_text


@dataclass(frozen=True)
class Arguments(Settings):
    """Continue texts with a trained model."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]  # directory of a run, e.g. runs/laptop
    step: str = ""  # checkpoint to read: its number, or best, of the lowest validation loss; empty: the newest
    tokenizer: str = ""  # for a run that knows none: a tokenizer.json, a file of ranks, or bytes
    prompt: tuple[str, ...] = ()  # texts to continue, one continuation each
    prompts: str = ""  # file of prompts, or - for standard input: a line is a text, or JSON {"prompt": .., "top_k": ..}
    beams: Count = 0  # search the likeliest text with so many beams, and draw nothing; --json prints what all found
    length_penalty: float = 1.0  # a beam's score is its log-probability / length**length_penalty; above 0 favours long
    draft: str = ""  # directory of a small run with the same tokenizer, which proposes tokens; the text is not changed
    draft_tokens: Size = 4  # tokens that the draft proposes for each step of the model
    weights: Literal["compute", "int8"] = "compute"  # numbers of matrices: model.precision's, or int8 with scales
    cache: Literal["compute", "bfloat16", "int8"] = "compute"  # numbers of the cache
    samples: Size = 1  # continuations of each prompt; the n-th (from 0) of all uses seed + n
    json: bool = False  # print one JSON object a text instead
    # devices along each of data, stage, fsdp, expert, context, tensor
    mesh: MeshFlag = dataclasses.field(default_factory=MeshConfig)
    devices: Count = 0  # simulate this many CPU devices; 0: work on those there are


def requests_of(args: Arguments) -> list[Request]:
    """Every prompt with its own settings; what a JSON line does not say, the flags do. None at all: an empty prompt."""
    asked = [{"prompt": text} for text in args.prompt] + (read_prompts(args.prompts) if args.prompts else [])
    shared = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
    asked = [own for own in asked or [{}] for _ in range(args.samples)]
    return [Request(**shared | {"seed": args.seed + n} | own) for n, own in enumerate(asked)]


def read_prompts(name: str) -> list[dict]:
    """Read settings of one request from each line that is not empty. Raises: UserError naming the line."""
    place = "standard input" if name == "-" else name
    lines = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).replace(b"\r\n", b"\n").split(b"\n")
    asked = [_settings(line, f"{place}:{number}") for number, line in enumerate(lines, 1) if line]
    if not asked:
        raise UserError(f'{place}: no prompt in it; a line is a text, or JSON {{"prompt": "..", "top_k": 5}}')
    return asked


def _settings(line: bytes, place: str) -> dict:
    try:
        values = json.loads(line) if line.startswith(b"{") else {"prompt": line.decode()}
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error.reason} at byte {error.start}): {line[:60]!r}") from error
    except ValueError as error:
        raise UserError(
            f'{place}: begins like JSON and is not ({error}): {line.decode()[:60]!r}; a text goes in {{"prompt": ".."}}'
        ) from error
    fields = [field.name for field in dataclasses.fields(Request)]
    for setting in values:
        if setting not in fields:
            raise UserError(f"{place}: {setting!r} is not a setting; {nearest(setting, fields)}")
    if isinstance(values.get("stop"), list):
        values["stop"] = tuple(values["stop"])
    try:
        Request(**values)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    return values


def tokens_of(sampler: Sampler, one: TextJob) -> list[dict]:
    """Each token of a text with its log-probability, and the likeliest ones with theirs."""
    text = functools.partial(token_text, sampler.encoding)
    likeliest = lambda token: [(text(id), logprob) for id, logprob in token.alternatives]
    drawn = lambda token: {"token": text(token.id), "logprob": token.logprob, "likeliest": likeliest(token)}
    return [drawn(token) for token in one.tokens]


def result_fields(sampler: Sampler, request: Request, one: TextJob) -> dict:
    """What was asked of a text, and what came."""
    more = {"drawn": tokens_of(sampler, one)} if request.logprobs else {}
    return dataclasses.asdict(request) | {"text": request.prompt + one.text, "ended": one.ended} | more


def show(sampler: Sampler, requests: list[Request], as_json: bool) -> None:
    """Print every text: a single one while it grows."""
    for n, request in enumerate(requests):
        if (room := sampler.make_job(request).max_new_tokens) < request.tokens:
            why = f"of {request.tokens} tokens fit behind its prompt in data.seq_len={sampler.cfg.data.seq_len}"
            print(f"note: text {n} ends after {room} tokens at most: no more {why}", file=sys.stderr)
    if as_json:
        for request, one in zip(requests, sampler.write(requests), strict=True):
            print(json.dumps(result_fields(sampler, request, one)))
    elif len(requests) == 1:
        print(requests[0].prompt, end="", flush=True)
        sampler.texts(requests, stream=lambda _, text: print(text, end="", flush=True))
        print()
    else:
        for n, text in enumerate(sampler.texts(requests)):
            print(f"--- {n}\n{text}")


def show_beams(sampler: Sampler, request: Request, args: Arguments) -> None:
    """Print the best text that beam search finds; with JSON, every beam's."""
    found = sampler.search(request, args.beams, args.length_penalty)
    if not args.json:
        print(request.prompt + found[0][0].text)
        return
    beams = [{"text": request.prompt + one.text, "ended": one.ended, "logprob": beam.logprob,
              "score": beam.score(args.length_penalty)} for one, beam in found]  # fmt: skip
    asked = {"prompt": request.prompt, "tokens": request.tokens, "length_penalty": args.length_penalty}
    print(json.dumps(asked | {"beams": beams}))


def show_speculative(sampler: Sampler, request: Request, args: Arguments, draft: Sampler) -> None:
    """Print a text as it grows, or as JSON, and how many tokens came of a step of the model."""
    stream = None if args.json else lambda text: print(text, end="", flush=True)
    if stream:
        stream(request.prompt)
    one, rounds = sampler.speculate(request, draft, args.draft_tokens, stream)
    if stream:
        print()
    else:
        print(json.dumps(result_fields(sampler, request, one) | {"tokens_per_step": rounds.tokens_per_step}))
    proposed = f"{args.draft_tokens} proposed for each"
    print(f"note: {rounds.tokens_per_step:.2f} tokens a step in {rounds.steps} steps, {proposed}", file=sys.stderr)


def check_beam_settings(args: Arguments, requests: list[Request]) -> None:
    """Raises: UserError for what beam search does not do."""
    if args.beams and args.draft:
        raise UserError(f"--beams {args.beams} and --draft {args.draft}: beams draw nothing; leave one of them out")
    if args.beams and args.samples > 1:
        raise UserError(f"--samples {args.samples}: beams draw nothing, all samples would be equal; --json prints "
                        f"the texts of all {args.beams} beams")  # fmt: skip
    for name in ("repetition_penalty", "logprobs") if args.beams else ():
        if other := [request for request in requests if getattr(request, name) != getattr(Settings, name)]:
            raise UserError(f"{name}={getattr(other[0], name)}: not with --beams {args.beams}, which rank whole texts")


HELP = """\
e.g. python -m generate runs/laptop --prompt 'def '
     python -m generate runs/laptop --prompts FILE --json
     python -m generate runs/laptop --prompt 'def ' --beams 4
     python -m generate runs/laptop --prompt 'def ' --draft runs/tiny --draft_tokens 4

Continue texts with a trained model."""


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m generate", description=HELP, use_underscores=True)
    check(args)
    requests = requests_of(args)
    if not args.json and any(request.logprobs for request in requests):
        raise UserError("--logprobs are printed as JSON; add --json")
    check_beam_settings(args, requests)
    use_devices(args.devices)
    load = functools.partial(generate.load, mesh=args.mesh, form=args.weights, cache=args.cache,
                             tokenizer=args.tokenizer)  # fmt: skip
    sampler = load(args.run, step=args.step)
    one_by_one = functools.partial(show_beams, sampler)
    if args.draft:
        one_by_one = functools.partial(show_speculative, sampler, draft=load(args.draft))
    elif not args.beams:
        return show(sampler, requests, args.json)
    for n, request in enumerate(requests):
        if len(requests) > 1 and not args.json:
            print(f"--- {n}")
        one_by_one(request=request, args=args)


if __name__ == "__main__":
    sys.exit(main())
