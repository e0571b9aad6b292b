"""``config.json``: its keys, the checks of its values, and the constraints that the engine relies on."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepinfer.config.model import ModelConfig, RopeScaling, VisionConfig, engram_primes
from deepinfer.config.ranges import MAX_ENGRAM_COLUMNS, MAX_EXPERTS, RANGES
from deepinfer.errors import ConfigError

# ------------------------------------------------------------------ the file's keys

_Kind = Literal["integer", "number", "list of integers", "fixed", "string", "true or false"]

_SECTIONS = ("quantization_config", "text_config", "text_config.rope_scaling", "vision_config")
_ROOT_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")

_FIXED: dict[str, object] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": [32, 32],
    "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.expert_dtype": "fp4",
    "text_config.model_type": "deepseek_v41_text",
    "text_config.num_key_value_heads": 1,
    "text_config.attention_bias": False,
    "text_config.attention_dropout": 0,
    "text_config.rope_scaling.type": "yarn",
    "text_config.hidden_act": "silu",
    "text_config.n_shared_experts": 1,
    "text_config.scoring_func": "sqrtsoftplus",
    "text_config.topk_method": "noaux_tc",
    "text_config.norm_topk_prob": True,
    "text_config.tie_word_embeddings": False,
    "vision_config.model_type": "deepseek_v41_vision",
}
"""Required keys with exactly one supported value: facts of the architecture."""

_OPTIONAL: dict[str, object] = {
    "quantization_config.fmt": "e4m3",
    "text_config.rope_scaling.rope_type": "yarn",
    "text_config.hc_shifted": True,
    "text_config.gate_temp": 1.0,
    "text_config.use_fp4_sparse_kv": True,
    "text_config.enable_confidence_head": True,
    "text_config.sample_from_anchor": True,
    "text_config.dspark_draft_topk": None,
}
"""Optional keys of derived copies; if absent, the value is the one given here, and no other value is supported."""

_INFORMATIONAL: dict[str, tuple[_Kind, object]] = {
    "transformers_version": ("string", "5.6.0"),
    "text_config.use_cache": ("true or false", True),
    "text_config.initializer_range": ("number", 0.02),
}
"""Keys without influence on inference: their type is checked; :func:`config_json` writes the value given here."""

_ALIASES = {"text_config.rope_scaling.type": "text_config.rope_scaling.rope_type"}
"""Required key -> optional key that may replace it."""

_SAME_AS = {"text_config.index_k_source_layer_ids": "text_config.kv_source_layer_ids"}
"""Optional key -> key with the same value: index keys and main entries are written by the same layers."""

_ADVICE = "correct config.json, or serve a checkpoint of DeepSeek-V4.1-Flash"
_MAX_FILE_BYTES = 4 << 20
"""Largest accepted file; the published file has 4 KB."""
_MAX_DIGITS = 1000
"""Digits of an integer that are read: more than any valid number has, fewer than Python's limit."""
_SHOWN_LENGTH = 80
_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """One key of the file.

    Attributes:
        kind: kind of its value; a "fixed" value must equal ``value``.
        value: value of a fixed or informational key.
        is_optional: whether the key may be absent.
        is_field: whether the value is a field of a configuration dataclass; the field has the last name of the key.
    """

    kind: _Kind
    value: object = None
    is_optional: bool = False
    is_field: bool = False


def _field_keys(prefix: str, owner: type, names: Iterable[str]) -> Iterator[tuple[str, _Key]]:
    kinds: dict[str, _Kind] = {
        "int": "integer",
        "float": "number",
        "float | None": "number",
        "tuple[int, ...]": "list of integers",
    }
    types = {field.name: str(field.type) for field in dataclasses.fields(owner)}
    for name in names:
        yield prefix + name, _Key(kind=kinds[types[name]], is_optional=types[name].endswith("None"), is_field=True)


def _all_keys() -> dict[str, _Key]:
    """Every known key by dotted path, in the order in which :func:`config_json` writes them.  Source: the published file."""
    text_fields = [
        field.name for field in dataclasses.fields(ModelConfig) if field.name not in (*_ROOT_FIELDS, "rope_scaling", "vision")
    ]
    fields = [
        *_field_keys("", ModelConfig, _ROOT_FIELDS),
        *_field_keys("text_config.", ModelConfig, text_fields),
        *_field_keys("text_config.rope_scaling.", RopeScaling, [field.name for field in dataclasses.fields(RopeScaling)]),
        *_field_keys("vision_config.", VisionConfig, [field.name for field in dataclasses.fields(VisionConfig)]),
    ]
    return {
        **{path: _Key(kind="fixed", value=value) for path, value in _FIXED.items()},
        **dict(fields),
        **{path: _Key(kind="fixed", value=value, is_optional=True) for path, value in _OPTIONAL.items()},
        **{path: _Key(kind=kind, value=value) for path, (kind, value) in _INFORMATIONAL.items()},
        **{path: _Key(kind="list of integers", is_optional=True) for path in _SAME_AS},
    }


