"""What a server counts, as Prometheus reads it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """The measures of one server."""

    def __init__(self):
        self.registry = CollectorRegistry()
        of = lambda kind, name, words, **more: kind(f"axis_{name}", words, registry=self.registry, **more)
        self.requests = of(Counter, "requests", "Requests answered", labelnames=("path", "status"))
        self.running = of(Gauge, "running_texts", "Texts that hold a slot of the engine")
        self.waiting = of(Gauge, "waiting_texts", "Texts that wait for a slot")
        self.prompt_tokens = of(Counter, "prompt_tokens", "Tokens of prompts that were accepted")
        self.drawn_tokens = of(Counter, "drawn_tokens", "Tokens that were drawn")
        self.first_token = of(Histogram, "first_token_seconds", "From a text's arrival to its first token",
                              buckets=FIRST_TOKEN_S)  # fmt: skip
        self.token = of(Histogram, "token_seconds", "From one token of a text to its next", buckets=TOKEN_S)
