"""Speculative text has the law (the distribution) of plain text: by enumeration, up to rounding, and by counting real tokens.

A language of a few tokens has logits for every prefix.  Plain text evaluates rules, masks and filters on the text so far, one
token at a time.  Speculation evaluates them on packed rows, with drafts that may be rejected.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from deepinfer.errors import GrammarFailed
from deepinfer.executor.rules import GrammarMasks, PackedRows, TokenRules
from deepinfer.grammar.compiler import compile_grammar
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.ops import sampling
from deepinfer.ops.sampling import (
    SamplingRows,
    markov_step,
    schedule_lengths,
    verify,
    verify_coupled,
)
from deepinfer.request import SamplingParams, StructuredOutput
from tests.ops.plain_sampling import process_logits, sample

CPU = torch.device("cpu")
EOS = 2
PROMPT, OUTPUT = [1, 0, 1], [2, 1]
"""The text before the round; its last token is the anchor."""
SMALL_P = 1e-3
"""A test fails if its statistic is less probable; seeds are fixed, so a test that passes once always passes."""


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_law(gen, *shape):
    return torch.softmax(torch.randn(*shape, generator=gen, dtype=torch.float64) * 1.5, -1)


def sampling_rows(params, n, seeds=None):
    """The parameters of one request, n times."""

    def column(value, dtype):
        return torch.full((n,), value, dtype=dtype)

    return SamplingRows(
        temperature=column(params.temperature, torch.float32),
        top_k=column(params.top_k, torch.int64),
        top_p=column(params.top_p, torch.float32),
        min_p=column(params.min_p, torch.float32),
        seeds=torch.zeros(n, dtype=torch.int64) if seeds is None else seeds,
        filters=params.has_filters,
    )


def grammar(prefix, vocab):
    """A mask that depends on the whole prefix; after a violation every token is allowed."""
    allowed = [True] * vocab
    for depth in range(len(prefix) + 1):
        allowed = [token != (sum(prefix[:depth]) + 2 * depth) % vocab for token in range(vocab)]
        if depth < len(prefix) and not allowed[prefix[depth]]:
            return [True] * vocab
    return allowed


@dataclass
class Setting:
    """A request's parameters, and whether its text must follow the grammar.

    ``prompt`` and ``output`` are the text before the round.
    """

    given: dict = field(default_factory=dict)
    has_grammar: bool = False
    output: tuple = tuple(OUTPUT)

    def __post_init__(self):
        self.params = SamplingParams(seq_seed=0, **self.given)

    def rules(self, prefixes, vocab):
        """Rules with one request for each prefix, after the text before the round."""
        rules = TokenRules(vocab, eos_token_id=EOS, forbidden=(), device=CPU)
        for prefix in prefixes:
            rules.add(str(prefix), self.params, len(PROMPT))
            rules.start(str(prefix), np.array([*PROMPT, *self.output, *prefix], dtype=np.int32))
        return rules

    @property
    def anchor(self):
        return len(PROMPT) + len(self.output) - 1

    def packed(self, prefixes, drafts, lens):
        """The rows of requests with the texts ``prefixes``, each with its drafts."""
        owners = torch.repeat_interleave(torch.arange(len(lens)), lens + 1)
        offsets = torch.arange(len(owners)) - (torch.cumsum(lens + 1, 0) - lens - 1)[owners]
        depths = torch.tensor([len(prefix) for prefix in prefixes])
        return PackedRows(
            request_ids=[str(prefix) for prefix in prefixes],
            owners=owners,
            offsets=offsets,
            positions=self.anchor + 1 + depths[owners] + offsets,
            draft_ids=drafts,
        )

    def ruled(self, rules, logits, prefixes, drafts, lens):
        """Packed logits and mask of requests with the texts ``prefixes``, each with its drafts."""
        vocab = logits.shape[-1]
        packed = self.packed(prefixes, drafts, lens)
        owners, offsets = packed.owners, packed.offsets
        logits, mask = rules.apply(logits, packed)
        if self.has_grammar:
            texts = [(*prefixes[i], *drafts[i, :j].tolist()) for i, j in zip(owners.tolist(), offsets.tolist(), strict=True)]
            table = {text: grammar(text, vocab) for text in set(texts)}
            mask = mask & torch.tensor([table[text] for text in texts])
        return logits, mask

    def law(self, logits, mask):
        """Probabilities of plain sampling."""
        rows = sampling_rows(self.params, len(logits))
        processed = process_logits(logits, rows, mask=mask.expand(logits.shape)).double()
        best = torch.nn.functional.one_hot(processed.argmax(-1), logits.shape[-1]).double()
        return torch.where(rows.greedy[:, None], best, torch.softmax(processed, -1))

    def plain_law(self, tables):
        """Laws of plain text: for each depth, [vocab] * depth, given each prefix."""
        vocab = tables[0].shape[-1]
        laws = []
        for depth, table in enumerate(tables):
            prefixes = list(itertools.product(range(vocab), repeat=depth))
            drafts, lens = torch.zeros(len(prefixes), 0, dtype=torch.int64), torch.zeros(len(prefixes), dtype=torch.int64)
            ruled = self.ruled(self.rules(prefixes, vocab), table.reshape(-1, vocab), prefixes, drafts, lens)
            laws.append(self.law(*ruled).view(table.shape))
        return laws


PENALTIES = {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": 0.9}
SETTINGS = {
    "plain": Setting(),
    "warm": Setting({"temperature": 0.6}),
    "greedy": Setting({"temperature": 0}),
    "top-k 1": Setting({"top_k": 1, **PENALTIES}),
    "top-k": Setting({"top_k": 2}),
    "small top-p": Setting({"top_p": 0.05}),
    "top-p": Setting({"top_p": 0.7}),
    "min-p": Setting({"min_p": 0.4}),
    "penalties": Setting({**PENALTIES}),
    "first penalties": Setting({**PENALTIES}, output=()),
    "rewards and filters": Setting({"frequency_penalty": -1.5, "repetition_penalty": 0.6, "top_p": 0.8, "min_p": 0.1}),
    "grammar": Setting(has_grammar=True),
    "grammar, penalties, filters": Setting({**PENALTIES, "top_p": 0.9, "temperature": 1.4}, has_grammar=True),
    "bias and bans": Setting({"logit_bias": {0: 1.5, 1: -0.7}, "banned_token_ids": [2]}),
    "held-back end": Setting({"first_n_token_no_eos": len(OUTPUT) + 2}),
    "forced": Setting({"golden_token_ids": [*OUTPUT, 2, 0]}),
}
each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())


# ----------------------------------------------------------------------------------------------------------- exact enumeration

# A round has drafts q1, q2[x1] and rows p0, p1[x1], p2[x1 x2]; the tests enumerate every path.  Plain text completes the emitted
# tokens to three.  The joint law of the three tokens must be that of plain text.

DRAFTERS = ("random", "one-hot", "the target itself", "on a zero of the target")


class Chain:
    """A random language of ``vocab`` tokens with a drafter and confidences."""

    def __init__(self, seed, vocab, setting=SETTINGS["plain"], drafter="random"):
        gen = generator(seed)
        self.vocab, self.setting = vocab, setting
        self.tables = [torch.randn(*[vocab] * (depth + 1), generator=gen, dtype=torch.float64) * 1.5 for depth in range(3)]
        self.p = setting.plain_law(self.tables)
        self.q = [random_law(gen, *[vocab] * (depth + 1)) for depth in range(2)]
        self.c = [torch.sigmoid(torch.randn([vocab] * depth, generator=gen) * 3) for depth in range(2)]
        if drafter == "one-hot":
            self.q = [self.one_hot(q.argmax(-1)) for q in self.q]
        elif drafter == "the target itself":
            self.q = self.p[:2]
        elif drafter == "on a zero of the target":
            self.q = [self.one_hot(p.argmin(-1)) for p in self.p[:2]]
        self._rows, self._laws = {}, {}

    def one_hot(self, ids):
        return torch.nn.functional.one_hot(ids, self.vocab).double()

    def law(self):
        return self.p[0][:, None, None] * self.p[1][:, :, None] * self.p[2]

    def rows(self, drafts):
        """[3, vocab] laws of the packed rows of a round."""
        if drafts not in self._rows:
            logits = torch.stack([self.tables[0], self.tables[1][drafts[0]], self.tables[2][drafts]])
            rules = self.setting.rules([()], self.vocab)
            self._rows[drafts] = self.setting.law(
                *self.setting.ruled(rules, logits, [()], torch.tensor([drafts]), torch.tensor([2]))
            )
        return self._rows[drafts]

    def emitted_law(self, drafts, num_drafts):
        """[vocab, vocab, vocab]: law of the first three tokens, given the drafts and the number of verified drafts."""
        if (drafts, num_drafts) in self._laws:
            return self._laws[drafts, num_drafts]
        out = torch.zeros([self.vocab] * 3, dtype=torch.float64)

        def complete(prefix, weight):
            if len(prefix) == 3:
                out[prefix] += weight
            elif weight > 0:
                for token, p in enumerate(self.p[len(prefix)][prefix].tolist()):
                    complete((*prefix, token), weight * p)

        reach, prefix = 1.0, ()
        for j in range(num_drafts):
            p, q, x = self.rows(drafts)[j], self.q[j][prefix], drafts[j]
            accept = min(1.0, (p[x] / q[x]).item())
            weights = sampling._emission_weights(torch.log(p)[None], q[None], torch.tensor([True]))
            for token, r in enumerate(torch.softmax(weights, -1)[0].tolist()):
                complete((*prefix, token), reach * (1 - accept) * r)
            reach, prefix = reach * accept, (*prefix, x)
        for token, p in enumerate(self.rows(drafts)[num_drafts].tolist()):
            complete((*prefix, token), reach * p)
        self._laws[drafts, num_drafts] = out
        return out

    def paths(self):
        """Every pair of drafts with its probability."""
        for x, y in itertools.product(range(self.vocab), repeat=2):
            weight = (self.q[0][x] * self.q[1][x, y]).item()
            if weight > 0:
                yield (x, y), weight


@pytest.mark.parametrize("drafter", DRAFTERS)
@each_setting
def test_emitted_law_equals_target_law_exactly(setting, drafter):
    for seed in range(3):
        chain = Chain(seed, 3, setting, drafter)
        for num_drafts in range(3):
            got = sum(weight * chain.emitted_law(drafts, num_drafts) for drafts, weight in chain.paths())
            assert (got - chain.law()).abs().max() < 1e-12


def test_drafts_are_always_and_never_accepted_where_they_should_be():
    chain = Chain(0, 3, SETTINGS["grammar"], "on a zero of the target")
    for drafts, _ in chain.paths():
        assert chain.rows(drafts)[0, drafts[0]] == 0  # this draft violates the grammar
    chain = Chain(0, 3, SETTINGS["penalties"], "the target itself")
    for drafts, _ in chain.paths():
        assert (chain.rows(drafts)[0] - chain.q[0]).abs().max() < 1e-15
        assert (chain.rows(drafts)[1] - chain.q[1][drafts[0]]).abs().max() < 1e-15


# Budget rules.  There are two requests.  A rule turns the confidences of their drafts, [2, 2], into two lengths.  The cost of a
# step has jumps, like the cost of padded batches.

COST = [1.0, 1.25, 1.3, 1.6, 1.65]
"""Costs of a step that verifies 0 … 4 drafts."""
CAPS = torch.tensor([2, 2])


def throughput(conf):
    """Expected tokens per cost for every budget."""
    survival = torch.sort(conf.double().cumprod(-1).flatten(), descending=True).values
    emitted = 2 + torch.nn.functional.pad(survival.cumsum(0), (1, 0))
    return (emitted / torch.tensor(COST, dtype=torch.float64)).tolist()


def best_budget(conf):
    rates = throughput(conf)
    return rates.index(max(rates))


def first_best_budget(conf):
    """The budget before the first draft that lowers the throughput."""
    rates = throughput(conf)
    return next((budget for budget in range(4) if rates[budget + 1] <= rates[budget]), 4)


STALE = torch.sigmoid(torch.randn(6, 2, 2, generator=generator(70)) * 3)
"""Confidences of an earlier round, equally likely."""


def lengths(rule, conf):
    """{lengths: probability}."""
    if rule == "best budget now":
        budgets = [best_budget(conf)]
    elif rule == "first best budget now":
        budgets = [first_best_budget(conf)]
    elif rule == "best budget of an older round":
        budgets = [best_budget(stale) for stale in STALE]
    elif rule == "threshold":
        return {tuple((conf >= 0.5).long().cumprod(-1).sum(-1).tolist()): 1.0}
    else:
        budgets = [rule]
    law = {}
    for budget in budgets:
        lens = tuple(schedule_lengths(conf, budget, CAPS).tolist())
        law[lens] = law.get(lens, 0) + 1 / len(budgets)
    return law


def deviation(rule, chains):
    """Largest error of the joint law of both texts, and the lengths that occurred."""
    vocab = chains[0].vocab
    joint = torch.zeros([vocab**3] * 2, dtype=torch.float64)
    seen = set()
    for case in itertools.product(*(list(chain.paths()) for chain in chains)):
        conf = torch.tensor([[chain.c[0], chain.c[1][drafts[0]]] for chain, (drafts, _) in zip(chains, case, strict=True)])
        weight = math.prod(weight for _, weight in case)
        for lens, chance in lengths(rule, conf).items():
            seen.add(lens)
            one, other = (
                chain.emitted_law(drafts, n).flatten() for chain, (drafts, _), n in zip(chains, case, lens, strict=True)
            )
            joint += weight * chance * torch.outer(one, other)
    return (joint - torch.outer(*(chain.law().flatten() for chain in chains))).abs().max().item(), seen


CHAIN_SEEDS = [(20, 21), (26, 27), (28, 29)]
LOSSLESS = [0, 1, 2, 3, 4, "best budget of an older round", "first best budget now", "threshold"]


@pytest.mark.parametrize("setting", [SETTINGS["plain"], SETTINGS["grammar, penalties, filters"]], ids=["plain", "ruled"])
@pytest.mark.parametrize("rule", LOSSLESS, ids=str)
def test_law_is_exact_for_budgets_that_do_not_depend_on_their_drafts(rule, setting):
    seen = set()
    for seeds in CHAIN_SEEDS:
        error, lens = deviation(rule, [Chain(seed, 3, setting) for seed in seeds])
        assert error < 1e-12
        seen |= lens
    if rule not in (0, 4):
        assert len(seen) > 1  # lengths depended on the drafts


def test_the_best_budget_by_the_confidences_of_the_drafts_themselves_is_biased():
    chains = [Chain(seed, 3) for seed in CHAIN_SEEDS[1]]
    assert deviation("best budget now", chains)[0] > 5e-3
    assert deviation("first best budget now", chains)[0] < 1e-12


def test_with_best_drafts_any_budget_is_lossless():
    for seeds in CHAIN_SEEDS:
        assert deviation("best budget now", [Chain(seed, 3, drafter="one-hot") for seed in seeds])[0] < 1e-12


# -------------------------------------------------------------------------------------------------------------------- counting


def chi_square_p(observed, expected):
    """Probability of a deviation as large as this; both [cells], expected with positive entries."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2, dtype=torch.float64), statistic / 2).item()


