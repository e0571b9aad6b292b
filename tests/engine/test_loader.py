"""Loading: settings that are refused before any weight is read, and the parts that speculation needs."""

import dataclasses
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer.config import EngineArgs, config_json, named_config
from deepinfer.engine import loader
from deepinfer.engine.loader import load, time_steps
from deepinfer.errors import ConfigError
from deepinfer.kv.manager import NO_HIT
from deepinfer.kv.prefix import PageChain
from deepinfer.tokenizer import byte_tokenizer
from tests.engine.harness import build, drain, fresh, params, request, tokens

SMALL = {"model": "random", "device": "cpu", "max_num_seqs": 2, "max_model_len": 64, "tokens_per_block": 16}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"num_drafts": 6},
            "num_drafts=6 is more than the 5 drafts that the model was trained to make at once; use 0 to 5 "
            r"\(DEEPINFER_USE_NEXTN_DECODE\)",
        ),
        ({"banned_token_ids": (3, 100_000)}, "banned_token_ids has 100000, but the vocabulary ends at .*; leave it out"),
        ({"num_drafts": 5, "max_backtracking_tokens": 5}, "cannot take back num_drafts=5 drafts and the token before them"),
        ({"banned_token_ids": tuple(range(272))}, "has all 271 tokens that could be sampled, which leaves none; ban fewer"),
        ({"banned_token_ids": (*range(270), 271, 5)}, "which leaves none; ban fewer"),
        (
            {"max_num_seqs": 1 << 20},
            r"max_num_seqs=1048576, .* need more than the 2.0 GiB that caches may take; lower one of them",
        ),
        ({"state_slots_ratio": 1 << 20}, "state_slots_ratio=1.04858e.06, .* lower one of them"),
        ({"max_backtracking_tokens": 1 << 16, "max_num_seqs": 20}, "max_backtracking_tokens=65536.* lower one of them"),
        ({"device": "cuda:99999999999999999999"}, "torch sees . CUDA device"),
        ({"device": "cuda:\u0663"}, "is unknown; use auto, cpu, cuda or cuda:N"),
        (
            {"decoder_replay": "compact", "decoder_replay_keep_tokens": 133},
            "less than the 134 tokens of a window with room for drafts; use at least 134",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_before_weights_are_read(given, says, monkeypatch):
    monkeypatch.setattr(loader, "_build_worker", None)
    with pytest.raises(ConfigError, match=says):
        load(EngineArgs(**{**SMALL, **given}), progress=False)


@pytest.mark.parametrize("given", [{"load_format": "dummy"}, {}])
def test_weights_beyond_the_memory_are_refused_at_once(given, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(dataclasses.replace(named_config("random"), hidden_size=32768))))
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    monkeypatch.setattr(loader, "_build_worker", None)
    monkeypatch.setattr(loader, "_free_bytes", lambda: 8 << 30)
    with pytest.raises(ConfigError, match=r"the weights of model=.* GiB, cpu has 8\.0 GiB; use a machine with more memory"):
        load(EngineArgs(**{**SMALL, "model": str(tmp_path), **given}), progress=False)


def test_the_system_says_how_much_memory_is_free():
    assert 1 << 20 < loader._free_bytes() < 1 << 50


def test_the_last_id_of_the_vocabulary_can_be_banned():
    last = named_config("random").vocab_size - 1
    with pytest.raises(ConfigError, match=f"the vocabulary ends at {last}"):
        load(EngineArgs(**SMALL, banned_token_ids=(last + 1,)), progress=False)
    load(EngineArgs(**SMALL, banned_token_ids=(last,), num_drafts=0), progress=False).core.close()


def test_defaults_are_the_published_facts(monkeypatch):
    for name in ("USE_NEXTN_DECODE", "MAX_BACKTRACKING_TOKENS", "ENABLE_MTP_VARLEN"):
        monkeypatch.delenv(f"DEEPINFER_{name}", raising=False)
    args = EngineArgs(model="random")
    assert (args.num_drafts, args.max_backtracking_tokens, args.adaptive_drafts) == (5, 6, False)
    layout = loader._layout(args, named_config("full"))
    assert layout.ring_tokens == 134
    assert (layout.page_bytes, layout.slot_bytes) == (114_048, 3_140_864)


