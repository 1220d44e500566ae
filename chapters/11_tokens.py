# %% [markdown]
# # 11 · Data loading: from tokens to batches
#
# A data loader turns text into batches of token ids: it tokenizes, shuffles, and gives each host its rows
# of each step.
#
# A loader that repeats tokens raises no error, and the loss falls. Below, it falls *faster* than in the
# correct run. So this page builds a loader that reads each token once, even if the run is interrupted and
# resumes on a different number of machines, and shows how to check that.
#
# *Prerequisites:* chapter 00 (what a step costs, what a mesh is). *Mesh:* `data=8`, then `data=4`,
# simulated. *Runs in* 15 s on 2 cores. *Reading takes* 30 minutes, the exercises an hour.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import sysconfig
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import dataset
from chapters import lesson, opening
from config import preset

# %% tags=["hide-input"] mystnb={"image": {"alt": "Eight hosts. Left: each reads 256 KiB of token ids per step, and the devices wait 328 milliseconds before each step of 347. Right: each reads 32 KiB in 41 milliseconds during the step before, and the devices wait only before the first."}}
tokens = opening.TOKENS  # of a step
step_ms = 32 * opening.compute_ms(6 * opening.PARAMETERS * tokens / opening.DEVICES)
all_ms, own_ms = (1e3 * n / 200_000 for n in (tokens, tokens / opening.DEVICES))
KiB = 4 * tokens / 2**10
two = lambda name, first, ms, gap: [(name, first + n * (ms + gap), ms) for n in (0, 1)]
in_step = two("step", all_ms, step_ms, all_ms), two("", 0, all_ms, step_ms)
loads = [("", start, own_ms) for start in (0, own_ms, own_ms + step_ms)]
ahead = two("step", own_ms, step_ms, 0), loads
rows = dict(rows=("device", "host\nloads"), places="host")
scenes = (
    opening.Scene("All rows, in the step", {"text read": KiB}, *in_step),
    opening.Scene("Own rows, in the background", {"text read": KiB / 8}, *ahead),
)
title, units = "Devices should never wait for a batch", ("KiB read per step", "ms")
opening.before_after(*scenes, title, units=units, **rows)
plt.gcf().subfigs[0].legends.clear()

# %% tags=["remove-cell"]
assert 326 < all_ms < 329 and 40 < own_ms < 42 and 346 < step_ms < 348

# %% [markdown]
# The figure shows two steps of 32 layers of Llama 3 8B, on eight hosts with one H100 each. (Steps are
# arithmetic at peak speed. A host is assumed to load 200,000 tokens per second, as if it tokenized the text
# in each step; the page measures yours with stored ids.)
#
# Many trainers have no epochs, and start each sequence at a random position
# ([nanoGPT](https://github.com/karpathy/nanoGPT/blob/master/train.py), `get_batch`).
#
# > **Predict.** Such a loader has read as many tokens as the text has. What fraction of the text has it
# > never read?


# %% tags=["hide-input"]
def count_targets(N, T, epochs):
    """How often each token is a target if windows of T start at random positions."""
    count_N = np.zeros(N, int)
    for start in np.random.default_rng(0).integers(N - T, size=epochs * N // T):
        count_N[start + 1 : start + T + 1] += 1
    return count_N


one, two, three = (count_targets(2_000_000, 200, epochs) for epochs in (1, 2, 3))
never = np.mean(one == 0)

# %%
my_prediction = None  # between 0 and 1
lesson.predicted("fraction never a target", my_prediction, never, within=0.05)

# %% tags=["remove-cell"]
assert abs(never - np.exp(-1)) < 0.02

# %% [markdown]
# The text has N tokens, and a sequence has T. One random sequence misses a given token with probability
# `1 - T/N`. The loader has drawn N/T sequences. All of them miss the token with probability
# `(1 - T/N)^(N/T)`, which is close to 1/e.

# %% tags=["hide-input"]
print(f"{np.mean(one > 1):.1%} of the tokens were a target more than once")
print(f"never a target after 2 epochs: {np.mean(two == 0):.1%}", end="")
print(f", after 3: {np.mean(three == 0):.1%}")

# %% [markdown]
# Random positions are fine only if you read a small part of the text, so that few windows overlap.
#
# ## A run that is interrupted three times
#
# The text is part of the Python standard library on your machine, so your numbers differ a little.
# For now, tokens are bytes. The token stream is split into training sequences of T = 256 tokens,
# called *windows*. Each step reads a batch of B = 8 windows, the *rows* of the batch.
#
# The loader is a seeded generator that shuffles the windows and yields each once.

# %%
library = Path(sysconfig.get_path("stdlib"))
read = lambda pattern: b"".join(f.read_bytes() for f in sorted(library.glob(pattern)))
text, held_out = read("[a-c]*.py"), read("d*.py")
B, T, STEPS, STOPPED_AT = 8, 256, 60, (15, 30, 45)


def as_windows(text):
    """Consecutive windows of T bytes; the remainder at the end is dropped."""
    return np.frombuffer(text, np.uint8)[: len(text) // T * T].reshape(-1, T)


def generator():
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(len(as_windows(text)))


def batches(stops):
    """The windows of each step. At a stop, a new process starts."""
    for step in range(STEPS):
        if step == 0 or step in stops:
            rows = generator()
        yield [next(rows) for _ in range(B)]


# %% [markdown]
# The model is a table that counts how often each byte followed each pair of bytes. As in a real trainer,
# the loss of a batch is computed *before* the batch is counted. The table is kept across interruptions,
# like a checkpoint.


# %%
def learn(counts, text_BT):
    """Mean loss of a byte given the previous two, in nats; then count it."""
    a, b, x = (text_BT[:, k : T - 2 + k] % 128 for k in range(3))  # ASCII is below 128
    p = counts[a, b, x] / counts[a, b].sum(axis=-1)
    np.add.at(counts, (a, b, x), 1)
    return -np.log(p).mean()


def train(stops):
    """Loss of each step, final loss on held-out text, and number of windows seen."""
    counts = np.full((128, 128, 128), 1 / 128)  # at first, all bytes are equally likely
    seen = list(batches(stops))
    losses = [learn(counts, as_windows(text)[rows]) for rows in seen]
    return losses, learn(counts, as_windows(held_out)), np.unique(seen).size


runs = {"not stopped": train(()), "stopped three times": train(STOPPED_AT)}

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two falling loss curves; the curve of the interrupted run drops at the first interruption and stays lower."}}
figure, axes = plt.subplots(figsize=(6.2, 3))
for (name, (losses, _, _)), style in zip(runs.items(), ("-", ":"), strict=True):
    axes.plot(losses, style, label=name, color="black", lw=1.5)
for stop in STOPPED_AT:
    axes.axvline(stop, ymax=0.62, color=lesson.NEUTRAL, lw=0.8)
    axes.text(stop, 3.2, "stop", color=lesson.NEUTRAL, ha="center", va="bottom")
axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0, 5))
axes.set_title("The broken run reports the lower training loss")
axes.legend(loc="upper right")
for name, (losses, other, seen) in runs.items():
    last = np.mean(losses[-10:])
    print(f"{name}: loss of the last 10 steps {last:.2f}, held-out {other:.2f}", end="")
    print(f"; {seen:,} different windows of {STEPS * B:,}")
