"""Sizes of a model: parameters by component, memory of a rank, state of a request, and contents of a model directory.

Owns the numbers of ``deepinfer inspect``.  :func:`verify_directory` reads headers of files.  All other functions depend only on
the configuration.  No function makes a tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tabulate import tabulate

from deepinfer.config import ModelConfig, load_config
from deepinfer.errors import ConfigError
from deepinfer.kv.layout import KVLayout
from deepinfer.model.checkpoint.reader import scan_checkpoint
from deepinfer.model.checkpoint.table import Component, TensorSpec, check_ranks, tensor_specs, tensor_table

GIB = 1 << 30
STATE_RESERVE_BYTES = 8 * GIB
"""Memory of a GPU that is kept free for other uses than weights and KV.

An estimate for a rank at the published dimensions with chunks of 16k tokens: 1.7 GiB for scratch of attention and MoE; 0.6 GiB
for dispatch slots, logits and index scores; 3 to 5 GiB for graphs and allocator slack; the sum is rounded up."""

_EP_SIZES = (1, 2, 4, 8, 16, 32, 64)


# ------------------------------------------------------------------ parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSize:
    """One line of the parameter inventory; parameters exclude scales, bytes include them."""

    component: Component
    num_tensors: int
    num_parameters: int
    num_bytes: int
    is_backbone: bool


def component_sizes(config: ModelConfig) -> tuple[ComponentSize, ...]:
    """Tensors, parameters and bytes by component, in order of first appearance.

    Source: the published checkpoint's tensor inventory; its backbone is everything except n-gram tables, drafter and vision.
    """
    tensors: Counter[Component] = Counter()
    parameters: Counter[Component] = Counter()
    sizes: Counter[Component] = Counter()
    for spec in tensor_table(config).values():
        tensors[spec.component] += 1
        parameters[spec.component] += spec.num_parameters
        sizes[spec.component] += spec.num_bytes
    return tuple(
        ComponentSize(
            component=component,
            num_tensors=tensors[component],
            num_parameters=parameters[component],
            num_bytes=sizes[component],
            is_backbone=component not in ("Engram tables", "DSpark", "vision"),
        )
        for component in tensors
    )


# ------------------------------------------------------------------ state of a request


def _layout(config: ModelConfig) -> KVLayout:
    """The layout that the caches use, with room for a whole draft; so the report agrees with the allocation."""
    return KVLayout(config, max_drafts=config.dspark_block_size)


def kv_token_bytes(config: ModelConfig) -> float:
    """Bytes of compressed entries and index keys per token, averaged over a compression group; 890 for the published model.

    For every store: (main record + index record) / ratio.  Source: ``kv_source_layer_ids`` and ``compress_ratios``.
    """
    return _layout(config).bytes_per_token


def window_state_bytes(config: ModelConfig) -> int:
    """Window keys of one request, draft layers included; 43 x 134 x 528 bytes for the published model.

    A layer stores ``sliding_window`` + ``dspark_block_size`` + 1 keys: the window, a whole draft and the bonus token.
    """
    layout = _layout(config)
    return len(layout.windows) * layout.ring_tokens * layout.records.window


def request_bytes(config: ModelConfig, context_tokens: int) -> int:
    """KV of one request with ``context_tokens`` tokens: entries of complete compression groups, and windows; without padding."""
    records = _layout(config).records
    entries = sum(context_tokens // config.ratio(source) for source in config.kv_source_layer_ids)
    return entries * (records.main + records.index_values + records.index_scales) + window_state_bytes(config)


# ------------------------------------------------------------------ memory of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of weights on one expert-parallel rank (rank 0, which holds the most table rows)."""

    experts: int
    dense: int
    embedding_and_head: int
    draft: int
    engram_tables: int
    vision: int

    @property
    def total(self) -> int:
        """Sum of all parts; a rank that serves no images does not need ``vision``."""
        return self.experts + self.dense + self.embedding_and_head + self.draft + self.engram_tables + self.vision


_GROUPS: dict[Component, str] = {
    "embedding": "embedding_and_head",
    "head": "embedding_and_head",
    "routed experts": "experts",
    "Engram tables": "engram_tables",
    "DSpark": "draft",
    "vision": "vision",
}


