"""Masks along drafts: equal to masks without drafts, rolled back, and right across trigger, bound token and budget."""

import json
import random

import numpy as np
import pytest

from deepinfer.errors import GrammarFailed
from deepinfer.grammar.matcher import FillJob, Forced, MaskFiller
from deepinfer.grammar.vocabulary import unpack
from tests.grammar.test_ebnf import JSON
from tests.grammar.walks import allowed, matcher, random_answer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["one", "two"]}, "n": {"type": "integer"}},
    "required": ["name", "kind"],
}
GRAMMARS = {
    "json": ("json", SCHEMA),
    "regex": ("regex", "(ab|a(c|d)*){2,4}[x-z]?"),
    "ebnf": ("ebnf", JSON),
    "lark": ("lark", 'start: "a" <think> /[b-d]{1,5}/ </think> %json {"enum": ["x", 12]}\n'),
}
TRIGGER = (103, 104, 103)  # the bytes "dede" share a beginning with it
BOUND, SPECIAL = 110, 263


def rows(made, vocabulary, drafts):
    masks = np.full((len(drafts) + 1, vocabulary.num_words), 7, dtype=np.int32)
    forced = made.fill(drafts, masks)
    return [None if (row == -1).all() else np.flatnonzero(unpack(row)).tolist() for row in masks], forced


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_along_drafts_equal_masks_without_them(name, tokenizer, vocabulary, seed):
    rng, start = random.Random(seed), matcher(vocabulary, *GRAMMARS[name])
    for _ in range(6):
        ids = random_tokens(start, vocabulary, rng)
        plain = start.copy()
        singles = []
        for token_id in ids:
            singles.append(allowed(plain, vocabulary))
            plain.advance([token_id])
        singles += [allowed(plain, vocabulary)] * (plain.state != "ended")
        drafted = start.copy()
        at = 0
        while at < len(ids):
            num_drafts = rng.randint(0, 5)
            drafts = ids[at : at + num_drafts]
            if rng.random() < 0.4 and drafts:
                drafts[rng.randrange(len(drafts))] = rng.choice([-1, 5, 40, vocabulary.eos_token_id, SPECIAL, 299])
            drafts += [-1] * (num_drafts - len(drafts))
            got, _ = rows(drafted, vocabulary, drafts)
            for offset, row in enumerate(got):
                if at + offset == len(singles):
                    assert row is None  # after the end token
                    break
                assert row == singles[at + offset], (ids, at, drafts, offset)
                draft = drafts[offset] if offset < num_drafts else -1
                if draft not in row:
                    assert set(map(str, got[offset + 1 :])) <= {"None"}
                    break
                if draft != ids[at + offset]:
                    break  # a legal draft that the answer does not have
            taken = rng.randint(1, 3)
            drafted.advance(ids[at : at + taken])
            at += taken


def random_tokens(made, vocabulary, rng):
    """A random answer, or its first 60 tokens; the end token is its last one."""
    made, ids = made.copy(), []
    while len(ids) < 60 and made.state != "ended":
        choices = allowed(made, vocabulary)
        is_last = vocabulary.eos_token_id in choices and rng.random() < 0.3
        ids.append(vocabulary.eos_token_id if is_last else rng.choice(choices))
        made.advance(ids[-1:])
    return ids


def test_a_batch_gives_the_rows_and_runs_of_single_matchers(vocabulary, seed):
    rng, filler = random.Random(seed), MaskFiller(2)
    jobs, want, first = [], [], 1
    for number in range(40):
        name = rng.choice(list(GRAMMARS))
        others = {"trigger_token_ids": TRIGGER, "max_free_tokens": 9} if number % 3 == 0 else {}
        made = matcher(vocabulary, *GRAMMARS[name], **others)
        ids = random_tokens(made, vocabulary, rng)
        cut = rng.randint(0, len(ids))
        made.advance(ids[:cut])
        drafts = [*ids[cut : cut + rng.randint(0, 5)], *([-1] * rng.randint(0, 1))]
        jobs.append(FillJob(matcher=made, first_row=first, draft_ids=drafts))
        own = np.empty((len(drafts) + 1, vocabulary.num_words), dtype=np.int32)
        want.append((made.copy().fill(drafts, own), own))
        first += len(drafts) + 2  # rows of no job between
    masks = np.full((first, vocabulary.num_words), 7, dtype=np.int32)
    for _ in range(2):  # the second call sees the state that the first one left
        got = filler.fill(jobs, masks)
        for job, forced, (wanted, own) in zip(jobs, got, want, strict=True):
            assert forced == wanted
            assert (masks[job.first_row : job.first_row + len(own)] == own).all()
            assert (masks[job.first_row - 1] == 7).all()


