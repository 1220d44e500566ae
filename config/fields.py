"""The types of settings: their allowed ranges, what they affect, and their checks. Nothing here imports JAX."""

import dataclasses
import enum
import functools
import math
import numbers
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints

from utils import UserError, suggest


class Range(NamedTuple):
    holds: Callable[[float], bool]
    words: str


class Form(NamedTuple):
    """The function that parses a setting's text. It raises a UserError that quotes what it cannot parse."""

    parse: Callable[[str], object]


Size = Annotated[int, Range(lambda x: x >= 1, "must be at least 1")]
Count = Annotated[int, Range(lambda x: x >= 0, "must be at least 0")]
Positive = Annotated[float, Range(lambda x: 0 < x < math.inf, "must be above 0, and finite")]
NotNegative = Annotated[float, Range(lambda x: 0 <= x < math.inf, "must be at least 0, and finite")]
Share = Annotated[float, Range(lambda x: 0 <= x <= 1, "must be between 0 and 1")]
ShareBelow1 = Annotated[float, Range(lambda x: 0 <= x < 1, "must be at least 0 and below 1")]

AUTO = "auto"  # the planner chooses a value that suits the mesh, the chip and its memory; see `plan/answer/auto.py`
SizeOrAuto = Size | Literal["auto"]
DTypeOrAuto = Literal["auto", "float32", "bfloat16", "int8"]


class Affects(enum.Enum):
    """What a setting affects. It is declared with the setting's type, or for a whole group in `Config`."""

    FUNCTION = enum.auto()  # the function that the parameters define; a run with run.init_from inherits it
    OWN = enum.auto()  # the same, for a feature that no supported family of published weights has; off by default
    NUMBERS = enum.auto()  # dtypes, in training and inference
    TRAINING = enum.auto()  # how parameters are trained, and on which data
    ORDER = enum.auto()  # the order of the tokens; it may change for future steps
    SPEED = enum.auto()  # time and memory; results change only by rounding
    RUN = enum.auto()  # how long a run is, where its files are stored, and what it reports
    START = enum.auto()  # only one start of a run; not written to its config.json


class Baseline(NamedTuple):
    """Two values of a setting in `work`: `plain` is the baseline for comparisons; `least` needs the least memory, or
    nearly so."""

    plain: str | int
    least: str | None = None


def metadata_of(hint, kind: type):
    """Return the metadata of type `kind` in a setting's `Annotated` type, or None."""
    return next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, kind)), None)


KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


def check(config, prefix: str = "") -> None:
    """Check the type and range of each field of a dataclass or NamedTuple, from flags, a file or Python.

    Raises: UserError for the first invalid field.
    """
    for name, hint in hints(type(config)).items():
        check_value(f"{prefix}{name}", getattr(config, name), hint)


def check_value(name: str, value, hint) -> None:
    """Raises: UserError if the value of a setting does not fit its type."""
    ranges = getattr(hint, "__metadata__", ())
    kind = get_args(hint)[0] if ranges else hint
    if kind == SizeOrAuto:
        return None if value == AUTO else check_value(name, value, Size)
    said = f"{name}={value!r}"
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = get_args(kind)
            raise UserError(f"{said}: should be one of {', '.join(map(repr, choices))}")
    elif get_origin(kind) is tuple and Ellipsis not in get_args(kind):
        if not isinstance(value, tuple) or len(value) != len(get_args(kind)):
            raise UserError(f"{said}: should be {len(get_args(kind))} values")
        for one, of in zip(value, get_args(kind), strict=True):
            check_value(name, one, of)
    elif kind in KINDS:
        numbers_are = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
        if not isinstance(value, numbers_are) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{said}: should be {KINDS[kind]}")
    elif dataclasses.is_dataclass(kind) and not isinstance(value, kind):
        raise UserError(f"{said}: should be a {kind.__name__}")
    for one in ranges:
        if isinstance(one, Range) and not one.holds(value):
            raise UserError(f"{said}: {one.words}")
        if isinstance(one, Form):
            one.parse(value)