_KEYS = _all_keys()
_PATHS = {path.rpartition(".")[2]: path for path, key in _KEYS.items() if key.is_field and not path.startswith("vision_config.")}
"""Field of :class:`ModelConfig` or :class:`RopeScaling` -> its dotted path in the file."""


# ------------------------------------------------------------------ reading and writing


def _is_a(value: object, kind: _Kind) -> bool:
    """Whether a JSON value has the kind: true and false are not numbers, numbers are finite, integers have 64 bits."""
    if kind == "list of integers":
        return isinstance(value, list) and all(_is_a(each, "integer") for each in value)
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "string":
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    if kind == "number":
        return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return isinstance(value, int) and abs(value) < 1 << 63


def _equals(value: object, expected: object) -> bool:
    """JSON equality: 0 and 0.0 are the same number, 0 and false are not the same value."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(_equals(a, b) for a, b in zip(value, expected, strict=True))
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def _shown(value: object) -> str:
    """A JSON value on one line; a long one is cut."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = "nested too deeply to be shown"
    except ValueError:  # Python converts no integer of more than 4300 digits to text
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN_LENGTH else text[: _SHOWN_LENGTH - 3] + "..."


def _named(path: str) -> str:
    """A key's path; quoted and cut if it is long or not printable."""
    return path if path.isprintable() and len(path) <= _SHOWN_LENGTH else _shown(path)


