"""The metrics of a server in Prometheus format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self):
        self.registry = CollectorRegistry()
        metric = lambda kind, name, text, **more: kind(f"axis_{name}", text, registry=self.registry, **more)
        self.requests = metric(Counter, "requests", "Responses sent", labelnames=("path", "status"))
        self.running = metric(Gauge, "running_texts", "Texts running in a slot of the engine")
        self.waiting = metric(Gauge, "waiting_texts", "Texts waiting for a slot")
        self.prompt_tokens = metric(Counter, "prompt_tokens", "Prompt tokens accepted")
        self.drawn_tokens = metric(Counter, "drawn_tokens", "Tokens generated")
        self.first_token = metric(Histogram, "first_token_seconds", "Time from a text's arrival to its first token",
                                  buckets=FIRST_TOKEN_S)  # fmt: skip
        self.token = metric(Histogram, "token_seconds", "Time between consecutive tokens of a text", buckets=TOKEN_S)
