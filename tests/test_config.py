"""The configuration: reading and writing the published structure, every constraint, the named shapes, the Engram primes."""

import copy
import dataclasses
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config import ModelConfig, check, config_json, engram_primes, load_config, named_config, parse_config
from deepinfer.config.ranges import RANGES
from deepinfer.errors import ConfigError
from deepinfer.tokenizer import byte_tokenizer

NAMES = ("golden", "random", "full")


def leaves(tree, prefix=""):
    """Dotted paths of all values that are not objects."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def parent(tree, path):
    *sections, name = path.split(".")
    for section in sections:
        tree = tree[section]
    return tree, name


PUBLISHED = config_json(named_config("full"))
PATHS = sorted(leaves(PUBLISHED))


@pytest.mark.parametrize("name", NAMES)
def test_written_configuration_reads_back_equal(name, tmp_path):
    config = named_config(name)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    assert load_config(tmp_path) == config
    assert hash(load_config(tmp_path)) == hash(config)


def test_model_without_images_reads_back_equal():
    config = dataclasses.replace(named_config("golden"), vision=None)
    raw = config_json(config)
    assert "vision_config" not in raw
    assert parse_config(raw) == config
    assert parse_config({**raw, "vision_config": None}) == config


def test_written_structure_is_the_published_one():
    assert PUBLISHED["architectures"] == ["DeepseekV41ForCausalLM"]
    assert PUBLISHED["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    assert PUBLISHED["text_config"]["compress_ratios"] == [0, 0] + [2] * 18 + [1] * 20 + [0] * 3
    assert PUBLISHED["text_config"]["rope_scaling"]["type"] == "yarn"
    assert PUBLISHED["vision_config"]["max_wh_ratio"] is None
    # root, quantization_config, text_config, its rope_scaling, vision_config
    assert len(PATHS) == 8 + 5 + 58 + 5 + 11


@given(st.sampled_from([path for path in PATHS if path != "vision_config.max_wh_ratio"]))
def test_dropped_key_is_named(path):
    raw = copy.deepcopy(PUBLISHED)
    section, name = parent(raw, path)
    del section[name]
    with pytest.raises(ConfigError, match="missing") as caught:
        parse_config(raw)
    assert path in str(caught.value)


@given(st.sampled_from(PATHS), st.text("abcxyz_", min_size=1, max_size=12))
def test_unknown_key_is_named(beside, name):
    raw = copy.deepcopy(PUBLISHED)
    section, _ = parent(raw, beside)
    name = "x_" + name
    section[name] = 1
    with pytest.raises(ConfigError, match="unknown key") as caught:
        parse_config(raw)
    assert beside.rpartition(".")[0] + "." * ("." in beside) + name in str(caught.value)


@given(st.sampled_from(PATHS), st.sampled_from(["seven", [1.5], {"a": 1}, float("nan"), 10**400, [True]]))
def test_wrong_type_is_named(path, value):
    raw = copy.deepcopy(PUBLISHED)
    section, name = parent(raw, path)
    if path == "transformers_version" and isinstance(value, str):
        value = 5
    section[name] = value
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert path in str(caught.value)
    assert "expected" in str(caught.value)


@given(st.sampled_from([path for path in PATHS if isinstance(parent(PUBLISHED, path)[0][path.rpartition(".")[2]], int)]))
def test_true_is_no_integer_and_an_integer_is_not_true(path):
    raw = copy.deepcopy(PUBLISHED)
    section, name = parent(raw, path)
    section[name] = int(section[name]) if isinstance(section[name], bool) else True
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.hidden_act", "gelu"),
        ("text_config.scoring_func", "softmax"),
        ("text_config.attention_bias", True),
        ("text_config.num_key_value_heads", 8),
        ("text_config.rope_scaling.type", "linear"),
        ("text_config.hc_shifted", False),
        ("text_config.sample_from_anchor", False),
        ("text_config.enable_confidence_head", False),
        ("text_config.dspark_draft_topk", 64),
        ("text_config.index_k_source_layer_ids", [2, 8, 14]),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.fmt", "e5m2"),
        ("dtype", "float16"),
    ],
)
def test_unsupported_value_is_named_with_the_supported_one(path, value):
    raw = copy.deepcopy(PUBLISHED)
    section, name = parent(raw, path)
    section[name] = value
    with pytest.raises(ConfigError, match="expected") as caught:
        parse_config(raw)
    assert path in str(caught.value)
    assert json.dumps(value) in str(caught.value)


def test_keys_of_derived_copies_are_accepted():
    raw = copy.deepcopy(PUBLISHED)
    raw["quantization_config"]["fmt"] = "e4m3"
    raw["text_config"] |= {
        "hc_shifted": True,
        "enable_confidence_head": True,
        "sample_from_anchor": True,
        "dspark_draft_topk": None,
        "gate_temp": 1,
        "use_fp4_sparse_kv": True,
        "index_k_source_layer_ids": [2, 8, 14, 20],
        "use_cache": False,
        "attention_dropout": 0.0,
    }
    raw["text_config"]["rope_scaling"]["rope_type"] = raw["text_config"]["rope_scaling"].pop("type")
    assert parse_config(raw) == named_config("full")
    raw["vision_config"]["max_wh_ratio"] = 8
    assert parse_config(raw).vision.max_wh_ratio == 8.0


def test_all_problems_are_listed_at_once_with_a_guess_for_a_misspelt_key():
    raw = copy.deepcopy(PUBLISHED)
    raw["text_config"]["hiden_size"] = raw["text_config"].pop("hidden_size")
    raw["dtype"] = "float16"
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    text = str(caught.value)
    assert "did you mean text_config.hidden_size?" in text
    assert "text_config.hidden_size is missing" in text
    assert 'dtype is "float16"; expected "bfloat16"' in text


@pytest.mark.parametrize("section", ["text_config", "quantization_config", "text_config.rope_scaling", "vision_config"])
def test_section_that_is_no_object_is_one_problem(section):
    raw = copy.deepcopy(PUBLISHED)
    place, name = parent(raw, section)
    place[name] = 3
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert str(caught.value).startswith(f"{section} is 3; expected an object")


@pytest.mark.parametrize("section", ["text_config", "quantization_config", "text_config.rope_scaling"])
def test_missing_section_is_one_problem(section):
    raw = copy.deepcopy(PUBLISHED)
    place, name = parent(raw, section)
    del place[name]
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert section in str(caught.value)
    assert "is missing" in str(caught.value)


def test_json_that_is_no_object_is_refused():
    with pytest.raises(ConfigError, match="expected an object"):
        parse_config([1, 2])


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="text_config is missing") as caught:
        load_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


GOLDEN = config_json(named_config("golden"))
BIG = st.integers(10, 70).map(lambda bits: 2**bits)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), BIG, BIG.map(lambda each: each + 1), st.integers(), st.floats(),
    st.sampled_from([10**5000, -(10**4400), nested(100_000), {"a": nested(50_000)}, 1e-320, 1e300, "", "\ud800\n", [], {}]),
    st.lists(st.integers(-2, 40), max_size=20), st.lists(BIG, max_size=3), st.lists(st.floats(), max_size=2), st.text(max_size=5),
)  # fmt: skip


def refusal(raw):
    """The error message for a configuration, or None if it is accepted."""
    try:
        parse_config(raw)
    except ConfigError as error:
        return str(error)
    return None


@settings(max_examples=300)
@given(st.sampled_from(["golden", "full"]), st.sampled_from([*PATHS, "text_config", "vision_config", "beside"]), VALUES)
def test_any_value_of_any_key_is_a_configuration_or_one_error_at_once(name, path, value):
    raw = copy.deepcopy(GOLDEN if name == "golden" else PUBLISHED)
    place, key = parent(raw, path)
    place[key] = value
    begin = time.process_time()
    text = refusal(raw)
    if text is None:
        assert parse_config(config_json(parse_config(raw))) == parse_config(raw)
    else:
        assert key in text
        assert "expected" in text
        assert len(text) < 5000
        text.encode()
    assert time.process_time() - begin < 1


LARGE = [path for path in PATHS if isinstance(parent(GOLDEN, path)[0].get(path.rpartition(".")[2]), int)]


@pytest.mark.parametrize("value", [10**6, 10**9, 2**62, 10**30, -1, 10**5000], ids=lambda value: f"{value.bit_length()} bits")
def test_no_whole_number_is_thought_about_for_long(value):
    for path in LARGE:
        raw = copy.deepcopy(GOLDEN)
        place, key = parent(raw, path)
        if isinstance(place[key], bool):
            continue
        place[key] = value
        begin = time.process_time()
        text = refusal(raw)
        assert text is None or key in text
        assert time.process_time() - begin < 1, path


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_the_shipped_shapes_lie_well_inside_their_ranges(name):
    config = named_config(name)
    for prefix, owner in (("", config), ("", config.rope_scaling), ("vision_config.", config.vision)):
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, int | float):
                low, high = RANGES.get(prefix + field.name)
                assert low <= value <= high / 2, field.name


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"dtype": "bfloat16", "dtype": "float16"}', "the key dtype occurs twice"),
        (b'{"text_config": {"x": 1, "y": 2, "x": 1}}', "the key x occurs twice"),
        (b"1" * 5000, "expected an object"),
        (b"NaN", "expected an object"),
        (
            b'{"text_config": {"vocab_size": ' + b"7" * 5000 + b"}}",
            r"text_config.vocab_size is 777\S*\.\.\.; expected an integer",
        ),
        (b'{"\\ud800": 1, "a\\nb": 2}', "unknown key"),
        (b" " * (5 << 20) + b"{}", "larger than the 4 MiB"),
        (b'{"text_config.hidden_size": 5120}', "text_config.hidden_size is an unknown key"),
        (json.dumps({f"key{number}": number for number in range(50_000)}).encode(), "more than 20 settings"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_file_of_any_content_is_refused_in_words_at_once(tmp_path, content, says):
    (tmp_path / "config.json").write_bytes(content)
    begin = time.process_time()
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(tmp_path)
    assert time.process_time() - begin < 1
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 10_000
    str(caught.value).encode()


def test_folder_in_the_place_of_the_file_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: Is a directory"):
        load_config(tmp_path)


def test_byte_order_mark_in_front_of_the_file_is_no_content(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED), encoding="utf-8-sig")
    assert load_config(tmp_path) == named_config("full")


def test_numbers_that_are_large_only_together_are_refused():
    golden = named_config("golden")
    for change, key in (
        ({"n_routed_experts": 4096, "num_nextn_predict_layers": 64, "dspark_n_routed_experts": 4096,
          "compress_ratios": golden.compress_ratios[:12] + (0,) * 64}, "n_routed_experts"),
        ({"engram_n_heads": 256, "engram_max_ngram_size": 16}, "engram_n_heads"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{key} is .* expected"):
            check(dataclasses.replace(golden, **change))


VIOLATIONS = [
    ({"hidden_size": 100}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"q_lora_rank": 65}, "q_lora_rank"),
    ({"moe_intermediate_size": 48}, "moe_intermediate_size"),
    ({"head_dim": 72}, "head_dim"),
    ({"index_head_dim": 48}, "index_head_dim"),
    ({"engram_head_dim": 16}, "engram_head_dim"),
    ({"o_lora_rank": 33}, "o_lora_rank"),
    ({"o_groups": 3}, "o_groups"),
    ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
    ({"qk_rope_head_dim": 34}, "qk_rope_head_dim"),
    ({"candidate_topk_blocks": 2}, "candidate_topk_blocks"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"sliding_window": -1}, "sliding_window"),
    ({"sliding_window": 7}, "sliding_window"),
    ({"sliding_window": 129}, "sliding_window"),
    ({"sliding_window": 1 << 17}, "sliding_window"),
    ({"hc_sinkhorn_iters": 10**9}, "hc_sinkhorn_iters"),
    ({"rope_theta": 1.0}, "rope_theta"),
    ({"rms_norm_eps": 1e-60}, "rms_norm_eps"),
    ({"image_token_id": 256}, "image_token_id"),
    ({"image_token_id": 1}, "image_token_id"),
    ({"dspark_noise_token_id": 300}, "dspark_noise_token_id"),
    ({"eos_token_id": -1}, "eos_token_id"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok"),
    ({"num_hidden_layers": 11}, "compress_ratios"),
    ({"compress_ratios": (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 1)}, "compress_ratios"),
    ({"compress_ratios": (0, 0, 2, 2, 1, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0)}, "compress_ratios"),
    ({"compress_ratios": (0, 0, 4, 4, 4, 4, 1, 1, 1, 1, 1, 1, 0, 0, 0)}, "compress_ratios"),
    ({"compress_ratios": (0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0)}, "compress_ratios"),
    ({"kv_source_layer_ids": ()}, "kv_source_layer_ids"),
    ({"kv_source_layer_ids": (2, 2, 6)}, "kv_source_layer_ids"),
    ({"kv_source_layer_ids": (4, 2, 6)}, "kv_source_layer_ids"),
    ({"kv_source_layer_ids": (2, 4, 6, 12)}, "kv_source_layer_ids"),
    ({"kv_source_layer_ids": (2, 4)}, "kv_source_layer_ids"),
    ({"kv_source_layer_ids": (4, 6)}, "kv_source_layer_ids"),
    ({"kv_source_layer_ids": (2, 4, 6, 8)}, "kv_source_layer_ids"),
    ({"index_source_layer_ids": (2, 6, 8, 10)}, "index_source_layer_ids"),
    ({"index_source_layer_ids": (0, 2, 4, 6, 8, 10)}, "index_source_layer_ids"),
    ({"index_source_layer_ids": (2, 3, 4, 6, 8, 10)}, "index_source_layer_ids"),
    ({"candidate_source_layer_id": 8}, "candidate_source_layer_id"),
    ({"engram_layer_ids": (1, 6)}, "engram_layer_ids"),
    ({"engram_layer_ids": (4, 1)}, "engram_layer_ids"),
    ({"engram_num_embeddings": (462, 631)}, "engram_num_embeddings"),
    ({"engram_num_embeddings": (462,)}, "engram_num_embeddings"),
    ({"engram_vocab_size": 68}, "engram_num_embeddings"),
    ({"engram_max_ngram_size": 1}, "engram_max_ngram_size"),
    ({"engram_compressed_vocab_size": 257}, "engram_compressed_vocab_size"),
    ({"dspark_target_layer_ids": ()}, "dspark_target_layer_ids"),
    ({"dspark_target_layer_ids": (9, 10, 12)}, "dspark_target_layer_ids"),
    ({"dspark_target_layer_ids": (5, 10, 11)}, "dspark_target_layer_ids"),
    ({"dspark_target_layer_ids": (3, 4, 5)}, "dspark_target_layer_ids"),
]


@pytest.mark.parametrize(("change", "key"), VIOLATIONS)
def test_violated_constraint_is_named(change, key):
    config = dataclasses.replace(named_config("golden"), **change)
    with pytest.raises(ConfigError, match="expected") as caught:
        check(config)
    assert key in str(caught.value)
    assert ";" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "key"),
    [({"hidden_size": 66}, "hidden_size"), ({"max_image_tokens": 3}, "max_image_tokens"), ({"min_pixels": 0}, "min_")],
)
def test_violated_vision_constraint_is_named(change, key):
    config = named_config("golden")
    with pytest.raises(ConfigError, match=rf"vision_config\.{key}"):
        check(dataclasses.replace(config, vision=dataclasses.replace(config.vision, **change)))


def test_violation_in_the_file_is_found_while_reading():
    raw = copy.deepcopy(PUBLISHED)
    raw["text_config"]["engram_num_embeddings"][0] += 1
    with pytest.raises(ConfigError, match=r"text_config\.engram_num_embeddings is \[384006169, 384016682\]"):
        parse_config(raw)


def test_shrunk_published_shape_is_accepted():
    """Benchmarks run real widths with fewer experts and smaller tables."""
    small = dataclasses.replace(named_config("full"), n_routed_experts=48, engram_vocab_size=1000)
    heights = tuple(sum(primes) for primes in engram_primes(small))
    check(dataclasses.replace(small, engram_num_embeddings=heights))


def test_published_primes_are_the_known_table():
    first = "57 79 81 97 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463"
    second = "477 487 499 507 511 573 609 627 667 669 693 697 711 729 759 769 781 799 813 819 841 877 879 889"
    expected = tuple(tuple(16_000_000 + int(each) for each in row.split()) for row in (first, second))
    assert engram_primes(named_config("full")) == expected


def test_golden_primes_are_the_known_table():
    assert engram_primes(named_config("golden")) == ((67, 71, 73, 79, 83, 89), (97, 101, 103, 107, 109, 113))


@given(st.integers(1, 200_000))
def test_engram_primes_are_consecutive_primes(start):
    config = dataclasses.replace(named_config("golden"), engram_vocab_size=start)
    found = [prime for layer in engram_primes(config) for prime in layer]
    naive = [n for n in range(max(2, start), found[-1] + 1) if all(n % d for d in range(2, int(n**0.5) + 1))]
    assert found == naive


def test_layer_kinds_of_the_golden_model():
    config = named_config("golden")
    kinds = [config.kind(layer) for layer in range(config.num_hidden_layers)]
    assert kinds == ["window"] * 2 + ["full", "reuse"] * 3 + ["reindex", "reuse"] * 2
    assert config.num_encoder_layers == 6


def test_configuration_needs_no_torch():
    code = "import sys, deepinfer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_field_of_the_model_is_a_key_of_the_file():
    names = {path.rpartition(".")[2] for path in PATHS}
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields - names == {"rope_scaling", "vision"}


def test_nano_counts_the_classes_of_its_tokenizer():
    classes = byte_tokenizer().compression_map()
    assert (len(classes), int(classes.max()) + 1) == (
        named_config("random").vocab_size,
        named_config("random").engram_compressed_vocab_size,
    )
