"""The vocabulary for grammars: special tokens apart, and forced text in the tokenizer's own tokens."""

import json

import numpy as np
import pytest

from deepinfer.errors import ConfigError
from deepinfer.grammar.vocabulary import Vocabulary, pack, unpack
from tests.grammar.walks import allowed, matcher

FORCED = '{"text":"</think> <｜end▁of▁sentence｜> ｜DSML｜ naïve"}'
SCHEMA = {"const": json.loads(FORCED)}


def test_a_larger_head_is_accepted_and_a_smaller_one_refused(tokenizer, vocabulary):
    assert vocabulary.num_words == 10
    assert vocabulary.vocab_size == tokenizer.vocab_size + 28
    with pytest.raises(ConfigError, match="272 ids and the LM head 271 outputs"):
        Vocabulary(tokenizer, 271)


def test_bits_are_packed_in_the_order_of_tokens():
    bits = np.zeros(64, dtype=np.bool_)
    bits[[0, 33, 63]] = True
    assert pack(bits).view(np.uint32).tolist() == [1, 2 + 2**31]
    assert unpack(pack(bits)).tolist() == bits.tolist()


def test_text_has_no_special_token_and_no_token_of_the_head_only(tokenizer, vocabulary):
    text = set(np.flatnonzero(unpack(vocabulary.text_mask)))
    assert text == set(range(tokenizer.vocab_size)) - set(tokenizer.special_ids) | {tokenizer.eos_id}
    assert set(np.flatnonzero(unpack(vocabulary.mask_with([259])))) == text | {259}
    assert vocabulary.special_id("<think>") == tokenizer.special("<think>")
    assert vocabulary.special_id("<nothing>") is None


@pytest.mark.parametrize("size", ["byte", "full"])
def test_forced_text_that_spells_special_tokens_stays_text(size, request):
    prefix = "full_" if size == "full" else ""
    tokenizer, vocabulary = (request.getfixturevalue(prefix + name) for name in ("tokenizer", "vocabulary"))
    made = matcher(vocabulary, "json", SCHEMA)
    ids = []
    while made.state != "ended":
        choices = allowed(made, vocabulary)
        token_id = next(
            iter(sorted(choices, key=lambda each: -len(tokenizer.token_bytes(each)) if each < tokenizer.vocab_size else 0))
        )
        assert token_id not in vocabulary.special_ids - {vocabulary.eos_token_id}
        made.advance([token_id])
        ids.append(token_id)
    text = tokenizer.decode(ids[:-1])
    assert json.loads(text) == json.loads(FORCED)
    assert not vocabulary.special_ids & set(ids[:-1])
