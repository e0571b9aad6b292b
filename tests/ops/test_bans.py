"""No excluded token is chosen, with any other parameters."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.engine.prompt import check_params
from deepinfer.errors import RequestError
from deepinfer.executor.rules import PackedRows, TokenRules
from deepinfer.executor.slots import SlotTable
from deepinfer.ops.sampling import verify, verify_coupled
from deepinfer.request import SamplingParams
from tests.engine.harness import build, drain, request
from tests.ops.plain_sampling import process_logits, sample

VOCAB, EOS, IMAGE = 7, 1, 6
CPU = torch.device("cpu")
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=4)
ENDS = st.sampled_from
LOGIT = st.one_of(st.floats(-20, 20, width=32), ENDS([0.0, -0.0, 1e4, -1e4, 3e38, -3e38, 1e-40]))


class Config:
    vocab_size, image_token_id = VOCAB, IMAGE


@st.composite
def asked(draw):
    """Parameters of a request, and tokens that the engine never samples."""
    forbidden = draw(IDS)
    shape = {
        "temperature": ENDS([0, 1e-45, 9.9999995e-6, 1e-5, 1e-3, 0.7, 1, 1e10, 3.4028235e38, 1e39]) | st.floats(0, 1e300),
        "top_p": ENDS([1e-50, 1e-45, 1e-30, 0.5, 1 - 1e-9, 1]) | st.floats(0, 1),
        "top_k": ENDS([-1, 1, 2, 3, 2**31 - 1]),
        "min_p": ENDS([0, 5e-324, 1e-30, 0.5, 1]) | st.floats(0, 1),
        "repetition_penalty": ENDS([0.001, 1, 1000]),
        "presence_penalty": ENDS([-2, 0, 2]),
        "frequency_penalty": ENDS([-2, 0, 2]),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCAB - 1), ENDS([-100, 100, 1e-50])),
        "banned_token_ids": IDS,
        "allowed_token_ids": st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        "first_n_token_no_eos": ENDS([0, 1, 2**31 - 1]),
    }
    given = draw(st.fixed_dictionaries({}, optional=shape))
    try:
        params = SamplingParams(seq_seed=draw(st.integers(0, 2**64 - 1)), **given)
        if len(set(forbidden) | {IMAGE}) < VOCAB:
            check_params(params, Config, banned=forbidden)
            return params, forbidden
    except RequestError:
        pass
    return SamplingParams(seq_seed=1, temperature=3e38, top_p=1e-45), [0]


def may_be(params, forbidden):
    allowed = set(range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids)
    allowed -= {*params.banned_token_ids, *forbidden, IMAGE}
    return allowed - {EOS} or allowed if params.first_n_token_no_eos > 3 else allowed


@settings(max_examples=75)
@example(  # the penalty of the only allowed token overflows
    (SamplingParams(temperature=0.0, repetition_penalty=1000.0, allowed_token_ids=[2], seq_seed=0), ()),
    [[-3e38] * VOCAB] * 3,
    [-1, -1],
    False,
)
@given(
    asked(),
    st.lists(st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB), min_size=3, max_size=3),
    st.lists(st.integers(-1, VOCAB - 1), min_size=2, max_size=2),
    st.booleans(),
)
def test_no_draw_and_no_verification_chooses_an_excluded_token(both, logits, drafts, filters):
    params, forbidden = both
    rules = TokenRules(VOCAB, eos_token_id=EOS, forbidden=[*forbidden, IMAGE], device=CPU)
    rules.add("a", params, 2)
    rules.start("a", np.array([2, 3], dtype=np.int32))
    table = SlotTable(2, 0, CPU)
    table.write(1, params, 100)
    positions = torch.arange(2, 5)
    packed = PackedRows(
        request_ids=["a"],
        owners=torch.zeros(3, dtype=torch.int64),
        offsets=torch.arange(3),
        positions=positions,
        draft_ids=torch.tensor([drafts]),
    )
    adjusted, mask = rules.apply(torch.tensor(logits), packed)
    filters = filters or params.has_filters
    rows = table.sampling(torch.tensor([1, 1, 1]), filters=filters)
    right = may_be(params, forbidden)
    processed = process_logits(adjusted, rows, mask=mask)
    assert not processed.isnan().any()
    assert not processed.isposinf().any()
    for row in processed:
        assert row[list(right)].isfinite().any()
        assert row[[i for i in range(VOCAB) if i not in right]].isneginf().all()
    assert set(sample(adjusted, rows, positions, mask=mask)[0].tolist()) <= right
    one, starts, lens = table.sampling(torch.tensor([1]), filters=filters), torch.tensor([1]), torch.tensor([2])
    emitted = [verify_coupled(adjusted, packed.draft_ids, lens, one, starts, mask=mask)[1]]
    for draft_logits in (None, torch.tensor(logits)[None, :2]):
        emitted.append(verify(adjusted, packed.draft_ids, draft_logits, lens, one, starts, mask=mask)[1])
    assert {token for each in emitted for token in each.flatten().tolist()} <= right | {-1}


HARD = [
    {"temperature": 3.4028235e38, "logit_bias": {5: 100}},
    {"temperature": 1e-5, "top_p": 1e-45, "repetition_penalty": 0.001},
    {"temperature": 1, "min_p": 1, "logit_bias": {5: 100, 21: 100}, "n": 3},
    {"temperature": 0, "logit_bias": {5: 100, 1: 100}, "first_n_token_no_eos": 100},
    {"temperature": 1e30, "top_k": 2**31 - 1, "allowed_token_ids": [5, 1, 21, 22], "frequency_penalty": -2},
]


@pytest.mark.parametrize("mode", ["coupled", "sampled", "argmax"])
def test_no_answer_of_an_engine_has_a_banned_token(mode):
    core = build(num_drafts=5, draft_mode=mode, banned_token_ids=(21,))
    work = [
        request(f"r{number}", (5, 21, 30), SamplingParams(max_tokens=8, banned_token_ids=[5], ignore_eos=True, **each))
        for number, each in enumerate(HARD)
    ]
    tokens = {token for answer in drain(core, work).values() for token, _ in answer}
    assert len(tokens) > 10
    assert tokens.isdisjoint({5, 21, core.executor.worker.config.image_token_id})
    with pytest.raises(RequestError, match="leave no token"):
        core.add(request("none", (5,), SamplingParams(allowed_token_ids=[21, 5], banned_token_ids=[5])))
    forced = request("forced", (5,), SamplingParams(max_tokens=2, golden_token_ids=[21, 5], banned_token_ids=[5]))
    assert [token for token, _ in drain(core, [forced])["forced"]] == [21, 5]
    core.close()