def is_remote(path: str) -> bool:
    """Whether a path is a URL: gs://, s3://, https://, .."""
    return "://" in path


# Strings that encode several values: work.remat, model.rope_scaling, data.skip, data.mixture, data.objective, .. ------


REMAT = ("none", "dots", "branches", "full")
ACTIVATIONS = ("input", "queries", "keys", "attention", "branch", "hidden")  # of a layer; see docs/planner.md
HOST = "@host"
MAXTEXT = {"minimal": "dots", "qkv_proj_offloaded": "queries@host,keys@host", "decoder_layer_input": "input",
           "query_proj": "queries", "key_proj": "keys", "value_proj": "keys", "context": "attention",
           "out_proj": "branch", "mlpwi": "hidden"}  # fmt: skip


@functools.lru_cache(maxsize=64)
def parse_remat(text: str) -> dict[str, bool] | None:
    """Parse a list of activations such as `queries,keys@host`: activation -> whether the host's memory stores it.

    One of REMAT, or `auto`, gives None.
    Raises: UserError that quotes the part that cannot be parsed.
    """
    if text in (AUTO, *REMAT):
        return None
    found, given = {}, f"work.remat={text!r}"
    for part in map(str.strip, text.split(",")):
        name = part.removesuffix(HOST)
        if name in found:
            raise UserError(f"{given}: {name!r} is given twice")
        if name in REMAT:
            raise UserError(f"{given}: {name!r} cannot be in a list; use it alone, or list {', '.join(ACTIVATIONS)}")
        if name not in ACTIVATIONS:
            near = f"MaxText's {name!r} is {MAXTEXT[name]!r} here" if name in MAXTEXT else suggest(name, ACTIVATIONS)
            raise UserError(f"{given}: unknown activation {name!r}; {near}; each may end with {HOST}; without a list, "
                            f"use {', '.join(REMAT)} or {AUTO}")  # fmt: skip
        found[name] = part.endswith(HOST)
    return found


PIPELINES = "gpipe", "1f1b", "interleaved", "zb"


@functools.lru_cache(maxsize=64)
def parse_pipeline(text: str) -> tuple[str, int]:
    """Parse `1f1b` or `interleaved:4` into the name of a pipeline schedule, and the chunks of layers on each stage.

    Without a number, interleaved has 2 chunks. Any other schedule has 1.
    Raises: UserError that quotes what cannot be parsed.
    """
    name, _, chunks = text.partition(":")
    if text not in (AUTO, *PIPELINES) and not (name == "interleaved" and re.fullmatch(r"[1-9]\d*", chunks)):
        raise UserError(f"work.schedule={text!r}: should be one of {AUTO}, {', '.join(PIPELINES)}, or "
                        "interleaved:CHUNKS, such as interleaved:4")  # fmt: skip
    return name, int(chunks or (2 if name == "interleaved" else 1))


class RopeScaling(NamedTuple):
    """How the frequencies of rotary embeddings are scaled; see `rotary.frequency_factors`."""

    kind: str  # llama3, yarn, yarn_exact or linear
    factor: float
    # Not used by linear, which slows down all pairs:
    low: float = 1.0  # a pair that turns this often in the original context, or less, is slowed down by the factor
    high: float = 2.0  # a pair that turns this often, or more often, keeps its frequency
    original: float = 1.0  # positions of the original context
    mscale: float = 0.0  # yarn, yarn_exact
    mscale_all: float = 0.0  # yarn, yarn_exact


