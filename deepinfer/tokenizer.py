"""Text to token ids and back, for byte-level BPE vocabularies stored as ``tokenizer.json``.

Owns the vocabulary: spellings, the bytes of each id, and the classes that Engram hashes instead of ids.  The library
``tokenizers`` encodes text.  Decoding uses our own table of bytes for each id.  A whole answer and an answer that is streamed
token by token therefore give the same text, even if a character is split over tokens or the bytes are not valid UTF-8.  (The
library's own stream decoder keeps invalid bytes until a valid character follows, and loses invalid bytes at the end.)

Invariant: :meth:`Tokenizer.encode` never returns the id of an added token.  Only :meth:`Tokenizer.special` gives these ids.

Place in the flow: the prompt reader encodes with it; the model reads the compression map once at load.  No torch.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from deepinfer.errors import ConfigError, RequestError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"

_NUM_BYTES = 256
_BLANKS = re.compile("[ \t\r\n]+")
_REPLACEMENT = "\ufffd"
_PROBE = "a  B\u00c5\ufb01A\u0308\t7\n \uff21 "
"""A text with blanks, capitals, marks, ligatures and wide letters; a tokenizer that normalises text changes it."""


class TextStream:
    """Decodes the ids of one answer one by one.

    Invariant: the results of all :meth:`push` calls and one :meth:`finish`, joined, equal ``Tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Add one id and return the text that is complete now; "" while a character is incomplete.

        Raises:
            RequestError: the id is not in the vocabulary.
        """
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return the text of an incomplete character at the end: "" or U+FFFD.  The stream is empty afterwards."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class Tokenizer:
    """One model's vocabulary, made from the text of a ``tokenizer.json``.

    Attributes:
        source: the JSON text.
        vocab_size: number of ids; ids are 0 .. vocab_size - 1 without gaps.
        bos_id: id that begins every prompt.
        eos_id: id that ends an answer.
    """

    def __init__(self, source: str) -> None:
        """Read a vocabulary from the JSON text of a ``tokenizer.json``.

        Raises:
            ConfigError: the text is not a byte-level tokenizer with gapless ids and the begin and end tokens.
        """
        self.source = source
        self._library = _build(source)
        self._added: dict[str, int] = {
            token.content: token_id for token_id, token in self._library.get_added_tokens_decoder().items()
        }
        ids = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = len(ids)
        self._spellings = sorted(ids, key=ids.__getitem__)
        if [ids[spelling] for spelling in self._spellings] != list(range(self.vocab_size)):
            raise ConfigError(
                f"the tokenizer's {self.vocab_size} ids are not 0 to {self.vocab_size - 1}; "
                "every id needs exactly one spelling: use the tokenizer.json that came with the checkpoint"
            )
        self._bytes = self._table_of_bytes()
        self._most_bytes = self._longest()
        self.bos_id = self.special(BOS)
        self.eos_id = self.special(EOS)

    @classmethod
    def from_dir(cls, model_dir: Path) -> Tokenizer:
        """Read ``tokenizer.json`` of a model directory.

        Raises:
            ConfigError: the file is missing, unreadable or not a usable tokenizer.
        """
        path = model_dir / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; give a complete model directory") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the tokenizer {path} is not UTF-8 text; copy the file again") from error

    def encode(self, text: str) -> list[int]:
        """Ids of plain text.  No token is added; spellings of special tokens are ordinary characters.

        Raises:
            RequestError: the text holds a lone surrogate, which has no encoding in UTF-8.
        """
        try:
            text.encode()  # the library's own error for such text is a TypeError that explains nothing
        except UnicodeEncodeError as error:
            raise RequestError(f"the text holds a lone surrogate at character {error.start}; send valid Unicode") from error
        return self._library.encode(text, add_special_tokens=False).ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of ``len(encode(text))``: the number of tokens if every token had the greatest length.

        Cost: that of encoding the text as UTF-8, 1 ms for 10 MB.
        """
        if not self._most_bytes:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._most_bytes)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, including the spellings of special tokens; invalid UTF-8 becomes U+FFFD.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """Start decoding one answer token by token."""
        return TextStream(self)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id; for a special token, its spelling in UTF-8.

        Raises:
            RequestError: the id is not in the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}; send ids below that")
        return self._bytes[token_id]

    def special(self, spelling: str) -> int:
        """Id of an added token.

        Raises:
            ConfigError: the vocabulary has no added token of this spelling.
        """
        if spelling not in self._added:
            raise ConfigError(
                f"the tokenizer has no special token {spelling!r}; use the tokenizer.json that came with the checkpoint"
            )
        return self._added[spelling]

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of the added tokens, ascending.  :meth:`encode` never returns them."""
        return tuple(sorted(self._added.values()))

    def compression_map(self) -> npt.NDArray[np.int32]:
        """The class of every id for Engram's hashes: ids whose texts differ only in case, accents or blanks share a class.

        The key of an id is its text in NFKC, then NFD, without marks, in lower case, with each run of blanks as one space, and
        without white space at the ends.  A text of one space keeps that space.  A text that this rule would make empty (only
        marks or white space) is its own key.  If the bytes are not a complete text, the key is the vocabulary entry.

        Returns:
            [vocab_size] int32; classes are numbered from 0 in the order in which they first appear.

        Source: the published size of the compressed vocabulary, 99,092 classes for the 129,280 ids of the V4 tokenizer; only this
        rule gives this size.  Cost: one pass over the vocabulary in Python.
        """
        classes: dict[str, int] = {}
        numbered = [classes.setdefault(self._class_key(token_id), len(classes)) for token_id in range(self.vocab_size)]
        return np.array(numbered, dtype=np.int32)

    def save(self, path: Path) -> None:
        """Write the ``tokenizer.json`` of this vocabulary to the file ``path``."""
        path.write_text(self.source, encoding="utf-8")

    def _table_of_bytes(self) -> list[bytes]:
        """Bytes of every id: an added token's spelling in UTF-8, or the bytes of an entry's characters."""
        byte_of = {spelling: byte for byte, spelling in enumerate(byte_spellings())}
        try:
            return [
                spelling.encode() if spelling in self._added else bytes(map(byte_of.__getitem__, spelling))
                for spelling in self._spellings
            ]
        except KeyError as error:
            raise ConfigError(
                f"a vocabulary entry holds {error.args[0]!r}, which stands for no byte; give a byte-level tokenizer.json"
            ) from error

    def _longest(self) -> int:
        """Bytes of the longest token that a text can have; 0 if a token may replace more of a text than its own bytes."""
        plain = [each for each, spelling in zip(self._bytes, self._spellings, strict=True) if spelling not in self._added]
        is_exact = self.decode(self.encode(_PROBE)) == _PROBE  # the tokenizer normalises, drops and adds nothing
        has_all_bytes = sum(len(each) == 1 for each in set(plain)) == _NUM_BYTES  # the library drops missing bytes silently
        return max(map(len, plain), default=0) if is_exact and has_all_bytes else 0

    def _class_key(self, token_id: int) -> str:
        """The common key of all ids of one class; see :meth:`compression_map`."""
        text = self._bytes[token_id].decode("utf-8", "replace")
        if _REPLACEMENT in text:
            return self._spellings[token_id]
        decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        bare = "".join(char for char in decomposed if not unicodedata.category(char).startswith("M"))
        folded = _BLANKS.sub(" ", bare.lower())
        return folded if folded == " " else folded.strip() or text


def byte_spellings() -> list[str]:
    """The character of each byte in a byte-level vocabulary, indexed by the byte.

    A printable Latin-1 byte is its own character.  The other bytes, in order, are the characters from U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    return [chr(byte if byte in printable else _NUM_BYTES + others.index(byte)) for byte in range(_NUM_BYTES)]


