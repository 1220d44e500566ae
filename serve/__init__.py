"""An HTTP server for a trained model, with the completions and chat completions of OpenAI's protocol.

Open `app.py` first: it maps paths to responses, and checks who has access. `protocol.py` parses a request's JSON into
engine jobs and writes the generated texts as JSON. `template.py` renders a model's chat template. `worker.py` runs the
engine in a thread, `metrics.py` defines the Prometheus metrics, and `lifetime.py` starts and stops the server. The
command is `python -m serve`.

From outside: `app` and `worker`, for programs that wrap them in another server.
"""