@functools.lru_cache(maxsize=64)
def parse_rope_scaling(text: str) -> RopeScaling | None:
    """Parse `llama3:8:1:4:8192`, `linear:8`, or `yarn:40:1:32:4096`, which may end with two more numbers, as may
    yarn_exact. Empty text gives None.

    Raises: UserError that quotes text that cannot be parsed.
    """
    if not text:
        return None
    kind, *words = text.split(":")
    try:
        found = RopeScaling(kind, *map(float, words))
        numbers = {"llama3": (4,), "yarn": (4, 5, 6), "yarn_exact": (4, 5, 6), "linear": (1,)}
        valid = len(words) in numbers.get(kind, ())
        valid &= all(map(math.isfinite, found[1:])) and found.factor >= 1 and found.original > 0
        valid &= 0 < found.low < found.high and found.mscale >= 0 and found.mscale_all >= 0
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise UserError(f"model.rope_scaling={text!r}: should be llama3:FACTOR:LOW:HIGH:POSITIONS, such as "
                        "llama3:8:1:4:8192, the same numbers with yarn or yarn_exact, such as yarn:4:1:32:32768, or "
                        "linear:8"
                        )  # fmt: skip
    return found


class Window(NamedTuple):
    """Sliding windows of attention."""

    size: int = 0  # positions to which a query attends, its own and those before it; 0: all
    full_every: int = 0  # n: every n-th layer has no window; 0: all layers have it
    theta: float = 0.0  # RoPE base of the layers with a window, whose frequencies are not scaled; 0: model.rope_theta


@functools.lru_cache(maxsize=64)
def parse_window(text: str) -> Window:
    """Parse `4096`, or `1024:6` if every 6th layer attends to all positions. Empty text: all layers do. A third number,
    as in `1024:6:10000`, is the RoPE base of layers with a window.

    Raises: UserError that quotes text that cannot be parsed.
    """
    form = re.fullmatch(r"(\d+)(?::(\d+)(?::(\d+\.?\d*))?)?", text)
    size, every, theta = form.groups("0") if form else "000"
    found = Window(int(size), int(every), float(theta))
    missing = [not number for number in found[: 1 + text.count(":")]]
    if text and (any(missing) or found.full_every == 1):
        raise UserError(f"model.window={text!r}: should be a number of positions, such as 4096, or 1024:6 if every 6th "
                        "layer (2 or more) attends to all positions; 1024:6:10000 also sets the RoPE base of the others"
                        )  # fmt: skip
    return found


class Softmax(NamedTuple):
    """What differs from a plain softmax of attention's scores, and of the logits."""

    sinks: bool = False  # a learned score per head that joins the softmax of attention (gpt-oss)
    scores_cap: float = 0.0  # cap of attention's scores; 0: none
    logits_cap: float = 0.0  # cap of the logits; 0: none


@functools.lru_cache(maxsize=64)
def parse_softmax(text: str) -> Softmax:
    """Parse `sinks`, or `cap:50:30`, which caps attention's scores at 50 and the logits at 30; 0: no cap.

    Raises: UserError that quotes text that cannot be parsed.
    """
    caps = re.fullmatch(r"cap:(\d+\.?\d*):(\d+\.?\d*)", text)
    found = Softmax(text == "sinks", *map(float, caps.groups() if caps else ()))
    if text and not any(found):
        raise UserError(f"model.softmax={text!r}: should be empty, sinks, or cap:SCORES:LOGITS with two numbers, "
                        "such as cap:50:30; one may be 0, which is no cap")  # fmt: skip
    return found


BIASED_PARTS = ("feed_forward", "logits", "attention", "experts")  # of a model


@functools.lru_cache(maxsize=64)
def parse_bias(text: str) -> frozenset[str]:
    """Parse a list of the parts of a model that have biases, such as `attention,experts`. Empty text: none has.

    Raises: UserError that quotes what cannot be parsed.
    """
    parts = text.split(",") if text else []
    for part in parts:
        if part not in BIASED_PARTS or parts.count(part) > 1:
            raise UserError(f"model.bias={text!r}: {part!r} should be one of {', '.join(BIASED_PARTS)}, given once")
    return frozenset(parts)