def _flatten(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Leaf values by dotted path, and the problem of each broken section."""
    flat: dict[str, Any] = {}
    problems = {}

    def take(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if "." in name:  # its path would look like a key of a section
                problems[prefix + name] = _unknown(prefix + name, value)
            else:
                flat[prefix + name] = value

    take("", raw)
    for section in _SECTIONS:
        if section == "vision_config" and flat.get(section) is None:
            flat.pop(section, None)
        elif section in flat:
            inner = flat.pop(section)
            if isinstance(inner, dict):
                take(f"{section}.", inner)
            else:
                problems[section] = f"{section} is {_shown(inner)}; expected an object of settings; {_ADVICE}"
        elif section.rpartition(".")[0] not in problems:
            problems[section] = f"{section} is missing; expected an object of settings; add it as in the published config.json"
    return flat, problems


def _unknown(path: str, value: object) -> str:
    near = difflib.get_close_matches(path, _KEYS, n=1) if len(path) <= _SHOWN_LENGTH else []
    hint = f"; did you mean {near[0]}?" if near else ""
    found = f"{_named(path)} is an unknown key (value {_shown(value)})"
    return f"{found}; expected only the keys of DeepSeek-V4.1-Flash{hint}; remove or rename it"


def _value_problem(path: str, key: _Key, value: object) -> str | None:
    if key.kind == "fixed":
        if _equals(value, key.value):
            return None
        return f"{path} is {_shown(value)}; expected {_shown(key.value)}, the only supported value; {_ADVICE}"
    if _is_a(value, key.kind) or (key.is_optional and value is None):
        return None
    article = "an" if key.kind[0] in "aeiou" else "a"
    expected = key.kind if key.kind == "true or false" else f"{article} {key.kind}"
    return f"{path} is {_shown(value)}; expected {expected}; {_ADVICE}"


def _expected_keys(has_vision: bool) -> dict[str, _Key]:
    return {path: key for path, key in _KEYS.items() if has_vision or not path.startswith("vision_config.")}


def _raise_if(problems: Iterable[str]) -> None:
    """Raise for one problem its message; for several problems a list, limited to :data:`_LISTED`."""
    found = list(itertools.islice(problems, _LISTED + 1))
    if len(found) == 1:
        raise ConfigError(found[0])
    if len(found) > _LISTED:
        raise ConfigError(f"more than {_LISTED} settings of the model are not usable:\n  " + "\n  ".join(found[:_LISTED]))
    if found:
        raise ConfigError(f"{len(found)} settings of the model are not usable:\n  " + "\n  ".join(found))


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Read the published structure of ``config.json``; no key is ignored.

    Args:
        raw: the decoded JSON object.  ``vision_config`` is absent or null for a model without images.

    Returns:
        A configuration that satisfies :func:`check`.

    Raises:
        ConfigError: keys are unknown or missing, or values have a wrong type or are not supported.  The message lists them
            by dotted path.

    Source: the published ``config.json``, whose ``dspark_*`` keys describe the drafter.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"config.json holds {_shown(raw)}; expected an object of settings; {_ADVICE}")
    flat, broken = _flatten(raw)
    keys = _expected_keys(has_vision=raw.get("vision_config") is not None)
    _raise_if(itertools.chain(broken.values(), _key_problems(flat, keys, broken)))
    config = _assemble(flat, keys)
    check(config)
    return config


def _key_problems(flat: dict[str, Any], keys: dict[str, _Key], broken: dict[str, str]) -> Iterator[str]:
    """Problems of keys and leaf values outside ``broken`` sections."""
    for path, value in flat.items():
        if path not in keys:
            yield _unknown(path, value)
    for path, key in keys.items():
        if path in flat:
            problem = _value_problem(path, key, flat[path])
            if problem:
                yield problem
        elif not (key.is_optional or _ALIASES.get(path) in flat or any(path.startswith(f"{section}.") for section in broken)):
            expected = _shown(key.value) if key.kind == "fixed" else key.kind
            yield f"{path} is missing; expected {expected}; add it as in the published config.json"
    for path, other in _SAME_AS.items():
        if _is_a(flat.get(path), "list of integers") and flat[path] != flat.get(other):
            yield f"{path} is {_shown(flat[path])}; expected the value of {other}, {_shown(flat.get(other))}; remove it"


def _assemble(flat: dict[str, Any], keys: dict[str, _Key]) -> ModelConfig:
    values: dict[str, dict[str, Any]] = {"text": {}, "rope": {}, "vision": {}}
    for path, key in keys.items():
        if key.is_field:
            value = flat.get(path)
            if key.kind == "number" and value is not None:
                value = float(value)
            elif key.kind == "list of integers":
                value = tuple(flat[path])
            owner = "rope" if ".rope_scaling." in path else "vision" if path.startswith("vision_config.") else "text"
            values[owner][path.rpartition(".")[2]] = value
    vision = VisionConfig(**values["vision"]) if values["vision"] else None
    return ModelConfig(rope_scaling=RopeScaling(**values["rope"]), vision=vision, **values["text"])


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The content of ``config.json`` for a configuration: ``parse_config(config_json(config)) == config``."""
    tree: dict[str, Any] = {}
    for path, key in _expected_keys(has_vision=config.vision is not None).items():
        section, _, name = path.rpartition(".")
        if key.is_field:
            owners = {"text_config.rope_scaling": config.rope_scaling, "vision_config": config.vision}
            value = getattr(owners.get(section, config), name)
        elif key.is_optional:
            continue
        else:
            value = key.value
        node = tree
        for part in section.split(".") if section else ():
            node = node.setdefault(part, {})
        node[name] = list(value) if isinstance(value, (tuple, list)) else value
    return tree


def _integer(text: str) -> int:
    """An integer.  Only the first digits of a very long one are read, because Python refuses to convert thousands of digits."""
    return int(text[:_MAX_DIGITS])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without repeated keys; JSON readers differ in which of two values they take."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {_named(repeated)} occurs twice in one object")
    return made


def load_config(model_dir: Path) -> ModelConfig:
    """Read and check ``config.json`` of a model directory.

    Raises:
        ConfigError: the file is absent, is not JSON or does not describe a supported model.  The message names the file.
    """
    path = model_dir / "config.json"
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; name a directory that holds a checkpoint with config.json"
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is larger than the {_MAX_FILE_BYTES >> 20} MiB that a configuration may have; "
            "copy it again from the published model"
        )
    try:
        raw = json.loads(content.decode("utf-8-sig"), parse_int=_integer, object_pairs_hook=_object)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; copy it again from the published model") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); copy it again from the published model") from error
    try:
        return parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_sampling_defaults(model_dir: Path) -> dict[str, float]:
    """The sampling parameters that ``generation_config.json`` of a model directory recommends; {} without the file.

    Other keys of the file are ignored.  A ``top_k`` of 0 means all tokens there, which is -1 here.

    Raises:
        ConfigError: the file cannot be read, or a value is not a number.
    """
    path = model_dir / "generation_config.json"
    if not path.exists():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path} ({error}); copy it again from the published model, or remove it") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object; copy it again from the published model, or remove it")
    found = {name: raw[name] for name in _SAMPLING_KEYS if raw.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path} has {name}={_shown(value)}; use a number, or remove the key")
    if found.get("top_k") == 0:
        found["top_k"] = -1
    return found