def test_masks_do_not_depend_on_what_was_filled_before(vocabulary, tokenizer, seed):
    rng, start = random.Random(seed), matcher(vocabulary, "json", SCHEMA)
    ids, _ = random_answer(start, vocabulary, tokenizer, rng)
    busy, fresh = start.copy(), start.copy()
    for token_id in ids:
        rows(busy, vocabulary, [rng.choice(allowed(busy, vocabulary)), rng.randrange(270), token_id])
        busy.advance([token_id])
    fresh.advance(ids)
    assert rows(busy, vocabulary, [40, 37]) == rows(fresh, vocabulary, [40, 37])


def test_the_end_token_is_allowed_exactly_where_the_grammar_accepts(vocabulary, tokenizer):
    made = matcher(vocabulary, "regex", "ab?")
    (a, b), end = tokenizer.encode("ab"), vocabulary.eos_token_id
    assert rows(made, vocabulary, [a, b, end, a]) == ([[a], [end, b], [end], None, None], Forced(offset=0, token_ids=(a,)))
    assert not made.is_accepting
    made.advance([a, b])
    assert (made.state, made.is_accepting) == ("constrained", True)
    assert rows(made, vocabulary, [end, -1]) == ([[end], None, None], Forced(offset=0, token_ids=(end,)))
    made.advance([end, 5, 5])
    assert made.state == "ended"
    assert rows(made, vocabulary, [3]) == ([None, None], None)
    assert not made.needs_mask([3])


@pytest.mark.parametrize("wrong", [40, 1, 0, SPECIAL, 299, 100_000])
def test_a_wrong_token_fails_this_matcher_for_good(wrong, vocabulary):
    made = matcher(vocabulary, "regex", "abc")
    other = made.copy()
    with pytest.raises(GrammarFailed):
        made.advance([wrong])
    assert made.state == "failed"
    assert made.needs_mask()
    with pytest.raises(GrammarFailed):
        made.advance([100])
    with pytest.raises(GrammarFailed):
        rows(made, vocabulary, [])
    assert other.state == "constrained"
    other.advance([100, 101, 102, 1])
    assert other.state == "ended"


def test_special_tokens_are_allowed_only_by_name(vocabulary, tokenizer):
    think = tokenizer.special("<think>")
    loose = matcher(vocabulary, "lark", "start: T\nT: ~/abc/\n")
    assert not vocabulary.special_ids & (set(allowed(loose, vocabulary)) - {vocabulary.eos_token_id})
    named = matcher(vocabulary, "lark", f"start: <[{think}]> T\nT: ~/abc/\n")
    assert allowed(named, vocabulary) == [think]
    named.advance([think])
    assert not vocabulary.special_ids & (set(allowed(named, vocabulary)) - {vocabulary.eos_token_id, think})


def test_the_tokens_that_break_a_grammar_are_found(vocabulary, tokenizer):
    made = matcher(vocabulary, "regex", "abc")
    abc, end = tokenizer.encode("abc"), vocabulary.eos_token_id
    assert made.first_refused([*abc, end]) is None
    assert made.first_refused(abc[:2]) is None
    assert made.first_refused([abc[0], end]) == 1
    assert made.first_refused([*abc, abc[0]]) == 3
    assert made.first_refused([*abc, end, abc[0]]) == 4
    free = matcher(vocabulary, "regex", "abc", trigger_token_ids=TRIGGER, end_needs_trigger=True, max_free_tokens=3)
    assert free.first_refused([5, 6, end]) == 2
    assert free.first_refused([5, 6, 7, TRIGGER[0], 9]) == 4
    assert made.state == free.state.replace("free", "constrained") == "constrained"


# Free text: trigger, bound token and budget.


