"""Frozen settings; the only reader of ``config.json``, flags and environment.  Does not import torch."""

from deepinfer.config.engine import DraftSampling, EngineArgs, cache_dir, folder
from deepinfer.config.environment import Environment, environment
from deepinfer.config.file import QUANT_BLOCK, check, config_json, load_config, load_sampling_defaults, parse_config
from deepinfer.config.model import LayerKind, ModelConfig, RopeScaling, VisionConfig, engram_primes
from deepinfer.config.named import RANDOM_COMPRESSED_VOCAB_SIZE, named_config
from deepinfer.config.server import ServerArgs

__all__ = [
    "QUANT_BLOCK",
    "RANDOM_COMPRESSED_VOCAB_SIZE",
    "DraftSampling",
    "EngineArgs",
    "Environment",
    "LayerKind",
    "ModelConfig",
    "RopeScaling",
    "ServerArgs",
    "VisionConfig",
    "cache_dir",
    "check",
    "config_json",
    "engram_primes",
    "environment",
    "folder",
    "load_config",
    "load_sampling_defaults",
    "named_config",
    "parse_config",
]