MODES = {
    "rejection, drawn drafts": ("sampled", False),
    "rejection, best drafts": ("argmax", False),
    "coupled": ("coupled", True),
    "coupled, best drafts": ("argmax", True),
}
NUM_TEXTS = 20000


@pytest.mark.parametrize(("drafts", "is_coupled"), MODES.values(), ids=MODES.keys())
@each_setting
def test_counted_tokens_have_the_law_of_plain_text(setting, drafts, is_coupled):
    n, vocab = NUM_TEXTS, 4
    gen = generator(30)
    tables = [torch.randn(*[vocab] * (depth + 1), generator=gen) * 1.2 for depth in range(3)]
    bases = [table + torch.randn(table.shape, generator=gen) * 0.5 for table in tables[:2]]
    embed, head = torch.randn(vocab, 3, generator=gen) * 0.5, torch.randn(vocab, 3, generator=gen) * 0.5
    rows = sampling_rows(setting.params, n, seeds=torch.arange(n) * 7919 + 12345)
    anchors = torch.full((n,), setting.anchor)
    ids, used, prev = [], [], torch.full((n,), [*PROMPT, *setting.output][-1])
    for k in (1, 2):
        base = bases[0].expand(n, -1) if k == 1 else bases[1][ids[0]]
        prev, logits, _ = markov_step(base, prev, embed, head, torch.zeros(n, 1), torch.zeros(1, 4), rows, anchors, k, drafts)
        ids.append(prev)
        used.append(logits)
    draft_ids, lens = torch.stack(ids, 1), torch.tensor([2, 1, 2, 0, 2])[torch.arange(n) % 5]
    target = torch.stack([tables[0].expand(n, -1), tables[1][ids[0]], tables[2][ids[0], ids[1]]], 1)
    target = target[torch.arange(3) <= lens[:, None]]
    target, mask = setting.ruled(setting.rules([()], vocab), target, [()] * n, draft_ids, lens)
    if is_coupled:
        counts, emitted = verify_coupled(target, draft_ids, lens, rows, anchors, mask=mask)
    else:
        draft_logits = torch.stack(used, 1) if drafts == "sampled" else None
        counts, emitted = verify(target, draft_ids, draft_logits, lens, rows, anchors, mask=mask)
    first = emitted[:, 0]
    # If a text has only one token so far, a step without drafts gives the second one.
    prefixes = [(token,) for token in first.tolist()]
    rules = setting.rules(sorted(set(prefixes)), vocab)
    none = torch.zeros(n, 0, dtype=torch.int64)
    logits, mask = setting.ruled(rules, tables[1][first], prefixes, none, torch.zeros(n, dtype=torch.int64))
    plain, _ = sample(logits, rows, anchors + 2, mask=mask)
    second = torch.where(emitted[:, 1] >= 0, emitted[:, 1], plain)
    laws = setting.plain_law(tables[:2])
    law = (laws[0][:, None] * laws[1]).flatten()
    seen = torch.bincount(first * vocab + second, minlength=vocab * vocab).double()
    assert seen[law == 0].sum() == 0
    likely = law > 0
    if int(likely.sum()) > 1:
        assert chi_square_p(seen[likely], n * law[likely]) > SMALL_P
        if drafts != "argmax" and not setting.params.golden_token_ids:
            assert 0.2 < counts.double().mean() < 1.35  # 1.4 drafts on average: some are accepted and some rejected


