"""Parse the commands in README.md and docs/*.md with their expected output, and run them unchanged.

A page may contain:

- A block (between ``` lines) whose first line is a command: every line is a command. `# comment` is ignored, and
  `# exit status N` gives the expected exit status (default 0).
- A block whose first line begins with `$ `: such lines are commands, and the lines below each are its output.
- A block that begins with three backquotes and `python`: a program. The next block is its output.
- A block that begins with three backquotes and `diff`: a change of files, which `test_recipes.py` applies.
- A block that begins with three backquotes and `text`: ignored.
- Any other block, and a table whose paragraph contains "prints this table": the output of the command that the
  paragraph before quotes in backquotes. `...` matches any lines, and within a line any words.
- `python ...` or `make ...` between backquotes in the text: a command with arguments is run like in a block. Without
  arguments it only runs with --help (`make NAME`: only checks that the target exists).
"""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = "```"
HOSTS = ("./launcher.sh ", "./setup_tpu.sh ", "./debug_tpu.sh ")  # run by tests/launch, on simulated hosts
STARTS = (
    "python ",
    "make ",
    "source ",
    "cat ",
    "head ",
    "curl ",
    "lm_eval ",
    *HOSTS,
)  # how a line in a block of commands may begin
RUN, NAMED = "run", "named"
KINDS_OF_BLOCK = {f"{FENCE}python": "program", f"{FENCE}diff": "change", f"{FENCE}text": "text"}
LONGEST_S = 3600.0  # timeout per command: the longest takes 150 s alone, and 20 times that on a busy machine

# Tables ---------------------------------------------------------------------------------------------------------------

# Commands that are not run, and why. Each row must be on a page, and each command must be here or be run.
IN_A_BUCKET = "needs a bucket: tests/data/test_buckets.py trains in one"
PROFILED = "prints seconds of this machine: tests/train/test_profile.py records steps and reads them"
NOT_RUN = {
    "python main.py laptop --run.dir gs://BUCKET/runs": IN_A_BUCKET,
    "python -m train.checkpoint ls gs://BUCKET/runs/laptop": IN_A_BUCKET,
    'python -m generate gs://BUCKET/runs/laptop --prompt "def "': IN_A_BUCKET,
    "python main.py t5_base --init-from runs/flan": "needs the published weights",
    **dict.fromkeys(
        (
            "python -m plan mistral --topology v5p:2x2x4 --search 16 --data.seq_len 2048 --data.batch_size 16",
            "python -m weights from-hf mistral --out runs/mistral",
            'python -m generate runs/mistral --tokenizer sp:mistral/tokenizer.model --prompt "def " --tokens 20',
            'python -m data.prepare --source "text:*/*.py" --tokenizer sp:mistral/tokenizer.model --out tokens/own-sp',
            "python main.py llama3_8b --init-from runs/mistral --mesh fsdp=16 --data.path tokens/own-sp "
            "--data.seq_len 2048 --data.batch_size 16 --optim.lr 1e-5 --optim.warmup_steps 2 "
            "--run.name tuned-mistral --run.steps 20",
            "python -m weights to-hf runs/tuned-mistral --out mistral-tuned",
        ),
        "needs the published weights: tests/weights/test_released.py runs it with a small stand-in",
    ),
    "python main.py t5_laptop": "takes minutes; the page runs it for 60 steps",
    "make test": "these are the tests",
    "make test-long": "these are the tests",
    "make test-more": "these are the tests",
    "make test-all": "these are the tests",
    "make test-tpu": "these are the tests",
    "make test-tpu-all": "these are the tests",
    "make test-rotation": "these are the tests",
    "make test-rotation DAY=3": "these are the tests",
    'make test-long ARGS="tests/compile/test_ordered.py -k unordered"': "these are tests",
    'make test ARGS="tests/data/test_order.py tests/data/test_hosts.py tests/data/test_packing.py"': "these are tests",
    "make chapters": "these are tests too; `make test-site` runs them as notebooks",
    "make test-site": "these are tests too; `.ci/run` runs them",
    "make rehearse": "these are tests too; `.ci/run` runs them",
    "./launcher.sh --hosts hosts.txt -- python -m data.prepare --tokenizer cl100k_base "
    "--out tokens/stdlib-cl100k_base": "downloads the tokenizer",
    "./launcher.sh --hosts hosts.txt --restarts 3 -- python main.py moe1b": "needs a TPU slice",
    "python -m plan Qwen2.5-7B/config.json --topology v5p:4x4x4 --search 64 --data.batch_size 64": "needs a "
    "published file: tests/plan/test_published.py plans it",
    "python -m plan laptop --model.n_experts 0 --mesh data=2,fsdp=2 --optim.outer every=10 --compile": "a case of "
    "tests/plan/test_planner.py compiles local steps",
    **{
        f"python main.py tiny --model.n_experts 0 --mesh data=2 --devices 2 --run.steps 400 --run.name {run}": "trains "
        "for a minute: tests/test_local_steps.py tests the outer step"
        for run in (
            "plain",
            "local --optim.outer every=10",
            "halves --optim.outer every=10,fragments=2",
        )
    },
    "python -m bench.plan --drawn 24": "compiles for half an hour",
    "python -m bench.plan moe1b --topology v4:2x4x4 --first 10": "compiles for a quarter of an hour",
    "python -m data.prepare --source stdlib --tokenizer gpt2 --out tokens/stdlib-gpt2": "downloads the tokenizer",
    'python -m data.train_tokenizer --source "text:*/*.py" --vocabulary 1024 --out tokens/own.bpe': "needs `make "
    "extra-parity`",
    'python -m data.prepare --source "text:*/*.py" --tokenizer bpe:tokens/own.bpe --out tokens/own-1024': "needs the "
    "output of the previous command",
    "python main.py laptop --run.name profiled --run.steps 8 --run.profile 6:8 --mesh fsdp=4,tensor=2 "
    "--devices 8": PROFILED,
    "python -m plan.profile runs/profiled --rows 3": PROFILED,
    "python main.py laptop --run.tracker wandb --run.name watched": "needs `make extra-wandb`",
    "python -m evaluate runs/laptop --tasks lambada_openai,hellaswag --limit 100 "
    "--cache runs/laptop/answers.jsonl": "needs `make extra-evaluate`, and downloads",
    "lm_eval --model local-completions --tasks hellaswag --model_args model=NAME,base_url="
    "http://127.0.0.1:8000/v1/completions,tokenizer=DIR,max_length=4096": "needs a server, and downloads",
}
# Commands that `make test-rotation` runs, and a similar test that `make test-tpu` runs. Each row must be on a page.
REPEATS = {
    "python -m bench.options": "its rows of v4, in tests/bench/test_options.py",
    "python -m bench.overlap llama3_8b --topology v4:4x4x4 --mesh fsdp=32,tensor=2 --data.batch_size 64 "
    "--data.seq_len 4096 --work.remat full": "that step, in tests/plan/test_tpu.py; the command, on docs/seconds.md",
    "python -m plan moe1b --topology v4:4x4x8 --mesh fsdp=32,stage=2,tensor=2 --data.batch_size 1024 --compile":
        "moe1b on 32 chips, and a larger slice that has no larger program, in tests/plan/test_tpu.py",
    "python -m plan mixtral_8x7b --topology v4:8x8x16 --mesh fsdp=128,tensor=8 --data.batch_size 1024 --compile":
        "mixtral_8x7b on 64 chips, and the same, there",
}  # fmt: skip
# Commands that need the TPU compiler but no TPU, run by `make test-tpu` or `make test-rotation`.
TPU = re.compile(r"make plan\b|--topology v\S+.* --(compile|max_batch)\b|bench\.\w+ .*--topology|bench\.options")

