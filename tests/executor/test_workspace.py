"""Memory for choosing tokens: it is bounded, it is subtracted before pages are counted, and no bit of a result depends on it."""

import random
import weakref
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.config import EngineArgs, named_config
from deepinfer.engine import loader
from deepinfer.errors import ConfigError
from deepinfer.executor.graphs import Graphs
from deepinfer.executor.rules import TokenRules
from deepinfer.executor.slots import SlotTable
from deepinfer.executor.speculate import Speculator
from deepinfer.executor.worker import workspace_bytes
from deepinfer.model.drafter import Drafts
from deepinfer.ops import sampling
from deepinfer.ops.cases import CASES
from deepinfer.request import SamplingParams
from tests.devices import no_waits
from tests.executor.test_rules import make_rules, pack, random_turn
from tests.executor.test_speculate import plan_of, round_of
from tests.ops.invariance import arguments_of, is_same

CPU = torch.device("cpu")
IN_PARTS = {
    f"sampling.{name}" for name in ("sample", "token_logprobs", "top_logprobs", "verify", "verify_coupled", "markov_step")
}
SAMPLING = [each for each in CASES if each.op.name in IN_PARTS]


# --------------------------------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize(("dtype", "num_rows"), [(torch.bfloat16, 3), (torch.float64, 1)])
def test_rows_in_parts_are_the_rows_together(dtype, num_rows, monkeypatch):
    config = named_config("golden")
    for case in SAMPLING:
        arguments = arguments_of(case, dtype, CPU, config)
        whole = case.op(**arguments)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "WORKSPACE_BYTES", num_rows * sampling.row_bytes(config.vocab_size, dtype))
            assert is_same(case.op(**arguments), whole), f"{case.op.name} {case.name}"


def test_rules_in_parts_are_the_rules_together(seed, monkeypatch):
    rng = random.Random(seed)
    for _ in range(20):
        turns = [random_turn(rng, f"r{number}") for number in range(5)]
        rules = make_rules()
        for turn in turns:
            turn.enter(rules)
        packed = pack(turns, num_padding=2)
        logits = torch.randn(len(packed.owners), 23)
        whole = rules.apply(logits.clone(), packed)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "WORKSPACE_BYTES", 1)
            assert all(torch.equal(a, b) for a, b in zip(rules.apply(logits.clone(), packed), whole, strict=True))


def test_a_small_batch_is_one_part():
    assert sampling.parts_of(64, sampling.row_bytes(272, torch.float32)) == [slice(0, 64)]
    assert sampling.parts_of(0, 5) == [slice(0, 0)]
    assert len(sampling.parts_of(1536, sampling.row_bytes(129_280, torch.float32))) > 50


def test_requests_that_wait_hold_no_rows():
    rules = make_rules()
    for number in range(100):
        rules.add(f"r{number}", SamplingParams(logit_bias={3: 1.0}, presence_penalty=1.0, banned_token_ids=[4]), 3)
    tables = (rules._biases, rules._histories, rules._masks)
    assert all(len(table.tensors[0]) == 0 for table in tables)
    for number in range(100):
        rules.start(f"r{number}", np.array([2, 3, 4], dtype=np.int32))
        rules.stop(f"r{number}")
    assert all(len(table.tensors[0]) == 4 for table in tables)
    rules.start("r7", np.array([2, 3, 4], dtype=np.int32))
    rules.remove("r7")
    assert not rules._rules


# ----------------------------------------------------------------------------------------------------------------------- measured