(whole, whole_other, _), (stopped, stopped_other, _) = runs.values()
assert np.mean(stopped[-10:]) < np.mean(whole[-10:]) and stopped_other > whole_other

# %% [markdown]
# Each restart reads the same windows again, and the model memorizes them. The training loss rewards this.
# Held-out files show the damage.
#
# In a translation toolkit, a run that was interrupted after its first epoch
# resumed with the same batches ([joeynmt 125](https://github.com/joeynmt/joeynmt/issues/125)).
#
# ## One sample order for all epochs
#
# Before the run begins, fix which window goes into each row of each step: **one endless order** of windows,
# in which each epoch is a new permutation. The figure shows 29 windows and four steps of 8 rows. The run is
# interrupted in the middle, and resumes on half as many hosts:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Four rows of eight window numbers. Two rows are split over four hosts, two over two hosts."}}
rng = np.random.default_rng(0)
endless = [*rng.permutation(29), *rng.permutation(29)]  # and so on
figure, axes = plt.subplots(figsize=(6.2, 2.6))
for index, window in enumerate(endless[:32]):
    step, row = divmod(index, 8)
    hosts = 4 if step < 2 else 2
    host = row * hosts // 8
    shade = dict(color=lesson.NEUTRAL, alpha=0.1 + 0.6 * host / (hosts - 1), lw=0)
    axes.add_patch(plt.Rectangle((row, step), 1, 1, **shade))
    bold = "bold" if index >= 29 else "normal"
    axes.text(row + 0.5, step + 0.5, window, ha="center", va="center", weight=bold)
axes.axhline(2, color="black", lw=1.5)
axes.set(xlim=(0, 8), ylim=(4, 0), ylabel="step", xticks=[])
axes.set_yticks(np.arange(4) + 0.5, ["0", "1", "2", "3"])
axes.set_title("The number of hosts does not change the rows")
axes.set_xlabel("row; each shade is a host: four before the stop, two after")

# %% [markdown]
# A step reads the next B windows of the order, and each host reads its rows of the batch. (Bold numbers are
# the second epoch, which starts in the middle of a batch.) So the loader has **no state** to lose: a batch
# depends only on the settings and the step number.
#
# ## A function of the step
#
# `order(i)` is the i-th window of the endless order. You can compute it without a list of all windows:
#
# 1. A shuffle never maps two indices to the same window. A *Feistel network* has this property: split the bits
#    of i into two halves, XOR one half with a hash of the other, swap the halves, and repeat. The same XOR
#    undoes a round, so two indices never collide.
# 2. The network permutes a power of 4. If the result is not below the number of windows, feed it back in until
#    it is. For example, 5 windows need halves of 2 bits, so 16 slots. If the network maps 3 to 11, 11 to 7 and
#    7 to 1, then `order(3)` is window 1. (This is a permutation too: undo the rounds to invert it.)
#
# To check a loader, give it a stream in which **every token is its own serial number**. Then each batch
# shows what was read, and `np.bincount` counts each target (token to predict). Here is the loader with this
# check:

# %% tags=["by-hand"]
import hashlib

import numpy as np