NUMBER = r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w|\.\d)"


@dataclass(frozen=True)
class Kind:
    """A tolerance for numbers at a certain place in a line. In `where`, `#` is the number."""

    name: str
    where: str
    share: float = 0.0  # relative difference
    factor: float = 0.0  # or: largest ratio
    absolute: float = 0.0  # or: absolute difference


# The first matching kind decides. Other numbers may be off by 1%, so integers from 1 to 99 must be equal.
KINDS = (
    Kind("rounding: a number with e-", r"(?=\d\.\d+e-)#", factor=30),
    Kind("loss, bits a byte, entropy", r"(loss|validation|unigram|bigram) #|# bits/byte", share=0.03),
    Kind("tokens and documents of a text", r"(train:?|val:?|over) # tokens|in # documents|^  # documents", factor=2),
    Kind("rows of a text", r"in # (windows|rows)|#% of documents span|#% padding", factor=2),
    Kind("tokens/s of this machine", r"# tokens/s", factor=20),
    Kind("seconds on this machine", r"(import|initialize|compile|in) # s\b|^(gpipe|1f1b|zb) .* #$", factor=20),
    Kind("memory of the host process", r"peak memory # GiB", factor=2),
    Kind("bytes of a checkpoint", r"\.\.\. +# .*good$", share=0.05),
    Kind("loss of a checkpoint", r" #(?: +best)? +good$", share=0.03),
    Kind("one number compared with another", r"│ +(?=[-+])#% +│", absolute=1.0),
)
EXACT = Kind("any other", "#", share=0.01)


# The content of a page-------------------------------------------------------------------------------------------------