PERIOD = 1000  # the weights of a mixture are exact over any window of this many sequences


@functools.lru_cache(maxsize=64)
def parse_skips(text: str) -> tuple[tuple[int, int], ...]:
    """Parse `1200:1210,5000:5001` into pairs: (first step that uses a later batch, from 0; number of skipped batches).

    Raises: UserError that quotes the part that cannot be parsed.
    """
    found = []
    for part in filter(None, text.split(",")):
        first, last = map(int, match.groups()) if (match := re.fullmatch(r"(\d+):(\d+)", part)) else (0, 0)
        if not 1 <= first < last:
            raise UserError(f"data.skip={text!r}: {part!r} should be START:END, two steps of metrics.jsonl; 1200:1210 "
                            "skips 10 batches: step 1200 uses the batch of step 1210")  # fmt: skip
        found.append((first - 1, last - first))
    return tuple(sorted(found))


MIXTURE_PART = (
    r"[A-Za-z0-9_.-][A-Za-z0-9_./-]*",
    "NAME=WEIGHT, where NAME is a directory of tokens in data.path, such as code=0.7",
)


class Packing(NamedTuple):
    """What the sequences of a batch have; see `data.packing`."""

    documents: bool = False  # whole documents, packed by length; else windows of the text
    ordered: bool = False  # the windows of an epoch are in the order of the text
    unmasked: bool = False  # a token also attends to earlier documents in its sequence


@functools.lru_cache(maxsize=64)
def parse_packing(text: str) -> Packing:
    """Parse `windows`, `documents` or `windows,ordered`, each with `,unmasked` or without it.

    Raises: UserError that quotes what cannot be parsed. Documents are packed by length, so they cannot be `ordered`.
    """
    if not re.fullmatch(r"(documents|windows(,ordered)?)(,unmasked)?", text):
        raise UserError(f"data.packing={text!r}: should be windows, windows,ordered or documents (which are packed by "
                        "length), and may end with ,unmasked, such as windows,unmasked")  # fmt: skip
    return Packing("documents" in text, "ordered" in text, "unmasked" in text)


class Schedule(NamedTuple):
    """A learning-rate schedule; see `optimizer.learning_rate`."""

    kind: str  # cosine, wsd, rsqrt or points
    decay: Share = 0.2  # wsd: fraction of all steps spent decaying
    final: NotNegative = 0.1  # cosine, wsd: learning rate at the last step, as a fraction of the peak
    points: tuple[tuple[int, float], ...] = ()  # (step, multiple of the peak), with increasing steps


SCHEDULES = {"cosine": ("final",), "wsd": ("decay", "final"), "rsqrt": ()}


@functools.lru_cache(maxsize=64)
def parse_schedule(text: str) -> Schedule:
    """Parse `cosine:0.1`, `wsd:0.2:0.1` or `rsqrt`, with numbers that may be left out, or points: `0:0,1000:1`.

    Raises: UserError that quotes the part that cannot be parsed.
    """
    kind, *numbers = text.split(":")
    names, number, points = SCHEDULES.get(kind, ()), r"\d*\.?\d+(?:e-?\d+)?", []
    if kind in SCHEDULES and re.fullmatch(rf"{kind}(:{number}){{,{len(names)}}}", text):
        found = Schedule(kind, **dict(zip(names, map(float, numbers), strict=False)))
        check(found, f"optim.schedule={text!r}: ")
        return found
    for part in text.split(","):
        match = re.fullmatch(rf"(\d+):({number})", part)
        if not match or (points and int(match[1]) <= points[-1][0]):
            raise UserError(f"optim.schedule={text!r}: {part!r} should be cosine:FINAL, wsd:DECAY:FINAL, rsqrt, or "
                            "STEP:MULTIPLE,.. with increasing steps; such as cosine:0.1 or 0:0,1000:1")  # fmt: skip
        points.append((int(match[1]), float(match[2])))
    return Schedule("points", points=tuple(points))


