"""DEEPINFER_* variables, and the settings that take their defaults from them."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config import EngineArgs
from deepinfer.config import engine as engine_module
from deepinfer.config.environment import PREFIX, VARIABLES, Environment, environment, read_environment
from deepinfer.errors import ConfigError


def test_nothing_set_gives_the_defaults():
    read = read_environment({"PATH": "/bin"})
    for name in (each.name for each in dataclasses.fields(Environment)):
        assert getattr(read, name) == VARIABLES[PREFIX + name.upper()].default


def test_the_used_rows_are_the_fields():
    used = {name.removeprefix(PREFIX).lower() for name, row in VARIABLES.items() if row.use == "used"}
    assert used == {each.name for each in dataclasses.fields(Environment)}


@pytest.mark.parametrize("row", VARIABLES.values(), ids=VARIABLES)
def test_every_default_can_be_written_out(row, caplog):
    default = row.default
    if default is None:
        text = ""
    elif isinstance(default, bool):
        text = str(int(default))
    else:
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    assert read_environment({row.name: text}) == read_environment({})
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("ZERO_OVERHEAD_SCHEDULING", "0", "zero_overhead_scheduling", False),
        ("YOCO_PREFILL_TRUNCATION_MODE", "Compact", "yoco_prefill_truncation_mode", "compact"),
        ("YOCO_PREFILL_KEEP_TOKENS", " 140 ", "yoco_prefill_keep_tokens", 140),
        ("NUM_STATE_SLOTS_RATIO", "2.5", "num_state_slots_ratio", 2.5),
        ("DISABLE_SYNC_GUARD", "true", "disable_sync_guard", True),
        ("LOGGING_INTERVAL_STEP", "7", "logging_interval_step", 7),
        ("HF_MODEL_DIR", "/models/flash", "hf_model_dir", "/models/flash"),
        ("API_KEY", "one, two", "api_key", ("one", "two")),
        ("ADMIN_TOKEN", "secret", "admin_token", "secret"),
        ("GC_INTERVAL_STEP", "", "gc_interval_step", 1000),
        ("USE_NEXTN_DECODE", "0", "use_nextn_decode", 0),
        ("ENABLE_MTP_VARLEN", "1", "enable_mtp_varlen", True),
        ("MAX_BACKTRACKING_TOKENS", "8", "max_backtracking_tokens", 8),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "0.8", "dflash_confidence_head_temperature", (0.8,)),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1, 1.5,2", "dflash_confidence_head_temperature", (1.0, 1.5, 2.0)),
        ("DECODE_PERF_CACHE_DIR", "/tmp/curves", "decode_perf_cache_dir", "/tmp/curves"),
        ("DECODE_PERF_CACHE_TTL_SEC", "60", "decode_perf_cache_ttl_sec", 60),
        ("DECODE_TOKEN_BLACKLIST", "5, 17", "decode_token_blacklist", (5, 17)),
        ("BATCH_INVARIANT", "1", "batch_invariant", True),
        ("ENFORCE_EAGER", "1", "enforce_eager", True),
        ("DFLASH_ENFORCE_EAGER", "1", "dflash_enforce_eager", True),
        ("CUDAGRAPH_BATCH_SIZE_INTERVAL", "16", "cudagraph_batch_size_interval", 16),
        ("DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL", "4", "dflash_cudagraph_batch_size_interval", 4),
        ("XGRAMMAR_TIMEOUT", "2.5", "xgrammar_timeout", 2.5),
        ("XGRAMMAR_DISABLE_CACHE", "1", "xgrammar_disable_cache", True),
        ("XGRAMMAR_CACHE_LIMIT_BYTES", "0", "xgrammar_cache_limit_bytes", 0),
        ("XGRAMMAR_DEBUG", "true", "xgrammar_debug", True),
        ("SO_BUILDER_CPUS", "2", "so_builder_cpus", 2),
    ],
)
def test_used_variables_are_read(name, text, field, value):
    assert getattr(read_environment({PREFIX + name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("GC_INTERVAL_STEP", "often", "a whole number from 1 on"),
        ("GC_INTERVAL_STEP", "0", "a whole number from 1 on"),
        ("PROFILE_HTTP_PORT_BASE", "70000", "from 1 to 65535"),
        ("NUM_STATE_SLOTS_RATIO", "0.5", "a number from 1 on"),
        ("XGRAMMAR_TIMEOUT", "soon", "a number from 0 on"),
        ("SO_BUILDER_CPUS", "0", "a whole number from 1 on"),
        ("NUM_STATE_SLOTS_RATIO", "nan", "a number from 1 on"),
        ("ZERO_OVERHEAD_SCHEDULING", "yes", "0 or 1"),
        ("YOCO_PREFILL_TRUNCATION_MODE", "on", "one of off, mask, compact"),
        ("DECODE_TOKEN_BLACKLIST", "1,x", "token ids separated by commas"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,0", "one positive number"),
        ("DECODE_TOKEN_BLACKLIST", "-1", "token ids separated by commas"),
        ("USE_NEXTN_DECODE", "-1", "a whole number from 0 on"),
        ("ENABLE_MTP_VARLEN", "auto", "0 or 1"),
        ("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,inf", "one positive number"),
        ("DECODE_PERF_CACHE_TTL_SEC", "1h", "a whole number from 0 on"),
        ("COMPUTE_SUM_SMALLER_PROBS", "1", "is not supported"),
        ("ACCELERATOR", "ascend", "is not supported"),
        ("MAX_BACKTRACKING_TOKENS", "0", "a whole number from 1 on"),
        ("SAMPLER_FORCE_TOPK", "8", "set it to 0 or unset it"),
    ],
)
def test_values_that_cannot_be_honoured_are_errors_that_name_the_variable(name, text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        read_environment({PREFIX + name: text})
    assert f"{PREFIX}{name}={text}" in str(caught.value).replace("'", "")


def test_harmless_variables_are_checked_and_accepted(caplog):
    assert read_environment({PREFIX + "GLOO_TIMEOUT": "3", PREFIX + "SHOW_EPLB_DETAIL": "1"}) == read_environment({})
    assert not caplog.text
    with pytest.raises(ConfigError, match="GLOO_TIMEOUT"):
        read_environment({PREFIX + "GLOO_TIMEOUT": "soon"})


def test_an_unknown_variable_is_a_warning_with_the_nearest_name(caplog):
    read_environment({PREFIX + "GC_INTERVAL_STEPS": "5", PREFIX + "QQQ": "1", "OTHER": "1"})
    first, second = (each.getMessage() for each in caplog.records)
    assert "DEEPINFER_GC_INTERVAL_STEPS is unknown" in first
    assert "did you mean DEEPINFER_GC_INTERVAL_STEP?" in first
    assert second == "the environment variable DEEPINFER_QQQ is unknown and has no effect"


@pytest.fixture
def variables(monkeypatch):
    def put(**given):
        for name, value in given.items():
            monkeypatch.setenv(PREFIX + name, value)
        environment.cache_clear()

    yield put
    monkeypatch.undo()
    environment.cache_clear()


def test_variables_are_read_once(variables, monkeypatch):
    variables(LOGGING_INTERVAL_STEP="9")
    assert environment().logging_interval_step == 9
    monkeypatch.setenv(PREFIX + "LOGGING_INTERVAL_STEP", "10")
    assert environment().logging_interval_step == 9


def test_settings_take_their_defaults_from_variables_and_may_differ(variables):
    variables(
        YOCO_PREFILL_TRUNCATION_MODE="mask",
        YOCO_PREFILL_KEEP_TOKENS="140",
        ZERO_OVERHEAD_SCHEDULING="0",
        NUM_STATE_SLOTS_RATIO="3",
        PREFILL_MAX_SUM_SEQLEN_K="5000",
        DISABLE_SYNC_GUARD="1",
        LOGGING_INTERVAL_STEP="11",
        GC_INTERVAL_STEP="12",
        USE_NEXTN_DECODE="9",
        ENABLE_MTP_VARLEN="1",
        DFLASH_CONFIDENCE_HEAD_TEMPERATURE="1.5",
        DECODE_PERF_CACHE_DIR="/tmp/curves",
        DECODE_PERF_CACHE_TTL_SEC="60",
        DECODE_TOKEN_BLACKLIST="5,17",
        BATCH_INVARIANT="1",
        ENFORCE_EAGER="1",
        DFLASH_ENFORCE_EAGER="1",
        CUDAGRAPH_BATCH_SIZE_INTERVAL="16",
        DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL="4",
    )
    args = EngineArgs(model="random", max_num_seqs=500)
    assert (args.decoder_replay, args.decoder_replay_keep_tokens, args.asynchronous) == ("mask", 140, False)
    assert (args.state_slots_ratio, args.max_sum_keys, args.sync_guard) == (3.0, 5000, False)
    assert (args.logging_interval_steps, args.gc_interval_steps) == (11, 12)
    assert args.max_num_batched_tokens == 5000  # 500 requests, each with one token and nine drafts
    assert (args.num_drafts, args.adaptive_drafts, args.max_backtracking_tokens) == (9, True, 10)
    assert (args.confidence_temperatures, args.draft_temperatures) == ((1.5,), (1.5,) * 9)
    assert (args.decode_perf_cache_dir, args.decode_perf_cache_ttl_s) == ("/tmp/curves", 60)
    assert (args.enforce_eager, args.draft_enforce_eager) == (True, True)
    assert (args.graph_rows_interval, args.graph_requests_interval) == (16, 4)
    assert (args.banned_token_ids, args.batch_invariant) == ((5, 17), True)
    assert EngineArgs(model="random", decoder_replay="off").decoder_replay == "off"
    assert EngineArgs(model="random", num_drafts=2, max_num_seqs=2000).max_num_batched_tokens == 6000


def test_speculation_is_on_in_full_and_repeatable_unless_asked_otherwise():
    args = EngineArgs(model="random")
    assert (args.num_drafts, args.adaptive_drafts, args.draft_sampling, args.max_backtracking_tokens) == (5, False, "coupled", 6)
    assert (args.draft_temperatures, args.banned_token_ids, args.decode_perf_cache_dir) == ((1.0,) * 5, (), None)
    assert not args.batch_invariant


def test_a_temperature_for_each_draft_is_kept_in_order():
    args = EngineArgs(model="random", num_drafts=3, confidence_temperatures=(0.5, 1.0, 2.0))
    assert args.draft_temperatures == (0.5, 1.0, 2.0)
    off = EngineArgs(model="random", num_drafts=0, confidence_temperatures=(0.5, 1.0, 2.0))
    assert off.draft_temperatures == ()


def test_more_may_be_taken_back_than_drafts_need(variables):
    variables(MAX_BACKTRACKING_TOKENS="8")
    assert EngineArgs(model="random").max_backtracking_tokens == 8
    assert EngineArgs(model="random", max_backtracking_tokens=9).max_backtracking_tokens == 9
    assert EngineArgs(model="random", max_backtracking_tokens=0).max_backtracking_tokens == 6


def test_the_cache_folder_can_be_chosen(variables, tmp_path):
    variables(CACHE_DIR=str(tmp_path))
    assert engine_module.cache_dir() == tmp_path


ORIGINAL = {
    "served_model_name": "deepinfer-model",
    "tokenizer": None,
    "trust_remote_code": False,
    "load_format": "auto",
    "seed": 0,
    "max_model_len": 4096,
    "data_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "engram_parallel_size": 1,
    "engine_rank": 0,
    "engine_group_rank": 0,
    "gpu_memory_utilization": 0.9,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 256,
    "disable_log_stats": False,
    "stop_preempted_request": True,
    "engine_type": "NORMAL",
    "chunked_prefill": False,
    "ignore_len": 128 * 1024 * 1024,
    "tokens_per_block": 128,
    "lookahead_tokens": 0,
    "offline_inference": False,
}


def test_settings_of_the_original_have_its_names_and_defaults():
    args = EngineArgs(model="random")
    assert {name: getattr(args, name) for name in ORIGINAL} == ORIGINAL
    unset = dict.fromkeys(ORIGINAL)
    assert EngineArgs.from_keywords(model="random", **unset) == args
    assert EngineArgs.from_keywords(model="random", data_parallel_size=0, tokens_per_block=-1, trust_remote_code=True)


def test_settings_survive_a_trip_through_json():
    args = EngineArgs(model="random", max_model_len=1000, decoder_replay="compact", decoder_replay_keep_tokens=140, seed=3)
    args = dataclasses.replace(args, confidence_temperatures=(1.0, 2.0, 3.0, 4.0, 5.0), banned_token_ids=(4, 5))
    assert EngineArgs.from_keywords(**json.loads(json.dumps(dataclasses.asdict(args)))) == args


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_num_batched_tokens": 1024, "chunked_prefill": False}, "allow chunked_prefill"),
        ({"expert_parallel_size": 2, "data_parallel_size": 1}, "cannot be grouped by expert_parallel_size=2"),
        ({"expert_parallel_size": 8}, "expert_parallel_size=8 is not supported"),
        ({"context_parallel_size": 8}, "context_parallel_size=8 is not supported"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 is not supported"),
        ({"engine_type": "COMPLETION", "stop_preempted_request": False}, "needs stop_preempted_request=True"),
        ({"engine_type": "COMPLETION"}, "engine_type='COMPLETION' is not supported"),
        ({"engine_type": "BOTH"}, "one of NORMAL, PROMPT, COMPLETION"),
        ({"engine_rank": 1}, "engine_rank=1 is not supported"),
        ({"lookahead_tokens": 4}, "lookahead_tokens=4 is not supported"),
        ({"revision": "main"}, "models are local directories"),
        ({"ignore_len": 100}, "ignore_len=100 would drop"),
        ({"decoder_replay": "mask"}, "needs the number of tokens to keep"),
        ({"state_slots_ratio": 0.5}, "state_slots_ratio=0.5"),
        ({"step_limit_s": 1.0}, "step_limit_s=1.0 ends the process before"),
        ({"hit_invariant": "on"}, "hit_invariant='on' is not a boolean"),
        ({"max_num_sequences": 1}, "did you mean max_num_seqs"),
        ({"logging_interval_steps": 0}, "logging_interval_steps=0"),
        ({"model": ""}, "model='' is not a name"),
        ({"num_drafts": -1}, "num_drafts=-1 must be 0"),
        ({"num_drafts": True}, "num_drafts=True must be 0"),
        ({"adaptive_drafts": 1}, "adaptive_drafts=1 is not a boolean"),
        ({"draft_sampling": "greedy"}, "one of coupled, sampled, argmax"),
        ({"confidence_temperatures": (1.0, 2.0)}, "has 2 values; give one, or one for each of num_drafts=5"),
        ({"confidence_temperatures": ()}, "has 0 values"),
        ({"confidence_temperatures": (0.0,)}, "confidence_temperatures=0.0 must be positive numbers"),
        ({"confidence_temperatures": (float("inf"),)}, "confidence_temperatures=inf must be positive numbers"),
        ({"confidence_temperatures": 2.0}, "confidence_temperatures=2.0 is not a tuple"),
        ({"max_backtracking_tokens": 5}, "cannot take back num_drafts=5"),
        ({"num_drafts": 7, "max_backtracking_tokens": 6}, "use at least 8"),
        ({"decode_perf_cache_dir": 3}, "decode_perf_cache_dir=3 is not a path"),
        ({"decode_perf_cache_ttl_s": -1}, "decode_perf_cache_ttl_s=-1"),
        ({"banned_token_ids": (-1,)}, "banned_token_ids=-1"),
        ({"banned_token_ids": "5"}, "banned_token_ids='5' is not a tuple"),
        ({"batch_invariant": 1}, "batch_invariant=1 is not a boolean"),
    ],
)
def test_bad_settings_say_what_is_wrong(given, says):
    with pytest.raises(ConfigError, match=says):
        EngineArgs.from_keywords(**{"model": "random", **given})


def test_a_prompt_longer_than_a_step_is_cut_unless_forbidden():
    assert EngineArgs(model="random", max_num_batched_tokens=1024).chunked_prefill is True
    assert EngineArgs(model="random", max_num_batched_tokens=4096).chunked_prefill is False


def test_the_longest_request_must_fit_into_most_of_the_pool():
    args = EngineArgs(model="random", max_model_len=1280, asynchronous=True)
    assert args.max_runtime_len == 1281
    args.check_pool(14)  # 11 pages of 128 tokens in 80 % of 14
    with pytest.raises(ConfigError, match="may need 11 pages of 128 tokens, more than 80% of the 13"):
        args.check_pool(13)


FIELDS = [each.name for each in dataclasses.fields(EngineArgs)]
EXTREMES = st.one_of(
    st.booleans(), st.integers(), st.integers(0, 80).map(lambda bits: 2**bits - 1), st.floats(), st.text(max_size=3),
    st.sampled_from([10**5000, -(10**5000), "\0", "\ud800", "~nobody-here/x", b"x", object(), {}, (), [[]], np.zeros((2, 2))]),
    st.sampled_from([1e-320, 1e-45, 1e-9, 1e12, 1e300, 2.0**63, np.int64(5), np.float32(2), np.True_, np.array(7)]),
    st.lists(st.one_of(st.integers(-1, 300), st.floats(), st.booleans()), max_size=5),
)  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([each for each in FIELDS if each != "model"]), EXTREMES, min_size=1, max_size=2))
def test_any_value_of_any_setting_is_accepted_for_both_doors_or_one_error(values):
    try:
        args = EngineArgs(model="random", **values)
    except ConfigError as error:
        text = str(error)
        assert any(name in text for name in values)
        assert len(text) < 500
        assert "0x" not in text
        text.encode()
    else:
        there = EngineArgs.from_keywords(**json.loads(json.dumps(dataclasses.asdict(args))))
        assert there == args
        assert {type(value) for value in dataclasses.astuple(args)} <= {int, float, str, bool, tuple, type(None)}


COMPANIONS = {
    "max_model_len": {"ignore_len": 2**31},
    "max_num_seqs": {"max_num_batched_tokens": 2**21},
    "num_drafts": {"max_backtracking_tokens": 2000},
    "max_backtracking_tokens": {"num_drafts": 0},
    "ignore_len": {"max_model_len": 2},
    "max_num_batched_tokens": {"max_num_seqs": 1},
    "step_limit_s": {"step_warn_s": 0.01},
}
ONE_VALUE = set(engine_module._ONLY)


@pytest.mark.parametrize("name", sorted({*engine_module._WHOLE, *engine_module._NUMBER} - ONE_VALUE))
def test_both_ends_of_a_setting_are_accepted_and_nothing_beyond(name):
    low, high, _ = {**engine_module._WHOLE, **engine_module._NUMBER}[name]
    least = {"max_model_len": 2, "tokens_per_block": 2, "ignore_len": 2}.get(name, low)
    for value in (least, high):
        assert getattr(
            EngineArgs(model="random", **{"step_limit_s": math.inf, **COMPANIONS.get(name, {}), name: value}), name
        ) in (
            value,
            *(range(1, 10_000) if value == 0 else ()),  # with 0 the engine chooses the number
        )
    beyond = [np.nextafter(low, -1)] if isinstance(low, float) or name == "state_slots_ratio" else [low - 5]
    for value in [*beyond, *([high + 1] if high < math.inf else []), math.nan]:
        with pytest.raises(ConfigError, match=rf"^{name}="):
            EngineArgs(model="random", **{name: value})


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        ({"max_num_seqs": np.int32(7)}, {"max_num_seqs": 7}),
        ({"max_model_len": np.array(100)}, {"max_model_len": 100}),
        ({"state_slots_ratio": np.float64(1.5)}, {"state_slots_ratio": 1.5}),
        ({"hit_invariant": np.True_}, {"hit_invariant": True}),
        ({"banned_token_ids": np.arange(3)}, {"banned_token_ids": (0, 1, 2)}),
        ({"confidence_temperatures": [np.float32(0.5)]}, {"confidence_temperatures": (0.5,)}),
        ({"model": Path("some/folder"), "tokenizer": Path("t")}, {"model": "some/folder", "tokenizer": "t"}),
        ({"seed": 2**64 + 3}, {"seed": 3}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
    ],
    ids=str,
)
def test_values_that_mean_the_same_are_kept_as_plain_ones(values, plain):
    assert EngineArgs(**{"model": "random", **values}) == EngineArgs(**{"model": "random", **plain})


def test_numbers_that_fp32_cannot_divide_by_are_no_temperatures():
    for value in (1e-300, 1e-45, 1e39, 1e300):
        with pytest.raises(ConfigError, match=re.escape(f"confidence_temperatures={value}")):
            EngineArgs(model="random", confidence_temperatures=(value,))


SETTINGS_OF_VARIABLES = {
    "max_backtracking_tokens": "max_backtracking_tokens",
    "decode_perf_cache_ttl_s": "decode_perf_cache_ttl_sec",
    "state_slots_ratio": "num_state_slots_ratio",
    "max_sum_keys": "prefill_max_sum_seqlen_k",
    "decoder_replay_keep_tokens": "yoco_prefill_keep_tokens",
    "confidence_temperatures": "dflash_confidence_head_temperature",
    "banned_token_ids": "decode_token_blacklist",
    "logging_interval_steps": "logging_interval_step",
    "gc_interval_steps": "gc_interval_step",
    "graph_rows_interval": "cudagraph_batch_size_interval",
    "graph_requests_interval": "dflash_cudagraph_batch_size_interval",
}
TEXTS = st.one_of(
    st.integers().map(str), st.floats().map(str), st.sampled_from(["1" * 5000, "0", "-1", "1e400", "9" * 18, "1,,2", "\u0663"])
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)), TEXTS, max_size=3))
def test_what_a_variable_may_be_its_setting_may_be(texts):
    try:
        read = read_environment(texts)
    except ConfigError as error:
        said = str(error)
    else:
        said = " ".join(texts)
        values = {name: getattr(read, variable) for name, variable in SETTINGS_OF_VARIABLES.items()}
        EngineArgs(model="random", num_drafts=0, **values)
        EngineArgs(model="random", num_drafts=read.use_nextn_decode, max_num_seqs=1)
    assert not texts or any(name in said for name in texts)
    assert len(said) < 500


@pytest.mark.parametrize(
    ("variables_", "says"),
    [
        ({"DEEPINFER_CACHE_DIR": "~nobody-here/x"}, "DEEPINFER_CACHE_DIR='~nobody-here/x' begins at a home folder"),
        ({"DEEPINFER_CACHE_DIR": "", "XDG_CACHE_HOME": "~nobody-here"}, "XDG_CACHE_HOME='~nobody-here' begins"),
    ],
)
def test_a_cache_folder_that_cannot_be_found_is_one_sentence(variables_, says, variables, monkeypatch):
    for name, value in variables_.items():
        monkeypatch.setenv(name, value)
    environment.cache_clear()
    with pytest.raises(ConfigError, match=says):
        engine_module.cache_dir()


def test_a_user_without_a_home_is_told_what_to_set(variables, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "DEEPINFER_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    environment.cache_clear()
    with pytest.raises(ConfigError, match="no home folder; set DEEPINFER_CACHE_DIR"):
        engine_module.cache_dir()
