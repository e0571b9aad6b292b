"""An engine that replays lists of token ids behind the client's interface, and a server around it on a real socket."""

import asyncio
import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import uvicorn

from deepinfer.config import ServerArgs, named_config
from deepinfer.engine import ipc
from deepinfer.engine.client import EngineStats
from deepinfer.errors import StepFailed
from deepinfer.metrics import Metrics
from deepinfer.request import FinishReason, RequestOutput
from deepinfer.server.app import make_app, make_service
from deepinfer.tokenizer import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
DSML, THINK_END, END = (TOKENIZER.special(each) for each in ("｜DSML｜", "</think>", EOS))
MAX_MODEL_LEN = 16384


def ids_of(text):
    """Ids of a text in which the marks of calls and the end of reasoning are special tokens."""
    ids, rest = [], text
    marks = {"｜DSML｜": DSML, "</think>": THINK_END}
    while rest:
        at, mark = min(((rest.find(each), each) for each in marks if each in rest), default=(len(rest), ""))
        ids += TOKENIZER.encode(rest[:at]) + ([marks[mark]] if mark else [])
        rest = rest[at + len(mark) :]
    return ids


def call_of(name, /, **arguments):
    """The text of one call."""
    lines = [
        f'<｜DSML｜ parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{value}</｜DSML｜ parameter>\n'
        for key, value in arguments.items()
    ]
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(lines)}</｜DSML｜ invoke>\n'


def calls_of(*calls):
    """The text of a block of calls."""
    return "\n\n<｜DSML｜ calls>\n" + "".join(calls) + "</｜DSML｜ calls>"


class ScriptedEngine:
    """Replays ``script``, ``chunk`` tokens a step.

    ``pause_s`` is the time before each step; after ``fail_after`` steps the engine dies.  ``open`` counts open iterators.
    ``drafts`` are the numbers of drafts that each step verifies and accepts.
    """

    def __init__(self):
        self.facts = ipc.Ready(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            ignore_len=2**20,
            vocab_size=TOKENIZER.vocab_size,
            eos_token_id=END,
            pid=1,
            takes_images=True,
            sampling_defaults={"temperature": 1.0, "top_p": 0.95},
            memory=ipc.Memory(device="cpu", weight_bytes=3 << 20, cache_bytes=5 << 30, num_cache_tokens=1 << 20),
        )
        self.reset()

    def reset(self):
        self.say("hello")
        self.chunk, self.pause_s, self.first_pause_s, self.fail_after = 3, 0.0, 0.0, None
        self.drafts = (0, 0)
        self.is_alive = True
        self.asked = []
        self.later = []
        self.open = 0
        self.num_steps = 0

    def say(self, *texts, reason=FinishReason.STOP):
        """Answer n is ``texts[n]``, or the last one."""
        self.scripts = [ids_of(text) for text in texts]
        self.reason = reason

    def say_in_turn(self, *texts):
        """Each request is answered by the next text."""
        self.later = list(texts)

    async def steps(self, request_id, prompt_token_ids, params, images=(), *, priority=0, salt=b""):
        if self.later:
            self.say(self.later.pop(0))
        self.asked.append(
            SimpleNamespace(
                prompt=TOKENIZER.decode(prompt_token_ids),
                ids=list(prompt_token_ids),
                params=params,
                images=images,
                priority=priority,
                salt=salt,
            )
        )
        scripts = [self.scripts[min(number, len(self.scripts) - 1)][: params.max_tokens] for number in range(params.n)]
        self.open += 1
        try:
            if self.first_pause_s:
                await asyncio.sleep(self.first_pause_s)
            done = 0
            while done < max(map(len, scripts)) or not done:
                await asyncio.sleep(self.pause_s)
                self.num_steps += 1
                if self.fail_after is not None and self.num_steps > self.fail_after:
                    raise StepFailed("the scripted engine was asked to fail")
                records = []
                for sample_idx, script in enumerate(scripts):
                    is_cut = len(script) == params.max_tokens
                    ids = script[done : done + self.chunk]
                    for number, token_id in enumerate(ids, done + 1):
                        is_last = is_cut and number == len(script)
                        reason = FinishReason.LENGTH if is_last else None
                        records.append(self._record(request_id, prompt_token_ids, sample_idx, token_id, number, reason))
                    if not is_cut and done < max(1, len(script)) <= done + self.chunk:
                        number = len(script) + 1
                        records.append(self._record(request_id, prompt_token_ids, sample_idx, END, number, self.reason))
                if done:  # the prompt's step has no drafts
                    verified, accepted = self.drafts
                    records[0] = dataclasses.replace(records[0], draft_tok=verified, accept_tok=accepted)
                done += self.chunk
                yield records
        finally:
            self.open -= 1

    def _record(self, request_id, prompt, sample_idx, token_id, number, reason):
        return RequestOutput(
            request_id=request_id,
            prompt_len=len(prompt),
            token_id=token_id,
            finished=reason is not None,
            finish_reason=reason,
            num_output_tokens=number,
            max_num_batched_tokens=2048,
            num_cached_tokens=4,
            token_logprobs=-0.5,
            top_token_ids=tuple(range(97, 97 + self.asked[-1].params.top_logprobs)),
            top_logprobs=(-0.5,) * self.asked[-1].params.top_logprobs,
            **self._of_prompt(prompt) if number == 1 and not sample_idx and self.asked[-1].params.prompt_logprobs else {},
            sample_idx=sample_idx,
            message="the scripted grammar" if reason == FinishReason.GRAMMAR_ERROR else None,
        )

    def _of_prompt(self, prompt):
        """Log-probabilities -1, -2, …; the most likely tokens are the prompt's own token and the next ids."""
        num_top = self.asked[-1].params.top_logprobs
        found = {"prompt_logprobs": (None, *(-float(place) for place in range(1, len(prompt))))}
        if num_top:
            found["prompt_top_token_ids"] = ((), *(tuple(range(each, each + num_top)) for each in map(int, prompt[1:])))
            found["prompt_top_logprobs"] = (
                (),
                *(tuple(-float(place + more) for more in range(num_top)) for place in range(1, len(prompt))),
            )
        return found

    async def follow(self, *args, take, **kwargs):
        async with contextlib.aclosing(self.steps(*args, **kwargs)) as steps:
            async for records in steps:
                if not take(records):
                    return

    async def stats(self):
        return EngineStats(scheduler=None, metrics=Metrics().snapshot())


async def _count_tasks():
    return len(asyncio.all_tasks())


class Server:
    """The application on a free port, in a thread with its own event loop."""

    def __init__(self, fetch=None, **settings):
        self.engine = ScriptedEngine()
        self._fetch = fetch
        self.args = ServerArgs(port=0, **{"served_model_names": ("nano", "other")} | settings)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(20)

    async def _run(self):
        self.service = make_service(self.engine, self.args, named_config("random"), TOKENIZER, self._fetch)
        config = uvicorn.Config(make_app(self.service), port=0, lifespan="off", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext
        task = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._loop = asyncio.get_running_loop()
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started.set()
        await task
        self.service.threads.shutdown()

    def num_tasks(self):
        """Tasks of the server's event loop."""
        return asyncio.run_coroutine_threadsafe(_count_tasks(), self._loop).result(5)

    def close(self):
        self._server.should_exit = True
        self._thread.join(20)
