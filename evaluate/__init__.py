"""Evaluate a model: on tasks of `data/tasks.py` or of lm-evaluation-harness, or the loss on any directory of tokens.

Open `scoring.py` first: it computes the log-probability of each token of a text, on any mesh. `task.py` answers the
examples of our own tasks, and `metrics.py` compares decoded answers with the targets. `validation.py` does this during
training. `answering.py` tokenizes the requests of the harness and answers each once. `answers.py` stores results in
files, for resuming. `harness.py` is the adaptor to EleutherAI's harness, and the only file that imports it.
`perplexity.py` computes the loss on a validation split as training does. `follow.py` evaluates each checkpoint of a run
that trains. The command is `python -m evaluate`.

From outside: `scoring.Scorer`, `answering.Answerer`, `task.Evaluator`, `validation.Validation`.
"""