class AdamW(NamedTuple):
    """The numbers of AdamW."""

    b1: ShareBelow1 = 0.9  # decay rate of the first moment, per step
    b2: ShareBelow1 = 0.95  # of the second moment
    eps: Positive = 1e-8  # added to the square root of the second moment
    moments: Literal["parameters", "float32", "bfloat16"] = "parameters"  # dtype of the stored moments


class Muon(NamedTuple):
    """The numbers of Muon."""

    momentum: ShareBelow1 = 0.95  # decay rate of the momentum, per step
    steps: Size = 5  # of the Newton-Schulz iteration
    rms: Positive = 0.2  # root mean square of an update, before the learning rate


@functools.lru_cache(maxsize=64)
def parse_muon(text: str) -> Muon:
    """Parse `momentum=0.95,steps=5,rms=0.2`; a part that is left out has its default.

    Raises: UserError that quotes what cannot be parsed.
    """
    return _parse_parts("optim.muon", text, Muon, "momentum=DECAY,steps=NUMBER,rms=NUMBER or a part of it, such as "
                        "momentum=0.9")  # fmt: skip


BFLOAT16_STEP = 2**-8  # bfloat16 has 8 significant bits; a smaller relative change may be rounded away


@functools.lru_cache(maxsize=64)
def parse_adamw(text: str) -> AdamW:
    """Parse `b1=0.9,b2=0.95,eps=1e-8,moments=float32`; a part that is left out has its default.

    Raises: UserError that quotes what cannot be parsed, or moments that bfloat16 rounds away.
    """
    found = _parse_parts("optim.adamw", text, AdamW, "b1=DECAY,b2=DECAY,eps=NUMBER,moments=DTYPE or a part of it, such "
                         "as b2=0.99 or moments=bfloat16")  # fmt: skip
    if found.moments == "bfloat16" and 1 - max(found.b1, found.b2) < BFLOAT16_STEP:
        raise UserError(f"optim.adamw={text!r}: with b1={found.b1} and b2={found.b2} a moment changes by less than "
                        "1/256 of itself per step, which bfloat16 rounds away; use up to 0.995")  # fmt: skip
    return found


class Outer(NamedTuple):
    """The outer steps of a run with local steps; see `local_steps.py`."""

    every: Size = 0  # steps between outer steps of the same layers; 0: no local steps
    lr: NotNegative = 0.7
    momentum: ShareBelow1 = 0.9
    fragments: Size = 1  # an outer step exchanges 1/fragments of the layers


