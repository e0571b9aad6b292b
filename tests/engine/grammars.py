"""Grammars for the golden model: its ids are letters, and requests that follow a grammar."""

import functools

from deepinfer.grammar.compiler import GrammarCompiler
from deepinfer.grammar.vocabulary import Vocabulary

VOCAB, BOS, EOS, PAD = 256, 0, 1, 2


class Letters:
    """A tokenizer whose ids above 8 are bytes; the first ids are special tokens."""

    vocab_size, bos_id, eos_id, pad_id = VOCAB, BOS, EOS, PAD
    special_ids = tuple(range(9))

    def token_bytes(self, token_id):
        return f"<s{token_id}>".encode() if token_id < 9 else bytes([token_id])

    def encode(self, text):
        return [each for each in text.encode() if each >= 9]

    def decode(self, ids):
        return bytes(each for each in ids if each >= 9).decode("utf-8", "replace")


LETTERS = Letters()


@functools.cache
def vocabulary():
    return Vocabulary(LETTERS, VOCAB)


def compiler(**given):
    return GrammarCompiler(vocabulary, **({"timeout_s": 20.0, "num_threads": 2, "cache_bytes": 1 << 24} | given))