def byte_tokenizer() -> Tokenizer:
    """The tokenizer of the ``nano`` model: one id for each byte, no merges, and the special tokens of prompts.

    Ids 0 to 2 are the begin, end and padding tokens.  Ids 3 to 258 are the bytes in order.  Ids 259 to 265 mark turns, thinking
    and tool calls.  Ids 266 to 269 are reserved.  Id 270 is the image token.  Id 271 is the drafter's noise token.
    """
    head = [BOS, EOS, PAD]
    marks = ["<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜"]
    reserved = [f"<｜place▁holder▁no▁{number}｜>" for number in range(4)]
    tail = [*marks, *reserved, IMAGE, "<｜dspark_noise｜>"]
    spellings = [*head, *byte_spellings(), *tail]
    made = tokenizers.Tokenizer(models.BPE(vocab={spelling: index for index, spelling in enumerate(spellings)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(spelling, normalized=False, special=True) for spelling in [*head, *tail]])
    return Tokenizer(made.to_str(pretty=True))


def _build(source: str) -> tokenizers.Tokenizer:
    """The library's tokenizer for ``source``, configured so that it never finds an added token in text.

    The library ignores added tokens in text only if they are marked as special.  Published files do not mark the tokens of turns
    and thinking.  This function marks all of them.  The change does not affect :meth:`Tokenizer.save` and decoding.
    """
    try:
        description: dict[str, Any] = json.loads(source)
        if description["decoder"]["type"] != "ByteLevel":
            raise ConfigError(f"the tokenizer's decoder is {description['decoder']['type']}; give a byte-level tokenizer.json")
        for token in description["added_tokens"]:
            token["special"] = True
        library = tokenizers.Tokenizer.from_str(json.dumps(description))
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed description
        raise ConfigError(f"the tokenizer description cannot be read: {error!r}; copy tokenizer.json again") from error
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()
    return library