@functools.lru_cache(maxsize=64)
def parse_outer(text: str) -> Outer:
    """Parse `every=100,lr=0.7,momentum=0.9,fragments=4`, of which only `every` is required. Empty text gives every=0.

    Raises: UserError that quotes what cannot be parsed.
    """
    if not text:
        return Outer()
    found = _parse_parts("optim.outer", text, Outer, "every=STEPS, then any of lr=RATE, momentum=MOMENTUM and "
                         "fragments=NUMBER, such as every=100,fragments=4")  # fmt: skip
    if found.every % found.fragments:
        more = -(-found.every // found.fragments) * found.fragments
        raise UserError(f"optim.outer={text!r}: {found.every} is not a multiple of {found.fragments}; use every={more}")
    return found


def _parse_parts(name: str, text: str, kind: type, form: str):
    """Parse NAME=VALUE,.. into a NamedTuple with defaults. Raises: UserError for the setting `name`; see `form`."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        found = kind(**{part: type(kind._field_defaults[part])(word) for part, word in pairs})
    except (KeyError, ValueError):
        raise UserError(f"{name}={text!r}: should be {form}") from None
    check(found, f"{name}={text!r}: ")
    return found


class Phase(NamedTuple):
    """The weights of a mixture from one step on."""

    first: int  # step, from 0
    shares: dict[str, int]  # name -> number of sequences out of PERIOD


@functools.lru_cache(maxsize=64)
def parse_mixture(text: str) -> tuple[Phase, ...]:
    """Parse `code=0.7,prose=0.3@5000:code=0.5,prose=0.5`: weights, and new weights from step 5000 on (counted from 1).

    Raises: UserError that quotes the part that cannot be parsed, or the weights whose sum is not 1.
    """
    phases = []
    for part in text.split("@") if text else ():
        begins, colon, words = part.rpartition(":")
        if bool(colon) != bool(phases) or (colon and not (begins.isdecimal() and int(begins) > phases[-1].first + 1)):
            form = "STEP:NAME=WEIGHT,... with a later step" if phases else "NAME=WEIGHT,..."
            raise UserError(f"data.mixture={text!r}: {part!r} should be {form}")
        phases.append(Phase(int(begins) - 1 if colon else 0, _shares(f"data.mixture={text!r}", words, *MIXTURE_PART)))
    if len({frozenset(phase.shares) for phase in phases}) > 1:
        raise UserError(f"data.mixture={text!r}: all phases (separated by @) must have the same names; use 0 if unused")
    return tuple(phases)


def _shares(given: str, words: str, name: str, form: str) -> dict[str, int]:
    """Parse NAME=WEIGHT,.. into weights, in sequences out of PERIOD.

    given  the whole setting, for errors
    name   regular expression of a NAME
    form   what one part should be, for errors
    """
    shares, sum_is = {}, []
    for part in words.split(","):
        match = re.fullmatch(rf"({name})=(\d*\.?\d+)", part)
        if not match:
            raise UserError(f"{given}: {part!r} should be {form}")
        key, weight = match[1], match[2]
        share = Fraction(weight) * PERIOD
        if key in shares:
            raise UserError(f"{given}: {key!r} is given twice")
        if share.denominator > 1:
            raise UserError(
                f"{given}: {part!r}: a weight may have at most 3 decimals; use {key}={round(share) / PERIOD}"
            )
        shares[key] = int(share)
        sum_is.append(weight)
    if (total := sum(shares.values())) != PERIOD:
        raise UserError(f"{given}: weights must add up to 1, but {' + '.join(sum_is)} = {total / PERIOD}")
    return shares


@functools.lru_cache(maxsize=64)
def parse_objectives(text: str) -> dict[str, int]:
    """Parse data.objective: `span`, or a mixture such as `span:0.5:32=0.5,prefix=0.5`. Return objective -> sequences
    out of PERIOD.

    Raises: UserError that quotes the part that cannot be parsed, or the weights whose sum is not 1.
    """
    given, form = f"data.objective={text!r}", "causal, prefix, task, span or span:RATE:LENGTH, such as span:0.5:32"
    shares = {text: PERIOD}
    if "=" in text:
        shares = _shares(given, text, r"[a-z]+(?::[\d.]+)*", "OBJECTIVE=WEIGHT, such as span:0.5:32=0.25")
    for name in shares:
        if name not in ("causal", "prefix", "task"):
            match = re.fullmatch(r"span(:(0?\.\d+):(\d*\.?\d+))?", name)
            if not match:
                raise UserError(f"{given}: {name!r} should be {form}")
            if match[1] and not (0 < float(match[2]) < 1 <= float(match[3])):
                raise UserError(f"{given}: {name!r} needs a rate above 0 and below 1, and a mean length of 1 or more")
    return shares


def span_rate(name: str) -> tuple[float, float]:
    """Return the fraction of masked tokens and the mean length of a span, of an objective `span` or `span:0.5:32`."""
    rate, length = (name.split(":")[1:] + ["0.15", "3"])[:2]
    return float(rate), float(length)


def flatten(values: dict, prefix="") -> dict:
    """Flatten nested settings to {dotted name: value}."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