# ------------------------------------------------------------------------------------------------------------------- matchers


class ThreeTokens:
    """The tokenizer of the enumerated language: two letters and the end token."""

    vocab_size, bos_id, eos_id, pad_id = 3, EOS, EOS, EOS
    special_ids = (EOS,)

    def token_bytes(self, token_id):
        return (b"a", b"b", b"<end>")[token_id]

    def encode(self, text):
        return ["ab".index(each) for each in text]


class MatcherSetting(Setting):
    """A request whose masks come from a matcher, through the rules, as in an engine."""

    def __init__(self, regex, **given):
        super().__init__(given)
        self.args = StructuredOutput.read({"schema_type": "regex", "schema": regex})
        self.compiled = compile_grammar(self.args, Vocabulary(ThreeTokens(), 3))

    def ruled(self, rules, logits, prefixes, drafts, lens):
        packed = self.packed(prefixes, drafts, lens)
        bits = np.full((len(prefixes), drafts.shape[1] + 1, 1), -1, dtype=np.int32)
        for number, prefix in enumerate(prefixes):
            matcher = Matcher(self.compiled, self.args)
            try:
                matcher.advance(prefix)
            except GrammarFailed:  # plain text never has this prefix
                continue
            matcher.fill(drafts[number].tolist(), bits[number])
        is_dead = torch.zeros(bits.shape[:2], dtype=torch.bool)
        masks = GrammarMasks(owners=torch.arange(len(prefixes)), bits=torch.from_numpy(bits), is_dead=is_dead)
        logits, mask = rules.apply(logits, packed, masks)
        assert not masks.is_dead.any(), "a grammar always leaves a token"
        return logits, mask


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("regex", ["(ab|ba)*", "a(ba)*b?", "bab", "[ab]{1,2}", "(a|bb)(ab)?"])
def test_the_law_under_a_matcher_is_that_of_plain_text(regex, drafter):
    """One-hot drafts are what forced tokens become; drafts on a zero of the target break the grammar."""
    for seed, given in enumerate(({}, {**PENALTIES, "top_p": 0.9})):
        chain = Chain(seed, 3, MatcherSetting(regex, **given), drafter)
        for num_drafts in range(3):
            got = sum(weight * chain.emitted_law(drafts, num_drafts) for drafts, weight in chain.paths())
            assert (got - chain.law()).abs().max() < 1e-12
