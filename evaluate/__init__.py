"""Evaluate a model: benchmark tasks of lm-evaluation-harness, and the loss on any directory of tokens.

Open `scoring.py` first: it computes the log-probability of each token of a text, on any mesh. `answering.py` tokenizes
requests and answers each once. `answers.py` caches the answers in a file, for resuming. `harness.py`
is the adaptor to EleutherAI's harness, and the only file that imports it. `perplexity.py` computes the loss on a
validation split as training does. `metrics.py` compares decoded texts with the targets of a task. `show.py` prints
progress and tables. The command is `python -m evaluate`.

From outside: `scoring.Scorer`, `answering.Answerer`.
"""
