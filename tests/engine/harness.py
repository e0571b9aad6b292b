"""Engines around the golden model, and requests that run through them."""

from dataclasses import replace

import numpy as np
import torch

from deepinfer.engine.core import EngineCore
from deepinfer.executor.executor import Executor
from deepinfer.executor.graphs import Buckets
from deepinfer.executor.worker import Worker
from deepinfer.kv.layout import KVLayout, RecordSizes
from deepinfer.kv.manager import KVManager
from deepinfer.model.drafter import Drafter
from deepinfer.ops.sampling import signed
from deepinfer.request import Request, SamplingParams
from deepinfer.scheduler.budget import CostCurve, DraftBudget
from deepinfer.scheduler.limits import Limits
from tests.model.tiny import CPU, model, weights

PAGE_TOKENS = 16


def build(
    *,
    device=CPU,
    exact=False,
    num_pages=120,
    max_num_seqs=6,
    spare_slots=3,
    budget=300,
    is_async=True,
    cache=True,
    exact_replay=False,
    keep=0,
    replay_mode="compact",
    max_model_len=400,
    num_drafts=0,
    draft_mode="coupled",
    is_adaptive=False,
    draft_budget=None,
    drafter=lambda network: Drafter(network, weights("golden")),
    buckets=None,
    banned_token_ids=(),
    tower=None,
    compiler=None,
):
    """An engine in the production regime, or in fp64 with ``exact``."""
    network = model("golden", device, exact=exact)
    config = network.config
    layout = KVLayout(config, page_tokens=PAGE_TOKENS, records=RecordSizes.of(config, exact=exact))
    num_slots = max_num_seqs + spare_slots + 1
    kv = KVManager(
        layout,
        num_pages=num_pages,
        num_slots=num_slots,
        replay_tokens=config.exact_replay_tokens(is_decoder_bounded=keep > 0) if exact_replay else config.sliding_window,
        is_replay_exact=exact_replay,
        margin=max(layout.ring_tokens, keep),
        enable_prefix_cache=cache,
    )
    worker = Worker(
        config,
        network,
        tower,
        layout,
        num_pages=num_pages,
        num_slots=num_slots,
        max_model_len=max_model_len,
        drafter=drafter(network) if num_drafts else None,
        num_drafts=num_drafts,
        draft_mode=draft_mode,
        replay_mode=replay_mode,
        buckets=buckets,
        banned_token_ids=banned_token_ids,
    )
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_id=config.eos_token_id,
        image_token_id=config.image_token_id,
        decoder_keep_tokens=keep,
        save_states=cache and spare_slots > 0,
        num_drafts=num_drafts,
    )
    curve = CostCurve([1, 2, 4, 8, 16, 32], [1.0, 1.1, 1.3, 1.9, 3.3, 6.0])
    if is_adaptive and num_drafts:
        draft_budget = DraftBudget(num_slots, num_drafts, curve)
    return EngineCore(Executor(lambda: worker), kv, limits, budget=draft_budget, is_async=is_async, compiler=compiler)


class KnowingDrafter(Drafter):
    """A drafter that knows the texts; the test chooses how many drafts are right.  Other drafts are those of the network.

    The drafter's network runs too, so that its state is read and written as usual.
    """

    def __init__(self, network, texts, num_right):
        """``texts`` maps seeds to texts, from the first token of the prompt on.  ``num_right(seed, position of the anchor)`` is
        the number of right drafts of a round.
        """
        super().__init__(network, weights("golden"))
        self._texts, self._num_right = texts, num_right

    def draft(self, anchors, anchor_positions, slots, floors, rows, mode, num_drafts, cache, forced=None):
        drafts = super().draft(anchors, anchor_positions, slots, floors, rows, mode, num_drafts, cache, forced)
        ids, confidences = drafts.ids.tolist(), drafts.confidences.clone()
        for number, (seed, position) in enumerate(zip(rows.seeds.tolist(), anchor_positions.tolist(), strict=True)):
            text = self._texts.get(seed)
            if text is None:
                continue
            right = self._num_right(seed, position)
            for at in range(num_drafts):
                known = text[position + 1 + at] if position + 1 + at < len(text) else None
                if at < right and known is not None:
                    ids[number][at] = known
                elif at == right and ids[number][at] == known:
                    ids[number][at] = (known + 1) % 250
        return replace(drafts, ids=torch.tensor(ids), confidences=confidences)


