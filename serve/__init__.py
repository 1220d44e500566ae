"""A trained model behind HTTP: the completions and chat completions of OpenAI's protocol.

Open `app.py` first: what is answered at which path. `protocol.py` turns a request's JSON into jobs of the engine, and
their texts into JSON; `template.py` is a model's own form of chats; `worker.py` is the thread that runs the engine, and
who waits for it; `metrics.py` is what Prometheus reads; `lifetime.py` begins and ends it all. A command:
`python -m serve`.

From outside: `app` and `worker`, by who puts another server around them.
"""
