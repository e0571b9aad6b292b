"""Under a grammar every equality holds bit for bit: drafted = plain = preempted = cached = in company.  Answers are valid.

Each seed is another random engine: number of drafts, how many of them are right, adaptive lengths or not, one step ahead or not,
pool, cache, chunks, moments of arrival, steps padded as for graphs or not.  Some requests have no grammar.
"""

import json
import re
from dataclasses import replace

import jsonschema
import pytest
import regex

from deepinfer.errors import RequestError
from deepinfer.request import FinishReason, SamplingParams
from tests.engine.grammars import EOS, LETTERS, compiler
from tests.engine.harness import build, drain, knowing, random_engine, request, rng_of, tokens

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a long word", "another long word"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
WHOLE = re.compile(r"[a-f]{2,5}-(north|south|northwest)\.[0-9]{3}")
LIST = re.compile(r"\[(x(,x)*)?\]")
BLANKS = r"[ \t\n\r]{0,8}"
STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}){0,6}"'
ENTRIES = [rf'(?:"name"{BLANKS}:{BLANKS}{STRING}{BLANKS},{BLANKS})?']
ENTRIES += [rf'"kind"{BLANKS}:{BLANKS}"(?:a|another) long word"{BLANKS},{BLANKS}', rf'"count"{BLANKS}:{BLANKS}(?:0|[1-9][0-9]?)']
BEGINNINGS = {
    "json": rf"\{{{BLANKS}{''.join(ENTRIES)}{BLANKS}\}}",
    "regex": WHOLE.pattern,
    "ebnf": LIST.pattern,
}
"""Patterns of whole answers, to judge the beginning of one that was cut."""
GRAMMARS = [
    ({"schema_type": "json", "schema": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    ({"schema_type": "regex", "schema": WHOLE.pattern}, lambda text: WHOLE.fullmatch(text) is not None),
    ({"schema_type": "ebnf", "schema": 'root ::= "[" ("x" ("," "x")*)? "]"'}, lambda text: LIST.fullmatch(text) is not None),
]
TRIGGER, BOUND = (7, 8), 6
PREFER_ENDS = {ord(each): 4.0 for each in '"}].9'}
"""Random weights would write long answers; these tokens end them."""


def constrained(rng, number, max_tokens):
    """Parameters of a request with one of the grammars, sometimes after free text."""
    args, _ = GRAMMARS[number % len(GRAMMARS)]
    if rng.random() < 0.4:
        args = args | {"trigger_token_ids": list(TRIGGER), "max_free_tokens": int(rng.integers(0, 7)), "end_needs_trigger": True}
        if rng.random() < 0.5:
            args["bound_token_id"] = BOUND
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3} if rng.random() < 0.3 else {}
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.8, 1.2])),
        top_k=int(rng.choice([-1, 30])),
        max_tokens=max_tokens,
        seq_seed=int(rng.integers(0, 2**62)),
        logit_bias=PREFER_ENDS,
        so_args=args,
        **penalties,
    )


def work_of(rng):
    work, stem = [], tokens(rng, int(rng.integers(20, 32)))
    for number in range(int(rng.integers(3, 5))):
        prompt = stem[: int(rng.integers(1, len(stem)))] if rng.random() < 0.5 else stem + tokens(rng, int(rng.integers(1, 10)))
        max_tokens = int(rng.integers(20, 50))
        if number == 3:
            params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seq_seed=int(rng.integers(0, 2**62)))
        else:
            params = constrained(rng, int(rng.integers(0, 3)), max_tokens)
        work.append(request(f"r{number}", prompt, params))
    return work


def whole(work, **given):
    """All requests on new memory, in one piece, without drafts."""
    core = build(max_num_seqs=8, spare_slots=0, budget=2000, is_async=False, cache=False, compiler=compiler(), **given)
    found = drain(core, work)
    core.close()
    return found


def check_answer(each, answer):
    """The answer follows its grammar, or is the beginning of one that does."""
    args = each.params.structured_output
    if args is None:
        return False
    ids = [token_id for token_id, _ in answer]
    if args.trigger_token_ids:
        places = [at for at in range(len(ids) - 1) if tuple(ids[at : at + 2]) == TRIGGER]
        if not places:
            assert len(ids) == each.params.max_tokens, "the end needs the trigger"
            return False
        budget = args.max_free_tokens + 2 + (args.bound_token_id is not None)
        assert places[0] + 2 <= budget, "the budget of free tokens was exceeded"
        ids = ids[places[0] + 2 :]
    assert all(token_id >= 9 or token_id == EOS for token_id in ids), "constrained text has no special token"
    if ids and ids[-1] == EOS:
        judge = next(judge for given, judge in GRAMMARS if given["schema_type"] == args.schema_type)
        assert judge(LETTERS.decode(ids)), LETTERS.decode(ids)
        return True
    text = LETTERS.decode(ids)
    assert regex.fullmatch(BEGINNINGS[args.schema_type], text, partial=True), text
    return False