def knowing(requests, outputs, num_right):
    """A drafter for :func:`build` that knows the ``outputs`` of ``requests``."""
    texts = {
        signed(each.params.seq_seed): list(each.prompt_token_ids) + [token for token, _ in outputs[each.request_id]]
        for each in requests
    }
    return lambda network: KnowingDrafter(network, texts, num_right)


def tokens(rng, count):
    """Random token ids."""
    return tuple(int(each) for each in rng.integers(2, 250, count))


def params(rng, max_tokens=None, **given):
    """Random sampling parameters, sometimes greedy; a request may stop at the end token."""
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        top_k=int(rng.choice([-1, 20])),
        top_p=float(rng.choice([1.0, 0.9])),
        max_tokens=max_tokens or int(rng.integers(2, 7)),
        seq_seed=int(rng.integers(0, 2**62)),
        **given,
    )


def request(name, prompt, sampling, **given):
    return Request(request_id=name, prompt_token_ids=prompt, params=sampling, **given)


def drain(core, requests=(), rng=None, outputs=None):
    """Run ``requests`` to their ends; with ``rng`` they arrive at random times.  Returns name -> [(token, log-probability)]."""
    outputs = {} if outputs is None else outputs
    waiting = list(requests)
    for each in waiting:
        outputs.setdefault(each.request_id, [])
    while waiting or not core.is_idle:
        while waiting and (rng is None or core.is_idle or rng.random() < 0.4):
            core.add(waiting.pop(0))
        for output in core.step():
            if output.token_id is not None:
                outputs[output.request_id].append((output.token_id, output.token_logprobs))
        core.scheduler.check()
    return outputs


def fresh(requests, *, alone=False, **given):
    """Run every request without a cache, in one chunk, synchronously; with ``alone`` also without other requests."""
    core = build(max_num_seqs=8, spare_slots=0, budget=2000, is_async=False, cache=False, **given)
    results = {}
    for part in [[each] for each in requests] if alone else [requests]:
        results |= drain(core, part)
    core.close()
    return results


def two_turns(core, rng, prompt_tokens, max_tokens=None):
    """Run a conversation: the second prompt is the first prompt, its answer and new text.  Returns requests and outputs."""
    one = request("one", tokens(rng, prompt_tokens), params(rng, max_tokens))
    got = drain(core, [one])
    answer = tuple(token for token, _ in got["one"])
    more = tokens(rng, int(rng.integers(PAGE_TOKENS, 3 * PAGE_TOKENS)))
    two = request("two", one.prompt_token_ids + answer + more, params(rng, max_tokens))
    return [one, two], got | drain(core, [two])


def conversation(rng, sampling):
    """Requests for cache hits: some share the beginnings of their prompts, and their answers grow into new pages.

    Args:
        sampling: (number of the request, tokens of its answer) -> its parameters.
    """
    stem, work = tokens(rng, int(rng.integers(20, 32))), []
    for number in range(int(rng.integers(3, 5))):
        prompt = stem[: int(rng.integers(1, len(stem)))] if rng.random() < 0.5 else stem + tokens(rng, int(rng.integers(1, 10)))
        if rng.random() < 0.85:
            prompt += tokens(rng, (int(rng.integers(12, 16)) - len(prompt)) % PAGE_TOKENS)
        work.append(request(f"r{number}", prompt, sampling(number, int(rng.integers(4, 10)))))
    return work


def random_engine(rng, work, **given):
    """A random engine; most have only enough pages for two prompts of ``work``, or for its longest request."""
    is_tight = rng.random() < 0.85
    longest = max(-(-(len(each.prompt_token_ids) + each.params.max_tokens) // PAGE_TOKENS) for each in work)
    two = sum(sorted(-(-len(each.prompt_token_ids) // PAGE_TOKENS) for each in work)[:2])
    return build(
        num_pages=1 + max(longest, two - int(rng.random() < 0.3)) if is_tight else 120,
        max_num_seqs=int(rng.integers(3, 5)),
        spare_slots=int(rng.integers(0, 3)),
        budget=int(rng.integers(16, 80)),
        is_async=bool(rng.random() < 0.7),
        cache=bool(rng.random() < 0.8),
        exact_replay=True,
        buckets=Buckets(rows=int(rng.integers(1, 12)), requests=int(rng.integers(1, 6))) if rng.random() < 0.5 else None,
        **given,
    )


def rng_of(seed, salt):
    return np.random.default_rng([seed, salt])