# ------------------------------------------------------------------ constraints

QUANT_BLOCK = 32
"""Values that share a scale in weights and activations.  Source: ``quantization_config.weight_block_size``."""


def check(config: ModelConfig) -> None:
    """Check every constraint that the engine relies on and that needs neither weights nor tokenizer.

    Raises:
        ConfigError: constraints are violated.  The message lists for each the key, the value and the constraint.

    Source: the mathematics of the layers, of drafting and of bounded replay needs these constraints; the published shape
    satisfies them.
    """
    # Later groups rely on earlier ones: widths on positive numbers, layer rules on lists of the right length.
    for group in (_number_problems, _width_problems, _layer_problems, _source_problems, _engram_problems, _draft_problems):
        _raise_if(group(config))


def _problem(path: str, found: object, expected: str, action: str = _ADVICE) -> str:
    return f"{_PATHS.get(path, path)} is {_shown(found)}; expected {expected}; {action}"


def _digits(bound: float) -> str:
    """Format of a bound: all digits of an integer."""
    return "d" if isinstance(bound, int) else "g"


def _number_problems(config: ModelConfig) -> Iterator[str]:
    owners: list[tuple[str, Any]] = [("", config), ("", config.rope_scaling)]
    owners += [("vision_config.", config.vision)] if config.vision else []
    for prefix, owner in owners:
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, int | float):
                low, high = RANGES[prefix + field.name]
                if not low <= value <= high:
                    kind = "an integer" if isinstance(low, int) else "a number"
                    yield _problem(prefix + field.name, value, f"{kind} from {low:{_digits(low)}} to {high:{_digits(high)}}")
    for name in (*_ROOT_FIELDS, "engram_pad_token_id", "dspark_noise_token_id"):
        if getattr(config, name) >= config.vocab_size:
            yield _problem(name, getattr(config, name), f"a token id below vocab_size={config.vocab_size}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "dspark_noise_token_id"):
        if getattr(config, name) == config.image_token_id:
            yield _problem("image_token_id", config.image_token_id, f"an id that no other special token has, unlike {name}")
    for name, limit in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ):
        if getattr(config, name) > getattr(config, limit):
            yield _problem(name, getattr(config, name), f"at most {limit}={getattr(config, limit)}")
    if config.sliding_window % 2:
        yield _problem("sliding_window", config.sliding_window, "an even number: the encoder pools pairs of tokens")
    draft_experts = config.num_nextn_predict_layers * config.dspark_n_routed_experts
    if config.num_hidden_layers * config.n_routed_experts + draft_experts > MAX_EXPERTS:
        expected = f"at most {MAX_EXPERTS} experts in all layers together; there are {config.num_hidden_layers} layers"
        yield _problem("n_routed_experts", config.n_routed_experts, expected)


def _width_problems(config: ModelConfig) -> Iterator[str]:
    for name in ("hidden_size", "q_lora_rank", "moe_intermediate_size", "head_dim", "index_head_dim", "engram_head_dim"):
        if getattr(config, name) % QUANT_BLOCK:
            yield _problem(name, getattr(config, name), f"a multiple of {QUANT_BLOCK}, the width of a quantisation block")
    if config.o_groups * config.o_lora_rank % QUANT_BLOCK:
        yield _problem("o_lora_rank", config.o_lora_rank, f"o_groups x o_lora_rank a multiple of {QUANT_BLOCK}")
    if config.num_attention_heads % config.o_groups:
        yield _problem("o_groups", config.o_groups, f"a divisor of num_attention_heads={config.num_attention_heads}")
    widest = min(config.index_head_dim, config.head_dim)
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > widest:
        yield _problem(
            "qk_rope_head_dim", config.qk_rope_head_dim, f"an even number of at most {widest} (index_head_dim, head_dim)"
        )
    if (config.candidate_topk_blocks - 1) * config.candidate_block_size + 1 < config.index_topk:
        expected = f"(blocks - 1) x candidate_block_size + 1 >= index_topk={config.index_topk}, or candidates run short"
        yield _problem("candidate_topk_blocks", config.candidate_topk_blocks, expected)
    vision = config.vision
    if vision and vision.hidden_size % (4 * vision.num_attention_heads):
        expected = "a multiple of 4 x num_attention_heads (pairs of two rotary axes)"
        yield _problem("vision_config.hidden_size", vision.hidden_size, expected)