class Model:
    """The rules of free text, told with lists and without an automaton."""

    def __init__(self, trigger, bound=None, budget=None, end_needs_trigger=False):
        self.trigger, self.bound, self.budget, self.end_needs = list(trigger), bound, budget, end_needs_trigger
        self.text, self.num_free, self.forced, self.is_free = [], 0, [], True
        self._check_budget()

    def _check_budget(self):
        if self.is_free and not self.forced and self.budget is not None and self.num_free >= self.budget:
            self.forced = self._rest() if self.bound is None else [self.bound]

    def _rest(self):
        for size in range(len(self.trigger) - 1, -1, -1):
            if size == 0 or self.text[-size:] == self.trigger[:size]:
                return self.trigger[size:]
        raise AssertionError

    def step(self, token_id):
        was_forced = bool(self.forced)
        self.text.append(token_id)
        if was_forced:
            assert token_id == self.forced.pop(0)
        else:
            self.num_free += 1
        if self.text[-len(self.trigger) :] == self.trigger:
            self.is_free, self.forced = False, []
        elif token_id == self.bound and not self.forced:
            self.forced = self._rest()
        self._check_budget()

    def allows(self, token_id, end):
        if self.forced:
            return token_id == self.forced[0]
        return token_id != end or not self.end_needs


@pytest.mark.parametrize("trigger", [TRIGGER, (103,), (103, 103, 104), (110, 5), (5, 110)])
@pytest.mark.parametrize(
    "options", [{}, {"bound": BOUND}, {"budget": 4}, {"bound": BOUND, "budget": 3}, {"budget": 0}, {"budget": 0, "bound": BOUND}]
)
def test_trigger_bound_token_and_budget_at_every_place(trigger, options, vocabulary, tokenizer, seed):
    rng, end = random.Random(seed), vocabulary.eos_token_id
    (a, b) = tokenizer.encode("ab")
    args = {"trigger_token_ids": trigger, "end_needs_trigger": True}
    args |= {name: options[key] for key, name in (("bound", "bound_token_id"), ("budget", "max_free_tokens")) if key in options}
    start = matcher(vocabulary, "regex", "ab", **args)
    for _ in range(60):
        made, model = start.copy(), Model(trigger, end_needs_trigger=True, **options)
        text = []  # an answer: free tokens, then the grammar
        while model.is_free and len(text) < 25:
            token_id = model.forced[0] if model.forced else rng.choice([*trigger, *trigger, BOUND, 5, 103, SPECIAL])
            model.step(token_id)
            text.append(token_id)
        has_grammar = not model.is_free
        text += [a, b, end] if has_grammar else []
        num_free = len(text) - 3 if has_grammar else len(text)
        at = 0
        while at < len(text):
            drafts = text[at : at + rng.randint(0, 6)]
            got, forced = rows(made, vocabulary, drafts)
            replay = Model(trigger, end_needs_trigger=True, **options)
            for token_id in text[: min(at, num_free)]:
                replay.step(token_id)
            expected = []
            for offset in range(len(drafts) + 1):
                place = at + offset
                if place >= num_free and has_grammar:
                    expected.append([[a], [b], [end], None][min(place - num_free, 3)])
                    continue
                wanted = [each for each in range(vocabulary.num_words * 32) if replay.allows(each, end)]
                expected.append(wanted)
                if place < len(text):
                    replay.step(text[place])
            assert got == expected, (text, at, drafts)
            singles = [offset for offset, row in enumerate(got) if row is not None and len(row) == 1]
            assert (forced.offset if forced else None) == (singles[0] if singles else None)
            if forced is not None:
                run = text[at + forced.offset :][: len(forced.token_ids)]
                assert list(forced.token_ids[: len(run)]) == run
                assert len(forced.token_ids) <= 2 * len(drafts) + 1
            assert made.state == ("free" if at < num_free or not has_grammar else "constrained")
            taken = rng.randint(1, 4)
            made.advance(text[at : at + taken])
            at += taken
        again = start.copy()
        again.advance(text)
        assert again.state == ("ended" if has_grammar else "free")


def test_free_text_may_end_unless_it_needs_the_trigger(vocabulary):
    free = matcher(vocabulary, "regex", "ab", trigger_token_ids=TRIGGER)
    assert (free.state, free.is_accepting, free.needs_mask(), free.needs_mask([5, 6])) == ("free", True, False, False)
    assert free.needs_mask(TRIGGER)
    assert rows(free, vocabulary, [5, vocabulary.eos_token_id, 7]) == ([None] * 4, None)
    bound = matcher(vocabulary, "regex", "ab", trigger_token_ids=TRIGGER, end_needs_trigger=True)
    assert (bound.is_accepting, bound.needs_mask()) == (False, True)
    got, _ = rows(bound, vocabulary, [vocabulary.eos_token_id, 7])
    assert set(range(320)) - set(got[0]) == {vocabulary.eos_token_id}
    assert got[1:] == [None, None]
    free.advance([5, vocabulary.eos_token_id])
    assert free.state == "ended"


