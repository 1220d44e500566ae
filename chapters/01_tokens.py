# %% [markdown]
# # 01 · Tokens
#
# **Question.** A run is stopped, and goes on with another number of machines. Does it see the tokens that it
# would have seen, each of them once?
#
# **Why it hurts not to know.** A loader that repeats tokens, or skips some, raises no error, and the loss
# falls. Below it falls *faster* than that of the correct run.
#
# *Before this:* 00 (what a step costs). *Mesh:* none; no device is used, though the first cell, the same in all
# chapters, simulates eight. *Runs in* 15 s on 2 cores.

# %%
import utils

utils.simulate_devices(8)
import sysconfig
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import dataset
from chapters import lesson
from config import preset

# %% [markdown]
# ## Stopped three times
#
# The text is a part of the Python standard library, as it lies on your machine; your numbers differ a little
# from ours. Tokens are its bytes, for now. The stream is cut into windows of T = 256 tokens, and a step sees
# B = 16 of them. (A capital letter is the size of a whole dim, here and in the names of arrays.)
#
# The loader is the one that everybody writes first: a generator, seeded, that shuffles the windows and
# yields each of them once.

# %%
library = Path(sysconfig.get_path("stdlib"))
read = lambda pattern: b"".join(f.read_bytes() for f in sorted(library.glob(pattern)))
text, held_out = read("[a-c]*.py"), read("d*.py")
B, T, STEPS = 16, 256, 100
windows = len(text) // T


def generator():
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(windows)


def batches(stops):
    """The windows of each step. At a stop the process ends, and another one starts."""
    for step in range(STEPS):
        if step == 0 or step in stops:
            rows = generator()
        yield [int(next(rows)) for _ in range(B)]


# %% [markdown]
# In place of a model we take a table: how often has each byte followed each three bytes? It learns by
# counting. Like a trainer it reports the loss of a batch *before* it learns from it. What it has learned
# survives the stops, as a checkpoint does.


# %%
def learn(counts, text_BT):
    """Mean loss of a byte after three others, in nats; then count it."""
    *before, x = (text_BT[:, k : T - 3 + k].astype(int) for k in range(4))
    key = (before[0] * 7919 + before[1] * 521 + before[2]) % len(counts)
    p = counts[key, x] / counts[key].sum(axis=-1)
    np.add.at(counts, (key, x), 1)
    return -np.log(p).mean()