@lru_cache(maxsize=4)  # a report computes many rank counts for one model
def _one_expert_each(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The table with only the first expert of every layer; all experts of a layer have the same shapes."""
    return tuple(spec for spec in tensor_specs(config) if spec.expert_id == 0)


def rank_memory(config: ModelConfig, ep_size: int, spare_experts: int = 0) -> RankMemory:
    """Bytes of weights that one rank holds.

    Args:
        config: the model's configuration.
        ep_size: ranks that share experts and table rows.
        spare_experts: additional copies of routed experts per layer, summed over all ranks; draft layers have none.

    Raises:
        ConfigError: ``ep_size`` does not divide the number of experts.
    """
    check_ranks(config, ep_size, spare_experts)
    groups: dict[str, int] = dict.fromkeys(("experts", "dense", *_GROUPS.values()), 0)
    for spec in _one_expert_each(config):
        group = _GROUPS.get(spec.component, "dense")
        spares = spare_experts if group == "experts" else 0
        copies = (spec.num_experts + spares) // ep_size if spec.split == "expert" else 1
        groups[group] += copies * (spec.num_bytes // spec.shape[0]) * spec.local_shape(0, ep_size)[0]
    return RankMemory(**groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Memory that one rank of an expert-parallel group needs.

    Attributes:
        ep_size: ranks in the group.
        weights: bytes of weights.
        kv_bytes: bytes of KV of the rank's own requests.
        total_bytes: sum of weights, KV and the reserve.
        is_fitting: whether the total fits on the GPU.
    """

    ep_size: int
    weights: RankMemory
    kv_bytes: int
    total_bytes: int
    is_fitting: bool


def rank_plans(config: ModelConfig, *, num_requests: int, context_tokens: int, gpu_gib: float) -> tuple[RankPlan, ...]:
    """Memory of a rank for 1, 2, 4, … 64 ranks, without those numbers that do not divide the experts.

    Args:
        config: the model's configuration.
        num_requests: requests running on each rank (attention is data-parallel).
        context_tokens: tokens of each request.
        gpu_gib: usable GiB of one GPU.

    Raises:
        ConfigError: an argument is out of range.
    """
    if num_requests < 0 or context_tokens < 0 or gpu_gib <= 0:
        found = f"num_requests={num_requests}, context_tokens={context_tokens}, gpu_gib={gpu_gib}"
        raise ConfigError(
            f"{found} are not a valid load; expected counts of at least 0 and a positive memory; correct the arguments"
        )
    if context_tokens > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ConfigError(f"context_tokens={context_tokens} exceeds the model's limit of {limit}; ask for a shorter context")
    kv_bytes = num_requests * request_bytes(config, context_tokens)
    plans = []
    for ep_size in _EP_SIZES:
        try:
            check_ranks(config, ep_size)
        except ConfigError:
            continue  # this number of ranks does not divide the experts
        weights = rank_memory(config, ep_size)
        total = weights.total + kv_bytes + STATE_RESERVE_BYTES
        plans.append(
            RankPlan(
                ep_size=ep_size,
                weights=weights,
                kv_bytes=kv_bytes,
                total_bytes=total,
                is_fitting=total <= gpu_gib * GIB,
            )
        )
    return tuple(plans)


# ------------------------------------------------------------------ directories


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryReport:
    """Comparison of a model directory's headers with its configuration.

    Attributes:
        config: read from its ``config.json``.
        num_shards, num_tensors, num_bytes: found in the directory; bytes of tensor data.
        expected_tensors, expected_bytes: required by the configuration.
        dtype_counts: tensors by stored dtype, most frequent first.
        problems: one line per kind of damage; empty when sound.
    """

    config: ModelConfig
    num_shards: int
    num_tensors: int
    num_bytes: int
    expected_tensors: int
    expected_bytes: int
    dtype_counts: tuple[tuple[str, int], ...]
    problems: str

    @property
    def is_sound(self) -> bool:
        """Whether the headers hold exactly the tensors that the configuration requires."""
        return not self.problems


def verify_directory(model_dir: Path) -> DirectoryReport:
    """Compare ``config.json`` and all shard headers of a directory; no tensor data is read.

    Raises:
        ConfigError: ``config.json`` is not usable.
        CheckpointError: the directory has no shard.  Damaged shards are in the report.
    """
    config = load_config(model_dir)
    scan = scan_checkpoint(model_dir, config)
    table = tensor_table(config)
    return DirectoryReport(
        config=config,
        num_shards=len(scan.shards),
        num_tensors=len(scan.tensors),
        num_bytes=sum(stored.num_bytes for stored in scan.tensors.values()),
        expected_tensors=len(table),
        expected_bytes=sum(spec.num_bytes for spec in table.values()),
        dtype_counts=tuple(Counter(stored.dtype for stored in scan.tensors.values()).most_common()),
        problems=scan.describe_problems(),
    )


# ------------------------------------------------------------------ text


def _table(rows: list[list[object]], headers: list[str]) -> str:
    return tabulate(rows, headers=headers, intfmt=",", floatfmt=",.2f", disable_numparse=[0])


def _gib(num_bytes: int) -> float:
    return num_bytes / GIB


def _render_components(config: ModelConfig) -> str:
    sizes = component_sizes(config)
    rows: list[list[object]] = []
    for title, parts in (
        ("backbone", [each for each in sizes if each.is_backbone]),
        ("total", [each for each in sizes if not each.is_backbone]),
    ):
        rows += [[each.component, each.num_tensors, each.num_parameters, each.num_bytes] for each in parts]
        counted = sizes if title == "total" else parts
        rows.append(
            [
                title,
                sum(each.num_tensors for each in counted),
                sum(each.num_parameters for each in counted),
                sum(each.num_bytes for each in counted),
            ]
        )
    return _table(rows, ["component", "tensors", "parameters", "bytes"])


def _render_plans(plans: tuple[RankPlan, ...]) -> str:
    rows: list[list[object]] = [
        [
            f"EP{plan.ep_size}",
            _gib(plan.weights.experts),
            _gib(plan.weights.dense),
            _gib(plan.weights.embedding_and_head),
            _gib(plan.weights.draft),
            _gib(plan.weights.engram_tables),
            _gib(plan.weights.vision),
            _gib(plan.kv_bytes),
            _gib(plan.total_bytes),
            "yes" if plan.is_fitting else "no",
        ]
        for plan in plans
    ]
    names = ["rank of", "experts", "dense", "embed + head", "draft", "Engram", "vision", "KV", "sum", "fits"]
    return _table(rows, names)


def render_inventory(config: ModelConfig, *, num_requests: int, context_tokens: int, gpu_gib: float) -> str:
    """The report of ``deepinfer inspect``: parameters and bytes by component, then memory of a rank in GiB.

    Args:
        config: the model's configuration.
        num_requests: requests running on each rank.
        context_tokens: tokens of each request.
        gpu_gib: usable GiB of one GPU.

    Raises:
        ConfigError: an argument is out of range.
    """
    plans = rank_plans(config, num_requests=num_requests, context_tokens=context_tokens, gpu_gib=gpu_gib)
    fitting = ", ".join(f"EP{plan.ep_size}" for plan in plans if plan.is_fitting) or "none of these sizes"
    state = f"{kv_token_bytes(config):,.6g} bytes a token and {window_state_bytes(config):,} bytes of windows a request"
    return "\n".join(
        (
            _render_components(config),
            "",
            f"KV: {state}.",
            f"Memory of one rank in GiB, {num_requests:,} requests x {context_tokens:,} tokens on each, "
            f"{_gib(STATE_RESERVE_BYTES):g} GiB reserved for scratch and graphs (in the sum):",
            _render_plans(plans),
            f"Fits on a GPU with {gpu_gib:g} GiB: {fitting}.",
        )
    )


def render_directory(report: DirectoryReport) -> str:
    """The report of ``deepinfer check`` on a model directory: what was found, what was expected, what is wrong."""
    rows: list[list[object]] = [
        ["shards", report.num_shards, "any"],
        ["tensors", report.num_tensors, report.expected_tensors],
        ["bytes", report.num_bytes, report.expected_bytes],
        *([f"{dtype} tensors", count, ""] for dtype, count in report.dtype_counts),
    ]
    verdict = "The headers hold exactly what config.json promises." if report.is_sound else f"Problems:\n{report.problems}"
    return f"{_table(rows, ['headers', 'found', 'expected'])}\n{verdict}"
