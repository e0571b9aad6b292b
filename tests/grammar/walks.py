"""Answers under masks: random ones, and given ones."""

import json

import numpy as np

from deepinfer.grammar.compiler import compile_grammar
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.vocabulary import unpack
from deepinfer.request import StructuredOutput

ENDINGS = b'"}])>01aeZ:,'
"""Bytes that a walk prefers when it is long, so that it comes to an end."""


def structured(kind, schema, **others):
    if not isinstance(schema, str):
        schema = json.dumps(schema)
    return StructuredOutput.read({"schema_type": kind, "schema": schema, **others})


def matcher(vocabulary, kind, schema, **others):
    args = structured(kind, schema, **others)
    return Matcher(compile_grammar(args, vocabulary), args)


def allowed(made, vocabulary):
    """The tokens that may come next, ascending."""
    masks = np.zeros((1, vocabulary.num_words), dtype=np.int32)
    made.fill([], masks)
    return np.flatnonzero(unpack(masks[0])).tolist()


def accepts(made, vocabulary, ids):
    """Whether an answer of these tokens is allowed at every step, and may end; the matcher does not change."""
    made = made.copy()
    for token_id in [*ids, vocabulary.eos_token_id]:
        if token_id not in allowed(made, vocabulary):
            return False
        made.advance([token_id])
    return made.state == "ended"


def random_answer(made, vocabulary, tokenizer, rng, *, short=30, most=400):
    """A random answer under the masks: its tokens without the end token, and whether it ended."""
    made = made.copy()
    ids = []
    endings = [tokenizer.encode(chr(byte))[0] for byte in ENDINGS]
    while len(ids) < most:
        choices = allowed(made, vocabulary)
        assert choices, tokenizer.decode(ids)
        assert not vocabulary.special_ids & (set(choices) - {vocabulary.eos_token_id})
        assert max(choices) < tokenizer.vocab_size
        if len(ids) > short and vocabulary.eos_token_id in choices:
            token_id = vocabulary.eos_token_id
        elif len(ids) > short and (ends := [each for each in endings if each in choices]) and rng.random() < 0.9:
            token_id = ends[0] if rng.random() < 0.6 else rng.choice(ends)
        else:
            token_id = rng.choice(choices)
        made.advance([token_id])
        if token_id == vocabulary.eos_token_id:
            return ids, True
        ids.append(token_id)
    return ids, False
