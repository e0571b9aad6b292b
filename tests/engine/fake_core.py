"""A core process without a model: it counts upwards from the last token of the prompt, and fails on request.

The tests give it to the client as ``program``.  A prompt that ends with one of the ids below has the effect of that id.
"""

import sys
import time
from types import MappingProxyType, SimpleNamespace

from deepinfer.engine.ipc import Memory
from deepinfer.engine.process import main
from deepinfer.errors import ConfigError, ContextTooLong
from deepinfer.request import FinishReason, RequestOutput
from deepinfer.scheduler.stats import SchedulerStats

RAISES, STICKS, PAUSES = 301, 302, 303
"""The effects on the step, in this order: it raises, it never ends, it takes a second."""


class FakeCore:
    def __init__(self, args):
        self.args = args
        self.requests = {}
        self.num_steps = self.num_output_tokens = 0

    is_idle = property(lambda self: not self.requests)
    num_unfinished = property(lambda self: len(self.requests))

    def is_unfinished(self, request_id):
        return request_id in self.requests

    compiler = last_step = None
    is_async = False
    refused = MappingProxyType({})
    waits_for_grammars = False

    def grammar_of(self, request_id):
        return None

    def add(self, request, pictures=(), grammar=None):
        if len(request.prompt_token_ids) >= self.args.max_model_len:
            raise ContextTooLong("too long")
        self.requests[request.request_id] = [request, 0]

    def abort(self, request_ids):
        gone = [self.requests.pop(each) for each in list(request_ids) if each in self.requests]
        return len(gone), sum(len(request.prompt_token_ids) + count for request, count in gone)

    def step(self):
        time.sleep(0.0002)  # no step of a real core is faster
        outputs = []
        self.num_steps += 1
        for request_id, entry in list(self.requests.items()):
            request, count = entry
            last = request.prompt_token_ids[-1]
            if last == RAISES:
                raise ZeroDivisionError("the fake was asked to")
            if last == STICKS:
                time.sleep(3600)
            if last == PAUSES:
                time.sleep(1)
            entry[1] = count + 1
            is_last = entry[1] == request.params.max_tokens
            if is_last:
                del self.requests[request_id]
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    prompt_len=len(request.prompt_token_ids),
                    token_id=last + entry[1],
                    finished=is_last,
                    finish_reason=FinishReason.LENGTH if is_last else None,
                    num_output_tokens=entry[1],
                    max_num_batched_tokens=self.args.max_num_batched_tokens,
                )
            )
        self.num_output_tokens += len(outputs)
        return outputs

    def flush(self):
        return []

    def stats(self):
        return SchedulerStats(
            num_running=len(self.requests),
            num_waiting=0,
            num_pages=100,
            num_held_pages=25,
            num_cached_pages=10,
            num_slots=8,
            num_held_slots=2,
            num_saved_states=1,
            num_steps=self.num_steps,
            num_computed_tokens=self.num_output_tokens + 90,
            num_padding_rows=7,
            num_output_tokens=self.num_output_tokens,
            num_rounds=0,
            num_verified_drafts=(),
            num_accepted_drafts=(),
            num_asked_tokens=200,
            num_hit_tokens=50,
            num_replayed_tokens=5,
            num_preempted=3,
            num_finished={FinishReason.STOP: 1},
        )

    def close(self):
        pass


def load(args, *, progress):
    if args.model == "refused":
        raise ConfigError("the fake refuses this model; name another")
    if args.model == "broken":
        raise ZeroDivisionError("the fake cannot load")
    config = SimpleNamespace(vocab_size=400, image_token_id=270, eos_token_id=1, vision=None)
    memory = Memory(device="cpu", weight_bytes=0, cache_bytes=0, num_cache_tokens=0)
    return SimpleNamespace(config=config, tokenizer=None, core=FakeCore(args), memory=memory, sampling_defaults={})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], load=load))
