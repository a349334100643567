"""From sentences to token numbers."""

import subprocess
import sys

import pytest

from tiltsam.lab import text


def test_the_built_in_tokenizer_is_the_same_everywhere():
    ids = text.encode(["Sharpness, tilted!"])["input_ids"]
    assert ids.tolist() == [[1, *map(text.hash_token, ["sharpness", ",", "tilted", "!"]), 2]]
    code = "from tiltsam.lab import text; print(text.encode(['Sharpness, tilted!'])['input_ids'].tolist())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(ids.tolist())
    words = [f"word{i}" for i in range(5000)]
    numbers = [text.hash_token(word) for word in words]
    assert 3 <= min(numbers) <= max(numbers) < text.VOCABULARY
    assert len(set(numbers)) > 3500  # 8189·(1 - e^(-5000/8189)) = 3742 of them are distinct on average


def test_long_sentences_are_cut_the_longer_first():
    out = text.encode(["a " * 50, "a", "a " * 50], ["b", "b " * 50, "b " * 50], max_length=13)
    a, b = text.hash_token("a"), text.hash_token("b")
    counts = [[int((row == token).sum()) for token in (a, b, 1, 2)] for row in out["input_ids"]]
    assert counts == [[9, 1, 1, 2], [1, 9, 1, 2], [5, 5, 1, 2]]
    assert out["attention_mask"].sum(1).tolist() == [13, 13, 13]
    assert text.encode(["a " * 50], max_length=7)["input_ids"].tolist() == [[1, a, a, a, a, a, 2]]
    with pytest.raises(ValueError, match=r"5 or more .* got 4"):
        text.encode(["a"], max_length=4)
