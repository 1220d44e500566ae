"""What a model is worth: tasks of lm-evaluation-harness, and the loss of any folder of tokens.

Open `scoring.py` first: the log-probability of each token of a text, on any mesh.
`answers.py` keeps what has been answered, so that a kill costs little; `answering.py` turns texts into tokens, asks,
and remembers; `harness.py` is the adaptor to EleutherAI's harness, which alone needs it; `perplexity.py` reads a
validation split as training does; `show.py` draws bars and tables. `python -m evaluate` is the command.

From outside: `scoring.Scorer`, `answering.Answerer`.
"""
