"""The vocabulary that is cut from the published one."""

import json
from collections import Counter

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine.loader import model_directory
from deepinfer.tokenizer import BOS, EOS, IMAGE, PAD, Tokenizer
from training.export import save_tokenizer
from training.tokenizer import count_tokens, cut, published_source

TEXTS = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? It is 2024-05-17, and 12 + 345 = 357.\n",
    'def add(first: int, second: int) -> int:\n    """Add two numbers."""\n    return first + second\n',
    '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
)


@pytest.fixture(scope="module")
def counts():
    return count_tokens([*TEXTS, "A house and a garden, a tree and a bird: they were all there before the war began."])


@pytest.fixture(scope="module")
def small(counts):
    return Tokenizer(cut(counts, 384))


@pytest.fixture(scope="module")
def published():
    library = tokenizers.Tokenizer.from_str(published_source())
    library.encode_special_tokens = True
    return library


@given(st.text())
def test_any_text_round_trips(small, text):
    assert small.decode(small.encode(text)) == text


@given(st.binary())
def test_every_byte_has_a_token(small, data):
    byte_ids = {small.token_bytes(token_id): token_id for token_id in range(3, 259)}
    assert b"".join(small.token_bytes(byte_ids[bytes([each])]) for each in data) == data


@given(st.text(st.sampled_from("the quick brown fox 12,.\n()_=\"' é中"), max_size=60) | st.sampled_from(TEXTS))
def test_splits_like_the_whole_vocabulary_where_that_needs_kept_tokens_only(small, published, text):
    whole = published.encode(text, add_special_tokens=False).tokens
    kept = json.loads(small.source)["model"]["vocab"]
    if all(each in kept for each in whole):
        assert [kept[each] for each in whole] == small.encode(text)


def test_merges_are_closed_and_ids_have_no_gaps(small):
    model = json.loads(small.source)["model"]
    assert small.vocab_size == 384
    for merge in model["merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= model["vocab"].keys()


def test_tokens_of_several_digits_are_left_out(small):
    assert [small.decode([each]) for each in small.encode("12345")] == list("12345")


def test_special_tokens_have_their_places_and_flags(small):
    assert [small.special(each) for each in (BOS, EOS, PAD)] == [0, 1, 2]
    assert small.special(IMAGE) == 382
    flags = {each["content"]: (each["normalized"], each["special"]) for each in json.loads(small.source)["added_tokens"]}
    assert flags["<｜User｜>"] == flags["<｜System｜>"] == flags["<think>"] == flags["｜DSML｜"] == (True, False)
    assert flags[BOS] == (False, True)
    assert flags[IMAGE] == (False, False)


def test_a_corpus_that_is_too_small_is_an_error():
    with pytest.raises(ValueError, match="10240 was asked for"):
        cut(Counter({"Ġthe": 3}))


def test_the_folder_of_nano_has_what_other_programs_read(tmp_path):
    nano = model_directory("nano")
    save_tokenizer(tmp_path, Tokenizer.from_dir(nano))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (nano / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8")