@pytest.mark.parametrize("block", [pytest.param(n, marks=[pytest.mark.slow] if n >= 3 else []) for n in range(150)])
def test_constrained_drafted_is_plain(block):
    seen = dict.fromkeys(["valid", "accepted", "preempted"], 0)
    for seed in range(5 * block, 5 * block + 5):
        rng = rng_of(seed, 40)
        work = work_of(rng)
        expected = whole(work)
        seen["valid"] += sum(check_answer(each, expected[each.request_id]) for each in work)
        largest = int(rng.integers(0, 6))
        core = random_engine(
            rng,
            work,
            num_drafts=int(rng.integers(0, 6)),
            is_adaptive=bool(rng.random() < 0.5),
            drafter=knowing(work, expected, lambda *_, rng=rng, largest=largest: int(rng.integers(0, largest + 1))),
            compiler=compiler(),
        )
        assert drain(core, work, rng if rng.random() < 0.4 else None) == expected, f"seed {seed}"
        stats = core.stats()
        seen["accepted"] += sum(stats.num_accepted_drafts)
        seen["preempted"] += stats.num_preempted
        core.close()
    assert min(seen["valid"], seen["accepted"]) >= 5, f"the histories are too tame to show anything: {seen}"


@pytest.mark.parametrize("mode", ["coupled", "sampled", "argmax"])
def test_forced_tokens_are_accepted_in_every_mode(mode):
    """A grammar that forces long words: rounds accept many tokens, although the drafter is random."""
    so_args = {"schema_type": "regex", "schema": "(an|the) (answer|reply) that leaves no choice for a long time"}
    params = SamplingParams(temperature=1.0, max_tokens=60, seq_seed=3, so_args=so_args)
    core = build(num_drafts=5, draft_mode=mode, compiler=compiler())
    (answer,) = drain(core, [request("a", tokens(rng_of(0, 41), 20), params)]).values()
    ids = [token_id for token_id, _ in answer]
    assert re.fullmatch(so_args["schema"], LETTERS.decode(ids))
    stats = core.stats()
    core.close()
    assert len(ids) / stats.num_rounds >= 2.5, "forced tokens take the places of drafts"


def test_every_answer_of_a_request_follows_the_grammar():
    params = replace(constrained(rng_of(1, 42), 1, 40), n=3, temperature=1.0)
    core = build(num_drafts=2, compiler=compiler())
    core.add(request("a", tokens(rng_of(0, 42), 20), params))
    answers = {0: [], 1: [], 2: []}
    while not core.is_idle:
        for output in core.step():
            answers[output.sample_idx].append((output.token_id, output.token_logprobs))
    core.close()
    assert len({tuple(each) for each in answers.values()}) == 3
    for sample_idx, answer in answers.items():
        check_answer(request("a", (3,), params.with_sample(sample_idx)), answer)


def finish(core, *requests):
    """Last record of each request."""
    for each in requests:
        core.add(each)
    last = {}
    while not core.is_idle:
        for output in core.step():
            if output.finished:
                last[output.request_id] = output
        core.scheduler.check()
    return last


def test_a_grammar_that_cannot_be_compiled_ends_only_its_request():
    core = build(compiler=compiler())
    bad = SamplingParams(max_tokens=5, so_args={"schema_type": "regex", "schema": "("})
    good = SamplingParams(max_tokens=5, ignore_eos=True)
    last = finish(core, request("bad", (3, 4), bad), request("good", (3, 4), good))
    core.close()
    assert last["bad"].finish_reason == FinishReason.GRAMMAR_ERROR
    assert "regex" in last["bad"].message
    assert last["bad"].token_id is None
    assert last["good"].finish_reason == FinishReason.LENGTH


