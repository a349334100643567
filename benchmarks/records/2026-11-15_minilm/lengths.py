"""How many training examples are longer than 64 tokens: ``python lengths.py DATA_ROOT > lengths.txt``."""

import sys
from pathlib import Path

from tiltsam.lab.data.glue import GLUE, read_glue
from tiltsam.lab.pretrained import load_tokenizer, text_source

tokens = load_tokenizer(text_source("minilm"))
for task in ("rte", "mrpc", "wnli", "stsb", "cola"):
    table = read_glue(Path(sys.argv[1]) / "glue" / task / "train.tsv", GLUE[task])
    pairs = [table.first] if table.second is None else [table.first, table.second]
    lengths = [len(ids) for ids in tokens(*pairs)["input_ids"]]
    for room in (64, 128):
        longer = sum(length > room for length in lengths)
        print(f"{task}: {longer} of {len(lengths)} ({longer / len(lengths):.1%}) are longer than {room} tokens")
