"""The vocabulary in the form that masks are computed from.

The library gets the bytes of each token, and the special tokens apart from them.  It never reads ``tokenizer.json``: a tokenizer
that it makes from that file turns forced text that spells a special token, such as ``{"const": "</think>"}``, into that token.

Invariant: text is encoded with the tokenizer of the prompts, so forced tokens are those that this tokenizer gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import llguidance
import numpy as np
import numpy.typing as npt

from deepinfer.errors import ConfigError
from deepinfer.tokenizer import Tokenizer

WORD_BITS: Final = 32

Words = npt.NDArray[np.int32]
"""Bits of token ids: bit ``i % 32`` of word ``i // 32`` belongs to token ``i``."""


class Vocabulary:
    """One model's tokens for grammars; shared by all threads.

    Attributes:
        vocab_size: number of outputs of the LM head.
        num_words: words of one mask.
        eos_token_id: token that ends an answer.
        special_ids: ids of the special tokens, the end token included.
        library: the library's tokenizer.
        text_mask: [num_words] int32, the tokens that constrained text may contain: all tokens with bytes, and the end token.

    Cost: 1 s for 129,280 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Prepare a tokenizer for grammars.

        Args:
            vocab_size: number of outputs of the LM head; ids from ``tokenizer.vocab_size`` on are never allowed.

        Raises:
            ConfigError: the tokenizer has more ids than the LM head.
        """
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the LM head {vocab_size} outputs; "
                "use the tokenizer.json that came with the checkpoint"
            )
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // WORD_BITS)
        self.eos_token_id = tokenizer.eos_id
        self.special_ids = frozenset(tokenizer.special_ids)
        self._spellings = {tokenizer.token_bytes(each).decode(): each for each in tokenizer.special_ids}
        allowed = np.zeros(self.num_words * WORD_BITS, dtype=np.bool_)
        allowed[: tokenizer.vocab_size] = True
        allowed[list(self.special_ids - {self.eos_token_id})] = False
        self.text_mask = pack(allowed)
        self.library = llguidance.LLTokenizer(_Wrapper(tokenizer, vocab_size))  # type: ignore[arg-type]

    def special_id(self, spelling: str) -> int | None:
        """Id of the special token of this spelling; None if there is none."""
        return self._spellings.get(spelling)

    def mask_with(self, token_ids: Sequence[int]) -> Words:
        """:attr:`text_mask` with some special tokens allowed too."""
        allowed = unpack(self.text_mask)
        allowed[list(token_ids)] = True
        return pack(allowed)


def pack(allowed: npt.NDArray[np.bool_]) -> Words:
    """Bits from booleans, one for each token; their number is a multiple of 32."""
    return np.packbits(allowed, bitorder="little").view(np.int32)


def unpack(words: Words) -> npt.NDArray[np.bool_]:
    """Booleans from bits."""
    return np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)


class _Wrapper:
    """What the library reads from a tokenizer; the names are its own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_id
        self.special_token_ids = list(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(each) for each in range(tokenizer.vocab_size)]
        self.tokens += [b""] * (vocab_size - tokenizer.vocab_size)  # a token without bytes is never allowed
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)