def test_rules_that_leave_no_token_end_only_their_request():
    so_args = {"schema_type": "regex", "schema": "[xy]+"}
    dead = SamplingParams(max_tokens=5, so_args=so_args, banned_token_ids=[ord("x"), ord("y")], seq_seed=1)
    alive = SamplingParams(max_tokens=5, so_args=so_args, banned_token_ids=[ord("x")], seq_seed=1)
    core = build(num_drafts=3, compiler=compiler())
    last = finish(core, request("dead", (3, 4), dead), request("alive", (3, 4), alive))
    core.close()
    assert last["dead"].finish_reason == FinishReason.GRAMMAR_ERROR
    assert "leave no token" in last["dead"].message
    assert last["alive"].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert last["alive"].message is None


@pytest.mark.parametrize(("golden", "position"), [([ord("a"), ord("z")], 1), ([EOS], 0), ([ord("a"), 5], 1)])
def test_forced_tokens_that_break_the_grammar_are_refused(golden, position):
    params = SamplingParams(max_tokens=6, golden_token_ids=golden, so_args={"schema_type": "regex", "schema": "[ab]{4}"})
    core = build(compiler=compiler())
    last = finish(core, request("a", (3, 4), params))
    core.close()
    assert f"at position {position}" in last["a"].message


def test_without_a_compiler_structured_output_is_refused():
    core = build()
    with pytest.raises(RequestError, match="started without"):
        core.add(request("a", (3, 4), SamplingParams(so_args={"schema_type": "regex", "schema": "a"})))
    assert core.is_idle
    core.close()


def test_an_abort_while_the_grammar_compiles_leaves_nothing():
    core = build(compiler=compiler())
    core.add(request("a", (3, 4), SamplingParams(so_args={"schema_type": "regex", "schema": "[a-z]{3}"})))
    assert core.waits_for_grammars
    assert core.abort(["a"])[0] == 1
    assert core.is_idle
    assert core.step() == []
    core.close()


def test_a_request_that_begins_with_output_tokens_follows_the_same_grammar():
    rng = rng_of(3, 43)
    work = [request("a", tokens(rng, 20), constrained(rng, number, 40)) for number in range(3)]
    for each in work:
        expected = whole([each])["a"]
        for count in (1, len(expected) // 2, len(expected) - 1):
            begun = replace(each, output_token_ids=tuple(token_id for token_id, _ in expected[:count]))
            assert whole([begun])["a"] == expected[count:]


def test_masks_cost_nothing_without_grammars():
    core = build(num_drafts=2, compiler=compiler())
    drain(core, [request("a", (3, 4, 5), SamplingParams(max_tokens=6, ignore_eos=True, seq_seed=0))])
    assert core.executor.call(lambda: core.executor.worker._grammars._thread) is None
    core.close()


@pytest.mark.parametrize("given", [{"trigger_token_ids": [5, EOS]}, {"trigger_token_ids": [5], "bound_token_id": EOS}])
def test_the_end_token_cannot_be_forced(given):
    core = build(compiler=compiler())
    params = SamplingParams(so_args={"schema_type": "regex", "schema": "a"} | given)
    with pytest.raises(RequestError, match="so_args names the end token 1"):
        core.add(request("a", (3, 4), params))
    core.close()


@pytest.mark.parametrize("has_bound", [False, True])
@pytest.mark.parametrize("budget", range(8))
def test_the_trigger_may_fall_at_every_place_of_a_round(budget, has_bound):
    """All drafts are right, so rounds go right across the bound token, the trigger and the first constrained token."""
    args = {"schema_type": "regex", "schema": "[xyz]{9}", "trigger_token_ids": list(TRIGGER), "max_free_tokens": budget}
    args |= {"end_needs_trigger": True} | ({"bound_token_id": BOUND} if has_bound else {})
    work = [
        request(
            f"r{number}", tokens(rng_of(number, 44), 12 + number), SamplingParams(max_tokens=30, seq_seed=number, so_args=args)
        )
        for number in range(3)
    ]
    expected = whole(work)
    core = build(num_drafts=5, drafter=knowing(work, expected, lambda *_: 5), compiler=compiler())
    assert drain(core, work) == expected
    stats = core.stats()
    core.close()
    assert sum(stats.num_accepted_drafts) > 0.5 * sum(stats.num_verified_drafts)
    for answer in expected.values():
        ids = [token_id for token_id, _ in answer]
        forced = ([BOUND] if has_bound else []) + list(TRIGGER)
        assert ids[budget : budget + len(forced)] == forced
        assert LETTERS.decode(ids[budget + len(forced) :]).strip("xyz") == ""
        assert len(ids) == budget + len(forced) + 9 + 1