def test_a_copy_goes_its_own_way(vocabulary, tokenizer):
    made = matcher(vocabulary, "regex", "a(b|c)d")
    made.advance(tokenizer.encode("a"))
    copy = made.copy()
    copy.advance(tokenizer.encode("cd"))
    made.advance(tokenizer.encode("b"))
    assert (made.is_accepting, copy.is_accepting) == (False, True)
    assert allowed(made, vocabulary) == tokenizer.encode("d")


# Forced tokens.


@pytest.mark.parametrize("size", ["byte", "full"])
def test_forced_tokens_are_what_masks_allow(size, request, seed):
    prefix = "full_" if size == "full" else ""
    tokenizer, vocabulary = (request.getfixturevalue(prefix + name) for name in ("tokenizer", "vocabulary"))
    rng, made = random.Random(seed), matcher(vocabulary, "json", SCHEMA)
    text = '{"name":"Jo","kind":"two","n":12}'
    ids = tokenizer.encode(text)
    num_forced = at = 0
    while at < len(ids):
        drafts = ids[at : at + 3] if rng.random() < 0.5 else [ids[at], -1, -1]
        masks = np.empty((4, vocabulary.num_words), dtype=np.int32)
        forced = made.fill(drafts, masks)
        if forced is not None:
            replay = made.copy()
            replay.advance(drafts[: forced.offset])
            assert 0 < len(forced.token_ids) <= 7
            for token_id in forced.token_ids:
                assert allowed(replay, vocabulary) == [token_id]
                replay.advance([token_id])
            num_forced += len(forced.token_ids)
        made.advance([ids[at]])
        at += 1
    assert num_forced > 10


def test_a_run_goes_on_from_the_trigger_into_the_grammar_and_to_the_end(vocabulary, tokenizer):
    made = matcher(vocabulary, "regex", "abc", trigger_token_ids=TRIGGER, bound_token_id=BOUND)
    abc, end = tokenizer.encode("abc"), vocabulary.eos_token_id
    whole = (*TRIGGER, *abc, end)
    got, forced = rows(made, vocabulary, [5, BOUND, -1, -1])
    assert forced == Forced(offset=2, token_ids=whole)
    assert got[2] == [TRIGGER[0]]
    assert rows(made, vocabulary, [BOUND])[1] == Forced(offset=1, token_ids=whole[:3])


# Limits.


def test_an_error_along_drafts_ends_only_the_rows_after_it(vocabulary, tokenizer, monkeypatch):
    """A mask beyond its limit at row 1 leaves row 0 as it is, row 1 empty, and the matcher usable."""
    made = matcher(vocabulary, "regex", "[ab]{1,50}")
    (a,) = tokenizer.encode("a")
    library = made._library

    class Failing:
        """The library's matcher, which fails when it has consumed a draft."""

        def __init__(self, inner):
            self._inner, self._num, self._error = inner, 0, ""

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def consume_token(self, token_id):
            self._num += 1
            return self._inner.consume_token(token_id)

        def unsafe_compute_mask_ptr(self, pointer, size):
            if self._num:
                self._error = "too complex"
            else:
                self._inner.unsafe_compute_mask_ptr(pointer, size)

        def is_error(self):
            return bool(self._error)

        def get_error(self):
            return self._error

    made._library = Failing(library)
    got, _ = rows(made, vocabulary, [a, a, a])
    assert [len(each) if each is not None else None for each in got] == [2, 0, None, None]
    assert made.state == "constrained"
    made.advance([a])
    assert allowed(made, vocabulary) == [vocabulary.eos_token_id, *tokenizer.encode("ab")]


def test_a_mask_beyond_its_limit_fails_the_answer(vocabulary):
    made = matcher(vocabulary, "ebnf", 'root ::= (s | [a-d]){1,400}\ns ::= "(" root ")" | s s | s? s? s? "x"')

    def generate():
        for _ in range(600):
            made.advance([123])  # "x"
            allowed(made, vocabulary)

    with pytest.raises(GrammarFailed, match=r"limit|complex|items"):
        generate()
    assert made.state == "failed"


def test_a_whole_answer_with_the_full_vocabulary(full_tokenizer, full_vocabulary):
    made = matcher(full_vocabulary, "json", SCHEMA)
    text = json.dumps({"name": "naïve", "kind": "one", "n": 3}, ensure_ascii=False)
    for token_id in full_tokenizer.encode(text):
        assert token_id in allowed(made, full_vocabulary)
        made.advance([token_id])
    assert full_vocabulary.eos_token_id in allowed(made, full_vocabulary)
