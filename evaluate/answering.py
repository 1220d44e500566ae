"""Answer the requests of an evaluation: tokenize as lm-evaluation-harness does, and compute equal requests once.

Source: lm-evaluation-harness, `TemplateLM` and `HFLM`.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import generate
from architectures import architecture
from data import tokenizers
from evaluate.answers import Answers, request_key
from evaluate.scoring import Pair, Score, Scorer
from generate.runs import Run
from progress import print_to_stderr, show_progress
from utils import UserError


class Answerer:
    """Answers requests about texts with a run.

    rows   texts per batch, over all devices
    bos    special token before each text; empty: none
    """

    def __init__(self, run: Run, rows: int = 32, bos: str = "", cache: str = ""):
        if not architecture(run.cfg.model).continues_prompt:
            raise UserError("the harness scores texts that continue their context, and this model has an encoder; "
                            "evaluate it with --task or --perplexity")  # fmt: skip
        self.run, self.encoding, self.rows, self.max_tokens = run, run.encoding, rows, run.cfg.data.seq_len
        self.bos = [special_token_id(run.encoding, bos)] if bos else []
        self.prefix = (*self.bos, run.encoding.eot_token)[0]  # precedes a continuation that has no context
        self.scorer = Scorer(run.cfg, run.params, run.mesh, rows)
        self.sampler = generate.Sampler(run.cfg, run.params, run.encoding, run.mesh)
        fingerprint = tokenizers.fingerprint(run.encoding)
        of = {"weights": run.digest, "tokenizer": fingerprint, "seq_len": self.max_tokens, "bos": bos}
        self.answers = Answers(cache, of)

    # Tokens -----------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Tokenize a text as model input. Special tokens that appear in the text are treated as plain text."""
        return self.bos + self.encode_plain(text)

    def encode_plain(self, text: str) -> list[int]:
        return tokenizers.encode(self.encoding, text.encode()).tolist()

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Tokenize both together, and split after the context's tokens; its trailing spaces go to the continuation.

        An empty context is replaced by `self.prefix`, which is removed from the continuation if that begins with it.
        Raises: UserError if the continuation has no token after the cut.
        """
        if not context:
            ids = self.encode_plain(continuation)
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix] else ([self.prefix], ids)
        before = self.encode(context.rstrip())
        after = self.encode(context + continuation)[len(before) :]
        if not after:
            raise UserError(f"cannot score {continuation!r} after {context[-20:]!r}: one token spans both")
        return before or [self.prefix], after

    # Answers ----------------------------------------------------------------------------------------------------------

    def answer_all(self, what: str, keys: list[str], work: Callable[[list[int]], Iterator[tuple[int, object]]]) -> list:
        """Return the answer for each key. work(numbers) computes new ones, yielding (index into numbers, answer)."""
        first = {}
        for number, key in enumerate(keys):
            if key not in self.answers:
                first.setdefault(key, number)
        numbers = list(first.values())
        with show_progress(what, len(numbers), say=print_to_stderr) as advance:
            for place, answer in work(numbers) if numbers else ():
                self.answers.add(keys[numbers[place]], answer)
                advance()
        return [self.answers[key] for key in keys]

    def score_pairs(self, what: str, pairs: list[Pair]) -> list[Score]:
        keys = [request_key("pair", *pair) for pair in pairs]
        scores = self.answer_all(what, keys, lambda numbers: self.scorer.score([pairs[n] for n in numbers]))
        return [(log, best) for log, best in scores]

    def loglikelihood(self, requests: list[tuple[str, str]]) -> list[Score]:
        """Score each (context, continuation): its log-probability, and whether each token is the most likely."""
        return self.score_pairs("log-probabilities", [self.encode_pair(*request) for request in requests])

    def generate_texts(self, requests: list[tuple[str, dict]]) -> list[str]:
        """Continue each context.

        requests  (context, settings of generate.Request: tokens, temperature, stop, ..)
        With a temperature above 0, each repetition of a request is sampled with a different seed.
        """
        times, keys, asked = Counter(), [], []
        for context, settings in requests:
            again = request_key("text", context, settings)
            seed = times[again] if settings["temperature"] else 0
            times[again] += 1
            prompt = self.truncate_context(context, settings["tokens"])
            asked.append(generate.Request(prompt=prompt, seed=seed, **settings))
            keys.append(request_key("text", context, settings, seed))

        def work(numbers: list[int]) -> Iterator[tuple[int, str]]:
            order = sorted(range(len(numbers)), key=lambda place: -len(asked[numbers[place]].prompt))
            for begin in range(0, len(order), self.rows):
                places = order[begin : begin + self.rows]
                written = self.sampler.run_requests([asked[numbers[place]] for place in places])
                yield from ((place, one.text) for place, one in zip(places, written, strict=True))

        return self.answer_all("texts", keys, work)

    def truncate_context(self, context: str, tokens: int) -> str:
        """Cut a context from the left so that `tokens` new tokens and the end-of-text token before it fit."""
        room = self.max_tokens - tokens - 1
        if room < 1:
            raise UserError(f"a task requests up to {tokens} new tokens, which do not fit in data.seq_len="
                            f"{self.max_tokens}; raise --seq_len, or lower max_gen_toks in the task")  # fmt: skip
        ids = self.encode_plain(context)
        return context if len(ids) <= room else self.encoding.decode_bytes(ids[-room:]).decode(errors="ignore")


def special_token_id(encoding, name: str) -> int:
    """Return the id of a special token. Raises: UserError if there is none with this name."""
    if name not in encoding.special_tokens_set:
        raise UserError(f"--bos {name}: not a special token of {encoding.name!r}; it has "
                        f"{', '.join(sorted(encoding.special_tokens_set))}")  # fmt: skip
    return encoding.encode_single_token(name)
