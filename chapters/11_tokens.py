# %% [markdown]
# # 11 · Tokens to batches
#
# **Question.** A run is stopped, and goes on with another number of machines. Does it see the tokens that it
# would have seen, each of them once?
#
# **Why it hurts not to know.** A loader that repeats tokens, or skips some, raises no error, and the loss
# falls. Below it falls *faster* than that of the correct run.
#
# *Before this:* 00 (what a step costs, what a mesh is). *Mesh:* `data=8`, then `data=4`, simulated.
# *Runs in* 15 s on 2 cores; reading takes 30 minutes, trying it an hour.

# %%
from devices import simulate_devices

simulate_devices(8)
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
# B = 8 of them. (A capital letter is the size of a whole dim, here and in the names of arrays.)
#
# The loader is the one that everybody writes first: a generator, seeded, that shuffles the windows and
# yields each of them once.

# %%
library = Path(sysconfig.get_path("stdlib"))
read = lambda pattern: b"".join(f.read_bytes() for f in sorted(library.glob(pattern)))
text, held_out = read("[a-c]*.py"), read("d*.py")
B, T, STEPS, STOPPED_AT = 8, 256, 60, (15, 30, 45)


def cut(text):
    """Windows of T bytes, one behind the other; what remains at the end is left out."""
    return np.frombuffer(text, np.uint8)[: len(text) // T * T].reshape(-1, T)


def generator():
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(len(cut(text)))


def batches(stops):
    """The windows of each step. At a stop the process ends, and another one starts."""
    for step in range(STEPS):
        if step == 0 or step in stops:
            rows = generator()
        yield [next(rows) for _ in range(B)]


# %% [markdown]
# In place of a model we take a table: how often has each byte followed each two bytes? It learns by counting.
# Like a trainer it reports the loss of a batch *before* it learns from it. What it has learned survives the
# stops, as a checkpoint does.


# %%
def learn(counts, text_BT):
    """Mean loss of a byte after two others, in nats; then count it."""
    a, b, x = (text_BT[:, k : T - 2 + k] % 128 for k in range(3))  # ASCII is below 128
    p = counts[a, b, x] / counts[a, b].sum(axis=-1)
    np.add.at(counts, (a, b, x), 1)
    return -np.log(p).mean()


def train(stops):
    """Loss of each step, the loss on other text at the end, and the windows seen."""
    counts = np.full((128, 128, 128), 1 / 128)  # at first all bytes are as likely
    seen = list(batches(stops))
    losses = [learn(counts, cut(text)[rows]) for rows in seen]
    return losses, learn(counts, cut(held_out)), np.unique(seen).size


runs = {"not stopped": train(()), "stopped three times": train(STOPPED_AT)}

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two falling curves; that of the stopped run drops at the first stop and stays lower."}}
figure, axes = plt.subplots(figsize=(6.2, 3))
for (name, (losses, _, _)), style in zip(runs.items(), ("-", ":"), strict=True):
    axes.plot(losses, style, label=name, color="black", lw=1.5)
for stop in STOPPED_AT:
    axes.axvline(stop, ymax=0.62, color=lesson.NEUTRAL, lw=0.8)
    axes.text(stop, 3.2, "stop", color=lesson.NEUTRAL, ha="center", va="bottom")
axes.set(xlabel="step", ylabel="loss, nats a byte", ylim=(0, 5))
axes.set_title("The broken run reports the lower loss")
axes.legend(loc="upper right")
for name, (losses, other, seen) in runs.items():
    last = np.mean(losses[-10:])
    print(f"{name}: last loss {last:.2f}, on other text {other:.2f}", end="")
    print(f"; {seen:,} of {STEPS * B:,} windows were new")
(whole, whole_other, _), (stopped, stopped_other, _) = runs.values()
assert np.mean(stopped[-10:]) < np.mean(whole[-10:]) and stopped_other > whole_other

# %% [markdown]
# Each start draws the same windows again, and the run learns them by heart. The printed loss rewards it; the
# loss on other text, of files that neither run has read, shows the damage. A translation toolkit had this
# fault: a run interrupted after its first epoch went on with the batches of that epoch, in the same order
# ([joeynmt 125](https://github.com/joeynmt/joeynmt/issues/125)). In another trainer a restart read the first
# files again, and perplexity rose from 239 to 782 when the next ones came ([entrenar
# 295](https://github.com/paiml/entrenar/issues/295)).
#
# ## One order, cut twice
#
# Which window lies in which row of which step? Let that be fixed before the run begins, in **one endless
# order**. Here are 29 windows, four steps of 8 rows, and a stop in the middle, after which there are half as
# many machines:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Four rows of eight window numbers. Two rows are cut between four hosts, two between two hosts."}}
rng = np.random.default_rng(0)
endless = [*rng.permutation(29), *rng.permutation(29)]  # and so on
figure, axes = plt.subplots(figsize=(6.2, 2.6))
for place, window in enumerate(endless[:32]):
    step, row = divmod(place, 8)
    hosts = 4 if step < 2 else 2
    host = row * hosts // 8
    shade = dict(color=lesson.NEUTRAL, alpha=0.1 + 0.6 * host / (hosts - 1), lw=0)
    axes.add_patch(plt.Rectangle((row, step), 1, 1, **shade))
    bold = "bold" if place >= 29 else "normal"
    axes.text(row + 0.5, step + 0.5, window, ha="center", va="center", weight=bold)
axes.axhline(2, color="black", lw=1.5)
axes.set(xlim=(0, 8), ylim=(4, 0), ylabel="step", xticks=[])
axes.set_yticks(np.arange(4) + 0.5, ["0", "1", "2", "3"])
axes.set_title("The hosts cut a row; the row does not know them")
axes.set_xlabel("a shade is a host: four before the stop, two after it")

# %% [markdown]
# A step is a slice of the order, a machine's part is a slice of the slice, and nothing else picks a row.
# (Bold is the second epoch, another permutation: it begins inside of a batch.) So the loader has **no state**
# that a stop could lose: a batch is a function of the settings and the number of the step. What follows
# builds what stands behind such a function: ids, windows, batches, an order, and the audit.
#
# ## Text to ids
#
# A byte a token makes long sequences. *Byte-pair encoding* shortens them: count all pairs of neighbours, give
# the commonest pair an id of its own, repeat. A regular expression first cuts the text into words, and no
# pair reaches across a cut. So each different word is kept once, and a merge recounts only those that hold
# its pair.

# %%
from collections import Counter, defaultdict
from itertools import pairwise

import regex

from data import prepare, tokenizers

print("words:", regex.findall(tokenizers.GPT2_PATTERN, "    if self.x:\n  return 12"))


def merged(parts, pair):
    """A list of byte strings, with each occurrence of the pair joined."""
    out = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


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
# White space is a word too, so the longest tokens are indents. A token is a string of bytes, and its rank
# says how early it was made. Encoding needs no more than that: join the neighbours whose union has the lowest
# rank, until no union has one. The first k merges do not depend on the later ones, so one training gives
# tokenizers of all smaller sizes.
#
# > **Predict.** With 1,024 - 256 = 768 merges, how many bytes of *other* text does a token stand for? (256
# > ids: 1 byte.)


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


# %% tags=["hide-input"]
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
print("other text: the same ids from these lines and from tiktoken, OpenAI's encoder")

# %%
my_prediction = None  # bytes a token
counted = len(held_out) / len(ours)
lesson.predicted("bytes a token", my_prediction, counted, "bytes", within=0.1)

# %% tags=["remove-cell"]
assert 1.8 < counted < 3.5

# %% [markdown]
# ## Loss a token, bits a byte
#
# Fewer tokens for the same text is a shorter run. But a longer token is harder to guess. The smallest model
# there is, the *unigram* model, knows how often each id occurs and nothing else. Count it on our text, and
# measure its loss on the other text, for tokenizers of eight sizes:

# %% tags=["hide-input"]
sizes_V, table = (256, 320, 384, 512, 768, 1024, 1536, 2048), []
for V in sizes_V:
    ids, other_ids = (tokenizers.encode(rank_file(V), x) for x in (text, held_out))
    p_V = np.bincount(ids, minlength=V) + 1.0  # + 1: an id that never occurred may yet
    nats = -np.log(p_V / p_V.sum())[other_ids].mean()
    per_token, own = len(held_out) / len(other_ids), len(text) / len(ids)
    table.append((per_token, own, nats, nats / np.log(2) / per_token))
bytes_a_token, own, nats, bits = map(np.array, zip(*table, strict=True))
print("  ids  bytes/token  nats/token  bits/byte")
for V, *row in zip(sizes_V, bytes_a_token, nats, bits, strict=True):
    print("{:5}  {:11.2f}  {:10.2f}  {:9.2f}".format(V, *row))
assert (np.diff(nats) > 0).all() and (np.diff(bits) < 0).all()

# %% tags=["hide-input"] mystnb={"image": {"alt": "Left: bytes a token grow ever more slowly with the vocabulary. Right: loss a token rises, bits a byte fall."}}
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
# The loss says that the tokenizer of bytes is the best one, and bits a byte say that it is the worst. Only
# the second is a statement about text. Probabilities of tokens multiply to the probability of the text, so
# nats *add up*: the sum over all tokens, over ln 2, is the length in bits of the text when coded by this
# model (nearly: a text has other cuts into tokens, too). Divide it by bytes, which no tokenizer can change:
#
#     bits a byte = nats a token / ln 2 / bytes a token
#
# Losses of two tokenizers cannot be compared; bits a byte on the same text can.
#
# Are more ids always better? Each token pays for its logits, a product of D x V (D, the model's width): `6 D
# V` FLOPs a token in a training step, 2 forward and 4 backward. So count FLOPs a *byte*. For models of three
# sizes, by the project's planner:

# %% tags=["hide-input"]
from plan import costs

print("FLOPs a byte, over those of 256 ids")
models = {}
for name in ("tiny", "laptop", "dense_124m"):
    each = [preset(name, **{"model.vocab_size": V}) for V in sizes_V]
    flops = [*map(costs.model_flops_per_token, each)] / bytes_a_token
    models[f"D={each[0].model.d_model}"] = flops / flops[0]
print("  ids", *(f"{name:>7}" for name in models))
for row, V in enumerate(sizes_V):
    print(f"{V:5}", *(f"{shares[row]:7.2f}" for shares in models.values()))

# %% [markdown]
# A merge pays as long as it lengthens tokens by a larger share than it adds to the FLOPs of one. For the
# narrowest model that ends near 1,000 ids; for the widest, whose layers cost much more than its logits,
# beyond this table. (Whether it then learns as well a byte, only training tells.)
#
# ## Shards and a manifest
#
# `python -m data.prepare` writes ids to disk, here called as a function. Before each document, a file, stands
# one more id, the *end of text*: 1,024 in a tokenizer of 1,024. All documents of a split form one stream, cut
# into files, the *shards*. (Of an array, a device's piece is called so, too.) Whether a document is
# held out depends on a hash of its name alone: more documents move none from one split to the other.


# %% tags=["hide-input"]
def prepared(name, shard_tokens):
    source, bpe = f"text:{library}/[a-d]*.py", f"bpe:{folder}/1024.bpe"
    out, more = str(folder / name), dict(val_share=0.15, shard_tokens=shard_tokens)
    more["overwrite"] = True  # so that this cell runs again
    prepare.prepare(prepare.Arguments(out, source, bpe, **more))
    return out


large, small = prepared("large", 100_000), prepared("small", 999)
corpus = dataset.load(large)
print("written:", *sorted(p.name for p in Path(large).iterdir()))
for name, split in corpus.splits.items():
    mapped = type(split.shards[0]).__name__
    print(f"{name}: {split.tokens:,} {split.shards[0].dtype} ids in {mapped}s")
m = corpus.manifest
print(f"nats a token: uniform {np.log(1025):.2f}", end="")
print(f", unigram {m['unigram_nats']:.2f}, bigram {m['bigram_nats']:.2f}")

# %% [markdown]
# A `memmap` is a file that looks like an array. Opening it reads a header; taking a slice reads the pages it
# lies on. So a corpus may be larger than memory, and all processes of a machine share what has been read.
#
# `begins` says where in a shard documents begin. The manifest holds each file's size and sha256. A shard of
# another size is refused; `dataset.verify` reads all and finds a single wrong byte. It also holds what a loss
# is to be compared with.
# A new model starts near *uniform*, where every id is as likely as all others. When it passes *unigram*, it
# knows which ids are common; below *bigram*, it has used more than the token before. (Many pairs occur once,
# and the bigram is counted on the very pairs it describes: that flatters it.)
#
# Now windows. Window i has tokens `i*T .. i*T + T - 1` as inputs and each one's successor as target: the last
# target of a window is the first input of the next. So every token but the first is a target once. Windows
# care neither about documents nor about shards.
#
# ## What is in a batch
#
# To see documents end inside windows, they must be short: the first lines of some docstrings, as bytes, a
# document each. `prepare.from_ids` takes ids in place of text, and holds out the last of them. A `preset` is
# one of the project's sets of settings, some of them replaced.

# %%
functions = abs, all, any, bin, chr, id, len, max, min, ord, sum
lines = [f.__doc__.splitlines()[0].encode() for f in functions]
documents = [np.frombuffer(line, np.uint8) for line in lines]
out, more = str(folder / "lines"), dict(val_share=0.2, overwrite=True)
prepare.from_ids(documents, out, tokenizer="bytes", **more)
sizes = {"data.path": out, "data.seq_len": 36, "data.batch_size": 6}
batch = dataset.batch(preset("tiny", **sizes), 0)
print({name: batch[name].shape for name in batch})

# %% tags=["hide-input"] mystnb={"image": {"alt": "Six rows of letters in coloured runs; below, grey wedges that start anew with each run."}}
figure, panels = plt.subplots(2, 1, figsize=(6.6, 4.4), sharex=True)
for (row, t), token in np.ndenumerate(batch["tokens_BT"]):
    segment, position = batch["segments_BT"][row, t], batch["positions_BT"][row, t]
    if not segment:
        continue
    colour = plt.colormaps["Pastel1"](segment)
    panels[0].add_patch(plt.Rectangle((t, row), 1, 1, color=colour, lw=0))
    letter = "|" if token == 256 else chr(token)
    panels[0].text(t + 0.5, row + 0.55, letter, size=9, ha="center", va="center")
    size = (position + 1) / 38
    panels[1].bar(t + 0.5, -size, bottom=row + 1, width=1, color=lesson.NEUTRAL)
panels[0].set_title("Each row numbers its documents anew: 1 blue, 2 green")
panels[1].set_title("Positions restart with each document")
for axes in panels:
    axes.set(xlim=(0, 36), ylim=(6, 0), ylabel="row of the batch")
    axes.set_yticks(np.arange(6) + 0.5, range(6))
panels[1].set_xlabel("place in the window")

# %% [markdown]
# A colour is a number in `segments_BT`, `|` is the end of text, which opens a document, and the height of the
# grey is `positions_BT`. The model lets attention stay inside a segment (`data.mask_documents`), so no
# document sees another one. White is padding, behind the end of the stream: segment 0, and weight 0 in
# `weights_BT`. Who drops that window loses text; who lets the padding count measures the wrong loss.
#
# A document that is cut goes on in another row, begins there at position 0, and has lost what stood before:
# the price of windows. In nanochat every row begins with a document, and about 35% of the tokens are cropped
# to make the rows full
# ([dataloader](https://github.com/karpathy/nanochat/blob/master/nanochat/dataloader.py)). Best fit
# (`--data.packing documents`) takes the longest first, puts each into the row with the least room that holds
# it, and pads. The same lines in rows of 128:

# %% tags=["hide-input"]
for packing in ("windows", "documents"):
    d = preset("tiny", **{"data.seq_len": 128, "data.packing": packing}).data
    print(dataset.in_words(dataset.load(out).splits["train"], d))

# %% [markdown]
# One rule must not be forgotten: **targets are shifted by one**. Without the shift, each token is its own
# answer. The least loss of a model that sees one token, on the text of before:

# %%
ids = corpus.splits["train"].read(0, 10**9).astype(int)
share = lambda values: np.unique(values, return_counts=True)[1] / len(values)
entropy = lambda values: -share(values) @ np.log(share(values))
for name, targets_N in {"shifted": ids[1:], "not shifted": ids[:-1]}.items():
    least = entropy(ids[:-1] * 1025 + targets_N) - entropy(ids[:-1])
    print(f"{name:11} {abs(least):.2f} nats a token")

# %% [markdown]
# A loss far below the bigram's, early, is no success: the model copies.

# %% [markdown]
# ## Each token once
#
# To audit a loader, feed it a stream in which **every token is its own serial number**. Then a batch says by
# itself what was read, and the count is `np.bincount` of the targets.

# %%
N = 9000
SERIAL = {"data.path": str(folder / "serial"), "model.vocab_size": 10_001}
SERIAL |= {"data.seq_len": 64, "data.batch_size": 24}
more = dict(vocab_size=10_000, val_share=0.1, overwrite=True)
prepare.from_ids(np.arange(10_000), SERIAL["data.path"], **more)
serial = preset("tiny", **SERIAL)


def targets(step):
    """The targets of a step, without padding."""
    batch = dataset.batch(serial, step)
    return batch["targets_BT"][batch["weights_BT"] > 0]


all_targets = np.concatenate([targets(step) for step in range(47)])
times_N = np.bincount(all_targets, minlength=N)
print(f"{N:,} tokens, each a target", *np.unique(times_N), "times in 47 steps")
assert (times_N == 8).all()

# %% [markdown]
# N = 9,000 targets are 141 windows of 64, the last of them short. So 47 steps of 24 windows are eight epochs,
# and all of them but the last end inside a batch. No token is lost there.
#
# Many trainers do without epochs and begin each sequence at a random place
# ([nanoGPT](https://github.com/karpathy/nanoGPT/blob/master/train.py), `get_batch`). It needs one line and no
# bookkeeping.
#
# > **Predict.** Such a loader draws as many windows as an epoch has. What share of the tokens was never a
# > target?


# %%
def drawn(N, T, epochs):
    """How often each token is a target if windows of T begin at random places."""
    times_N = np.zeros(N, int)
    for start in np.random.default_rng(0).integers(N - T, size=epochs * N // T):
        times_N[start + 1 : start + T + 1] += 1
    return times_N


one, two, three = (drawn(2_000_000, 200, epochs) for epochs in (1, 2, 3))
my_prediction = None  # between 0 and 1
never = np.mean(one == 0)
lesson.predicted("share never a target", my_prediction, never, within=0.05)
print(f"{np.mean(one > 1):.1%} were one more than once")
print(f"never, after 2 epochs' worth: {np.mean(two == 0):.1%}", end="")
print(f", after 3: {np.mean(three == 0):.1%}")

# %% tags=["remove-cell"]
assert abs(never - np.exp(-1)) < 0.02

# %% [markdown]
# A draw misses a given token with probability `1 - T/N`, and there are N/T draws: `(1 - T/N)^(N/T)`, close to
# 1/e. More than a third of the corpus is paid for and not read, and about a quarter is read twice or more.
# Only a run that reads a small part of its corpus may do without epochs: after 1% of the N/T draws a token
# has come twice with probability 0.01^2 / 2.
#
# ## A function of the step
#
# `order(i)` is the window at place i of the endless order. How can it be known without a list of all windows?
# A shuffle is a function that never gives two places the same window, and such functions can be computed. Cut
# the bits of i into two halves; xor one of them with a hash of the other; swap; repeat. Each turn can be
# undone by the same xor, so no two places meet. A result that is no window goes through again. With that, a
# loader is this program, for an empty file, and its audit:

# %% tags=["by-hand"]
import hashlib

import numpy as np

N, T, B = 9_000, 64, 24  # targets of the text, and of a window; rows of a batch
stream = np.arange(N + 1)  # each token is its own serial number
WINDOWS = -(-N // T)  # the last one is short


def shuffled(i, count, key):
    """Place i of a permutation of 0..count-1: nothing is stored."""
    half = (max(count - 1, 1).bit_length() + 1) // 2
    while True:
        left, right = i >> half, i % 2**half
        for turn in range(4):
            hashed = hashlib.sha256(f"{key}, {turn}, {right}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(hashed) % 2**half)
        i = (left << half) + right
        if i < count:
            return i


# %% tags=["by-hand"]
def order(place):
    """The endless order: another permutation in each epoch."""
    epoch, i = divmod(place, WINDOWS)
    return shuffled(i, WINDOWS, key=epoch)


def batch_targets(step):
    """The targets of a step's rows. No state: any step, at any time, on any host."""
    windows = [order(place) for place in range(step * B, (step + 1) * B)]
    return [stream[w * T + 1 : min((w + 1) * T, N) + 1] for w in windows]


later = [batch_targets(step) for step in range(20, 47)]  # another process, afterwards
first = [batch_targets(step) for step in range(20)]
seen = np.concatenate([row for step in first + later for row in step])
times = np.bincount(seen, minlength=N + 1)[1:]
assert (times == 8).all(), "not each token once an epoch"
print(f"47 steps are 8 epochs: each token a target {times.min()} times")
print(f"a million million windows, place 7: {shuffled(7, 10**12, key=0):,}")

# %% [markdown]
# [Grain](https://google-grain.readthedocs.io) does it with a cipher, an invertible function by trade
# ([index_shuffle](https://github.com/google/grain/tree/main/grain/_src/python/experimental/index_shuffle)),
# and with another key in each epoch. So to resume is to call `dataset.batch` with the step of the checkpoint,
# and any step costs the same:

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
# **Hosts.** Chips are driven by machines, the *hosts*, a process each. The usual way gives each of n hosts
# its share of the windows, h, h + n, h + 2n and so on, and lets it shuffle them. In an epoch each window
# comes once, on any number of hosts.
#
# > **Predict.** Eight hosts make the first half of an epoch, then four make the second half. What share of
# > the windows was never seen?


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
    if second == 8:
        assert (times == 1).all()
        print("30 steps on 8 hosts: each window once")
my_prediction = None  # between 0 and 1
never = np.mean(times == 0)
lesson.predicted("8 hosts, then 4, share never seen", my_prediction, never, within=0.1)
print(f"seen twice: {np.mean(times == 2):.0%}")

# %% tags=["remove-cell"]
assert 0.15 < never < 0.35

# %% [markdown]
# Two halves of two different orders: half of what the second run reads has been read, so about a quarter of
# the windows come twice and another quarter never. MaxText with Grain keeps a state for each host that loads,
# and stays with their number: a run that went on with twice the machines kept 64 loading hosts, and the
# others loaded nothing ([maxtext 2537](https://github.com/AI-Hypercomputer/maxtext/pull/2537)). Mosaic's
# Streaming calls the property that we want *elastic determinism*
# ([docs](https://docs.mosaicml.com/projects/streaming)).
#
# In the endless order the rows of a batch are fixed before anyone asks who makes them. A host asks which rows
# its devices hold (`sharding.own_rows`), and makes these and no others; `sharding.put` lays them on its
# devices. Which rows they are is exercise 3.

# %% [markdown]
# Audit it where the tokens end up: Eight simulated devices hold the first 23 steps, four the other 24. What
# lies on each device is counted:


# %%
import sharding


def on_devices(step, devices):
    """The targets of a step, device by device, without padding."""
    mesh = sharding.make_mesh(f"data={devices}")
    there = sharding.put(dataset.batch(serial, step), mesh)
    on_each = lambda name: [np.asarray(p.data) for p in there[name].addressable_shards]
    pieces = zip(on_each("targets_BT"), on_each("weights_BT"), strict=True)
    return [targets[weights > 0] for targets, weights in pieces]


for second in (8, 4):
    held = []
    for step in range(47):
        held += on_devices(step, 8 if step < 23 else second)
    times_N = np.bincount(np.concatenate(held), minlength=N)
    print(f"23 steps on 8, 24 on {second}: {len(held)} pieces", end="")
    print(", each token", *np.unique(times_N), "times")
    assert (times_N == 8).all()
    whole = np.concatenate(on_devices(46, second))  # and the last step is the same one
    assert np.array_equal(whole, targets(46))

# %% [markdown]
# **Mixtures.** Several corpora, each shuffled on its own, make one endless order too, if the place of a row
# says which corpus it comes from. Two corpora of ids below and from 5,000 on, 7 rows of the first to 3 of the
# other:

# %%
for name, low in {"code": 0, "prose": 5_000}.items():
    ids_N = np.arange(low, low + 5_000)
    prepare.from_ids(ids_N, str(folder / "mix" / name), **more)
mix = {"data.path": str(folder / "mix"), "data.mixture": "code=0.7,prose=0.3"}
mixed = preset("tiny", **SERIAL | mix)
of_step = lambda step: dataset.batch(mixed, step)["tokens_BT"][:, 1] < 5_000
is_code = np.concatenate([of_step(step) for step in range(125)])
for begin in (0, 999, 2_000):
    print(f"1,000 rows from {begin:,}: {is_code[begin : begin + 1000].sum()} of code")
    assert is_code[begin : begin + 1000].sum() == 700

# %% [markdown]
# Exactly 700, wherever one begins. A draw for each row would miss it by (1,000 * 0.7 * 0.3)^½ = 14, usually.
#
# **Shards.** Their size is a matter of disks and copying, so it must not show. A loader that cuts windows
# inside each shard drops the rest behind the last one, and its order changes with the size of the shards.
# Above, one text was written twice:

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
    print(f"{len(shards):3} shards: the same 30 batches", end="")
    print(f"; windows inside shards would lose {lost:.1%}")

# %% [markdown]
# All that this part shows is also held by tests, in `tests/test_dataset.py`.
#
# ## What it costs, and when not to
#
# A host makes only its own rows, so what it reads and makes does not grow with the number of hosts. (JAX's
# guide to [distributed data loading](https://docs.jax.dev/en/latest/distributed_data_loading.html) warns of
# this way: rows on the wrong devices raise no error. Hence the audit.) Is one core of a host enough? Measured
# is this machine's processor time, for batches of the project's headline run `moe1b`, 256 sequences of 1,024;
# planned is its step on 32 TPU v4 chips, four to a host.

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
print(f"tokens a second: a core makes {made:,.0f}, a host eats {a_host:,.0f}", end="")
print(f": {made / a_host:,.0f} times enough")
for chips in (32, 512, 4096):
    read = a_host * 4  # ids of 4 bytes: uint16 is too small for this vocabulary
    print(f"{chips:4} chips: a host reads {read / 1e6:.1f} MB/s", end="")
    print(f", all {chips // 4:5,} hosts {read * chips / 4 / 1e9:6.2f} GB/s")
assert made > 4 * a_host and big.model.vocab_size > 2**16, "a core no longer keeps up"

# %% [markdown]
# If every host made the whole batch, what all hosts read would grow with
# the *square* of the chips. `dataset.prefetch` makes batches in a thread while the chips work, so below that
# bound they do not wait. The figures say nothing about a network file system: the pages read here lay in
# memory.
#
# ## Exercise 1: the last window
#
# How many targets has window number `window` of a stream of `tokens` tokens? The first window is number 0.

# %% tags=["hide-input"]
windows_of = {}
for T_ in (64, 100, 300):
    small_cfg = preset("tiny", **{**SERIAL, "data.seq_len": T_})
    rows = [b["weights_BT"].sum(axis=1) for b in dataset.evaluation_batches(small_cfg)]
    windows_of[T_] = [int(n) for n in np.concatenate(rows) if n > 0]

# %% tags=["hide-input"]
CASES = [(w, 1001, T_) for T_, found in windows_of.items() for w in (0, len(found) - 1)]
is_last = lambda w, N, T: w == -(-(N - 1) // T) - 1
WINDOW_HINTS = [
    (lambda w, N, T: T, "Full windows only. Which is last, if the first is number 0?"),
    (lambda w, N, T: min(T, N - w * T), "Tokens. Has each of them a successor?"),
    (lambda w, N, T: N - 1 - w * T, "That is all there is from here on, however long."),
    (lambda w, N, T: N - w * T, "All tokens from here on. How many has a window?"),
    (
        lambda w, N, T: (N - 1) % T if is_last(w, N, T) else T,
        "Right, but where T divides the targets: there the last window is full.",
    ),
]

# %% tags=["hide-input"]
WINDOW_HINTS += [
    (
        lambda w, N, T: min(T, N - w * T) - 1,
        "Right for the last. What a full one's last input has to guess lies behind.",
    ),
    (
        lambda w, N, T: (N - 1) % T,
        "That is what full windows leave over, whichever window is asked for.",
    ),
    (lambda w, N, T: T * (w < (N - 1) // T), "Full windows only: one is lost."),
    (lambda w, N, T: -(-(N - 1) // T), "That is the number of windows."),
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
GROW_HINTS += [
    (
        lambda s, c, a, b: s * a if s < c else c * a + s * b,
        "Behind the change the steps before it are counted twice.",
    ),
    (
        lambda s, c, a, b: min(s, c) * b + max(s - c, 0) * a,
        "The two sizes have changed places.",
    ),
    (
        lambda s, c, a, b: min(s + 1, c) * a + max(s + 1 - c, 0) * b,
        "There the batch ends, and the next one begins.",
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
# `return min(step, change) * before + max(step - change, 0) * after`. So "a function of the step" was short
# for "of the sequences before it". `dataset.batch` multiplies the step with the batch size of *today*:
# correct as long as it is that of yesterday. A run of this project therefore refuses to go on with another
# `data.batch_size` (`train.directory.decisive` says what may change); OLMo keeps the number of sequences in the
# checkpoint, for this very reason ([OLMo 182](https://github.com/allenai/OLMo/pull/182)).
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
# Return the windows that `host` of `hosts` has to cut in a step, so that all hosts' rows, one after the
# other, are bit for bit the batch of `dataset.batch`, whether there are 1, 4 or 32 of them. `order[i]` is the
# endless sequence; look at as few of its places as you can. (A line of the checker names a step and a number
# of hosts, and speaks of all hosts' rows.)

# %% tags=["hide-input"]
B_all = 64
wide = preset("tiny", **{**SERIAL, "data.batch_size": B_all})
ORDER = dataset._shuffled(141, wide.run.seed)


class Counted:
    """The order, and how many of its places were looked at."""

    looks = 0

    def __getitem__(self, i):
        self.looks += 1
        return ORDER[i]


def joined(answer, step, hosts, order=ORDER):
    answer = lesson.answered(answer)
    rows = [[*answer(order, step, host, hosts, B_all)] for host in range(hosts)]
    return np.concatenate(rows)


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
own_places = lambda s, h, n, B: range(s * B + h * (B // n), s * B + (h + 1) * (B // n))
HOST_HINTS += [
    (
        lambda order, *case: [*own_places(*case)],
        "These are places. Which windows does the order have there?",
    ),
    (
        lambda order, s, h, n, B: [order[i] for i in range(s * B, s * B + B)],
        "Every host has cut the whole batch: together too many rows.",
    ),
    (slice_from(lambda s, h, n, B: h * (B // n)), "The same batch in every step."),
    (
        slice_from(lambda s, h, n, B: (s * n + h) * B),
        "Between a host and the next, windows are left out. How many rows has one?",
    ),
]


# %% tags=["hide-input"]
def check_hosts(answer):
    windows = lambda step: dataset.batch(wide, step)["targets_BT"][:, 0] // 64
    right = lambda step, hosts: windows(step)
    made = lambda f: lambda step, hosts: joined(f, step, hosts)
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
# The order belongs to the run, the slice to the host. Nothing is sent between them: each can compute any
# place of the order. That the rows keep their places matters for bits, not for learning.
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
assert check_hosts(rows_of_host) == check_hosts(None) == lesson.NOTHING
assert check_hosts(lambda *_: None) == lesson.NOTHING
lazy = lambda order, s, h, n, B: (order[i] for i in own_places(s, h, n, B))
assert check_hosts(lazy).startswith("Right: the same")

# %% [markdown]
# ## A bug to find
#
# A loader that keeps its place in the checkpoint. It has a test: stop, restore, compare with a run that was
# not stopped. The test passes. On a cluster that takes its machines back three times a day, the training loss
# is better than anyone had hoped. Mend the class where it stands, then run the cells below.


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


# %% tags=["hide-input"]
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
    (Loader, "As before your change: right after one stop, wrong after two."),
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


# %% tags=["hide-output"]
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
# ([KempnerForge 57](https://github.com/KempnerInstitute/KempnerForge/issues/57)). The mend came with a test
# of three runs in a row: one stop cannot tell "since the last start" from "since the first". The best mend
# has no `state`: give `__iter__` the step, which the checkpoint holds anyway.
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
# ## In one table
#
# A batch is `tokens_BT`; a device of `data=n` holds `tokens_bT`, b = B/n of its rows.
#
# | what | who has it | what is read or sent | in PyTorch |
# |---|---|---|---|
# | the order | everyone can compute any place of it | nothing | `DistributedSampler`, whose order depends on the number of ranks |
# | a host's rows | that host | T + 1 ids a row, from its own disk or a bucket | a rank's `DataLoader` |
# | positions, segments, weights | made beside the ids | nothing | `document_ids`, `ignore_index` |
# | the place | the number of the step, in the checkpoint | nothing | `StatefulDataLoader` |
# | sum of weights | all devices | one number a step, an all-reduce | `num_items_in_batch` |
#
# None of it is on the critical path while a core makes tokens faster than a host's chips eat them.
#
# ## Three lines to keep
#
# 1. A batch is a function of the settings and the step, and of nothing else: no generator, no host, no file.
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
