"""Engines around the golden model, and requests that run through them."""

import numpy as np

from deepinfer.engine.core import EngineCore
from deepinfer.executor.executor import Executor
from deepinfer.executor.worker import Worker
from deepinfer.kv.layout import KVLayout, RecordSizes
from deepinfer.kv.manager import KVManager
from deepinfer.request import Request, SamplingParams
from deepinfer.scheduler.scheduler import Limits
from tests.model.tiny import CPU, model

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
):
    """An engine; the production regime unless ``exact``."""
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
    worker = Worker(config, network, None, layout, num_pages=num_pages, num_slots=num_slots, replay_mode=replay_mode)
    limits = Limits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_id=config.eos_token_id,
        image_token_id=config.image_token_id,
        decoder_keep_tokens=keep,
        save_states=cache and spare_slots > 0,
    )
    return EngineCore(Executor(lambda: worker), kv, limits, is_async=is_async)


def tokens(rng, count):
    """Random text."""
    return tuple(int(each) for each in rng.integers(2, 250, count))


def params(rng, max_tokens=None, **given):
    """Random sampling, sometimes greedy; a request may stop at the end token."""
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
    """Run ``requests`` to their ends; with ``rng`` they arrive at random moments.  Name -> [(token, log-probability)]."""
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
    """Every request on new memory, in one piece, one step after the other; ``alone`` also without company."""
    core = build(max_num_seqs=8, spare_slots=0, budget=2000, is_async=False, cache=False, **given)
    results = {}
    for part in [[each] for each in requests] if alone else [requests]:
        results |= drain(core, part)
    core.close()
    return results


def two_turns(core, rng, prompt_tokens, max_tokens=None):
    """A conversation: the second prompt is the first one, its answer and something new.  The requests, and what they gave."""
    one = request("one", tokens(rng, prompt_tokens), params(rng, max_tokens))
    got = drain(core, [one])
    answer = tuple(token for token, _ in got["one"])
    more = tokens(rng, int(rng.integers(PAGE_TOKENS, 3 * PAGE_TOKENS)))
    two = request("two", one.prompt_token_ids + answer + more, params(rng, max_tokens))
    return [one, two], got | drain(core, [two])


def rng_of(seed, salt):
    return np.random.default_rng([seed, salt])