@pytest.mark.parametrize(
    ("given", "ring_tokens"),
    [({"num_drafts": 0}, 129), ({"num_drafts": 3}, 132), ({"num_drafts": 3, "max_backtracking_tokens": 10}, 138)],
)
def test_rings_have_room_for_what_a_step_may_take_back(given, ring_tokens):
    assert loader._layout(EngineArgs(model="random", **given), named_config("full")).ring_tokens == ring_tokens


def test_step_times_are_measured_once_and_found_again(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    args = EngineArgs(**SMALL, num_drafts=5, adaptive_drafts=True, decode_perf_cache_dir=str(tmp_path))
    core = load(args, progress=False).core
    measured = core.scheduler._budget.curve
    core.close()
    assert measured.sizes.tolist() == [8, 12]
    assert (measured.profile_ms > 0).all()
    assert len(list(tmp_path.iterdir())) == 1

    monkeypatch.setattr(loader, "time_steps", None)
    core = load(args, progress=False).core
    found = core.scheduler._budget.curve
    core.close()
    assert found.to_json() == measured.to_json()


def test_without_adaptive_lengths_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(loader, "time_steps", None)
    for given in ({"num_drafts": 0, "adaptive_drafts": True}, {"num_drafts": 2, "adaptive_drafts": False}):
        core = load(EngineArgs(**SMALL, **given), progress=False).core
        assert core.scheduler._budget is None
        core.close()


def test_a_worker_is_timed_and_left_as_it_was(seed):
    core = build(num_drafts=3, max_num_seqs=4, max_model_len=60)
    worker = core.executor.worker
    curve = core.executor.call(lambda: time_steps(worker, num_drafts=3, max_rows=14, context=50, num_runs=1))
    assert curve.sizes.tolist() == [8, 14]
    assert (curve.profile_ms > 0).all()
    assert core.executor.call(lambda: not worker._unfinished)
    rng = np.random.default_rng(seed)
    work = [request(f"r{number}", tokens(rng, 20), params(rng, 5)) for number in range(3)]
    assert drain(core, work) == fresh(work), "no request reads the values that the clock left in slots and pages"
    core.close()


def planner_of(monkeypatch, **given):
    """The scheduler of an engine with these settings, and the model's configuration; the worker cannot compute."""
    args, config = EngineArgs(**{**SMALL, "max_model_len": 1024, **given}), named_config("random")
    model = SimpleNamespace(device="cpu")
    worker = SimpleNamespace(layout=loader._layout(args, config), num_pages=100, num_slots=10, model=model)
    monkeypatch.setattr(loader, "_build_worker", lambda *_, **__: worker)
    core = load(args, progress=False).core
    core.close()
    return core.scheduler, config


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
@pytest.mark.parametrize("keep", [140, 200])
@pytest.mark.parametrize("num_drafts", [0, 5])
def test_hits_leave_what_the_decoder_half_runs_over_and_count_replay_by_its_layers(mode, keep, num_drafts, monkeypatch):
    """With a bounded decoder half, only the encoder half computes replayed tokens, and the end of a prompt is never a hit."""
    scheduler, config = planner_of(
        monkeypatch, decoder_replay=mode, decoder_replay_keep_tokens=keep, num_drafts=num_drafts, adaptive_drafts=False
    )
    kv, is_bounded = scheduler.kv, mode != "off"
    assert scheduler.limits.decoder_keep_tokens == (keep if is_bounded else 0)
    page, window = kv.layout.page_tokens, config.sliding_window
    margin = keep if is_bounded else kv.layout.ring_tokens
    share = config.num_encoder_layers / config.num_hidden_layers if is_bounded else 1
    assert 0 < config.num_encoder_layers < config.num_hidden_layers
    num_tokens = 400
    end = (num_tokens - margin) // page * page
    kinds = []
    for saved_at in range(page, end, page):
        chain = PageChain(page, saved_at.to_bytes(2, "little"))
        chain.extend(np.arange(num_tokens, dtype=np.int32), {})
        holding = kv.admit(chain, NO_HIT, num_tokens)
        kv.publish(holding, chain, num_tokens)
        assert kv.save_slot(holding) is not None
        kv.saved(holding, chain, saved_at, decoder_floor=num_tokens - keep if is_bounded else None)
        kv.release(holding)
        hit = kv.plan_hit(chain, num_tokens, decoder_floor=num_tokens - keep if is_bounded else None)
        assert (hit.kind, hit.num_tokens) == (("replay", end) if end - saved_at >= share * window else ("state", saved_at))
        kinds.append(hit.kind)
    assert set(kinds) == {"state", "replay"}