@dataclass
class Command:
    """A command on a page, and the blocks of output shown for it."""

    page: str
    line: int
    text: str
    how: str = RUN
    status: int = 0
    shown: list[list[str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def tpu(self) -> bool:
        return bool(TPU.search(self.text))

    @property
    def hosts(self) -> bool:
        return self.text.startswith(HOSTS)


def pages() -> list[str]:
    """List README and the pages of docs/, as paths from the root."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]


def uncommented(line: str) -> tuple[str, int]:
    """Return a command without its comment, and the exit status in the comment or 0."""
    status = re.search(r"# exit status (\d+)", line)
    return re.sub(r"\s+# .*$", "", line).strip(), int(status[1]) if status else 0


def page_parts(text: str) -> list[tuple[int, str, list[str]]]:
    """List (line, kind, lines) of a page: kind is `block`, `program`, `change`, `table` or `text` (a paragraph)."""
    found, inside = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(FENCE):
            inside = not inside
            if inside:
                found.append((number + 1, KINDS_OF_BLOCK.get(line, "block"), []))
        elif inside:
            found[-1][2].append(line)
        else:
            kind = "table" if line.startswith("|") else "text"
            if not line.strip() or not found or found[-1][1] != kind:
                found.append((number, kind, []))
            if line.strip():
                found[-1][2].append(line)
    assert not inside, "a block is not closed"
    return [(number, kind, lines) for number, kind, lines in found if lines]


def quoted_commands(lines: list[str]) -> list[str]:
    """List the commands in backquotes in a paragraph, which may continue on the next line."""
    return [words for words in re.findall(r"`([^`]+)`", " ".join(lines)) if re.match(r"(python|make) ", words)]


def names_only(text: str) -> bool:
    """Whether a command has no arguments, as in a sentence about the command."""
    return bool(re.fullmatch(r"python ([\w/]+\.py|-m [\w.]+)|make [\w-]+", text))


def commands(page: str, text: str) -> list[Command]:
    """List the commands of a page in order, each with the output shown.

    Raises: ValueError for a block of output without a command.
    """
    found: list[Command] = []

    def command(line: int, words: str, how: str = RUN, status: int = 0, again: bool = True) -> Command:
        same = [one for one in found if one.text == words]
        if not same or (again and how == RUN):
            found.append(Command(page, line, words, how, status))
            return found[-1]
        return same[-1]

    last: list[Command] = []
    before: list[str] = []
    for number, kind, lines in page_parts(text):
        if kind == "text" or (kind == "table" and not prints_table(before)):
            last = [
                command(number, words, NAMED if names_only(words) else RUN, again=False)
                for words in quoted_commands(lines)
            ]
        elif kind == "block" and lines[0].startswith(("$ ", *STARTS)):
            session = lines[0].startswith("$ ")
            for offset, line in enumerate(lines):
                if session and not line.startswith("$ "):
                    last[-1].shown[-1].append(line)
                elif line.strip():
                    if not session and not line.startswith(STARTS):
                        raise ValueError(f"{page}:{number + offset}: not a command: {line}")
                    last = [command(number + offset, *_and_status(line.removeprefix("$ ")))]
                    last[-1].shown += [[]] if session else []
        elif kind == "program":
            last = [command(number, "\n".join(("python - <<'END'", *lines, "END")))]
        elif kind != "change":
            if not last:
                raise ValueError(f"{page}:{number}: no command before this block of output")
            last[-1].shown.append(lines[2:] if kind == "table" else lines)
            last[-1].how = RUN
        before = lines
    return found


def prints_table(paragraph: list[str]) -> bool:
    return "prints this table" in " ".join(paragraph)


def _and_status(line: str) -> tuple[str, str, int]:
    words, status = uncommented(line)
    return words, RUN, status


def page_commands(page: str) -> list[Command]:
    return commands(page, (ROOT / page).read_text(encoding="utf-8"))


SERVED = "docs/serve.md"
NOT_RUN |= {one.text: "needs a server: tests/serve/test_page.py" for one in page_commands(SERVED) if one.how == RUN}

# Compare printed output with the page ---------------------------------------------------------------------------------


def numbers(line: str) -> list[re.Match]:
    return list(re.finditer(NUMBER, line))


def kind_of(line: str, number: re.Match) -> Kind:
    """Return the tolerance of a number, by its place in the line."""
    for kind in KINDS:
        place = re.compile(kind.where.replace("#", f"({NUMBER})"))
        for match in place.finditer(line):
            if number.span() in [match.span(group) for group in range(1, place.groups + 1)]:
                return kind
    return EXACT


def agree(kind: Kind, shown: float, printed: float) -> bool:
    if kind.factor:
        if not shown or not printed:
            return shown == printed or kind.name.startswith("rounding")
        return 1 / kind.factor <= printed / shown <= kind.factor
    return abs(printed - shown) <= max(kind.absolute, kind.share * abs(shown)) * (1 + 1e-9)


def compare(shown: str, printed: str) -> str | None:
    """Return how a printed line differs from the line shown, or None. Runs of spaces count as one space."""
    expected = numbers(shown)
    pattern, end = "", 0
    for number in [*expected, None]:
        words = shown[end : number.start() if number else None]
        pattern += re.sub(r"(\\ )+", r"\\s+", re.escape(words)).replace(r"\.\.\.", ".*?")
        pattern += f"({NUMBER})" if number else ""
        end = number.end() if number else end
    match = re.fullmatch(pattern, printed.rstrip()) or re.fullmatch(pattern.removeprefix(r"\s+"), printed.strip())
    if not match:
        return "no such line"
    value = lambda text: float(text.replace(",", ""))
    for number, got in zip(expected, match.groups(), strict=True):
        kind = kind_of(shown, number)
        if not agree(kind, value(number[0]), value(got)):
            return f"the page shows {number[0]}, the command printed {got} ({kind.name})"
    return None


def first_difference(shown: list[str], printed: str) -> str | None:
    """Return why the printed output does not contain a block, or None.

    Lines must be consecutive, ignoring blank lines; `...` matches any number of lines.
    """
    lines = [line for line in printed.splitlines() if line.strip()]
    at, runs = 0, [[]]
    for line in shown:
        if line.strip() == "...":
            runs.append([])
        elif line.strip():
            runs[-1].append(line)
    for run in filter(None, runs):
        attempts = [[compare(*pair) for pair in zip(run, lines[start:], strict=False)] + ["the output ends"]
                    for start in range(at, len(lines))]  # fmt: skip
        reasons = [next((n, why) for n, why in enumerate(one) if why) for one in attempts]
        whole = [start for start, (n, _) in enumerate(reasons, start=at) if n == len(run)]
        if not whole:
            n, why = max(reasons, key=lambda one: (one[0], one[1] != "no such line"), default=(0, "no output"))
            return f"{why}: {run[n]}"
        at = whole[0] + len(run)
    return None


# Running --------------------------------------------------------------------------------------------------------------


def make_site(folder: Path) -> Path:
    """Create a working directory like a checkout after `make`: links to all files but runs/ and tokens/, and a .venv.

    docs/ is a copy, because a command writes there. The stamps in .venv are new, so that make installs nothing.
    """
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs", "tokens", "docs"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("_build", "__pycache__"))
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != "installed" and not path.name.startswith("extra-"):
            (folder / ".venv" / path.name).symlink_to(path)
    for stamp in ("installed", *(path.name for path in Path(sys.prefix).glob("extra-*"))):
        (folder / ".venv" / stamp).touch()
    return folder


def environment(site: Path) -> dict[str, str]:
    """Return the environment of a fresh shell after `source .venv/bin/activate`, without test settings or network."""
    ours = re.compile(r"XLA_|NPROC$|COLUMNS$|PYTEST|HYPOTHESIS|JAX_|MAKE|ARGS$")
    env = {name: value for name, value in os.environ.items() if not ours.match(name)}
    nowhere = "http://127.0.0.1:9"  # the port `discard`: downloads fail at once
    env |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nowhere) | {"PIP_NO_INDEX": "1"}
    path = f"{site / '.venv' / 'bin'}{os.pathsep}{env['PATH']}"
    return env | {"PATH": path, "VIRTUAL_ENV": str(site / ".venv"), "JAX_PLATFORMS": "cpu"}


def run(one: Command, site: Path) -> str | None:
    """Run a command as its page shows it. Return what is wrong, or None."""
    words = one.text
    if one.how == NAMED:
        words = words.replace("make ", "make -n ") if words.startswith("make ") else f"{words} --help"
    process = subprocess.Popen(
        ["bash", "-c", words], cwd=site, env=environment(site), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=LONGEST_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # its children too
        raise
    tail = "\n".join(printed.splitlines()[-40:])
    if process.returncode != one.status:
        return f"{one}\nexit status {process.returncode}, expected {one.status}:\n{tail}"
    wrong = [why for block in one.shown if (why := first_difference(block, printed))]
    return f"{one}\n" + "\n".join(wrong) + f"\nwas not printed; the output ended with:\n{tail}" if wrong else None


def commands_only_named(found: list[Command]) -> list[Command]:
    """List commands that pages name but no page runs, without duplicates."""
    run_somewhere = {one.text for one in found if one.how == RUN} | set(NOT_RUN)
    return list({one.text: one for one in found if one.how == NAMED and one.text not in run_somewhere}.values())


def to_run(page: str, tpu: bool = False, hosts: bool = False) -> list[Command]:
    """List the commands of a page that a test runs, in order."""
    return [dataclasses.replace(one) for one in page_commands(page)
            if one.how == RUN and one.text not in NOT_RUN and (one.tpu, one.hosts) == (tpu, hosts)]  # fmt: skip
