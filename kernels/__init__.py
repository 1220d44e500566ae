"""What needs another form on each platform, one function outside for each: `grouped.grouped_matmul`, for the experts.

Open `grouped.py`. A kernel gives the numbers of its plain form, which the tests hold it to.

From outside: `grouped.grouped_matmul`. Who calls it need not know which form it took.
"""