def _layer_problems(config: ModelConfig) -> Iterator[str]:
    ratios, num_layers, num_drafts = config.compress_ratios, config.num_hidden_layers, config.num_nextn_predict_layers
    if len(ratios) != num_layers + num_drafts:
        expected = f"num_hidden_layers + num_nextn_predict_layers = {num_layers + num_drafts} entries, not {len(ratios)}"
        yield _problem("compress_ratios", ratios, expected)
        return
    if any(ratios[num_layers:]):
        yield _problem("compress_ratios", ratios, f"0 for the last {num_drafts} entries, the draft layers")
    halves = [(0, 2, 1).index(ratio) if ratio in (0, 1, 2) else math.inf for ratio in ratios[:num_layers]]
    if halves != sorted(halves) or halves[-1] != 2:
        yield _problem(
            "compress_ratios", ratios, "window layers (0), then encoder layers (2), then decoder layers (1, at least one)"
        )
    lists = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids")
    for name in lists:
        ids = getattr(config, name)
        if list(ids) != sorted(set(ids)) or any(not 0 <= layer < num_layers for layer in ids):
            yield _problem(name, ids, f"ascending layers without repetition, each in 0..{num_layers - 1}")
    for name in lists[:2]:
        if not getattr(config, name):
            yield _problem(name, (), "at least one layer")


def _source_problems(config: ModelConfig) -> Iterator[str]:
    kv, index, candidate = config.kv_source_layer_ids, config.index_source_layer_ids, config.candidate_source_layer_id
    if not set(kv) <= set(index):
        expected = f"all of kv_source_layer_ids={list(kv)} among them: a store needs index keys"
        yield _problem("index_source_layer_ids", index, expected)
    windows = [layer for layer in index if config.ratio(layer) == 0]
    if windows:
        yield _problem("index_source_layer_ids", index, f"layers with compressed keys only; {windows} have ratio 0")
    for layer in range(config.num_hidden_layers):
        ratio = config.ratio(layer)
        if ratio and (layer == 0 or config.ratio(layer - 1) != ratio) and layer not in kv:
            yield _problem("kv_source_layer_ids", kv, f"layer {layer} among them, the first with ratio {ratio}")
    decoder = config.num_encoder_layers
    if kv[-1] != decoder:
        yield _problem("kv_source_layer_ids", kv, f"its last to be {decoder}, the first decoder layer: the decoder has one store")
    if candidate != kv[-1]:
        yield _problem("candidate_source_layer_id", candidate, f"{kv[-1]}, the last of kv_source_layer_ids, with ratio 1")
    early = [layer for layer in index if layer not in kv and layer < kv[-1]]
    if early:
        expected = f"no layer besides kv sources below {kv[-1]}, where candidates begin; remove {early}"
        yield _problem("index_source_layer_ids", index, expected)


def _engram_problems(config: ModelConfig) -> Iterator[str]:
    layers, heights = config.engram_layer_ids, config.engram_num_embeddings
    if config.engram_compressed_vocab_size > config.vocab_size:
        found = config.engram_compressed_vocab_size
        yield _problem("engram_compressed_vocab_size", found, f"at most vocab_size={config.vocab_size}")
    late = [layer for layer in layers if layer >= config.kv_source_layer_ids[-1]]
    if late:
        yield _problem("engram_layer_ids", layers, f"layers below {config.kv_source_layer_ids[-1]}, the last kv source")
    if config.engram_columns * len(layers) > MAX_ENGRAM_COLUMNS:
        expected = f"(engram_max_ngram_size - 1) x heads x layers of at most {MAX_ENGRAM_COLUMNS} hash columns"
        yield _problem("engram_n_heads", config.engram_n_heads, expected)
        return
    sums = tuple(sum(primes) for primes in engram_primes(config))
    if heights != sums:
        expected = (
            f"{_shown(list(sums))}, the sums of each layer's primes from engram_vocab_size={config.engram_vocab_size} on, "
            "engram_n_heads x (engram_max_ngram_size - 1) of them for each of engram_layer_ids"
        )
        yield _problem("engram_num_embeddings", heights, expected)


def _draft_problems(config: ModelConfig) -> Iterator[str]:
    targets, decoder = config.dspark_target_layer_ids, config.num_encoder_layers
    if not targets:
        yield _problem("dspark_target_layer_ids", targets, "at least one layer whose input the drafter reads")
    elif targets[0] < decoder:
        expected = f"all from layer {decoder}, the first decoder layer: prefill runs the two halves over different tokens"
        yield _problem("dspark_target_layer_ids", targets, expected)