def train(stops):
    """Loss of each step, the loss on other text at the end, and the windows seen."""
    counts = np.full((2**14, 256), 1 / 256, np.float32)
    as_ids = lambda text: np.frombuffer(text, np.uint8)
    cut_NT = lambda text: as_ids(text)[: len(text) // T * T].reshape(-1, T)
    seen = list(batches(stops))
    losses = [learn(counts, cut_NT(text)[rows]) for rows in seen]
    return losses, learn(counts, cut_NT(held_out)), np.unique(seen).size


runs = {"not stopped": train(()), "stopped three times": train((25, 50, 75))}

# %% mystnb={"image": {"alt": "Two falling curves; that of the stopped run drops at the first stop and stays far lower."}}
figure, axes = plt.subplots(figsize=(6.2, 3))
for (name, (losses, _, _)), style in zip(runs.items(), ("-", ":"), strict=True):
    axes.plot(losses, style, label=name, color="black", lw=1.5)
for stop in (25, 50, 75):
    axes.axvline(stop, color=lesson.NEUTRAL, lw=0.8)
axes.set(xlabel="step", ylabel="loss, nats a byte", ylim=(0, None))
axes.set_title("The broken run reports the lower loss")
axes.legend()
for name, (losses, other, seen) in runs.items():
    last = np.mean(losses[-10:])
    print(f"{name:20} last loss {last:.2f}, on other text {other:.2f}", end="")
    print(f", {seen:,} of {STEPS * B:,} windows were new")
(whole, whole_other, _), (stopped, stopped_other, _) = runs.values()
assert np.mean(stopped[-10:]) < np.mean(whole[-10:]) and stopped_other > whole_other

# %% [markdown]
# Each start draws the same windows again, and the run learns them by heart. The printed loss rewards it; the
# loss on other text shows the damage. A translation toolkit had this fault: a run interrupted after its first
# epoch went on with the batches of that epoch, in the same order
# ([joeynmt 125](https://github.com/joeynmt/joeynmt/issues/125)).
#
# The cure is a loader with **no state**: a batch is a function of the settings and the number of the step.
# This page builds what stands behind such a function: ids, shards, windows, an order.
#
# ## Text to ids
#
# A byte a token makes long sequences. *Byte-pair encoding* shortens them: count all pairs of neighbours, give
# the commonest pair an id of its own, repeat. A regular expression first cuts the text into words, and no
# pair reaches across a cut. So each different word is kept once, and a merge recounts only those that hold its
# pair.

# %%
from collections import Counter, defaultdict
from itertools import pairwise

import regex

from data import prepare, tokenizers


def merged(parts, pair):
    """A list of byte strings, with each occurrence of the pair joined."""
    out = []
    for part in parts:
        fits = out and (out[-1], part) == pair
        out[-1:] = [out[-1] + part] if fits else [*out[-1:], part]
    return out


# %% [markdown]
# (`merged` looks one part back. That is the same as looking from the left for the pair, as a joined pair is
# longer than either half.)


# %%
def train_bpe(text, vocabulary):
    times = Counter(regex.findall(tokenizers.GPT2_PATTERN, text))
    parts = {word: [bytes([b]) for b in word.encode()] for word in times}
    pairs, words_with = Counter(), defaultdict(set)

    def count(word, sign):
        for pair in pairwise(parts[word]):
            pairs[pair] += sign * times[word]
            words_with[pair].add(word)

    for word in parts:
        count(word, 1)
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < vocabulary:
        pair = pairs.most_common(1)[0][0]
        ranks.setdefault(b"".join(pair), len(ranks))
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
# A token is a string of bytes, and its rank says how early it was made. Encoding needs no more than that:
# join the neighbours whose union has the lowest rank, until no union has one. The first k merges do not
# depend on the later ones, so one training gives tokenizers of all smaller sizes.
#
# > **Predict.** With 1,024 - 256 = 768 merges, how many bytes of *other* text does a token stand for? (256
# > ids: 1 byte.)


# %%
def encode(ranks, text):
    ids = []
    for word in regex.findall(tokenizers.GPT2_PATTERN, text):
        parts = [bytes([b]) for b in word.encode()]
        rank = lambda pair: ranks.get(b"".join(pair), len(ranks))
        while pairs := [pair for pair in pairwise(parts) if rank(pair) < len(ranks)]:
            parts = merged(parts, min(pairs, key=rank))
        ids += [ranks[part] for part in parts]
    return ids


# %%
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
assert ours == theirs.tolist()
print("other text: the same ids from these lines and from tiktoken")

# %%
my_prediction = None  # bytes a token
counted = len(held_out) / len(ours)
lesson.predicted("bytes a token", my_prediction, counted, "bytes", within=0.1)
assert 1.8 < counted < 3.5

# %% [markdown]
# ## Loss a token, bits a byte
#
# Fewer tokens for the same text is a shorter run. But a longer token is harder to guess. The smallest model
# there is, the *unigram* model, knows how often each id occurs and nothing else. Count it on our text, and
# measure its loss on the other text, for tokenizers of eight sizes:

# %%
sizes_V, table = (256, 320, 384, 512, 768, 1024, 1536, 2048), []
for V in sizes_V:
    ids, other_ids = (tokenizers.encode(rank_file(V), x) for x in (text, held_out))
    p_V = np.bincount(ids, minlength=V) + 1.0  # + 1: an id that never occurred may yet
    nats = -np.log(p_V / p_V.sum())[other_ids].mean()
    per_token, own = len(held_out) / len(other_ids), len(text) / len(ids)
    table.append((per_token, own, nats, nats / np.log(2) / per_token))
bytes_a_token, own, nats, bits = map(np.array, zip(*table, strict=True))
for V, *row in zip(sizes_V, bytes_a_token, nats, bits, strict=True):
    say = "{:5} ids: {:.2f} bytes a token, {:.2f} nats a token, {:.2f} bits a byte"
    print(say.format(V, *row))
assert (np.diff(nats) > 0).all() and (np.diff(bits) < 0).all()

# %% mystnb={"image": {"alt": "Left: bytes a token grow ever more slowly with the vocabulary. Right: loss a token rises, bits a byte fall."}}
figure, (left, right) = plt.subplots(1, 2, figsize=(6.6, 3.1))
left.plot(sizes_V, own, "o-", color="black", ms=3, label="text of the merges")
left.plot(sizes_V, bytes_a_token, "o--", color="black", ms=3, label="other text")
left.set(ylabel="bytes a token", title="Each doubling buys less", ylim=(0, None))
right.plot(sizes_V, nats, "o-", color="black", ms=3, label="nats a token")
right.plot(sizes_V, bits, "o--", color="black", ms=3, label="bits a byte")
right.set(title="Same model, two verdicts", ylim=(0, None))
for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set_xticks([256, 512, 1024, 2048], ["256", "512", "1,024", "2,048"])
    axes.set_xlabel("ids in the vocabulary")
    axes.legend(loc="lower right")

# %% [markdown]
# The loss says that the tokenizer of bytes is the best one, and bits a byte say that it is the worst. Only the
# second is a statement about text. Probabilities of tokens multiply to the probability of the text, so nats
# *add up*: the sum over all tokens, over ln 2, is the length in bits of the text when coded by this model
# (nearly: a text has other cuts into tokens, too). Divide it by bytes, which no tokenizer can change:
#
#     bits a byte = nats a token / ln 2 / bytes a token
#
# Losses of two tokenizers cannot be compared; bits a byte on the same text can.
#
# ## Shards and a manifest
#
# `python -m data.prepare` writes ids to disk, here called as a function. Before each document, a file, stands
# one more id, the *end of text*: 1,024 in a tokenizer of 1,024. All documents of a split form one stream, cut
# into files, the *shards*. Whether a document is held out depends on a hash of its name alone: more documents
# move none from one split to the other.


# %%
def prepared(name, shard_tokens):
    source, bpe = f"text:{library}/[a-d]*.py", f"bpe:{folder}/1024.bpe"
    out, more = str(folder / name), dict(val_share=0.15, shard_tokens=shard_tokens)
    prepare.prepare(prepare.Arguments(out, source, bpe, **more))
    return out


large, small = prepared("large", 100_000), prepared("small", 999)
corpus = dataset.load(large)
print("written:", *sorted(p.name for p in Path(large).iterdir()))
for name, split in corpus.splits.items():
    mapped = type(split.shards[0]).__name__
    print(f"{name}: {split.tokens:,} {split.shards[0].dtype} ids in {mapped}s")
m = corpus.manifest
print(f"unigram {m['unigram_nats']:.2f}, bigram {m['bigram_nats']:.2f} nats", end="")
print(f"; every id as likely as all others: {np.log(1025):.2f} nats")

# %% [markdown]
# A `memmap` is a file that looks like an array. Opening it reads a header; taking a slice reads the pages it
# lies on. So a corpus may be larger than memory, and all processes of a machine share what has been read.
#
# The manifest holds each shard's size and sha256, so a damaged copy is refused, and the entropies of the train
# split. They are what a loss is to be compared with. A new model starts near the third number. When it
# passes the first, it knows which ids are common; below the second, it has used more than the token before.
# (The second is counted on the very pairs it describes, and that flatters it:)

# %%
ids = corpus.splits["train"].read(0, 10**9).astype(int)
times = np.unique(ids[:-1] * 1025 + ids[1:], return_counts=True)[1]
print(f"{len(times):,} different pairs, of which {np.mean(times == 1):.0%} occur once")

# %% [markdown]
# Now windows. Window i has tokens `i*T .. i*T + T - 1` as inputs and each one's successor as target: the last
# target of a window is the first input of the next. Windows care neither about documents nor about shards.
#
# > **Predict.** T = 128. How many windows has the val split, whose size stands above? The last may be short.

# %%
SIZES = {"data.path": large, "data.seq_len": 128, "model.vocab_size": 1025}
cfg = preset("tiny", **SIZES)
my_prediction = None  # windows
val = dataset.evaluation_batches(cfg)
found = np.concatenate([batch["weights_BT"].sum(axis=1) for batch in val])
found = found[found > 0]
lesson.predicted("windows of val", my_prediction, len(found), "windows", within=0)
print(f"the last has {found[-1]:.0f} targets, all have {found.sum():,.0f}")
assert found.sum() == corpus.splits["val"].tokens - 1

# %% [markdown]
# All tokens but the first are a target, so `tokens - 1` is divided, and rounded up. The last window is filled
# with padding of weight 0. Who drops it loses text; who lets it count measures the wrong loss.
#
# ## What is in a batch
#
# To see documents end inside windows, they must be short: the first lines of some docstrings, as bytes, a
# document each. `prepare.from_ids` takes ids in place of text.

# %%
functions = abs, all, any, bin, chr, id, len, max, min, ord, sum
lines = [f.__doc__.splitlines()[0].encode() for f in functions]
documents = [np.frombuffer(line, np.uint8) for line in lines]
prepare.from_ids(documents, str(folder / "lines"), tokenizer="bytes", val_share=0.2)
sizes = {"data.path": str(folder / "lines"), "data.seq_len": 36, "data.batch_size": 6}
batch = dataset.batch(preset("tiny", **sizes), 0)
print({name: batch[name].shape for name in batch})

# %% mystnb={"image": {"alt": "Six rows of letters in coloured runs; below, grey wedges that start anew with each run."}}
figure, panels = plt.subplots(2, 1, figsize=(6.6, 4.2))
for (row, t), token in np.ndenumerate(batch["tokens_BT"]):
    segment, position = batch["segments_BT"][row, t], batch["positions_BT"][row, t]
    colour = plt.colormaps["Pastel1"](segment) if segment else "none"
    panels[0].add_patch(plt.Rectangle((t, row), 1, 1, color=colour, lw=0))
    letter = "|" if token == 256 else chr(token)
    panels[0].text(t + 0.5, row + 0.55, letter, size=9, ha="center", va="center")
    panels[1].bar(t + 0.5, position / 36, bottom=5 - row, width=1, color=lesson.NEUTRAL)
panels[0].set(ylim=(6, 0), title="A document is a segment, wherever the window cuts it")
panels[1].set(ylim=(0, 6), title="Positions restart with each document")
for axes in panels:
    axes.set(xlim=(0, 36), ylabel="sequence", yticks=[])
panels[1].set_xlabel("place in the window")

# %% [markdown]
# A colour is a number in `segments_BT`, white is padding, and `|` is the end of text. Attention stays inside a
# segment, so no document sees another one; the height of the grey is `positions_BT`. A document that was cut
# begins again at 0, and has lost what stood before: that is the price of windows. The other price, one document
# in each row and padding behind it, is higher when documents are short.
#
# One rule must not be forgotten: **targets are shifted by one**. Without the shift, each token is its own
# answer. The least loss of a model that sees one token, on the text of before:

# %%
share = lambda values: np.unique(values, return_counts=True)[1] / len(values)
entropy = lambda values: -share(values) @ np.log(share(values))
for name, targets_N in {"shifted": ids[1:], "not shifted": ids[:-1]}.items():
    least = entropy(ids[:-1] * 1025 + targets_N) - entropy(ids[:-1])
    print(f"{name:11} {abs(least):.2f} nats a token")

# %% [markdown]
# A loss far below the bigram's, early, is no success: the model copies. This is where the loader shifts, and
# numbers segments:

# %%
lesson.source(dataset._cut)

# %% [markdown]
# ## Each token once
#
# To audit a loader, feed it a stream in which **every token is its own serial number**. Then its batches
# confess what was read, and the count needs to trust nobody: it is `np.bincount` of the targets.

# %%
N, T, B = 9000, 64, 12
there = str(folder / "serial")
prepare.from_ids(np.arange(10_000), there, vocab_size=10_000, val_share=0.1)
SERIAL = {"data.path": there, "model.vocab_size": 10_001}
SERIAL |= {"data.seq_len": T, "data.batch_size": B}
serial = preset("tiny", **SERIAL)


def targets(step):
    """The targets of a step, without padding."""
    batch = dataset.batch(serial, step)
    return batch["targets_BT"][batch["weights_BT"] > 0]


all_targets = np.concatenate([targets(step) for step in range(47)])
times_N = np.bincount(all_targets, minlength=N)
print(f"{N:,} tokens, each a target", *np.unique(times_N), "times in 47 steps")
assert (times_N == 4).all()

# %% [markdown]
# N = 9,000 targets are 141 windows, so 47 steps of 12 are four epochs, and the end of an epoch falls
# inside a batch. No token is lost there.
#
# Many trainers do without epochs and begin each sequence at a random place
# ([nanoGPT](https://github.com/karpathy/nanoGPT/blob/master/train.py), `get_batch`). It needs one line and no
# bookkeeping.
#
# > **Predict.** Such a loader draws as many windows as an epoch has. What share of the tokens was never a
# > target?

# %%
rng, tokens, T_long = np.random.default_rng(0), 2_000_000, 200
times = np.zeros(tokens, int)
for epoch in (1, 2, 3):
    for start in rng.integers(tokens - T_long, size=tokens // T_long):
        times[start + 1 : start + T_long + 1] += 1
    never = np.mean(times == 0)
    if epoch == 1:
        my_prediction = None  # between 0 and 1
        lesson.predicted("share never a target", my_prediction, never, within=0.05)
        print(f"{np.mean(times > 1):.1%} were one more than once")
        assert abs(never - np.exp(-1)) < 0.02
    else:
        print(f"after {epoch} epochs' worth, never: {never:.1%}")

# %% [markdown]
# A draw misses a given token with probability `1 - T/N`, and there are N/T draws: `(1 - T/N)^(N/T)`, close to
# 1/e. More than a third of the corpus is paid for and not read, and about a quarter is read twice or more.
# A run that reads a hundredth of its corpus reads half a percent of that twice, and may do without epochs.
#
# ## A function of the step
#
# This is all there is in place of a generator:

# %%
lesson.source(dataset.batch, dataset._shuffled)

# %% [markdown]
# `order[i]` is the window at place i of an endless sequence, in which each epoch is another permutation.
# [Grain](https://google-grain.readthedocs.io) computes it from the seed and i, and stores nothing. So step
# 1,000,000 costs what step 0 costs, and to resume is to call the function with the step of the checkpoint. No
# state of the loader can be lost, as there is none:

# %%
from time import process_time

clock = process_time()
late = [dataset.batch(serial, step)["targets_BT"] for step in (10**9, 90, 10**9)]
print(f"{(process_time() - clock) / 3 * 1e3:.2f} ms a batch, wherever it is")
assert np.array_equal(late[0], late[2]) and not np.array_equal(late[0], late[1])
first_steps = [dataset.batch(serial, step)["targets_BT"] for step in range(100)]
assert np.array_equal(first_steps[90], late[1])  # step 90 of a run that began at 0

# %% [markdown]
# **Hosts.** Chips are driven by machines, the *hosts*, a process each. The usual way gives every host
# its share of the windows, h, h + n, h + 2n and so on, and lets it shuffle them. In an epoch each window comes
# once, on any number of hosts. Now stop it half-way on eight hosts and go on with four:


# %%
def per_host(step, hosts, windows=480, B=16):
    """The windows of a global batch, each host having shuffled its own."""
    b, rows = B // hosts, []
    for host in range(hosts):
        own = np.random.default_rng(host).permutation(np.arange(host, windows, hosts))
        rows += [*own[step * b : step * b + b]]
    return rows


for second in (8, 4):
    seen = [per_host(step, 8 if step < 15 else second) for step in range(30)]
    times = np.bincount(np.concatenate(seen), minlength=480)
    share = [f"{np.mean(times == k):.0%} {k} times" for k in range(3)]
    print(f"15 steps on 8 hosts, 15 on {second}: windows seen", ", ".join(share))
assert 0.15 < np.mean(times == 0) < 0.35

# %% [markdown]
# Two halves of two different orders: half of what the second run reads has been read, so about a quarter of
# the windows come twice and another quarter never. In MaxText with Grain, a run had to go on with exactly as
# many processes as it began with ([maxtext 1760](https://github.com/AI-Hypercomputer/maxtext/issues/1760)).
#
# `dataset.batch` has no argument that a host could change. Every host makes the *whole* global batch, and
# `sharding.put` gives each of its devices the rows that are its own (what a mesh is, says 00):

# %%
import sharding

lesson.source(sharding.put)

# %% [markdown]
# **Shards.** Their size is a matter of disks and copying, so it must not show. A loader that cuts windows
# inside each shard drops the rest behind the last one, and its order changes with the size of the shards.
# Above, one text was written twice:

# %%
both = [preset("tiny", **{**SIZES, "data.path": path}) for path in (large, small)]
for step in range(30):
    a, b = (dataset.batch(one, step) for one in both)
    assert all(np.array_equal(a[name], b[name]) for name in a)
for one in both:
    shards = dataset.load(one.data.path).splits["train"].shards
    whole = sum((len(s) - 1) // 128 * 128 for s in shards)
    lost = 1 - whole / (sum(map(len, shards)) - 1)
    print(f"{len(shards):3} shards: the same 30 batches", end="")
    print(f"; windows inside shards would lose {lost:.1%}")

# %% [markdown]
# `dataset.Split.read` joins what lies in several shards. All that this part shows is also held by tests, in
# `tests/test_dataset.py`.
#
# ## What it costs, and when not to
#
# **The loader.** Every host makes the whole batch, also the rows that others need. When is that too slow?
# Measured is this machine, one core, the headline model's batch of 256 sequences of 1,024; planned is its step
# on 32 TPU v4 chips, which stand in 8 hosts of 4.

# %%
from plan import planner

headline = preset("moe1b", **{"data.path": large})
dataset.batch(headline, 0)
clock = process_time()
for step in range(1, 9):
    dataset.batch(headline, step)
made = 8 * headline.data.tokens_per_step / (process_time() - clock)
one = planner.plan(headline, "v4:4x4x2")
needed = one.tokens_per_step / one.step_s
print(f"million tokens a second: made here {made / 1e6:.1f}", end="")
print(f", eaten by 32 chips {needed / 1e6:.2f}, so enough for", end="")
print(f" {32 * made / needed:,.0f} chips")
chips = 4096
read = needed / 32 * chips * 4  # bytes a second: ids below 100,352 need 4 bytes
print(f"{chips} chips: a host reads {read / 1e6:,.0f} MB/s, all {chips // 4:,}", end="")
print(f" hosts together {read * chips / 4 / 1e9:,.0f} GB/s")
assert made > needed

# %% [markdown]
# So the rule: the simple way works as long as tokens a second, of the *whole* machine, stay below what one core
# makes. `dataset.prefetch` makes batches in a thread while the chips work, so below that bound they do not wait
# for it. What all hosts read grows with the *square* of the chips: twice as many hosts read twice as much
# each. Long before 4,096 chips a host should cut only its own rows, from the same order (exercise 3).
# The figures say nothing about a network file system: the pages read here lay in memory.
#
# **The vocabulary.** More ids, fewer tokens; but each token pays for its logits, `6 D V` FLOPs in a training
# step. What counts is FLOPs a *byte*. The planner, for three models:

# %%
print("FLOPs a byte, over those of 256 ids:")
for name in ("tiny", "laptop", "dense_124m"):
    models = [preset(name, **{"model.vocab_size": V}) for V in sizes_V]
    flops = [planner.model_flops_per_token(model) for model in models] / bytes_a_token
    shares = zip(sizes_V, flops / flops[0], strict=True)
    print(f"{name:10}", *(f"{V}: {share:.2f} " for V, share in shares))

# %% [markdown]
# A merge pays as long as it lengthens tokens by a larger share than it adds to the FLOPs of one. For the tiny
# model that ends near 1,000 ids; for one of 124 million parameters, with a much larger rest, beyond this table.
#
# ## Exercise 1: the last window
#
# How many targets has window number `window` of a stream of `tokens` tokens?

# %% tags=["hide-input"]
windows_of = {}
for T_ in (64, 100, 300):
    small_cfg = preset("tiny", **{**SERIAL, "data.seq_len": T_})
    rows = [b["weights_BT"].sum(axis=1) for b in dataset.evaluation_batches(small_cfg)]
    windows_of[T_] = [int(n) for n in np.concatenate(rows) if n > 0]

# %% tags=["hide-input"]
CASES = [(w, 1001, T_) for T_, found in windows_of.items() for w in (0, len(found) - 1)]
last = lambda w, N, T: w == -(-(N - 1) // T) - 1
WINDOW_HINTS = [
    (lambda w, N, T: T, "Full windows only. What remains for the last one?"),
    (lambda w, N, T: min(T, N - w * T), "Tokens. Has each of them a successor?"),
    (lambda w, N, T: N - 1 - w * T, "That is all there is from here on, however long."),
    (lambda w, N, T: N - w * T, "All tokens from here on. How many has a window?"),
    (
        lambda w, N, T: (N - 1) % T if last(w, N, T) else T,
        "Right, but where T divides the targets: there the last window is full.",
    ),
]


# %% tags=["hide-input"]
def check_window(answer):
    right = lambda w, N, T: windows_of[T][w]
    done = "Right, for windows of 64, 100 and 300: the loader's own weights say so."
    return lesson.diagnose(answer, CASES, right, WINDOW_HINTS, done)


# %%
def targets_in(window, tokens, T):
    return ...


print(check_window(targets_in))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return min(T, tokens - 1 - window * T)`. Before it are `window * T` targets; there are `tokens - 1` in all.
# The loss is divided by the sum of the weights of the *whole* batch: a mean of the rows' means would give a
# target of the short row more weight than others.
# </details>

# %% tags=["remove-cell"]
assert check_window(lambda w, N, T: min(T, N - 1 - w * T)).startswith("Right, for")
for wrong, hint in WINDOW_HINTS:
    assert check_window(wrong) == hint
assert "Nothing there" in check_window(targets_in)

# %% [markdown]
# ## Exercise 2: a batch that grows
#
# A run has batches of `before` sequences, and from step `change` on batches of `after`. At which place of the
# endless order does the batch of `step` begin? No window may come twice, or be left out.

# %% tags=["hide-input"]
GROWS = [(2, 4, 8, 24), (4, 4, 8, 24), (10, 4, 8, 24), (7, 3, 16, 4)]
GROW_HINTS = [
    (
        lambda s, c, a, b: s * a if s < c else s * b,
        "At the change the place jumps: windows are left out if the batch grows.",
    ),
    (lambda s, c, a, b: s * a, "Right up to the change, not behind it."),
    (lambda s, c, a, b: s * b, "Right for a run that had only the second size."),
    (
        lambda s, c, a, b: s * a if s < c else (s - c) * b,
        "After the change it begins again with the first window.",
    ),
    (
        lambda s, c, a, b: c * a + (s - c) * b,
        "Right from the change on. And before it?",
    ),
]


# %% tags=["hide-input"]
def check_place(answer):
    right = lambda step, c, a, b: sum(a if s < c else b for s in range(step))
    done = "Right: no gap, no overlap."
    return lesson.diagnose(answer, GROWS, right, GROW_HINTS, done)


# %%
def place(step, change, before, after):
    return ...


print(check_place(place))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return min(step, change) * before + max(step - change, 0) * after`. So "a function of the step" was short for
# "of the sequences before it". `dataset.batch` multiplies the step with the batch size of *today*: correct
# as long as it is that of yesterday. A run of this project therefore refuses to go on with another
# `data.batch_size` (`train.directory.FREE` lists what may change); OLMo keeps the number of
# sequences in the checkpoint, for this very reason ([OLMo 182](https://github.com/allenai/OLMo/pull/182)).
# </details>

# %% tags=["remove-cell"]
grown = lambda s, c, a, b: min(s, c) * a + max(s - c, 0) * b
assert check_place(grown).startswith("Right: no")
for wrong, hint in GROW_HINTS:
    assert check_place(wrong) == hint
assert "Nothing there" in check_place(place)

# %% [markdown]
# ## Exercise 3: design a loader for 32 hosts
#
# Return the windows that `host` of `hosts` has to cut in a step, so that all hosts' rows, one after the other,
# are bit for bit the batch of `dataset.batch`, whether there are 1, 4 or 32 of them. `order[i]` is the endless
# sequence; look at as few of its places as you can.

# %% tags=["hide-input"]
B_all = 64
wide = preset("tiny", **{**SERIAL, "data.batch_size": B_all})
ORDER = dataset._shuffled(141, wide.data.seed)


class Counted:
    """The order, and how many of its places were looked at."""

    looks = 0

    def __getitem__(self, i):
        self.looks += 1
        return ORDER[i]


def joined(answer, step, hosts, order=ORDER):
    rows = [answer(order, step, host, hosts, B_all) for host in range(hosts)]
    return ... if any(r is ... for r in rows) else np.concatenate(rows)


# %% tags=["hide-input"]
def slice_from(first):
    """Rows of a host that begin at a place of the order, one after the other."""

    def rows(order, step, host, hosts, B):
        place = first(step, host, hosts, B)
        return [order[i] for i in range(place, place + B // hosts)]

    return rows


def strided(order, s, h, n, B):
    return [order[s * B + h + k * n] for k in range(B // n)]


def shuffled_alone(order, s, h, n, B):
    own = np.random.default_rng(h).permutation(np.arange(h, 141, n))
    return [own[(s * B // n + k) % len(own)] for k in range(B // n)]


# %% tags=["hide-input"]
HOST_HINTS = [
    (strided, "The right windows, in other rows: not the same batch, bit for bit."),
    (slice_from(lambda s, h, n, B: s * B), "All hosts have cut the same rows."),
    (
        slice_from(lambda s, h, n, B: s * (B // n)),
        "All hosts have cut the same rows, and steps overlap.",
    ),
    (
        slice_from(lambda s, h, n, B: (s + h) * (B // n)),
        "Windows come again at later steps. How far does the whole batch move in one?",
    ),
    (shuffled_alone, "Every host has an order of its own. Whose is that of the batch?"),
]


# %% tags=["hide-input"]
def check_hosts(answer):
    right = lambda step, hosts: dataset.batch(wide, step)["targets_BT"][:, 0] // T
    made = lambda f: (lambda *case: joined(f, *case)) if callable(f) else ...
    hints = [(made(f), hint) for f, hint in HOST_HINTS]
    cases = [(5, 4), (1, 32), (7, 1)]
    line = lesson.diagnose(made(answer), cases, right, hints, "Right")
    order = Counted()
    if line == "Right":
        joined(answer, 5, 32, order)
    if order.looks > B_all:
        looks = f"32 hosts look at {order.looks:,} places"
        return f"The right rows; {looks} for {B_all} of them. Which are one host's?"
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
# The order belongs to the run, the slice to the host. Nothing is sent between them: each can compute any place
# of the order. That the rows keep their places matters for bits, not for learning.
# </details>

# %% tags=["remove-cell"]
own_rows = slice_from(lambda s, h, n, B: s * B + h * (B // n))
assert check_hosts(own_rows).startswith("Right: the same")
for wrong, hint in HOST_HINTS:
    assert check_hosts(wrong) == hint, (check_hosts(wrong), hint)


def whole(order, step, host, hosts, B):
    rows = [order[i] for i in range(step * B, step * B + B)]
    return rows[host * B // hosts :][: B // hosts]


assert "look at 2,048 places" in check_hosts(whole)
assert "Nothing there" in check_hosts(rows_of_host) == check_hosts(None)

# %% [markdown]
# ## A bug to find
#
# A loader that keeps its place in the checkpoint. It has a test: stop, restore, compare with a run that was not
# stopped. The test passes. On a cluster that takes its machines back three times a day, the training
# loss is better than anyone had hoped.


# %%
class Loader:
    """Batches of 8 windows. `state` goes into a checkpoint, `restore` takes it out."""

    def __init__(self):
        self.first = self.batches = 0

    def __iter__(self):
        self.batches, order = 0, dataset._shuffled(1000, 0)
        while True:
            place = (self.first + self.batches) * 8
            self.batches += 1
            yield [order[i] for i in range(place, place + 8)]

    def state(self):
        return {"batches": self.batches}

    def restore(self, state):
        self.first = state["batches"]


# %%
def run(loader_class, stops, steps=120):
    """The windows of all steps; each stop ends the process after a checkpoint."""
    seen, state = [], None
    for step in range(steps):
        if step == 0 or step in stops:
            loader = loader_class()
            if state is not None:
                loader.restore(state)
            rows = iter(loader)
        seen.append(next(rows))
        state = loader.state()
    return np.array(seen)


assert np.array_equal(run(Loader, (40,)), run(Loader, ()))  # the test
print(f"stopped at 40: the same {run(Loader, ()).size} windows as not stopped")
often = run(Loader, (40, 70, 100))
print(f"stopped at 40, 70, 100: {np.unique(often).size} different ones")


# %% tags=["hide-input"]
class Again(Loader):
    def state(self):
        return {"batches": self.first}


class Short(Loader):
    def state(self):
        return {"batches": self.first + self.batches - 1}


class Long(Loader):
    def state(self):
        return {"batches": self.first + self.batches + 1}


# %% tags=["hide-input"]
place_of = dataset._shuffled(1000, 0)
never_stopped = np.reshape([place_of[i] for i in range(960)], (120, 8))
STOPS = [((),), ((40,),), ((40, 70, 100),), ((5, 6, 7),)]
LOADER_HINTS = [
    (Loader, "The windows are those of before: right after one stop, not after two."),
    (Again, "Every start begins where the run began."),
    (Short, "A batch comes twice at each stop."),
    (Long, "A batch is left out at each stop."),
]


def check_loader(answer):
    made = lambda c: (lambda stops: run(c, stops)) if callable(c) else ...
    hints = [(made(wrong), hint) for wrong, hint in LOADER_HINTS]
    done = "Mended: the same windows in the same order, stopped 0, 1 or 3 times."
    right = lambda stops: never_stopped
    return lesson.diagnose(made(answer), STOPS, right, hints, done)


# %%
print(check_loader(Loader))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `batches` counts since the *last* start, and `restore` takes it for a count since the first. After one stop
# they are the same number. So `state` must add what was restored:
#
# ```python
# def state(self):
#     return {"batches": self.first + self.batches}
# ```
#
# Seen in a training library: 30 batches, stop, 10 more, stop, and the third run skipped 10 in place of 40
# ([KempnerForge 57](https://github.com/KempnerInstitute/KempnerForge/issues/57)). The mend came with a test of
# three runs in a row: one stop cannot tell "since the last start" from "since the first". The best mend has
# no `state`: give `__iter__` the step, which the checkpoint holds anyway.
# </details>


# %% tags=["remove-cell"]
class Mended(Loader):
    def state(self):
        return {"batches": self.first + self.batches}


class AlsoMended(Loader):
    def restore(self, state):
        self.first = state["batches"]
        self.state = lambda: {"batches": self.first + self.batches}


for mended in (Mended, AlsoMended):
    assert check_loader(mended).startswith("Mended")
for wrong, hint in LOADER_HINTS:
    assert check_loader(wrong) == hint
assert "Nothing there" in check_loader(None)

# %% [markdown]
# ## Three lines to keep
#
# 1. A batch is a function of the settings and the step, and of nothing else: no generator, no host, no shard.
# 2. Count what a loader reads, with tokens that are serial numbers: the loss rewards a loader that repeats.
# 3. Losses compare models of one tokenizer; bits a byte compare all.
#
# **Sources.** Byte-pair encoding: Sennrich et al.,
# [arXiv:1508.07909](https://arxiv.org/abs/1508.07909), section 3.2; the cut into words is that of
# [GPT-2](https://github.com/openai/gpt-2/blob/master/src/encoder.py). Bits a byte: The Pile,
# [arXiv:2101.00027](https://arxiv.org/abs/2101.00027), section 3.1. Segments and positions in packed windows:
# Krell et al., [arXiv:2107.02027](https://arxiv.org/abs/2107.02027). What the cut of documents costs: Ding
# et al., [arXiv:2404.10830](https://arxiv.org/abs/2404.10830). Random access to a shuffle:
# [Grain](https://google-grain.readthedocs.io). Steps and their time: chapter 00.