N, T, B = 9_000, 64, 24  # targets in the text, targets per window, rows per batch
stream = np.arange(N + 1)  # each token is its own serial number
WINDOWS = -(-N // T)  # the last one is shorter


def shuffled(i, count, key):
    """Entry i of a permutation of 0..count-1. Nothing is stored."""
    half = (max(count - 1, 1).bit_length() + 1) // 2
    while True:
        left, right = i >> half, i % 2**half
        for round_ in range(4):
            hashed = hashlib.sha256(f"{key}, {round_}, {right}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(hashed) % 2**half)
        i = (left << half) + right
        if i < count:
            return i


# %% tags=["by-hand"]
def order(index):
    """The endless order: a different permutation in each epoch."""
    epoch, i = divmod(index, WINDOWS)
    return shuffled(i, WINDOWS, key=epoch)


def batch_targets(step):
    """The targets of a step's rows. Works for any step, at any time, on any host."""
    windows = [order(index) for index in range(step * B, (step + 1) * B)]
    return [stream[w * T + 1 : min((w + 1) * T, N) + 1] for w in windows]


later = [batch_targets(step) for step in range(20, 47)]  # could be another process
first = [batch_targets(step) for step in range(20)]
seen = np.concatenate([row for step in first + later for row in step])
count_N = np.bincount(seen, minlength=N + 1)[1:]
assert (count_N == 8).all(), "not once per epoch"
print(f"47 steps are 8 epochs: each token is a target {count_N.min()} times")
print(f"index 7 in an order of 10**12 windows: {shuffled(7, 10**12, key=0):,}")

# %% [markdown]
# [Grain](https://google-grain.readthedocs.io) does this with a cipher, which is invertible by design
# ([index_shuffle](https://github.com/google/grain/tree/main/grain/_src/python/experimental/index_shuffle)),
# and one key per epoch.
#
# ## Tokenization: text to ids
#
# A tokenizer decides how long the stream of the loader is. (For the loader alone, skip to "Files and a
# manifest".)
#
# With one token per byte, sequences are long. *Byte-pair encoding* (BPE) shortens them: count all pairs of
# adjacent tokens, give the most common pair a new id, and repeat. A regular expression first splits the
# text into words, and no pair crosses a word boundary. So store each distinct word once; after a merge,
# recount only words that contain the merged pair.

# %%
from collections import Counter, defaultdict
from itertools import pairwise

import regex

from data import prepare, tokenizers

print("words:", regex.findall(tokenizers.GPT2_PATTERN, "    if self.x:\n  return 12"))


def merged(parts, pair):
    """A list of byte strings, with each occurrence of the pair merged."""
    out = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


# %%
def train_bpe(text, vocabulary):
    frequency = Counter(regex.findall(tokenizers.GPT2_PATTERN, text))
    parts = {word: [bytes([b]) for b in word.encode()] for word in frequency}
    pairs, words_with = Counter(), defaultdict(set)

    def count(word, sign):
        for pair in pairwise(parts[word]):
            pairs[pair] += sign * frequency[word]
            words_with[pair].add(word)

    for word in parts:
        count(word, 1)
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < vocabulary:
        pair = pairs.most_common(1)[0][0]
        ranks.setdefault(b"".join(pair), len(ranks))  # a+bc and ab+c are one token
        for word in words_with.pop(pair):
            count(word, -1)
            parts[word] = merged(parts[word], pair)
            count(word, 1)
    return ranks


# %%
ranks = train_bpe(text.decode(), 2048)
print("first ids:", *list(ranks)[256:268])
print("longest:  ", *sorted(ranks, key=len)[-3:])

# %% [markdown]
# A token is a string of bytes. Its id, or *rank*, tells in which order the merges created it. Two adjacent
# tokens can merge if their concatenation is a token. To encode text, merge the pair with the lowest rank, and
# repeat until no pair can merge. The first k merges do not depend on later ones, so one training run gives
# you all smaller tokenizers.


# %% tags=["hide-input"]
def encode(ranks, text):
    ids = []
    for word in regex.findall(tokenizers.GPT2_PATTERN, text):
        parts = [bytes([b]) for b in word.encode()]
        rank = lambda pair: ranks.get(b"".join(pair), len(ranks))
        while pairs := [pair for pair in pairwise(parts) if rank(pair) < len(ranks)]:
            parts = merged(parts, min(pairs, key=rank))
        ids += [ranks[part] for part in parts]
    return ids


import base64

kept = tempfile.TemporaryDirectory()  # until the program ends
folder = Path(kept.name)


def rank_file(vocabulary):
    """Write the first ranks as a file: a token in base64 and its rank on each line."""
    first = [*ranks.items()][:vocabulary]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in first]
    (folder / f"{vocabulary}.bpe").write_bytes(b"".join(lines))
    return tokenizers.load(f"bpe:{folder}/{vocabulary}.bpe")


ours = encode({t: r for t, r in ranks.items() if r < 1024}, held_out.decode())
theirs = tokenizers.encode(rank_file(1024), held_out)

# %% tags=["hide-input"]
assert ours == theirs.tolist()
print("held-out text: this encoder and tiktoken (OpenAI's encoder) give the same ids")

# %% [markdown]
# ## Loss per token, bits per byte
#
# Another tokenizer also changes the loss, although the text is the same.
#
# With fewer tokens for the same text, a run is shorter. But a longer token is harder to predict. The
# simplest model, the *unigram* model, knows only how often each id occurs. Count the ids in the training
# text, and measure the loss on held-out text, for tokenizers of eight sizes.
#
# *Bits per byte* is the length in bits of the text, compressed with the model, divided by the bytes of the
# text. For that, a loss in nats is divided by ln 2 = 0.693.
#
# > **Predict.** With bytes as tokens, the loss is about 3.14 nats per token, or 4.53 bits per byte. With
# > 1,024 ids, it is 6.0 nats per token, and a token represents 2.57 bytes of held-out text on average. How
# > many bits per byte is that?

# %% tags=["hide-input"]
sizes_V, table = (256, 320, 384, 512, 768, 1024, 1536, 2048), []
for V in sizes_V:
    ids, other_ids = (tokenizers.encode(rank_file(V), x) for x in (text, held_out))
    p_V = np.bincount(ids, minlength=V) + 1.0  # + 1: unseen ids are possible
    nats = -np.log(p_V / p_V.sum())[other_ids].mean()
    per_token, own = len(held_out) / len(other_ids), len(text) / len(ids)
    table.append((per_token, own, nats, nats / np.log(2) / per_token))
bytes_a_token, own, nats, bits = map(np.array, zip(*table, strict=True))
bits_1024 = bits[sizes_V.index(1024)]

# %%
my_prediction = None  # bits per byte
lesson.predicted("bits per byte", my_prediction, bits_1024, within=0.03)

# %% tags=["remove-cell"]
assert abs(bits_1024 - 6.0 / 0.693 / 2.57) < 0.15, "the question's numbers are old"
assert abs(nats[0] - 3.14) < 0.1 and abs(bytes_a_token[5] - 2.57) < 0.15

# %% [markdown]
# A token has 6.0/ln 2 bits, and represents 2.57 bytes.

# %% tags=["hide-input"]
print("  ids  bytes/token  nats/token  bits/byte")
for V, *row in zip(sizes_V, bytes_a_token, nats, bits, strict=True):
    print("{:5}  {:11.2f}  {:10.2f}  {:9.2f}".format(V, *row))
assert (np.diff(nats) > 0).all() and (np.diff(bits) < 0).all()

# %% [markdown]
# The byte tokenizer has the lowest loss per token, but needs the most bits per byte. Only bits per byte
# measure how well the model predicts the text. The losses of its tokens *add up*, and the number of bytes
# does not depend on the tokenizer:
#
# bits per byte = nats per token / ln 2 / bytes per token
#
# Is a larger vocabulary always better? Each token also needs logits, a D x V matmul (D is the model dim, V
# the vocabulary size). In training, that is `6 D V` FLOPs per token, 2 forward and 4 backward. So count
# FLOPs per *byte*, here for models of three sizes:

# %% tags=["hide-input"]
from plan.count import costs

print("FLOPs per byte, relative to 256 ids")
models = {}
for name in ("tiny", "laptop", "dense_124m"):
    each = [preset(name, **{"model.vocab_size": V}) for V in sizes_V]
    flops = [*map(costs.model_flops_per_token, each)] / bytes_a_token
    models[f"D={each[0].model.d_model}"] = flops / flops[0]
print("  ids", *(f"{name:>7}" for name in models))
for row, V in enumerate(sizes_V):
    print(f"{V:5}", *(f"{shares[row]:7.2f}" for shares in models.values()))

# %% [markdown]
# A larger vocabulary pays off as long as bytes per token grow by a larger factor than FLOPs per token. For
# the narrowest model, this ends near 1,000 ids. For the widest, whose layers cost much more than its
# logits, even the largest vocabulary in the table pays off.
#
# ## Files and a manifest
#
# `python -m data.prepare` writes token ids to disk; here it is called as a function. Before each document
# (here, a file) it puts an extra id, the *end of text*: id 1,024 if the tokenizer has ids 0 to 1,023. All
# documents of a split form one stream, stored in several files. Whether a document is held
# out depends only on a hash of its name, so new documents do not move old ones to another split.


# %% tags=["hide-input"]
def prepared(name, shard_tokens):
    source, bpe = f"text:{library}/[a-d]*.py", f"bpe:{folder}/1024.bpe"
    out, more = str(folder / name), dict(val_share=0.15, shard_tokens=shard_tokens)
    more["overwrite"] = True  # so that you can run this cell again
    prepare.prepare(prepare.Arguments(out, source, bpe, **more))
    return out


large, small = prepared("large", 100_000), prepared("small", 999)
corpus = dataset.load(large)
print("written:", *sorted(p.name for p in Path(large).iterdir()))
for name, split in corpus.splits.items():
    mapped = type(split.shards[0]).__name__
    print(f"{name}: {split.tokens:,} {split.shards[0].dtype} ids in {mapped}s")
m = corpus.manifest
print(f"nats per token: uniform {np.log(1025):.2f}", end="")
print(f", unigram {m['unigram_nats']:.2f}, bigram {m['bigram_nats']:.2f}")

# %% [markdown]
# A `memmap` is a file that you use like an array. Opening it reads a header, and slicing it reads only the
# pages of the slice. So a corpus can be larger than memory, and all processes on a machine share the pages.
#
# `begins` lists where documents begin in a file. The manifest contains the size and sha256 of each file.
# Loading rejects a file of the wrong size, and `dataset.verify` reads all files and finds a single wrong byte.
#
# The manifest also contains three baseline losses. A new model starts near *uniform* (all ids are equally
# likely). Below *unigram*, it has learned which ids are common. Below *bigram*, it uses more than the
# previous token.
#
# Next, the stream is split into windows. Window i has tokens `i*T .. i*T + T - 1` as inputs, and the token
# after each input as its target. The last target of a window is the first input of the next window. So each
# token of the stream, except the first, is a target once. Windows ignore the boundaries of documents and files.
#
# ## What is in a batch
#
# To see documents end inside windows, use short documents: the first lines of some docstrings, as bytes.
# `prepare.from_ids` takes ids instead of text, and holds out the last documents.

# %%
functions = abs, all, any, bin, chr, id, len, max, min, ord, sum
lines = [f.__doc__.splitlines()[0].encode() for f in functions]
documents = [np.frombuffer(line, np.uint8) for line in lines]
out, more = str(folder / "lines"), dict(val_share=0.2, overwrite=True)
prepare.from_ids(documents, out, tokenizer="bytes", **more)
sizes = {"data.path": out, "data.seq_len": 36, "data.batch_size": 6}
batch = dataset.batch(preset("tiny", **sizes), 0)
print({name: batch[name].shape for name in batch})

# %% tags=["hide-input"] mystnb={"image": {"alt": "Six rows of letters in dark and light segments; below, gray wedges that restart with each segment."}}
figure, panels = plt.subplots(2, 1, figsize=(6.6, 4.4), sharex=True)
for (row, t), token in np.ndenumerate(batch["tokens_BT"]):
    segment, position = batch["segments_BT"][row, t], batch["positions_BT"][row, t]
    if not segment:
        continue
    shade = dict(color=lesson.NEUTRAL, alpha=0.55 if segment % 2 else 0.2, lw=0)
    panels[0].add_patch(plt.Rectangle((t, row), 1, 1, **shade))
    letter = "|" if token == 256 else chr(token)
    panels[0].text(t + 0.5, row + 0.55, letter, size=9, ha="center", va="center")
    size = (position + 1) / 38
    panels[1].bar(t + 0.5, -size, bottom=row + 1, width=1, color=lesson.NEUTRAL)
panels[0].set_title("Segments of each row, in alternating shades")
panels[1].set_title("Positions restart with each document")
for axes in panels:
    axes.set(xlim=(0, 36), ylim=(6, 0), ylabel="row of the batch")
    axes.set_yticks(np.arange(6) + 0.5, range(6))
panels[1].set_xlabel("index in the window")

# %% [markdown]
# The shades show `segments_BT`, which is numbered from 1 in each row. `|` is the end of text, which starts
# a document. The height of the gray bars is `positions_BT`. The model restricts attention to one segment
# (without `unmasked` in `data.packing`), so documents do not attend to each other. White is padding after
# the end: segment 0, and weight 0 in `weights_BT`. If you drop the last window, you lose text. If you
# count the padding, the loss is wrong.
#
# If a window ends inside a document, the rest of the document is in another row. There it starts at position
# 0, and cannot attend to the text before it. Best-fit packing (`--data.packing documents`) splits only
# documents that are longer than a row. It takes the longest first, puts each into the fullest row that still
# has space, and pads. Here are the same lines in rows of 128:

# %% tags=["hide-input"]
for packing in ("windows", "documents"):
    d = preset("tiny", **{"data.seq_len": 128, "data.packing": packing}).data
    print(dataset.describe_epoch(dataset.load(out).splits["train"], d))

# %% [markdown]
# **Targets are shifted by one.** Without the shift, each token is its own target. The next cell computes
# the lowest possible loss on the training text for a model that sees only one token:

# %%
ids = corpus.splits["train"].read(0, 10**9).astype(int)
share = lambda values: np.unique(values, return_counts=True)[1] / len(values)
entropy = lambda values: -share(values) @ np.log(share(values))
for name, targets_N in {"shifted": ids[1:], "not shifted": ids[:-1]}.items():
    least = entropy(ids[:-1] * 1025 + targets_N) - entropy(ids[:-1])
    print(f"{name:11} {abs(least):.2f} nats per token")

# %% [markdown]
# If the loss is far below the bigram loss early in training, the model probably copies its input.

# %% [markdown]
# ## Each token once
#
# The project's loader, `dataset.batch`, works like the program by hand. It gets the same check:

# %%
N = 9000
SERIAL = {"data.path": str(folder / "serial"), "model.vocab_size": 10_001}
SERIAL |= {"data.seq_len": 64, "data.batch_size": 24}
more = dict(vocab_size=10_000, val_share=0.1, overwrite=True)
prepare.from_ids(np.arange(10_000), SERIAL["data.path"], **more)
serial = preset("tiny", **SERIAL)


def targets(step):
    """The targets of a step without padding."""
    batch = dataset.batch(serial, step)
    return batch["targets_BT"][batch["weights_BT"] > 0]


all_targets = np.concatenate([targets(step) for step in range(47)])
count_N = np.bincount(all_targets, minlength=N)
print(f"{N:,} tokens: each is a target", *np.unique(count_N), "times in 47 steps")
assert (count_N == 8).all()

# %% [markdown]
# N = 9,000 targets make 141 windows of 64; the last is shorter. So eight epochs take 47 steps of 24
# windows.
#
# To resume, call `dataset.batch` with the step of the checkpoint. Every step costs the same:

# %%
from time import process_time

made_at = {}
for step in (0, 90, 10**9):
    clocks = []
    for _ in range(5):
        clock = process_time()
        made_at[step] = dataset.batch(serial, step)["targets_BT"]
        clocks.append(process_time() - clock)
    print(f"step {step:13,}: {min(clocks) * 1e3:.2f} ms")
first_steps = [dataset.batch(serial, step)["targets_BT"] for step in range(100)]
assert np.array_equal(first_steps[90], made_at[90])  # step 90 of a run that began at 0
assert not np.array_equal(made_at[90], made_at[10**9])

# %% [markdown]
# **Hosts.** Chips are attached to machines, the *hosts*, and each host runs one process. In the usual
# loader, host h of n gets windows h, h + n, h + 2n and so on, and shuffles them. In one epoch each window
# is read once, on any number of hosts.
#
# > **Predict.** Eight hosts read the first half of an epoch, then four read the second half. What fraction
# > of the windows is never read?


# %%
def per_host(step, hosts, windows=480, B=16):
    """The windows of a global batch if each host shuffles its own windows."""
    b, rows = B // hosts, []
    for host in range(hosts):
        own = np.random.default_rng(host).permutation(np.arange(host, windows, hosts))
        rows += [*own[step * b : step * b + b]]
    return rows


# %% tags=["hide-input"]
for second in (8, 4):
    seen = [per_host(step, 8 if step < 15 else second) for step in range(30)]
    reads = np.bincount(np.concatenate(seen), minlength=480)
    if second == 8:
        assert (reads == 1).all()
        print("30 steps on 8 hosts: each window is read once")
never = np.mean(reads == 0)

# %%
my_prediction = None  # between 0 and 1
lesson.predicted("8 hosts, then 4: never read", my_prediction, never, within=0.1)

# %% tags=["remove-cell"]
assert 0.15 < never < 0.35

# %% [markdown]
# Four hosts have a different order than eight. Half of the windows that they read had been read before.

# %% tags=["hide-input"]
print(f"windows read twice: {np.mean(reads == 2):.0%}, never: {never:.0%}")

# %% [markdown]
# MaxText with Grain stores a state for each loading host. A run that resumed with twice as many hosts kept 64
# loading hosts, and the others loaded nothing ([maxtext
# 2537](https://github.com/AI-Hypercomputer/maxtext/pull/2537)). `expansion_factor_real_data` now adapts the
# states. MosaicML Streaming calls this *elastic determinism*
# ([docs](https://docs.mosaicml.com/projects/streaming)).
#
# With the endless order, the rows of a batch do not depend on the hosts. A host looks up which rows its
# devices store (`sharding.own_rows`, exercise 3), and reads only those rows. `sharding.put` copies them
# to its devices.

# %% [markdown]
# Eight simulated devices get the first 23 steps, and four get the other 24:

# %%
import sharding


def on_devices(step, devices):
    """The targets of a step on each device, without padding."""
    mesh = sharding.make_mesh(f"data={devices}")
    there = sharding.put(dataset.batch(serial, step), mesh)
    on_each = lambda name: [np.asarray(p.data) for p in there[name].addressable_shards]
    shards = zip(on_each("targets_BT"), on_each("weights_BT"), strict=True)
    return [targets[weights > 0] for targets, weights in shards]


for second in (8, 4):
    on_all = []
    for step in range(47):
        on_all += on_devices(step, 8 if step < 23 else second)
    count_N = np.bincount(np.concatenate(on_all), minlength=N)
    print(f"23 steps on 8 devices, 24 on {second}: {len(on_all)} shards", end="")
    print(", each token", *np.unique(count_N), "times")
    assert (count_N == 8).all()
    whole = np.concatenate(on_devices(46, second))  # the last step is the same, too
    assert np.array_equal(whole, targets(46))

# %% [markdown]
# **Mixtures.** Several corpora also form one endless order. Each is shuffled separately, and the number of a
# row determines its corpus. Here are two corpora, one with ids below 5,000 and one with ids from 5,000 on.
# Every 7 rows of the first come with 3 rows of the second:

# %%
for name, low in {"code": 0, "prose": 5_000}.items():
    ids_N = np.arange(low, low + 5_000)
    prepare.from_ids(ids_N, str(folder / "mix" / name), **more)
mix = {"data.path": str(folder / "mix"), "data.mixture": "code=0.7,prose=0.3"}
mixed = preset("tiny", **SERIAL | mix)
of_step = lambda step: dataset.batch(mixed, step)["tokens_BT"][:, 1] < 5_000
is_code = np.concatenate([of_step(step) for step in range(125)])
for begin in (0, 999, 2_000):
    print(f"1,000 rows from {begin:,}: {is_code[begin : begin + 1000].sum()} are code")
    assert is_code[begin : begin + 1000].sum() == 700

# %% [markdown]
# The count is exactly 700, wherever you start. If each row chose its corpus at random, the count would
# typically be off by (1,000 * 0.7 * 0.3)^½ = 14.
#
# **Files.** You choose the file size for disks and copying, so it must not affect the batches. If a loader
# splits each file into windows separately, it drops the remainder of every file, and its order depends on the
# file size. Compare the two copies of the text above, with large and small files:

# %%
SIZES = {"data.seq_len": 128, "model.vocab_size": 1025}
both = [preset("tiny", **{**SIZES, "data.path": path}) for path in (large, small)]
for step in range(30):
    a, b = (dataset.batch(one, step) for one in both)
    assert all(np.array_equal(a[name], b[name]) for name in a)
for one in both:
    shards = dataset.load(one.data.path).splits["train"].shards
    whole = sum((len(s) - 1) // 128 * 128 for s in shards)
    lost = 1 - whole / (sum(map(len, shards)) - 1)
    print(f"{len(shards):3} files: the same 30 batches", end="")
    print(f"; windows per file would lose {lost:.1%} of the tokens")

# %% [markdown]
# ## What it costs, and when not to use it
#
# A host creates only its own rows. If it created the whole batch, a batch for twice as many hosts would be
# twice the work for each of them. (JAX's guide to [distributed data
# loading](https://docs.jax.dev/en/latest/distributed_data_loading.html) warns that rows on the wrong devices
# raise no error.)
#
# Is one core per host enough? The next cell measures CPU time on this machine, for `moe1b`, the project's
# main run, with 256 sequences of 1,024 tokens. The planner estimates the step time on 32 TPU v4 chips, four
# per host.

# %% tags=["hide-input"]
from plan import planner

big = preset("moe1b", **{"data.path": large})
dataset.batch(big, 0)
clock = process_time()
for step in range(1, 9):
    dataset.batch(big, step)
made = 8 * big.data.tokens_per_step / (process_time() - clock)
planned = planner.plan(big, "v4:4x4x2")
a_host = planned.tokens_per_step / planned.step_s / 8  # tokens a second, of 4 chips
print(f"tokens/s: a core produces {made:,.0f}, a host consumes {a_host:,.0f}", end="")
print(f", {made / a_host:,.0f} times less")
for chips in (32, 512, 4096):
    read = a_host * 4  # bytes: 100,352 ids need uint32
    print(f"{chips:4} chips: a host reads {read / 1e6:.1f} MB/s", end="")
    print(f", all {chips // 4:5,} hosts {read * chips / 4 / 1e9:6.2f} GB/s")
assert made > 4 * a_host and big.model.vocab_size > 2**16, "a core no longer keeps up"

# %% [markdown]
# An id takes 4 bytes here, because a vocabulary of 100,352 ids needs uint32. `dataset.prefetch` creates
# batches in a thread while the chips compute, so the chips never wait if a core is faster than they are. On
# TPUs, tokens are usually [in a bucket](../data.md#read-tokens-from-a-bucket); a host downloads only its
# rows.
#
# ## Exercise 1: the last window
#
# A stream has `tokens` tokens. How many targets does window number `window` have? The first window is
# number 0.

# %% tags=["hide-input"]
windows_of = {}
for T_ in (64, 100, 300):
    small_cfg = preset("tiny", **{**SERIAL, "data.seq_len": T_})
    rows = [b["weights_BT"].sum(axis=1) for b in dataset.evaluation_batches(small_cfg)]
    windows_of[T_] = [int(n) for n in np.concatenate(rows) if n > 0]
CASES = [(w, 1001, T_) for T_, found in windows_of.items() for w in (0, len(found) - 1)]
is_last = lambda w, N, T: w == -(-(N - 1) // T) - 1

# %% tags=["hide-input"]
WINDOW_HINTS = [
    (lambda w, N, T: T, "That is right for full windows. What about the last one?"),
    (lambda w, N, T: min(T, N - w * T), "You count inputs. Does each have a target?"),
    (lambda w, N, T: N - 1 - w * T, "That is the number of all remaining targets."),
    (lambda w, N, T: N - w * T, "Those are all remaining tokens."),
    (lambda w, N, T: (N - 1) % T if is_last(w, N, T) else T,
     "Almost right: if T divides the number of targets, the last window is full."),
    (lambda w, N, T: min(T, N - w * T) - 1,
     "Right for the last one. A full window's last target is outside the window."),
    (lambda w, N, T: (N - 1) % T,
     "That is the size of the last window. It does not depend on window."),
    (lambda w, N, T: T * (w < (N - 1) // T), "You drop the last window."),
    (lambda w, N, T: -(-(N - 1) // T), "That is the number of windows."),
]  # fmt: skip

# %% tags=["hide-input"]
check_window = lesson.checker(
    CASES, lambda w, N, T: windows_of[T][w], WINDOW_HINTS,
    "Right, for windows of 64, 100 and 300: the loader's weights agree.")  # fmt: skip


# %%
def targets_in(window, tokens, T):
    return ...


print(check_window(targets_in))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return min(T, tokens - 1 - window * T)`. There are `tokens - 1` targets in total, and `window * T` of
# them are in earlier windows. Divide the loss by the sum of the weights of the *whole* batch. A mean of row
# means would give the targets of the short row more weight than others.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_window, *WINDOW_HINTS,
              (lambda w, N, T: min(T, N - 1 - w * T), "Right, for"),
              (targets_in, "Nothing there"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: a batch size that grows
#
# A run has batches of `before` sequences, and from step `change` on batches of `after`. At which index of
# the endless order does the batch of `step` begin? No window may be repeated or skipped.

# %% tags=["hide-input"]
GROW_HINTS = [
    (lambda s, c, a, b: s * a if s < c else s * b,
     "At the change the index jumps: if the batch grows, you skip windows."),
    (lambda s, c, a, b: s * a, "Right up to the change, but not after it."),
    (lambda s, c, a, b: s * b, "Right for a run that always had the second size."),
    (lambda s, c, a, b: s * a if s < c else (s - c) * b,
     "After the change, you start again with the first window."),
    (lambda s, c, a, b: c * a + (s - c) * b,
     "Right from the change on, but not before it."),
    (lambda s, c, a, b: s * a if s < c else c * a + s * b,
     "After the change, you count the earlier steps twice."),
    (lambda s, c, a, b: min(s, c) * b + max(s - c, 0) * a,
     "You swapped the two batch sizes."),
    (lambda s, c, a, b: min(s + 1, c) * a + max(s + 1 - c, 0) * b,
     "That is where the next batch begins."),
]  # fmt: skip
check_first_index = lesson.checker(
    [(2, 4, 8, 24), (4, 4, 8, 24), (10, 4, 8, 24), (7, 3, 16, 4)],
    lambda step, c, a, b: sum(a if s < c else b for s in range(step)),
    GROW_HINTS, "Right: no gap, no overlap.")  # fmt: skip


# %%
def first_index(step, change, before, after):
    return ...


print(check_first_index(first_index))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return min(step, change) * before + max(step - change, 0) * after`. A batch depends on how many sequences
# were read before it. `dataset.batch` takes this to be the step times the *current* batch size, which is
# correct only if the batch size never changes. Therefore this project does not resume with a different
# `data.batch_size` (`train.directory.result_settings` lists what may change).
# OLMo stores the number of sequences in the checkpoint for this reason ([OLMo
# 182](https://github.com/allenai/OLMo/pull/182)).
# </details>

# %% tags=["remove-cell"]
grown = lambda s, c, a, b: min(s, c) * a + max(s - c, 0) * b
lesson.expect(check_first_index, *GROW_HINTS, (grown, "Right: no"),
              (first_index, "Nothing there"))  # fmt: skip

# %% [markdown]
# ## Exercise 3: design a loader for 32 hosts
#
# Return the windows that `host` of `hosts` has to read in a step. Concatenated over all hosts, the rows
# must be identical to the batch of `dataset.batch`, with 1, 4 or 32 hosts. `order[i]` is the i-th window
# of the endless order. Look up as few indices as possible. (The checker's messages give a step and a
# number of hosts, and are about the rows of all hosts.)

# %% tags=["hide-input"]
from itertools import islice

B_all = 64
wide = preset("tiny", **{**SERIAL, "data.batch_size": B_all})
ORDER = dataset._shuffled(141, wide.run.seed)


class Counted:
    """The order, and how many indices were looked up."""

    looks = 0

    def __getitem__(self, i):
        self.looks += 1
        return ORDER[i]


def concatenated(answer, step, hosts, order=ORDER):
    answer = lesson.answered(answer)
    some = lambda rows: [int(row) for row in islice(rows, 2 * B_all)]  # may be endless
    rows = [some(answer(order, step, host, hosts, B_all)) for host in range(hosts)]
    return np.concatenate(rows)


# %% tags=["hide-input"]
def slice_from(first):
    """Consecutive rows of a host, from an index of the order on."""

    def rows(order, step, host, hosts, B):
        index = first(step, host, hosts, B)
        return [order[i] for i in range(index, index + B // hosts)]

    return rows


def strided(order, s, h, n, B):
    return [order[s * B + h + k * n] for k in range(B // n)]


def shuffled_alone(order, s, h, n, B):
    own = np.random.default_rng(h).permutation(np.arange(h, 141, n))
    return [own[(s * B // n + k) % len(own)] for k in range(B // n)]


own_indices = lambda s, h, n, B: range(s * B + h * (B // n), s * B + (h + 1) * (B // n))

# %% tags=["hide-input"]
HOST_HINTS = [
    (strided, "The right windows, but in other rows, so the batch is not identical."),
    (slice_from(lambda s, h, n, B: s * B), "All hosts read the same rows."),
    (slice_from(lambda s, h, n, B: s * (B // n)),
     "All hosts read the same rows, and the steps overlap."),
    (slice_from(lambda s, h, n, B: (s + h) * (B // n)),
     "Windows repeat in later steps. How far does a step advance the whole batch?"),
    (shuffled_alone, "Each host shuffles separately. The batch has only one order."),
    (lambda order, *case: [*own_indices(*case)],
     "These are indices. Look up the windows in the order."),
    (lambda order, s, h, n, B: [order[i] for i in range(s * B, s * B + B)],
     "Every host reads the whole batch, so there are too many rows."),
    (slice_from(lambda s, h, n, B: h * (B // n)), "The same batch in every step."),
    (slice_from(lambda s, h, n, B: (s * n + h) * B),
     "You skip windows between the hosts. How many rows does a host have?"),
]  # fmt: skip


# %% tags=["hide-input"]
def check_hosts(answer):
    right = lambda step, hosts: dataset.batch(wide, step)["targets_BT"][:, 0] // 64
    run = lambda f: lambda step, hosts: concatenated(f, step, hosts)
    cases, order = [(5, 4), (1, 32), (7, 1)], Counted()
    line = lesson.diagnose(answer, cases, right, HOST_HINTS, "Right", run=run)
    if line == "Right":
        concatenated(answer, 5, 32, order)
    if order.looks > B_all:
        looks = f"32 hosts look up {order.looks:,} indices"
        return f"The right rows, but {looks} for {B_all} rows. Which belong to a host?"
    return line.replace("Right", "Right: the same batch from 1, 4 and 32 hosts.")


# %%
def rows_of_host(order, step, host, hosts, B):
    return ...


print(check_hosts(rows_of_host))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# first = step * B + host * (B // hosts)
# return [order[i] for i in range(first, first + B // hosts)]
# ```
#
# All hosts use the same order, but each has its own range of indices. Nothing is communicated: each host
# can compute any entry of the order. Training would also work with the rows in another order, but not
# reproduce the same bits.
# </details>

# %% tags=["remove-cell"]
own_rows = slice_from(lambda s, h, n, B: s * B + h * (B // n))


def whole(order, step, host, hosts, B):
    rows = [order[i] for i in range(step * B, step * B + B)]
    return rows[host * B // hosts :][: B // hosts]


lazy = lambda order, s, h, n, B: (order[i] for i in own_indices(s, h, n, B))
lesson.expect(check_hosts, *HOST_HINTS, (own_rows, "Right: the same"),
              (whole, "look up 2,048 indices"),
              (rows_of_host, lesson.NOTHING), (lambda *_: None, lesson.NOTHING),
              (lazy, "Right: the same"))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# This loader makes batches ahead of time, and stores its position in the checkpoint. Its test passes: stop,
# restore, and compare with an uninterrupted run. On a cluster with three preemptions a day, the training
# loss is better than anyone had hoped. Fix the program in place, then run the cells below.

# %%
from collections import deque


class Order:
    """The endless order of the windows: a new permutation in each epoch."""

    def __init__(self, windows, seed=0):
        self.windows, self.seed = windows, seed
        self.epoch, self.shuffle = None, None

    def __getitem__(self, index):
        epoch, i = divmod(index, self.windows)
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self.epoch, self.shuffle = epoch, rng.permutation(self.windows)
        return int(self.shuffle[i])


# %%
class Loader:
    """Batches of 8 windows. `state` goes into a checkpoint, `restore` reads it."""

    def __init__(self, windows=700, ahead=2):
        self.order, self.ahead = Order(windows), ahead
        self.first = self.batches = 0

    def __iter__(self):
        self.batches, waiting, number = 0, deque(), self.first
        while True:
            while len(waiting) < self.ahead:  # in a thread, in a real loader
                indices = range(number * 8, number * 8 + 8)
                waiting.append([self.order[index] for index in indices])
                number += 1
            self.batches += 1
            yield waiting.popleft()

    def state(self):
        return {"batches": self.batches}

    def restore(self, state):
        self.first = state["batches"]


# %%
def windows_read(loader_class, stops, steps=160):
    """The windows of all steps; at each stop, a new process restores the state."""
    seen, checkpoint = [], None
    for step in range(steps):
        if step == 0 or step in stops:
            loader = loader_class()
            if checkpoint is not None:
                loader.restore(checkpoint)
            rows = iter(loader)
        seen.append(next(rows))
        checkpoint = loader.state()
    return np.array(seen)


assert np.array_equal(windows_read(Loader, (40,)), windows_read(Loader, ()))
print("the test passes: with a stop at step 40, the windows of all steps are the same")


# %% tags=["hide-input"]
def counting(batches):
    """A Loader with another count of batches in its state."""
    state = lambda self: {"batches": batches(self)}
    return type("Counting", (Loader,), {"state": state})


def window_at(index):
    """The window at an index of the endless order, computed separately."""
    epoch, i = divmod(index, 700)
    return np.random.default_rng((0, epoch)).permutation(700)[i]


never_stopped = np.reshape([window_at(i) for i in range(160 * 8)], (160, 8))
LOADER_HINTS = [
    (Loader, "Unchanged: on such a day, the run reads some windows again."),
    (counting(lambda self: self.first), "Every restart begins where the run began."),
    (counting(lambda self: self.first + self.batches - 1),
     "A batch is repeated at each stop."),
    (counting(lambda self: self.first + self.batches + self.ahead - 1),
     "At each stop, a batch is skipped: it was made ahead, but not used."),
]  # fmt: skip

# %% tags=["hide-input"]
check_loader = lesson.checker(
    [((),), ((40,),), ((40, 70, 100),), ((5, 6, 7),)], lambda stops: never_stopped,
    LOADER_HINTS, "Fixed: the same windows in the same order, with 0, 1 or 3 stops.",
    run=lambda loader: lambda stops: windows_read(loader, stops))  # fmt: skip

# %% tags=["hide-output"]
print(check_loader(Loader))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `batches` counts since the *last* start, but `restore` treats it as a count since the first start. At the
# first stop, the two are equal, so the test passes. At later stops, the run goes back, and reads windows
# again. `state` must add the restored count:
#
# ```python
# def state(self):
#     return {"batches": self.first + self.batches}
# ```
#
# (The batches that were made ahead must not be counted: they are made again.) This happened in a training
# library: 30 batches, stop, 10 more, stop, and the third run skipped 10 batches instead of 40 ([KempnerForge
# 57](https://github.com/KempnerInstitute/KempnerForge/issues/57)). The fix came with a test of three runs in a
# row. The best fix needs no `state`: pass the step, which is in the checkpoint anyway, to `__iter__`.
# </details>


# %% tags=["remove-cell"]
class Mended(Loader):
    def restore(self, state):
        self.first = state["batches"]
        self.state = lambda: {"batches": self.first + self.batches}


also_mended = counting(lambda self: self.first + self.batches)
lesson.expect(check_loader, *LOADER_HINTS, (Mended, "Fixed"), (also_mended, "Fixed"))
often = windows_read(Loader, (40, 70, 100))
assert np.bincount(often.ravel()).max() > 3, "the bug no longer repeats windows"

# %% [markdown]
# ## In one table
#
# A batch is `tokens_BT`. A device of `data=n` stores `tokens_bT`, b = B/n of its rows.
#
# | what | where it is | what is read or sent | in JAX, PyTorch or Megatron-LM |
# |---|---|---|---|
# | the order | every host can compute any entry | nothing | Grain's `index_shuffle`; PyTorch's `DistributedSampler`, whose order depends on the number of ranks; Megatron-LM stores shuffle indices in files |
# | the rows of a host | that host | T + 1 ids per row, from its own disk or a bucket | `jax.make_array_from_process_local_data`; the `DataLoader` of a rank |
# | positions, segments, weights | computed with the ids | nothing | `document_ids`, `ignore_index`; `--reset-position-ids`, `--reset-attention-mask` |
# | the position in the data | the step number, in the checkpoint | nothing | a Grain iterator's state; `StatefulDataLoader`; `consumed_train_samples` |
# | sum of weights | all devices | one number per step, an all-reduce | `psum`; `num_items_in_batch` |
#
# Data loading is not on the critical path if a core produces tokens faster than the chips of its host
# consume them.
#
# ## Three lines to keep
#
# 1. A batch must depend only on the settings and the step, not on a generator, a host or a file.
# 2. Check a loader with tokens that are serial numbers, because the loss rewards a loader that repeats
#    itself.
# 3. The loss compares models with the same tokenizer; bits per byte compare all models.
#
# **Sources.** Byte-pair encoding: Sennrich et al., [arXiv:1508.07909](https://arxiv.org/abs/1508.07909),
# section 3.2; the split into words is that of
# [GPT-2](https://github.com/openai/gpt-2/blob/master/src/encoder.py). Bits per byte: The Pile,
# [arXiv:2101.00027](https://arxiv.org/abs/2101.00027), section 3.1. Segments and positions in packed
# windows: Krell et al., [arXiv:2107.02027](https://arxiv.org/abs/2107.02027). The cost of splitting
# documents: Ding et al., [arXiv:2404.10830](https://arxiv.org/abs/2404.10830). Random access to a shuffle:
# [Grain](https://google-grain.readthedocs.io). Steps and their time: chapter 00.