class Peak(TorchDispatchMode):
    """Most bytes of live tensors at one time, counting only tensors that are made within this context."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.most = Counter(), 0, 0

    def _forget(self, address, size):
        self.alive[address] -= 1
        if not self.alive[address]:
            del self.alive[address]
            self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        for each in _tensors(found):
            storage = each.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if (address in given and address not in self.alive) or not size:
                continue
            self.now += size if address not in self.alive else 0
            self.alive[address] += 1
            weakref.finalize(each, self._forget, address, size)
        self.most = max(self.most, self.now)
        return found


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []


RULES = {"presence_penalty": 0.5, "logit_bias": {3: 1.0}, "banned_token_ids": [4]}


class Step:
    """The decision of one step over rounds that verify all their drafts, including the rule tables."""

    def __init__(self, vocab, num_requests, num_drafts, mode, device=CPU, **given):
        self.params = [SamplingParams(seq_seed=n, **given) for n in range(num_requests)]
        slots = num_requests + 1
        self.table = SlotTable(slots, num_drafts, device, draft_vocab=vocab if mode == "sampled" else 0)
        self.rules = TokenRules(vocab, eos_token_id=1, forbidden=(), device=device)
        drafter = SimpleNamespace(commit=None, draft=lambda *args: Drafts) if num_drafts else None
        self.speculator = Speculator(
            self.table, self.rules, drafter, mode=mode, num_drafts=num_drafts, eos_token_id=1, graphs=Graphs(device)
        )
        self.rounds = [round_of(number + 1, max_drafts=num_drafts) for number in range(num_requests)]
        for each, params in zip(self.rounds, self.params, strict=True):
            self.rules.add(each.request_id, params, 3)
            self.rules.start(each.request_id, np.array([2, 3, 4], dtype=np.int32))
            self.table.write(each.slot, params, 100)
        self.table.num_tokens[1:] = 10
        self.table.draft_ids.fill_(5)
        self.num_rows = num_requests * (num_drafts + 1)
        self.generator = torch.Generator(device).manual_seed(3)
        self.shape, self.device = (self.num_rows, vocab), device

    def run(self):
        logits = torch.randn(self.shape, generator=self.generator, device=self.device)
        plan = plan_of(self.rounds)
        numbers = self.speculator.round_numbers(plan).to(self.device)
        laid = self.speculator.lay_out(numbers, self.num_rows)
        return lambda: self.speculator.decide([], self.rounds, laid, logits, self.params)


@pytest.mark.parametrize("mode", ["coupled", "sampled", "argmax"])
@pytest.mark.parametrize(
    ("vocab", "num_requests", "num_drafts", "given"),
    [
        (20_000, 6, 3, {"top_p": 0.9, "top_k": 50, **RULES, "top_logprobs": 5}),
        (20_000, 4, 5, {"temperature": 0.0, "golden_token_ids": [5, 6]}),
        (40_000, 5, 1, {"min_p": 0.1, "repetition_penalty": 1.1}),
        (5_000, 16, 2, {"top_logprobs": 20}),
    ],
)
def test_what_is_counted_is_enough(vocab, num_requests, num_drafts, given, mode, monkeypatch):
    """A bound that makes parts of one row shows that the formula, not the bound, covers the memory that grows with the batch."""
    for name in ("deepinfer.ops.sampling.WORKSPACE_BYTES", "deepinfer.executor.worker.WORKSPACE_BYTES"):
        monkeypatch.setattr(name, 1 << 20)
    monkeypatch.setattr("deepinfer.executor.worker._LOGIT_ROWS", 1)
    peak = Peak()
    with peak:
        Step(vocab, num_requests, num_drafts, mode, **given).run()()
    limit = workspace_bytes(vocab, max_num_seqs=num_requests, num_drafts=num_drafts, num_slots=num_requests + 1, draft_mode=mode)
    assert num_requests * (num_drafts + 1) * vocab * 4 < peak.most <= limit


@pytest.mark.parametrize("name", ["token_logprobs", "top_logprobs"])
def test_temporaries_of_an_operator_stay_within_the_bound(name, monkeypatch):
    bound = 8 << 20
    monkeypatch.setattr(sampling, "WORKSPACE_BYTES", bound)
    logits = torch.randn(40, 30_000)
    calls = {
        "token_logprobs": lambda: sampling.token_logprobs(logits, torch.arange(40)),
        "top_logprobs": lambda: sampling.top_logprobs(logits, 3),
    }
    peak = Peak()
    with peak:
        calls[name]()
    assert peak.most <= bound


# ------------------------------------------------------------------------------------------------------------------------ counted


def test_pages_get_what_choosing_tokens_leaves(monkeypatch):
    config, gib = named_config("full"), 1 << 30
    layout = loader._layout(EngineArgs(model="random"), config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * gib, 139 * gib))
    cuda = SimpleNamespace(type="cuda")

    def pages(**given):
        args = EngineArgs(model="random", max_model_len=65536, **given)
        return loader._num_pages(args, config, layout, 20, cuda)

    big, small = pages(max_num_seqs=512), pages(max_num_seqs=511)
    per_request = workspace_bytes(config.vocab_size, max_num_seqs=512, num_drafts=5, num_slots=20) - workspace_bytes(
        config.vocab_size, max_num_seqs=511, num_drafts=5, num_slots=20
    )
    assert abs((small - big) * layout.page_bytes - per_request) <= 2 * layout.page_bytes
    assert pages(max_num_seqs=512, draft_sampling="sampled") < big
    says = (
        r"no memory is left for pages: the weights leave 26\.1 GiB, choosing tokens takes \d+\.\d GiB and 20 state slots take "
        r"0\.1 GiB; lower max_num_seqs=4096 or num_drafts=5, or raise gpu_memory_utilization=0\.9$"
    )
    with pytest.raises(ConfigError, match=says):
        pages(max_num_seqs=4096)


@pytest.mark.parametrize("max_model_len", [65_536, 400_000, 600_000])
def test_on_a_cpu_caches_come_first(max_model_len):
    """The workspace takes at most half of the budget and leaves pages for two long requests, so small budgets still work."""
    config, budget = named_config("full"), loader._CPU_KV_BYTES
    args = EngineArgs(model="random", max_num_seqs=256, max_model_len=max_model_len)
    layout = loader._layout(args, config)
    uncounted = (budget - 20 * layout.slot_bytes) // layout.page_bytes
    num_pages = loader._num_pages(args, config, layout, 20, CPU)
    longest = layout.pages_for(max_model_len)
    assert num_pages >= min(uncounted, 1 + 2 * longest)
    assert num_pages < uncounted or 2 * longest >= uncounted


# ----------------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["coupled", "sampled"])
def test_deciding_a_full_batch_stays_within_what_is_counted(mode):
    vocab, num_requests, num_drafts, device = 129_280, 256, 5, torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = Step(vocab, num_requests, num_drafts, mode, device, top_p=0.9, top_k=50, top_logprobs=20, **RULES)
    decide = step.run()
    with torch.inference_mode(), no_waits(device):
        decide()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= workspace_bytes(
        vocab, max_num_seqs=num_requests, num_drafts=num_drafts, num_slots=num_requests + 1, draft_mode=mode
    )
